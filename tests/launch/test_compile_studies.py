"""launch/studies/compile_study.py: its cells, its figures, and what the committed answers must hold."""

import json
import pathlib

import pytest

from launch.studies import compile_cells
from launch.studies.compile_cells import K
from launch.studies.compile_complements import FORMS, complements, stack_of
from launch.studies.compile_figures import PICTURES, calibrated
from launch.studies.compile_heads import EXIT, HEAD, heads, with_head
from launch.studies.compile_kernels import kernels
from launch.studies.compile_variants import variants
from specsamp.models.config import chinchilla_70b
from specsamp.tpu.work import Work
from support import extras

RESULTS = pathlib.Path(__file__).parents[2] / "notebooks" / "results"


def test_cells_have_names_of_their_own():
    for name, cells in compile_cells.STUDIES.items():
        names = [json.dumps(cell.name) for cell in cells()]
        assert len(names) == len(set(names)) > 10, name


def test_shapes_of_drafts_have_as_many_parameters():
    counts = [
        compile_cells.TransformerConfig(vocab_size=32_000, head_size=128, **shape).num_parameters
        for name, shape in compile_cells.SHAPES.items()
        if "7B" not in name
    ]
    assert max(counts) < 4.4e9 and min(counts) > 3.6e9


def answers(study):
    return json.loads((RESULTS / f"compile_{study}.json").read_text(encoding="utf-8"))["cells"]


@pytest.fixture(scope="module")
def whole():
    return json.loads((RESULTS / "compile_chinchilla_v4.json").read_text(encoding="utf-8"))


def test_the_papers_setting_compiles_as_it_should(whole):
    programs = {program["name"]: program for program in whole["report"]["programs"]}
    round_ = programs["round"]
    assert round_["memory"]["temporaries"] < 0.5e9
    for name in ("draft step", "target step", "score"):
        assert programs[name]["hbm_bytes"] / programs[name]["floor_bytes"] < 1.05
    assert all(program["copies"] == [] and program["host_transfers"] == 0 for program in programs.values())
    calls = {"draft step": 8, "target step": 80, "score": 80}
    for name, layers in calls.items():
        assert programs[name]["collectives"] == {"all-reduce": 2 * layers + 1, "all-gather": 1}
    assert round_["collectives"] == {"all-reduce": 4 * 17 + 161, "all-gather": 5}


def test_straight_lines_agree_with_the_whole(whole):
    """Eighty layers compiled as they are, against eighty continued from two and four."""
    cells = answers("slices")
    same = next(cell for cell in cells if cell["name"] == {"topology": "v4:2x2x4", "batch": 1})
    programs = {program["name"]: program for program in whole["report"]["programs"]}
    lines = {"draft step": 0.04, "target step": 0.04, "score": 0.04, "round": 0.15}  # and how far off cycles may be
    for name, off in lines.items():
        made = same["programs"]["round, top-p, token" if name == "round" else name]
        assert made["hbm_bytes"] == pytest.approx(programs[name]["hbm_bytes"], rel=0.01), name
        assert made["collectives"] == programs[name]["collectives"], name
        assert made["cycles"] == pytest.approx(programs[name]["cycles"], rel=off), name


@pytest.mark.parametrize(
    "cells", [*compile_cells.STUDIES.values(), complements, variants, heads, kernels], ids=lambda cells: cells.__name__
)
def test_every_answer_is_there(cells):
    """And its milliseconds are made of its work, with the calibration of today."""
    document = json.loads((RESULTS / f"compile_{cells.__name__}.json").read_text(encoding="utf-8"))
    assert [cell["name"] for cell in document["cells"]] == [cell.name for cell in cells()]
    assert "calibrated" not in json.dumps(document)
    for cell in document["cells"]:
        for facts in cell.get("programs", {"": cell}).values():
            if "work" in facts:
                assert Work(**facts["work"]).streaming_ms == facts["streaming_ms"]
    assert "/tmp" not in document["command"]


def test_on_every_slice_the_paper_s_pair_is_as_it_should_be():
    """At batch 1: traffic near its floor, no copy, nothing to the host, the collectives of its layout alone."""
    cells = answers("slices")
    for cell in cells:
        for name, program in cell["programs"].items():
            if not program["fits"]:
                assert cell["name"] == {"topology": "v5e:4x4", "batch": 32}
                continue
            assert program["host_transfers"] == 0
            if cell["name"]["batch"] == 1:
                assert program["over_floor"] < 1.05 and program["copies"] == 0, (cell["name"], name)
                serial = 18 if name == "draft step" else 234 if "round" in name else 162
                assert sum(program["collectives"].values()) == serial


@extras.needs("matplotlib")
def test_the_figure_of_shapes_has_a_line_for_each_number_of_chips():
    """One for all collectives added and one for all hidden; and a point of the paper."""
    cells = answers("shapes")
    assert len(PICTURES["shapes"](cells).axes[0].lines) == 2 * 4 + 1


@extras.needs("matplotlib")
def test_the_figure_of_scoring_shows_the_calibrated_ratios_of_the_table():
    """A line for each kind of chip, and one at 1; what does not fit is left out."""
    cells = answers("scoring")
    unfit = {"name": {"topology": "v5e:2x2", "tokens": 2}, "fits": False, "why": "too much"}
    axis = PICTURES["scoring"]([*cells, unfit]).axes[0]
    assert "calibrated" in axis.get_title() and len(axis.lines) == 4 + 1
    for line, topology in zip(axis.lines, compile_cells.SLICES):
        ms = {c["name"]["tokens"]: calibrated(c).likely for c in cells if c["name"]["topology"] == topology}
        drawn = dict(zip(line.get_xdata(), line.get_ydata()))
        assert drawn == pytest.approx({tokens: ms[tokens] / ms[2] for tokens in ms if tokens > 1})
        assert str(line.get_label()).startswith(topology)
    at_the_ridge = {line.get_label()[:3]: round(line.get_ydata()[-1], 1) for line in axis.lines[:4]}
    assert at_the_ridge == {"v4:": 3.1, "v5e": 2.8, "v5p": 1.9, "v6e": 11.3}


def test_what_drafts_inside_the_target_costs_less_than_a_draft_model():
    """At batch 1 near the floor, nothing copied; a round has the collectives of its calls, and one for what a head reads."""
    rounds = {}
    for cell in answers("heads"):
        where, drafter = (cell["name"]["target"], cell["name"]["topology"]), cell["name"]["drafter"]
        programs = cell["programs"]
        counts = {name: sum(program["collectives"].values()) for name, program in programs.items()}
        assert all(program["host_transfers"] == 0 for program in programs.values())
        rounds[*where, drafter] = programs["round"]
        if drafter in (HEAD, EXIT):
            assert all(program["over_floor"] < 1.05 for program in programs.values()), cell["name"]
            assert counts["round"] - counts["score"] - 4 * counts["draft step"] in (0, 1)
    for (*where, drafter), inside in rounds.items():
        (beside,) = (one for (*other, name), one in rounds.items() if other == where and name not in (HEAD, EXIT))
        if drafter == HEAD:
            assert inside["cycles"] < beside["cycles"] and inside["collectives"] != beside["collectives"]
    assert len(rounds) == 10


def test_kernels_bring_calls_to_their_floor():
    """Compares them with the same calls without kernels; what is further off has its reason in the page of results."""
    without = {(cell["name"]["topology"], cell["name"]["batch"]): cell["programs"] for cell in answers("slices")}
    far = []
    for cell in answers("kernels"):
        name = cell["name"]
        if not cell["fits"]:
            assert (name["topology"], name["batch"]) == ("v5e:4x4", 8) and "18.4 GiB" in cell["why"]
            continue
        # Activations of many rows and wide vocabularies pass through HBM, on v5p scores of distances too.
        assert cell["host_transfers"] == 0
        if name["topology"] != "v5p:2x2x4":
            assert cell["copies"] <= (0 if name["model"].startswith("Chinchilla") else 2)
        assert cell["live_hbm_bytes"] < cell["hbm_bytes"]
        if max(cell["over_floor"], cell["live_over_floor"]) > 1.05:
            far.append(cell)
        programs = without.get((name["topology"], name["batch"]), {})
        plain = {f"{K + 1} tokens": "score", "2 tokens": "target step", f"round, K = {K}": "round, top-p, token"}
        if name["topology"] == "v4:2x2x4" and name["model"].startswith("Chinchilla") and name["program"] in plain:
            assert cell["over_floor"] < programs[plain[name["program"]]]["over_floor"] - 0.03
    # The draft of Llama's rounds has heads that kernels do not take.
    rounds = {"model": "Llama 3.3 70B + 3.2 1B", "program": f"round, K = {K}"}
    for cell in far:
        assert rounds.items() <= cell["name"].items() or cell["name"]["topology"] == "v5p:2x2x4", cell["name"]
        assert max(cell["over_floor"], cell["live_over_floor"]) < (
            1.4 if rounds.items() <= cell["name"].items() else 1.85
        )
        assert cell["copies"] <= 160


@extras.needs("libtpu")
def test_floors_of_the_grid_are_of_int8_as_far_as_the_form_says():
    """The target's, a head's step and a round's with the head."""
    floors = []
    for form in FORMS:
        programs = with_head(stack_of(chinchilla_70b(), form, batch=16))
        floors.append((programs.floor(programs.target), programs.floor(programs.draft), programs.floor_of_round(K)))
    for plain, weights, caches in zip(*floors, strict=True):
        assert plain > 1.2 * weights > 1.2 * 1.2 * caches, (plain, weights, caches)

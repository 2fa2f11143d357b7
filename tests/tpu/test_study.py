"""Continuing two depths in a straight line, and what the committed answers must hold."""

import dataclasses
import json
import pathlib

import pytest

from specsamp.analysis.compile_figures import PICTURES
from specsamp.tpu import study
from specsamp.tpu.calibration import calibrate
from specsamp.tpu.report import Memory, Program
from specsamp.tpu.variants import variants

RESULTS = pathlib.Path(__file__).parents[2] / "notebooks" / "results"


def program(layers, fits=True):
    memory = Memory(arguments=100 * layers, temporaries=7 + layers, outputs=0, capacity=10_000)
    return Program(
        name="x",
        tokens=5,
        floor_bytes=10.0 * layers + 3,
        live_floor_bytes=9.0 * layers,
        memory=memory if fits else None,
        out_of_memory=None if fits else "too much",
        hbm_bytes=11.0 * layers + 4,
        cycles=2.0 * layers + 1,
        collectives={"all-reduce": 2 * layers + 1, "all-gather": 1},
        collective_bytes={"all-reduce": 50.0 * layers},
        num_copies=layers,
    )


def test_a_straight_line():
    whole = study.continued(program(2), program(4), 80)
    assert whole.hbm_bytes == 11 * 80 + 4 and whole.floor_bytes == 803 and whole.cycles == 161
    assert whole.collectives == {"all-reduce": 161, "all-gather": 1}
    assert whole.collective_bytes == {"all-reduce": 4000} and whole.num_copies == 80
    assert whole.memory.arguments == 8000 and whole.memory.temporaries == 87 and whole.memory.fits


def test_what_does_not_fit_stays_so():
    assert study.continued(program(2), program(4, fits=False), 80).memory is None
    assert study.facts(program(2, fits=False), "v4:2x2x4") == {"fits": False, "why": "too much"}
    # Two and four layers fit, a hundred do not.
    assert study.facts(study.continued(program(2), program(4), 96), "v4:2x2x4")["fits"]
    made = study.facts(study.continued(program(2), program(4), 98), "v4:2x2x4")
    assert not made["fits"] and made["why"].endswith("of 0 GiB") and "hbm_bytes" not in made


def test_cells_have_names_of_their_own():
    for name, cells in study.STUDIES.items():
        names = [json.dumps(cell.name) for cell in cells()]
        assert len(names) == len(set(names)) > 10, name


def test_shapes_of_drafts_have_as_many_parameters():
    counts = [
        study.TransformerConfig(vocab_size=32_000, head_size=128, **shape).num_parameters
        for name, shape in study.SHAPES.items()
        if "7B" not in name
    ]
    assert max(counts) < 4.4e9 and min(counts) > 3.6e9


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
    cells = json.loads((RESULTS / "compile_slices.json").read_text(encoding="utf-8"))["cells"]
    same = next(cell for cell in cells if cell["name"] == {"topology": "v4:2x2x4", "batch": 1})
    programs = {program["name"]: program for program in whole["report"]["programs"]}
    lines = {"draft step": 0.04, "target step": 0.04, "score": 0.04, "round": 0.15}  # and how far off cycles may be
    for name, off in lines.items():
        made = same["programs"]["round, top-p, token" if name == "round" else name]
        assert made["hbm_bytes"] == pytest.approx(programs[name]["hbm_bytes"], rel=0.01), name
        assert made["collectives"] == programs[name]["collectives"], name
        assert made["cycles"] == pytest.approx(programs[name]["cycles"], rel=off), name


@pytest.mark.parametrize("cells", [*study.STUDIES.values(), variants], ids=lambda cells: cells.__name__)
def test_every_answer_is_there(cells):
    """And rests on the calibration that the estimates are made with."""
    document = json.loads((RESULTS / f"compile_{cells.__name__}.json").read_text(encoding="utf-8"))
    assert [cell["name"] for cell in document["cells"]] == [cell.name for cell in cells()]
    assert document["calibration"] == pytest.approx(dataclasses.asdict(calibrate()))
    assert "/tmp" not in document["command"]


def test_on_every_slice_the_paper_s_pair_is_as_it_should_be():
    """At batch 1: traffic near its floor, no copy, nothing to the host, the collectives of its layout alone."""
    cells = json.loads((RESULTS / "compile_slices.json").read_text(encoding="utf-8"))["cells"]
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


def test_pictures():
    """A line for each number of chips and a point of the paper; a line for each kind of chip, and one."""
    cells = json.loads((RESULTS / "compile_shapes.json").read_text(encoding="utf-8"))["cells"]
    assert len(PICTURES["shapes"](cells).axes[0].lines) == 4 + 1
    made = study.facts(program(2), "v4:2x2x4") | {"ridge_tokens": 229.0}
    cells = [{"name": {"topology": t, "tokens": n}} | made for t in study.SLICES for n in (1, 2, 5)]
    unfit = {"name": {"topology": "v5e:2x2", "tokens": 2}, "fits": False, "why": "too much"}
    assert len(PICTURES["scoring"]([*cells, unfit]).axes[0].lines) == 4 + 1

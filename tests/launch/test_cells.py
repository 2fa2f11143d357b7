"""Configurations and points become cells, and a file becomes prompts; other weights are refused."""

import json
import pathlib

import numpy as np
import pytest

from configs import random_pair, trained_pair
from launch.lib import cells
from launch.lib.experiment import Experiment, build
from launch.lib.fields import ExperimentConfig
from specsamp import BlockRule, Method, ModelDrafter, NgramDrafter, NoDrafter, TokenRule
from specsamp.analysis import grid
from specsamp.analysis.workload import Workload
from specsamp.sampling.synthetic import SyntheticAcceptance
from support import fakes
from support.refusals import refusal, refused_calls


@pytest.fixture
def experiment():
    return Experiment(
        pair=fakes.table_pair(5),
        pair_name="toy",
        method=Method(drafter=NoDrafter()),
        workload=Workload(),
    )


def points(*texts):
    return cells.parse_grid(texts)


def test_a_grid_becomes_cells(experiment):
    config = ExperimentConfig.from_config_dict(trained_pair.get_config())
    turned = points(
        "draft_length=0,3",
        "rule=token,block",
        "drafter=model,ngram",
        "sampling.temperature=0.0,0.8",
    )
    made = cells.make_cells(cells.turned(config, turned), experiment)
    plain = [one for one in made if one.key["draft_length"] == 0]
    assert len(made) == 2 + 8 and len(plain) == 2  # plain decoding has neither rule nor drafter
    assert all(one.method.drafter == NoDrafter() and one.key["drafter"] == "none" for one in plain)
    assert {type(one.method.drafter) for one in made if one not in plain} == {
        ModelDrafter,
        NgramDrafter,
    }
    assert {type(one.method.rule) for one in made if one not in plain} == {TokenRule, BlockRule}
    (heated,) = cells.make_cells(cells.turned(config, points("draft_temperature=0.5")), experiment)
    temperatures = [
        float(warp.warps[0].value)
        for warp in (heated.method.sampling, heated.method.draft_sampling)
    ]
    np.testing.assert_allclose(temperatures, [0.8, 0.5])
    both = cells.make_cells(
        cells.turned(config, [{"draft_temperature": 0.5}, {"draft_length": 3}]), experiment
    )
    # The values of a point do not carry over to the next point.
    assert [one.key["draft_temperature"] for one in both] == [0.5, None]
    (made_up,) = cells.make_cells(
        cells.turned(config, points("synthetic_acceptance=0.7")), experiment
    )
    assert made_up.method.rule == SyntheticAcceptance(TokenRule(), 0.7)
    assert made_up.key["synthetic_acceptance"] == 0.7
    assert "synthetic_acceptance" not in heated.key
    own = points("drafter=a.py:A(f(K), g(2)),model")
    assert [one["drafter"] for one in own] == ["a.py:A(f(K), g(2))", "model"]


@pytest.mark.parametrize(
    "drafter, grid",
    [("window", "sinks=0,4"), ("choosing:ngram:window", "window=8,64"), ("pard", "mask_id=1,2")],
)
def test_fields_of_the_drafter_make_cells(experiment, drafter, grid):
    config = ExperimentConfig.from_config_dict(trained_pair.get_config())
    config = config.turned({"window": 8, "mask_id": 1, "drafter": drafter})
    made = cells.make_cells(cells.turned(config, points(grid)), experiment)
    assert len(made) == 2


def test_cells_of_other_weights_make_another_file(tmp_path):
    """The same pair after another training, which changes only its weights, is refused."""
    path = str(tmp_path / "cells.json")
    config = ExperimentConfig.from_config_dict(random_pair.get_config("tiny"))
    built = build(config)

    def identity(weights):
        vars(built)["weights"] = weights  # the cached property
        return cells.known_identity(config) | cells.pair_identity(built)

    grid.Results.open(path, identity("first")).add({"key": {"batch": 1}, "result": {}}, {})
    assert grid.Results.open(path, identity("first")).find({"batch": 1})
    with refusal("weights was 'first', is 'second'. Give another --output"):
        grid.Results.open(path, identity("second"))


def test_files_of_prompts(tmp_path):
    (tmp_path / "a.txt").write_text("\ufeffdef f():\\n  x\r\nclass\fA:\n")  # as editors on Windows
    talk = {"messages": [{"role": "user", "content": "a"}], "tools": []}
    (tmp_path / "b.json").write_text(json.dumps({"prompts": [{"text": "x"}, talk]}))
    assert cells.read_prompts(str(tmp_path / "a.txt")) == ["def f():\n  x", "class\fA:"]
    assert cells.read_prompts(str(tmp_path / "b.json")) == ["x", talk]
    (tmp_path / "c.jsonl").write_text(
        '{"id": 3, "prompt": "x"}\n' + json.dumps(talk | {"prompt": None})
    )
    assert cells.read_prompts(str(tmp_path / "c.jsonl")) == ["x", talk]


def test_cells_show_the_cost_of_both_sides():
    rows = grid.read_document("notebooks/results/python_pair_grid.json")["cells"]
    cell = next(cell for cell in rows if cell["key"]["draft_length"])
    (plain, plain_ms), (name, ms) = cells.costs_of(
        [cell, {"key": cell["key"], "error": "out of memory"}]
    )
    assert plain == f"{name}, plain"
    assert plain_ms / ms == pytest.approx(cell["result"]["speedup"]["median"], rel=0.2)


def read(name, content):
    pathlib.Path(name).write_bytes(content)
    return cells.read_prompts(name)


test_refused_prompts = refused_calls(
    {
        "holds no prompts": lambda: read("prompts.txt", b""),
        "prompt 2 of .*txt.* is empty": lambda: read("prompts.txt", b"one\n\ntwo"),
        "prompt 2 of .*json.* is empty": lambda: read("prompts.json", b'["a", ""]'),
        "jsonl, prompt 1: it has a prompt and messages": lambda: read(
            "prompts.jsonl", b'{"prompt": "x", "messages": [{}]}'
        ),
        "is no JSON:": lambda: read("prompts.json", b'["a"'),
        "prompts.txt is no text in UTF-8": lambda: read("prompts.txt", b"\xff"),
        "is damaged, or of another kind": lambda: read("prompts.json", b'{"texts": []}'),
    }
)

"""The study of drafters: its cells, and what it refuses."""

import json

import pytest

from launch.studies import drafters
from specsamp.checkpoints.head_export import write_head
from specsamp.checkpoints.pair import load_pair
from specsamp.decoding.drafters import EarlyExitDrafter, FeatureDrafter, ModelDrafter, NgramDrafter
from specsamp.models.heads import FeatureHead
from specsamp.models.medusa import MedusaConfig
from support.run_script import call, save_tiny_pair
from support.weights import drawn_params


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    folder = tmp_path_factory.mktemp("pair")
    save_tiny_pair(folder, ["def f(x):", "return x"], num_layers=2)
    return folder


@pytest.fixture(scope="module")
def medusa(pair, tmp_path_factory):
    """Heads of random weights for the pair's target."""
    folder, target = tmp_path_factory.mktemp("medusa"), load_pair(pair).target.config
    layers = target.num_layers
    head = FeatureHead(
        MedusaConfig(layer=target, target_layers=layers, hidden_layers=(layers,), own_output=True, num_heads=1)
    )
    write_head(folder, head, drawn_params(head), target_name="pair", K=1)
    return folder


def study(pair, output, *arguments):
    fixed = [
        "--plain",
        f"--pair={pair}",
        "--prompt_count=1",
        "--max_new_tokens=4",
        "--exit_layer=1",
        f"--output={output}",
    ]
    return call("study", "drafters", *fixed, *arguments)


@pytest.fixture
def measured(monkeypatch):
    """Stands in for the measurement, which tests of its own have; holds the drafters that were measured."""
    seen = []

    def benchmark(pair, method, workload, progress):
        seen.append(method.drafter)
        K = method.drafter.K
        half = {"median": 0.5, "lower": 0.5, "upper": 0.5}
        part = {"ms": half}
        return {
            "acceptance": {
                "rounds": 4,
                "emitted": 6,
                "reached": [4] + [2] * (K - 1),
                "accepted_counts": [2, *[2] * K],
                "by_position": [0.5] * K,
            },
            "split": {"draft": part, "commit": part, "step": part},
            "speculative": {"ms_per_token": half},
            "speedup": half,
        }

    monkeypatch.setattr(drafters, "benchmark", benchmark)
    return seen


@pytest.mark.slow
def test_every_drafter_has_its_cells_and_none_is_measured_twice(pair, medusa, measured, tmp_path):
    """A head has none for more tokens than it drafts."""
    output, head = tmp_path / "cells.json", f"--head=Medusa={medusa}"
    done = study(pair, output, "--K=1", "--sampling=greedy", head)
    assert (done.returncode or 0) == 0, done.stderr
    kinds = [ModelDrafter, NgramDrafter, EarlyExitDrafter, FeatureDrafter]
    assert [type(drafter) for drafter in measured] == kinds
    rows = [line.split() for line in done.stdout.splitlines() if " greedy " in line]
    assert [row[-9:] for row in rows] == ["1 1.50 0.50 2.00 0.50 0.50x (0.50 to 0.50)".split()] * 4
    again = study(pair, output, "--K=1,2", "--sampling=greedy,1.0", head)
    assert (again.returncode or 0) == 0, again.stderr
    more = [(type(drafter), drafter.K) for drafter in measured[4:]]
    assert more == [(kind, K) for kind in kinds for K in (1, 2, 2) if kind is not FeatureDrafter or K == 1]
    cells = json.loads(output.read_text(encoding="utf-8"))["cells"]
    assert len(cells) == len(measured) == 4 + 10


def test_what_is_refused_before_anything_is_measured(pair, tmp_path):
    for argument, message in (
        ("--head=Medusa", "--head=Medusa: write a name and a folder, such as Medusa=runs/medusa_head"),
        ("--exit_layer=2", "exit_layer must be an integer >= 1 and below 2; got 2"),
        ("--exit_target=/nowhere", "no training run at '/nowhere'"),
    ):
        done = study(pair, tmp_path / "cells.json", argument)
        assert done.returncode == 2 and message in done.stderr, done.stderr
    assert not (tmp_path / "cells.json").exists()

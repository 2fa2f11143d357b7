"""launch/studies/drafters.py: its table, what it resumes, and what it refuses."""

import json

import jax
import pytest

from specsamp.checkpoints.head_export import write_head
from specsamp.checkpoints.pair import load_pair
from specsamp.models.heads import FeatureHead
from specsamp.models.medusa import MedusaConfig
from support.run_script import call, save_tiny_pair


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
    write_head(folder, head, head.init(jax.random.key(0)), target_name="pair", K=1)
    return folder


def study(pair, output, *arguments):
    fixed = ["--plain", f"--pair={pair}", "--prompts=1", "--max_new_tokens=4", "--exit_layer=1", f"--output={output}"]
    return call("studies/drafters", *fixed, *arguments)


def test_every_drafter_has_its_cells_and_none_is_measured_twice(pair, medusa, tmp_path):
    """A head has none for more tokens than it drafts; a draft that is its own target is always accepted."""
    output = tmp_path / "cells.json"
    done = study(pair, output, "--K=1", "--sampling=greedy", f"--head=Medusa={medusa}")
    assert (done.returncode or 0) == 0, done.stderr
    first = json.loads(output.read_text(encoding="utf-8"))
    names = [cell["key"]["drafter"] for cell in first["cells"]]
    assert names == ["draft model", "prompt lookup", "early exit after 1", "Medusa"]
    row = next(line for line in done.stdout.splitlines() if line.startswith("draft model"))
    assert row.split()[2:6] == ["greedy", "1", "2.00", "1.00"] and "Medusa" in done.stdout
    again = study(pair, output, "--K=1", "--K=2", "--sampling=greedy", f"--head=Medusa={medusa}")
    assert (again.returncode or 0) == 0, again.stderr
    cells = json.loads(output.read_text(encoding="utf-8"))["cells"]
    assert cells[:4] == first["cells"]
    assert [cell["key"]["drafter"] for cell in cells[4:]] == names[:3]


def test_what_is_refused_before_anything_is_measured(pair, tmp_path):
    for argument, message in (
        ("--head=Medusa", "--head=Medusa: write a name and a folder, such as Medusa=runs/medusa_head"),
        ("--exit_layer=2", "from 1 to 1, for a target of 2 layers; got 2"),
        ("--exit_target=/nowhere", "no training run at '/nowhere'"),
    ):
        done = study(pair, tmp_path / "cells.json", argument)
        assert done.returncode == 2 and message in done.stderr, done.stderr
    assert not (tmp_path / "cells.json").exists()

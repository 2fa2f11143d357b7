"""The launch boundary: what is wrong in a configuration is named, and the demo runs without compiling."""

import dataclasses
import json
import os

import jax
import pytest

from configs import random_pair
from launch.lib import experiment
from launch.lib.config import load_config
from launch.lib.fields import ExperimentConfig, SamplingFields
from specsamp.decoding.adaptive import Adaptive, Entropy
from specsamp.decoding.drafters import (
    BeamDrafter,
    ChoosingDrafter,
    EarlyExitDrafter,
    ModelDrafter,
    NgramDrafter,
    NoDrafter,
)
from specsamp.decoding.pair import Pair
from specsamp.sampling.rejection import BlockRule
from specsamp.sampling.warp import Chain, Greedy, MinP, Temperature, TopK, TopP
from support.run_script import call

TINY = "configs/random_pair.py:tiny"


def turned(**fields):
    """The tiny pair's configuration with other values; of a group's field as ``group__field``."""
    point = {name.replace("__", "."): value for name, value in fields.items()}
    return ExperimentConfig.from_config_dict(load_config(TINY)).turned(point)


def test_a_configuration_becomes_objects(monkeypatch):
    def without_params(target, draft, *_, **__):
        return Pair(target=target, target_params={}, draft=draft, draft_params={})

    monkeypatch.setattr(experiment, "bare_pair", without_params)
    config = turned(rule="block", target__num_layers=3, draft_length=2)
    made = experiment.build(config)
    assert made.method.rule == BlockRule() and made.method.drafter == ModelDrafter(made.pair.draft, 2)
    assert made.pair.target.config.num_layers == 3 and made.pair.draft.config.num_layers == 1
    assert made.workload.max_new_tokens == config.max_new_tokens
    assert [type(warp) for warp in made.method.sampling.warps] == [Temperature, TopP]
    hash((made.method.drafter, made.method.rule, made.pair.target))
    known = {"ngram": NgramDrafter(K=2), "none": NoDrafter(), "early_exit": EarlyExitDrafter(made.pair.target, 1, 2)}
    known["chosen"] = ChoosingDrafter((NgramDrafter(K=2), ModelDrafter(made.pair.draft, 2)))
    known["beam"] = BeamDrafter(made.pair.draft, 2, beams=4)
    for word, drafter in known.items():
        own = config.turned({"drafter": word, "exit_layer": 1})
        assert own.make_drafter(made.pair.target, made.pair.draft) == drafter
        assert own.make_drafter(made.pair.target, made.pair.draft, 0) == NoDrafter()
    assert made.method.adaptive is None and config.make_adaptive(NoDrafter()) is None
    stopping = config.turned({"adaptive.stop": "entropy", "adaptive.least": 0.5})
    assert stopping.make_adaptive(made.method.drafter) == Adaptive(lengths=(2,), stop=Entropy(0.5))
    choosing = config.turned({"adaptive.lengths": (0, 2), "adaptive.costs_ms": (1.0, 1.5)})
    assert choosing.make_adaptive(made.method.drafter) == Adaptive(lengths=(0, 2), costs_ms=(1.0, 1.5))
    with pytest.raises(ValueError, match="adaptive.lengths end with 2, but draft_length is 3"):
        choosing.make_adaptive(dataclasses.replace(made.method.drafter, K=3))


def test_sampling_that_is_off_is_left_out():
    fields = SamplingFields(temperature=1.0, top_k=5, top_p=1.0, min_p=0.1)
    assert [type(warp) for warp in fields.warp().warps] == [Temperature, TopK, MinP]
    assert dataclasses.replace(fields, temperature=0.0).warp() == Greedy()
    assert isinstance(SamplingFields(temperature=0.8).warp(), Chain)


@pytest.mark.parametrize("size", random_pair.SIZES)
def test_every_size_describes_a_pair(size):
    config = ExperimentConfig.from_config_dict(load_config(f"configs/random_pair.py:{size}"))
    target, draft = config.target.model(), config.draft.model()
    assert target.vocab_size == draft.vocab_size
    assert draft.config.num_parameters < target.config.num_parameters


def test_the_demo_counts_its_prompts():
    fields = ("--config.max_new_tokens=2", "--config.draft_length=1", "--config.sampling.top_p=1.0")
    fields += ("--config.target.num_layers=1", "--config.target.positions=rotary", "--config.draft.positions=rotary")
    done = call("demo", "--config=configs/random_pair.py:tiny", "--passes=1", *fields)
    assert done.returncode == 0, done.stderr
    assert "greedy, speculative = autoregressive: 3 of 3 prompts, 6 tokens" in done.stdout
    assert "the timings are left out" not in done.stdout


def test_the_benchmark_writes_only_where_it_is_told(tmp_path):
    output = tmp_path / "result.json"
    fields = {"repeats": 1, "draft_length": 0, "max_new_tokens": 1, "prompt_length": 1, "sampling.temperature": "0.0"}
    fields |= {"target.num_layers": 1, "target.positions": "rotary", "draft.positions": "rotary"}
    with jax.disable_jit():
        turned = (f"--config.{name}={value}" for name, value in fields.items())
        done = call("benchmark", f"--config={TINY}", f"--output={output}", "--plain", *turned)
    assert done.returncode == 0, done.stderr
    assert os.listdir(tmp_path) == ["result.json"]
    document = json.loads(output.read_text(encoding="utf-8"))
    assert document["command"].startswith("python launch/benchmark.py --config=")
    (cell,) = document["cells"]
    assert cell["workload"]["repeats"] == 1 and document["identity"]["config"]["seed"] == 0
    assert document["identity"]["random_weights"] and cell["result"]["split"] is None
    assert {"date", "python", "jax", "jaxlib", "flax", "specsamp", "device_kind", "cores"} <= set(
        document["environment"]
    )

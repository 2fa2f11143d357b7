"""The draft length "machine" is chosen by costs, timed once, and by acceptance on other prompts."""

import io
import json
import os

import pytest
from rich.console import Console

from launch.lib import machine_choice
from launch.lib.config import load_config
from launch.lib.fields import MACHINE, ExperimentConfig
from specsamp.analysis.costs import PerCall
from support.run_script import save_tiny_pair

FREE = dict.fromkeys((1, 2, 4, 6, 8), 10.0)  # scoring more positions costs nothing
DEAR = {T: 10.0 * T for T in FREE}
NEVER, ALWAYS = [99, 0, 0, 0, 0, 0, 0, 0], [0, 0, 0, 0, 0, 0, 0, 99]  # accepted tokens of rounds


def cell(drafter, accepted_counts):
    """Returns a cell of launch/benchmark.py with its acceptance alone."""
    key = {"draft_length": 7, "drafter": drafter, "rule": "token", "batch": 1, "temperature": 0.8}
    reached = [sum(accepted_counts[i:]) for i in range(7)]
    counts = {
        "rounds": sum(accepted_counts),
        "emitted": 0,
        "reached": reached,
        "accepted_counts": accepted_counts,
    }
    return {
        "key": key | {"top_k": 0, "top_p": 0.95, "min_p": 0.0},
        "result": {"acceptance": counts},
    }


@pytest.fixture
def config(tmp_path, monkeypatch):
    """Returns the configuration of a pair whose draft is its target."""
    monkeypatch.setattr(machine_choice, "use_compilation_cache", lambda: str(tmp_path / "kept"))
    save_tiny_pair(tmp_path, ["def f(x):", "return x"])
    config = ExperimentConfig.from_config_dict(load_config(f"configs/trained_pair.py:{tmp_path}"))
    return config.turned({"draft_length": MACHINE, "max_new_tokens": 8, "prompt_length": 8})


def choose(config, monkeypatch, draft_temperatures=True, **costs):
    timed = []
    costs = {
        word: PerCall(target_ms=ms, draft_ms=draft_ms) for word, (ms, draft_ms) in costs.items()
    }
    monkeypatch.setattr(
        machine_choice, "time_calls", lambda pair, methods, work: timed.append(methods) or costs
    )
    out = io.StringIO()
    found = machine_choice.for_machine(
        config, Console(file=out, width=200), draft_temperatures=draft_temperatures
    )
    return found, timed, out.getvalue()


@pytest.mark.parametrize(
    "model, ngram, hot, chosen",
    [
        ((FREE, 0.1), (FREE, 0.0), NEVER, ("model", 7, None)),  # a cheap draft that is accepted
        ((FREE, 9.0), (FREE, 0.0), NEVER, ("ngram", 7, None)),  # a dear draft
        ((DEAR, 9.0), (DEAR, 0.0), ALWAYS, ("model", 0, None)),  # nothing pays
        ((FREE, 0.1), (FREE, 0.0), ALWAYS, ("model", 7, 1.2)),  # a hotter draft is accepted more
    ],
)
def test_best_forecast_is_chosen_by_one_timing(
    config, monkeypatch, tmp_path, model, ngram, hot, chosen
):
    cells = [cell("model", [1, 0, 0, 0, 0, 0, 0, 9]), cell("ngram", [6, 0, 0, 0, 0, 0, 0, 4])]
    cells += [cell("model", hot)]
    cells[-1]["key"]["draft_temperature"] = 1.2
    (tmp_path / "acceptance.json").write_text(json.dumps({"identity": {}, "cells": cells}))
    found, timed, said = choose(config, monkeypatch, model=model, ngram=ngram)
    assert (found.drafter, found.draft_length, found.draft_temperature) == chosen
    assert [{word: one.drafter.K for word, one in methods.items()} for methods in timed] == [
        {"model": 7, "ngram": 7}
    ]
    assert "forecast for this machine, T = 0.8, top-p 0.95: model K = " in said
    again, timed, _ = choose(config, monkeypatch)
    assert again == found and not timed
    (kept,) = (tmp_path / "kept").iterdir()
    kept.write_text("{")
    assert choose(config, monkeypatch, model=model, ngram=ngram)[1], "a damaged file is made anew"
    os.utime(tmp_path / "draft.safetensors", ns=(0, 0))
    assert choose(config, monkeypatch, model=model, ngram=ngram)[1], "the pair was exported again"
    for other, tries in ((config, False), (config.turned({"rule": "block"}), True)):
        kept_temperature, _, _ = choose(other, monkeypatch, tries, model=model, ngram=ngram)
        assert kept_temperature.draft_temperature is None


@pytest.mark.parametrize(
    "fields, processes", [({}, 2), ({"mesh.data": 2}, 1), ({"mesh.model": 2}, 1)]
)
def test_machine_choice_refuses_several_devices(config, monkeypatch, fields, processes):
    monkeypatch.setattr(machine_choice.jax, "process_count", lambda: processes)
    with pytest.raises(
        ValueError, match="draft_length=machine takes a drafter, one device and jit: name a number"
    ):
        choose(config.turned(fields), monkeypatch)


@pytest.mark.slow
def test_acceptance_is_counted_without_recorded_results(config, monkeypatch):
    found, _, said = choose(config, monkeypatch, model=(FREE, 0.0), ngram=(FREE, 0.0))
    assert (found.drafter, found.draft_length) == ("model", 7), (
        "the draft is the target: everything is accepted"
    )
    assert "model K = 7: 8.00x" in said


def test_given_tree_shape_excludes_machine_choice(config):
    tree = config.turned({"draft_length": 3, "tree": (3, 2, 1), "rule": "recursive"})
    assert machine_choice.is_possible(config) and not machine_choice.is_possible(tree)

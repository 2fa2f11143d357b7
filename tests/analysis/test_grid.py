"""Many cells in one file: what is resumed, set aside, recorded and refused. Nothing is measured here."""

import dataclasses
import json
import pathlib

import jax
import numpy as np
import pytest

import fakes
from configs import random_pair, trained_pair
from launch import cells as launch_cells
from launch.experiment import Experiment, build
from specsamp.analysis import benchmark as benchmark_module
from specsamp.analysis import grid, hyper, tables
from specsamp.analysis.decoder import Workload
from specsamp.analysis.planner import make_plan
from specsamp.analysis.spread import Spread
from specsamp.analysis.synthetic import SyntheticAcceptance
from specsamp.decoding.drafters import ModelDrafter, NgramDrafter, NoDrafter
from specsamp.decoding.pair import Pair
from specsamp.sampling.rules import BlockRule, TokenRule
from specsamp.sampling.warp import chain, greedy, temperature

IDENTITY = {"pair": "toy", "config": {"max_new_tokens": 8}}
K, V = 2, 5
PART = dataclasses.make_dataclass("Part", ["ms"])(Spread.of([1.0]))
SPLIT = dataclasses.make_dataclass("Split", ["step_gb_per_s", "streamed_bytes", "draft", "score"])(
    Spread.of([1.0]), 8, PART, PART
)


@pytest.fixture(scope="module")
def pair():
    table, model = fakes.random_table(0, V), fakes.TableLM(V)
    return Pair(target=model, target_params=table, draft=model, draft_params=fakes.near(table, 1, 1.0))


def key(**changes):
    law = {"temperature": 0.8, "top_k": 0, "top_p": 0.95, "min_p": 0.0, "draft_temperature": None}
    return {"draft_length": 4, "drafter": "model", "rule": "token", "batch": 1, **law, **changes}


def cell(**changes):
    return grid.Cell(
        key=key(**changes), drafter=NgramDrafter(K=4), rule=TokenRule(), sampling=greedy(), draft_sampling=None,
        workload=Workload(),
    )  # fmt: skip


CELLS = [cell(batch=batch) for batch in (1, 2, 4)]


@pytest.fixture
def benchmarks(monkeypatch):
    """Replaces the measurement; says how often it was called."""
    calls = []

    def replace_by(*outcomes):
        todo = list(outcomes)

        def fake(pair, drafter, *arguments, **options):
            calls.append(drafter)
            outcome = todo.pop(0)
            if isinstance(outcome, BaseException):
                raise outcome
            return outcome

        monkeypatch.setattr(grid, "benchmark", fake)
        monkeypatch.setattr(jax, "clear_caches", lambda: None)
        return calls

    return replace_by


def stored(path):
    return json.loads(pathlib.Path(path).read_text(encoding="utf-8"))


def test_an_interrupted_run_goes_on_at_the_next_cell(tmp_path, benchmarks):
    path = str(tmp_path / "new" / "grid.json")
    calls = benchmarks({"n": 1}, KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt):
        grid.measure_cells(None, CELLS, grid.Results.open(path, IDENTITY), header=lambda: {"command": "first"})
    assert [one["key"]["batch"] for one in stored(path)["cells"]] == [1] and len(calls) == 2
    calls = benchmarks({"n": 2}, {"n": 3})
    again = grid.Results.open(path, IDENTITY)
    grid.measure_cells(None, CELLS, again, header=lambda: {"command": "second"})
    assert [one["result"]["n"] for one in stored(path)["cells"]] == [1, 2, 3]
    assert [one["command"] for one in stored(path)["cells"]] == ["first", "second", "second"]
    assert len(calls) == 4
    assert grid.measure_cells(None, CELLS, grid.Results.open(path, IDENTITY)) == []  # nothing is left


@pytest.mark.parametrize("text", ['{"cells": [', "[]", '{"result": 3}', '{"identity": {}, "cells": [{"key": {}}]}', ""])
def test_a_malformed_file_is_set_aside_and_never_overwritten(tmp_path, benchmarks, text):
    path = tmp_path / "grid.json"
    path.write_text(text, encoding="utf-8")
    (tmp_path / "grid.json.aside-1").write_text("older", encoding="utf-8")
    said = []
    results = grid.Results.open(str(path), IDENTITY, said.append)
    assert results.cells == [] and "set aside as" in said[0] and "aside-2" in said[0]
    benchmarks({"n": 1})
    grid.measure_cells(None, CELLS[:1], results)
    assert (tmp_path / "grid.json.aside-1").read_text() == "older"
    assert (tmp_path / "grid.json.aside-2").read_text() == text
    assert len(stored(path)["cells"]) == 1


def test_cells_of_another_run_are_refused_and_left_alone(tmp_path, benchmarks):
    path = str(tmp_path / "grid.json")
    benchmarks({"n": 1})
    grid.measure_cells(None, CELLS[:1], grid.Results.open(path, IDENTITY))
    before = stored(path)
    other = {**IDENTITY, "config": {"max_new_tokens": 9}}
    with pytest.raises(ValueError, match="max_new_tokens was 8, is 9. Give another --output"):
        grid.Results.open(path, other)
    assert stored(path) == before


def test_a_cell_that_runs_out_of_memory_is_recorded_and_the_rest_goes_on(tmp_path, benchmarks):
    path = str(tmp_path / "grid.json")
    full = jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating 99 bytes\nand more")
    benchmarks(full, MemoryError(), {"n": 3})
    grid.measure_cells(None, CELLS, grid.Results.open(path, IDENTITY))
    first, second, third = stored(path)["cells"]
    assert first["out_of_memory"] == "RESOURCE_EXHAUSTED: Out of memory allocating 99 bytes"
    assert second["out_of_memory"] == "MemoryError" and third["result"] == {"n": 3}
    assert "result" not in first
    table = tables.grid_table("", stored(path)["cells"][:2])
    assert [row[1] for row in table.rows] == ["out of memory"] * 2
    assert grid.measure_cells(None, CELLS, grid.Results.open(path, IDENTITY)) == []  # not tried again
    benchmarks(jax.errors.JaxRuntimeError("INTERNAL: something else"))
    with pytest.raises(jax.errors.JaxRuntimeError, match="something else"):
        grid.measure_cells(None, CELLS[:1], grid.Results.open(None, IDENTITY))


@pytest.fixture(scope="module")
def measured(pair):
    """One real cell."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(benchmark_module, "split_round", lambda *_: SPLIT)
        patch.setattr(benchmark_module, "streaming_gb_per_s", lambda nbytes: Spread.of([nbytes / 4]))
        results = grid.Results.open(None, IDENTITY)
        made = grid.Cell(
            key=key(draft_length=K, batch=2), drafter=ModelDrafter(pair.draft, K), rule=SyntheticAcceptance(TokenRule(), 0.6),
            sampling=chain(temperature(1.0)), draft_sampling=chain(temperature(0.5)),
            workload=Workload(batch=2, prompt_length=3, max_new_tokens=120, repeats=4),
        )  # fmt: skip
        grid.measure_cells(pair, [made], results)
        return results.cells[0]


def test_a_cell_of_made_up_acceptance(measured):
    """0.6 of the judged tokens, whatever the models think, and nobody could take it for the pair's."""
    counts = measured["result"]["acceptance"]
    judged = sum(counts["reached"])
    assert abs(counts["rate"] - 0.6) < 5 * np.sqrt(0.24 / judged) and judged > 400
    assert not measured["exact"]
    assert counts["emitted"] == 2 * 120 * 4
    described = grid.describe({**measured["key"], "synthetic_acceptance": 0.6})
    assert described.startswith("SYNTHETIC ACCEPTANCE 0.6: made up, not the pair's")


def test_what_a_cell_says_besides(measured):
    result = measured["result"]
    assert result["streaming_share"]["median"] == 0.5 and result["memory"]["caches"] > 0
    assert result["memory"]["peak"] > 1e6 and result["memory"]["peak_is_of"] == "process"
    for side in ("autoregressive", "speculative"):
        spent = result[side]["token_ms"]
        assert 0 < spent["p50"] <= spent["p90"] <= spent["p99"] and spent["tokens"] == 3 * 240
    assert measured["seconds"] > 0 and measured["workload"]["repeats"] == 4


def test_measured_cells_are_planned_with(measured):
    plain, drafted = (measured["result"][side]["ms_per_round"]["median"] for side in ("autoregressive", "speculative"))
    costs = grid.measured_costs([measured])
    assert costs.round_ms(0, 2) == plain and costs.round_ms(K, 2) == drafted
    profile = grid.measured_profile([measured])
    assert profile.by_position == tuple(measured["result"]["acceptance"]["by_position"])
    assert make_plan(profile, costs, draft_lengths=[K], batch=2)[K].round_ms == drafted
    assert grid.chosen([measured], rule="token", batch=2) == [measured]
    assert grid.chosen([measured], rule="block") == []
    with pytest.raises(ValueError, match="no measured cell has a draft"):
        grid.measured_profile([{**measured, "key": key(draft_length=0, drafter="none")}])


def test_points_of_a_sweep():
    assert hyper.product([hyper.sweep("a", [1, 2]), hyper.sweep("b", "xy")]) == [
        {"a": 1, "b": "x"}, {"a": 1, "b": "y"}, {"a": 2, "b": "x"}, {"a": 2, "b": "y"},
    ]  # fmt: skip
    assert hyper.zipit([hyper.sweep("a", [1, 2]), hyper.sweep("b", [3, 4]), hyper.sweep("c", [5])]) == [
        {"a": 1, "b": 3, "c": 5}, {"a": 2, "b": 4, "c": 5},
    ]  # fmt: skip
    assert hyper.product([]) == [{}]
    with pytest.raises(ValueError, match="sweeps of one length; got 2, 3 points"):
        hyper.zipit([hyper.sweep("a", [1, 2]), hyper.sweep("b", [1, 2, 3])])
    with pytest.raises(ValueError, match="'a' is swept twice"):
        hyper.product([hyper.sweep("a", [1]), hyper.sweep("a", [2])])
    with pytest.raises(ValueError, match="the sweep over 'a' has no values"):
        hyper.sweep("a", [])


@pytest.fixture
def experiment(pair):
    return Experiment(
        pair=pair, pair_name="toy", drafter=NoDrafter(), rule=TokenRule(), sampling=greedy(), workload=Workload()
    )


def points(*texts):
    return launch_cells.parse_grid(texts)


def test_a_grid_becomes_cells(experiment):
    config = trained_pair.get_config()
    made = launch_cells.make_cells(
        config, points("draft_length=0,3", "rule=token,block", "drafter=model,ngram", "sampling.temperature=0.0,0.8"), experiment
    )
    plain = [one for one in made if one.key["draft_length"] == 0]
    assert len(made) == 2 + 8 and len(plain) == 2  # plain decoding has neither rule nor drafter
    assert all(one.drafter == NoDrafter() and one.key["drafter"] == "none" for one in plain)
    assert {type(one.drafter) for one in made if one not in plain} == {ModelDrafter, NgramDrafter}
    assert {type(one.rule) for one in made if one not in plain} == {TokenRule, BlockRule}
    assert config == trained_pair.get_config()  # the configuration itself is not turned
    (heated,) = launch_cells.make_cells(config, points("draft_temperature=0.5"), experiment)
    laws = [float(law.warps[0].value) for law in (heated.sampling, heated.draft_sampling)]
    np.testing.assert_allclose(laws, [0.8, 0.5])
    assert config.draft_temperature is None
    both = launch_cells.make_cells(config, [{"draft_temperature": 0.5}, {"draft_length": 3}], experiment)
    assert [one.key["draft_temperature"] for one in both] == [0.5, None]  # a point knows nothing of the one before
    (cold,) = launch_cells.make_cells(config, points("draft_temperature=0"), experiment)
    assert float(cold.draft_sampling.warps[0].value) == 0 and float(cold.sampling.warps[0].value) > 0.7
    (made_up,) = launch_cells.make_cells(config, points("synthetic_acceptance=0.7"), experiment)
    assert made_up.rule == SyntheticAcceptance(TokenRule(), 0.7) and made_up.key["synthetic_acceptance"] == 0.7
    assert "synthetic_acceptance" not in heated.key


def test_cells_of_other_weights_make_another_file(tmp_path):
    """The same pair trained once more: nothing but its weights tells."""
    path, config = str(tmp_path / "cells.json"), random_pair.get_config("tiny")
    built = build(config)
    identity = lambda weights: launch_cells.identity_of(config, dataclasses.replace(built, weights=weights))
    grid.Results.open(path, identity("first")).add({"key": key(), "result": {}}, {})
    assert grid.Results.open(path, identity("first")).find(key())
    with pytest.raises(ValueError, match="weights was 'first', is 'second'. Give another --output"):
        grid.Results.open(path, identity("second"))


@pytest.mark.parametrize(
    "texts, message",
    [
        (["draft_length=4,-1"], "draft_length .*>= 0.*got -1"),
        (["draft_length=1.5"], "draft_length = 1.5 does not fit"),
        (["draft_length="], "--grid=draft_length=: write a field and its values"),
        (["draft_length"], "write a field and its values"),
        (["rule=lucky"], "no rule 'lucky'"),
        (["drafter=lm"], "no drafter 'lm'"),
        (["batch=0"], "batch must be an integer >= 1"),
        (["seed=1,2"], "'seed' makes another pair or text: run it apart"),
        (["synthetic_acceptance=1.5"], r"synthetic_acceptance must be a chance, in \[0, 1\]; got 1.5"),
        (["draft_temperature=-1.0"], "temperature must be >= 0"),
        (["draft_temperature=hot"], "draft_temperature = 'hot' does not fit"),
        (["sampling.top_p=0.0"], "top_p must lie in"),
        (["draft_length=1", "draft_length=2"], "'draft_length' is swept twice"),
    ],
)
def test_a_grid_is_checked_before_anything_is_measured(experiment, texts, message):
    with pytest.raises(ValueError, match=message):
        launch_cells.make_cells(random_pair.get_config("tiny"), points(*texts), experiment)


@pytest.mark.parametrize(
    "name, text, message",
    [
        ("prompts.txt", "", "holds no prompts"),
        ("prompts.txt", "one\n\ntwo", "prompt 2 of .* is empty"),
        ("prompts.json", "[]", "holds no prompts"),
        ("prompts.json", '["a", ""]', "prompt 2 of .* is empty"),
        ("prompts.json", '["a"', "is no JSON list of prompts"),
        ("prompts.json", '{"texts": []}', "is no JSON list of prompts"),
    ],
)
def test_files_of_prompts_that_hold_none(tmp_path, name, text, message):
    (tmp_path / name).write_text(text, encoding="utf-8")
    with pytest.raises(ValueError, match=message):
        launch_cells.read_prompts(str(tmp_path / name))


def test_files_of_prompts(tmp_path):
    (tmp_path / "a.txt").write_text("def f():\\n  x\nclass A:", encoding="utf-8")
    (tmp_path / "b.json").write_text('{"prompts": [{"text": "x"}]}', encoding="utf-8")
    assert launch_cells.read_prompts(str(tmp_path / "a.txt")) == ["def f():\n  x", "class A:"]
    assert launch_cells.read_prompts(str(tmp_path / "b.json")) == ["x"]

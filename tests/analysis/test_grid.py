"""Many cells in one file: resumption, records, refusals, costs. Only one cell is measured."""

import dataclasses
import json
import pathlib
import threading

import jax
import numpy as np
import pytest

from specsamp import Method, ModelDrafter, NgramDrafter, TokenRule, chain, temperature
from specsamp.analysis import benchmark as benchmark_module
from specsamp.analysis import grid, tables
from specsamp.analysis.acceptance import Profile
from specsamp.analysis.benchmark import benchmark
from specsamp.analysis.costs import CLOCK_DRIFT
from specsamp.analysis.planner import make_plan
from specsamp.analysis.workload import Quartiles, Workload
from specsamp.sampling.synthetic import SyntheticAcceptance
from support import fakes
from support.refusals import refusal

IDENTITY = {"pair": "toy", "config": {"max_new_tokens": 8}}
K = 2
SPLIT = dataclasses.make_dataclass("Split", ["step"])(Quartiles.of([1.0]))


def key(**changes):
    distribution = {
        "temperature": 0.8,
        "top_k": 0,
        "top_p": 0.95,
        "min_p": 0.0,
        "draft_temperature": None,
    }
    return {
        "draft_length": 4,
        "drafter": "model",
        "rule": "token",
        "batch": 1,
        **distribution,
        **changes,
    }


def cell(**changes):
    return grid.Cell(
        key=key(**changes), method=Method(drafter=NgramDrafter(K=4)), workload=Workload()
    )


CELLS = [cell(batch=batch) for batch in (1, 2, 4)]


@pytest.fixture
def outcomes(monkeypatch):
    """Returns a function that sets results and errors of cells, and returns the calls."""
    calls, todo = [], []

    def measure(number, say):
        calls.append(number)
        outcome = todo.pop(0)
        if isinstance(outcome, BaseException):
            raise outcome
        return outcome

    def given(*outcomes):
        todo[:] = outcomes
        return calls

    monkeypatch.setattr(jax, "clear_caches", lambda: None)
    given.measure = measure
    return given


def measure_cells(cells, results, outcomes, **options):
    return grid.measure_cells([each.facts for each in cells], outcomes.measure, results, **options)


def stored(path):
    return json.loads(pathlib.Path(path).read_text())


def test_interrupted_grid_continues_at_the_next_cell(tmp_path, outcomes):
    path = str(tmp_path / "new" / "grid.json")
    calls = outcomes({"n": 1}, KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt):
        measure_cells(
            CELLS, grid.Results.open(path, IDENTITY), outcomes, header=lambda: {"command": "first"}
        )
    assert [one["key"]["batch"] for one in stored(path)["cells"]] == [1] and len(calls) == 2
    calls = outcomes({"n": 2}, {"n": 3})
    again = grid.Results.open(path, IDENTITY)
    measure_cells(CELLS, again, outcomes, header=lambda: {"command": "second"})
    assert [one["result"]["n"] for one in stored(path)["cells"]] == [1, 2, 3]
    assert [one["command"] for one in stored(path)["cells"]] == ["first", "second", "second"]
    assert len(calls) == 4
    # No cell remains.
    assert measure_cells(CELLS, grid.Results.open(path, IDENTITY), outcomes) == {}


def test_cells_are_measured_again_only_on_request(tmp_path, outcomes):
    path = str(tmp_path / "grid.json")
    outcomes({"n": 1}, {"n": 2}, {"n": 3}, {"n": 4}, KeyboardInterrupt())
    measure_cells(CELLS, grid.Results.open(path, IDENTITY), outcomes)
    with pytest.raises(KeyboardInterrupt):
        measure_cells(CELLS[1:], grid.Results.open(path, IDENTITY), outcomes, again=True)
    # Each new result is stored at once, in its place.
    assert [one["result"]["n"] for one in stored(path)["cells"]] == [1, 4, 3]
    before = grid.Results.open(path, IDENTITY)
    other = grid.Results.open(path, IDENTITY)
    outcomes(MemoryError(), {"n": 5}, {"n": 6})
    measure_cells(CELLS[:2], other, outcomes, again=True)
    # A run that began before does not hold the newer results.
    measure_cells([cell(batch=8)], before, outcomes)
    # Running out of memory replaces no result.
    assert [one["result"]["n"] for one in stored(path)["cells"]] == [1, 5, 3, 6]


@pytest.mark.parametrize(
    "text", ["[]", '{"identity": {}, "cells": [{"key": {}}]}', "# A text", "[" * 100_000]
)
def test_a_file_of_something_else_is_left_alone(tmp_path, text):
    """Results of another tool, damaged files and texts never move or change, even during a run."""
    path = tmp_path / "audit.json"
    opened_before = grid.Results.open(str(path), IDENTITY)
    path.write_text(text)
    with refusal("audit.json .*left alone. Give another --output"):
        grid.Results.open(str(path), IDENTITY)
    with refusal("left alone"):
        opened_before.add({"key": key(batch=9), "result": {"n": 9}}, {})
    assert path.read_text() == text and len([*tmp_path.iterdir()]) == 1


def test_empty_output_file_has_no_cells(tmp_path):
    (tmp_path / "empty").touch()
    for path in (str(tmp_path / "empty"), "/dev/null"):
        results = grid.Results.open(path, IDENTITY)
        results.add({"key": key(), "result": {"n": 1}}, {})
        assert len(results.cells) == 1
    assert len(stored(tmp_path / "empty")["cells"]) == 1 and not pathlib.Path("/dev/null").is_file()


def test_two_writers_at_once_lose_no_cell(tmp_path):
    path = str(tmp_path / "grid.json")
    (tmp_path / ".grid.json.lock").touch()  # of a killed process

    def add(first):
        results = grid.Results.open(path, IDENTITY)
        for batch in range(first, first + 15):
            results.add({"key": key(batch=batch), "result": {}}, {})

    writers = [threading.Thread(target=add, args=(first,)) for first in (100, 200, 300)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
    assert len(stored(path)["cells"]) == 45 and [*tmp_path.iterdir()] == [tmp_path / "grid.json"]


def test_cells_of_another_machine_are_refused(tmp_path):
    """Cells of a file that names no machine are refused as well."""
    for name, machine in (("old", {}), ("other", {"machine": {"id": "a"}})):
        path = str(tmp_path / name)
        grid.Results.open(path, IDENTITY | machine).add({"key": key(), "result": {}}, {})
        with refusal("cells of another run: machine.id was .*, is 'b'. Give another --output"):
            grid.Results.open(path, IDENTITY | {"machine": {"id": "b"}})
    assert grid.Results.open(path, IDENTITY | {"machine": {"id": "a"}}).find(key())
    # A part of the identity is enough.
    assert grid.Results.open(path, {"machine": {"id": "a"}}).cells


def test_cell_out_of_memory_is_recorded(tmp_path, outcomes):
    path = str(tmp_path / "grid.json")
    full = jax.errors.JaxRuntimeError(
        "RESOURCE_EXHAUSTED: Out of memory allocating 99 bytes\nand more"
    )
    outcomes(full, MemoryError(), {"n": 3})
    measure_cells(CELLS, grid.Results.open(path, IDENTITY), outcomes)
    first, second, third = stored(path)["cells"]
    assert first["out_of_memory"] == "RESOURCE_EXHAUSTED: Out of memory allocating 99 bytes"
    assert second["out_of_memory"] == "MemoryError" and third["result"] == {"n": 3}
    assert "result" not in first
    table = tables.grid_table("", stored(path)["cells"][:2])
    assert [row[3] for row in table.rows] == ["out of memory"] * 2
    # They are not tried again.
    assert measure_cells(CELLS, grid.Results.open(path, IDENTITY), outcomes) == {}
    outcomes(jax.errors.JaxRuntimeError("INTERNAL: something else"))
    with pytest.raises(jax.errors.JaxRuntimeError, match="something else"):
        measure_cells(CELLS[:1], grid.Results.open(None, IDENTITY), outcomes)


@pytest.fixture(scope="module")
def measured():
    """Measures a real cell and returns it."""
    pair = fakes.table_pair(5, noise=1.0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(benchmark_module, "split_round", lambda *_: SPLIT)
        results = grid.Results.open(None, IDENTITY)
        made = grid.Cell(
            key=key(draft_length=K, batch=2),
            method=Method(
                drafter=ModelDrafter(pair.draft, K),
                rule=SyntheticAcceptance(TokenRule(), 0.6),
                sampling=chain(temperature(1.0)),
                draft_sampling=chain(temperature(0.5)),
            ),
            workload=Workload(batch=2, prompt_length=3, max_new_tokens=120, repeats=4),
        )
        grid.measure_cells(
            [made.facts], lambda *_: benchmark(pair, made.method, made.workload), results
        )
        return results.cells[0]


def test_a_cell_of_made_up_acceptance(measured):
    """With any models 0.6 of the verified tokens are accepted, as the description states first."""
    counts = measured["result"]["acceptance"]
    judged = sum(counts["reached"])
    assert abs(counts["rate"] - 0.6) < 5 * np.sqrt(0.24 / judged) and judged > 400
    assert not measured["exact"]
    assert counts["emitted"] == 2 * 120 * 4
    described = grid.describe({**measured["key"], "synthetic_acceptance": 0.6})
    assert described.startswith("SYNTHETIC ACCEPTANCE 0.6: made up, not the pair's")
    memory = measured["result"]["memory"]
    assert memory["caches"] > 0 and memory["peak"] > 1e6 and memory["peak_is_of"] == "process"


def test_measured_cells_are_planned_with(measured):
    plain, drafted = (
        measured["result"][side]["ms_per_round"]["median"]
        for side in ("autoregressive", "speculative")
    )
    costs = grid.measured_costs([measured])
    assert (costs.round_ms(0, 2), costs.round_ms(K, 2)) == pytest.approx((plain, drafted))
    fewer = measured["result"]["acceptance"] | {"accepted_counts": [9, 1, 0], "reached": [10, 1]}
    # The larger batch has the same texts.
    smaller = {"key": key(batch=1), "result": {"acceptance": fewer}}
    acceptance = grid.measured_acceptance([smaller, measured, smaller])
    assert acceptance[K].by_position == tuple(measured["result"]["acceptance"]["by_position"])
    assert make_plan(acceptance, costs, draft_lengths=[K], batch=2)[K].round_ms == pytest.approx(
        drafted
    )
    assert grid.chosen([measured], rule="token", batch=2) == [measured]
    assert grid.chosen([measured], rule="block") == []
    with refusal("no measured cell has a draft"):
        grid.measured_acceptance([{**measured, "key": key(draft_length=0, drafter="none")}])


def timed_cell(K, pace, plain_ms=2.0, drafted_ms=3.0):
    """Returns a cell of a machine that takes ``pace`` times as long for everything."""

    def spread(ms):
        return dataclasses.asdict(
            Quartiles.of([pace * ms * share for share in (0.98, 0.99, 1.0, 1.01, 1.02)])
        )

    sides = {"autoregressive": plain_ms, "speculative": drafted_ms if K else plain_ms}
    result = {side: {"draft_length": K, "ms_per_round": spread(ms)} for side, ms in sides.items()}
    named = key(draft_length=K, drafter="model" if K else "none")
    return {"key": named, "workload": {"repeats": 25}, "result": result}


def test_costs_are_compared_within_a_cell():
    """A machine that is busy after the first cells does not make drafting dearer."""
    paces = {0: 1.0, 1: 1.0, 4: 3.0, 8: 3.0, 12: 3.0}
    costs = grid.measured_costs([timed_cell(K, pace) for K, pace in paces.items()])
    np.testing.assert_allclose([costs.round_ms(K) / costs.round_ms(0) for K in (1, 4, 8, 12)], 1.5)
    assert costs.round_ms(0) == 2.0 * 3  # the median of the cells
    # Quartiles lie 2% apart, and clocks drift: both are in the band.
    np.testing.assert_allclose(costs.error, np.hypot(0.929 * 0.02 / 5, CLOCK_DRIFT), rtol=1e-2)
    band = make_plan(Profile.of_rate(0.7), costs)[4].speedup
    assert band.lower < band.value < band.upper

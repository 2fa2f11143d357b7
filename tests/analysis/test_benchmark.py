"""The benchmark's arithmetic and its file; never its times."""

import dataclasses
import io
import json
import math
import os
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specsamp.analysis import benchmark as benchmark_module
from specsamp.analysis import phases, report, split, tables
from specsamp.analysis.acceptance import expected_tokens, rate_error
from specsamp.analysis.benchmark import benchmark
from specsamp.analysis.measured import counts_of
from specsamp.analysis.timing import Quartiles, take_turns
from specsamp.analysis.workload import Workload
from specsamp.decoding.drafters import ModelDrafter, NgramDrafter, NoDrafter
from specsamp.decoding.loop import Loop
from specsamp.decoding.pair import Pair
from specsamp.decoding.results import RowStats
from specsamp.decoding.state import Request, Weights
from specsamp.models.config import tiny
from specsamp.models.transformer import TransformerLM
from specsamp.sampling.rejection import BlockRule, TokenRule
from specsamp.sampling.warp import chain, greedy, temperature
from support import fakes

K = 3
WORK = Workload(batch=2, prompt_length=5, max_new_tokens=11, repeats=2, seed=4)
SAMPLING = chain(temperature(0.8))


@pytest.fixture(scope="module")
def pair():
    """Table models: quick to compile."""
    table, model = fakes.random_table(0, 8), fakes.TableLM(8, max_positions=64)
    return Pair(target=model, target_params=table, draft=model, draft_params=fakes.near(table, 1, 0.5))


@pytest.fixture(scope="module")
def result(pair):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(split, "SECONDS_PER_SAMPLE", 1e-4)
        patch.setattr("specsamp.analysis.benchmark.STREAMED_COLUMNS", 64)
        patch.setattr("specsamp.analysis.benchmark.STREAMING_SECONDS", 1e-4)
        said = []
        result = benchmark(pair, ModelDrafter(pair.draft, K), TokenRule(), SAMPLING, WORK, said.append)
        assert any("phases" in text for text in said)
        return result


@pytest.fixture(scope="module")
def setting():
    """A loop of two rows, with its weights and request."""
    target, draft = TransformerLM(tiny(num_layers=1)), TransformerLM(tiny(num_layers=1, num_kv_heads=2))
    loop = Loop(target=target, drafter=ModelDrafter(draft, K), rule=TokenRule())
    random = np.random.default_rng(0)

    def weights_of(model):
        shapes = jax.eval_shape(lambda: model.fit_slots(model.prepare(model.init(jax.random.key(0))), 32))
        return jax.tree.map(lambda leaf: jnp.asarray(random.normal(size=leaf.shape, scale=0.1), leaf.dtype), shapes)

    request = Request.create(sampling=SAMPLING, limits=[20, 20])
    return loop, Weights(target=weights_of(target), draft=weights_of(draft)), request


@pytest.fixture
def buffers(setting):
    """What passes between the phases, in the middle of a text."""
    loop, weights, request = setting
    state = loop.prefill(weights, request, jnp.array([[1, 2, 3], [4, 5, 6]]), jnp.array([3, 2]), slots=32)
    return phases.first_buffers(loop, weights, request, state)


def numbers(tree):
    """All numbers of a JSON document."""
    if isinstance(tree, dict):
        tree = list(tree.values())
    return [n for x in tree for n in numbers(x)] if isinstance(tree, list) else [tree]


def test_every_field_is_finite_and_survives_json(result, tmp_path):
    path = tmp_path / "new folder" / "result.json"
    report.write_json(path, {"environment": report.environment(), "result": result})
    read = json.loads(path.read_text(encoding="utf-8"))["result"]
    assert read["acceptance"]["rate"] == result.acceptance.acceptance_rate
    assert counts_of({"result": read}) == result.acceptance
    assert all(math.isfinite(n) for n in numbers(read) if n is not None and not isinstance(n, str))
    for side in ("autoregressive", "speculative"):
        assert read[side]["ms_per_token"]["lower"] <= read[side]["ms_per_token"]["median"]
        assert read[side]["ms_per_token"]["median"] <= read[side]["ms_per_token"]["upper"]
    assert os.listdir(path.parent) == ["result.json"]


def test_statistics_are_consistent(result):
    counts = result.acceptance
    assert counts.emitted == WORK.batch * WORK.max_new_tokens * WORK.repeats
    assert sum(counts.accepted_counts) == counts.rounds and len(counts.accepted_counts) == K + 1
    assert counts.emitted_per_round == counts.emitted / counts.rounds
    assert result.speculative.draft_length == K and result.autoregressive.draft_length == 0
    allowed = expected_tokens(counts.acceptance_rate, K) / result.split.least_round.median
    assert result.allowed_speedup == allowed


def test_counts_as_json_and_back():
    """With the rates that follow from them; older files lack the number of drafted tokens."""
    stats = RowStats(rounds=10, emitted=19, drafted=20, reached=(10, 6), accepted_counts=(4, 3, 3))
    written = json.loads(report.to_json(stats))
    assert written["by_position"] == [0.6, 0.5] and written["rate"] == 9 / 16
    np.testing.assert_allclose(written["by_position_error"], [math.sqrt(0.24 / 10), math.sqrt(0.25 / 6)])
    np.testing.assert_allclose(written["rate_error"], math.sqrt(9 * 7 / 16**3))
    assert counts_of({"result": {"acceptance": written}}) == stats
    del written["drafted"]
    assert counts_of({"result": {"acceptance": written}}) == dataclasses.replace(stats, drafted=16)
    nothing = RowStats(rounds=3, emitted=3, drafted=0, reached=(0,), accepted_counts=(3, 0))
    written = json.loads(report.to_json(nothing))
    assert written["rate"] is None and written["by_position"] == written["by_position_error"] == [None]
    assert math.isnan(rate_error(0.5, 0)) and tables.rate_with_error(nothing) == ""


def test_all_run_once_before_any_runs_again():
    order = []
    answers = take_turns({name: lambda turn, name=name: order.append((name, turn)) or turn for name in "ab"}, 2)
    assert order == [("a", 0), ("b", 0), ("a", 1), ("b", 1)] and answers == {"a": [0, 1], "b": [0, 1]}


def test_all_phases_are_measured(result):
    measured = {name for name, value in vars(result.split).items() if isinstance(value, split.PhaseTime)}
    assert measured == {
        "draft_model",
        "draft",
        "score",
        "verify",
        "commit",
        "round",
        "step",
        "stream_step",
        "stream_score",
    }
    for name in measured:
        assert getattr(result.split, name).iterations >= 2 and getattr(result.split, name).linearity > 0


@pytest.mark.parametrize("warm_samples, as_in_a_loop", [(split.WARM_SAMPLES, True), (0, False)])
def test_phases_are_timed_in_caches_as_a_loop_leaves_them(monkeypatch, warm_samples, as_in_a_loop):
    """On a clock for which the first ten calls of the target after anything else take twice as long."""
    of_target = ["round", "score", "stream_score", "step", "stream_step"]
    warm = [0]

    class Bench:
        matrices = ()

        def __init__(self, *_):
            self.run_products = lambda: self.clock(True)
            self.run = lambda phase: self.clock(phase in (phases.whole_round, phases.score))

        def clock(self, reads_target):
            def seconds(iterations):
                cold = min(max(10 - warm[0], 0), iterations) if reads_target else 0
                warm[0] = warm[0] + iterations if reads_target else 0
                return iterations + cold

            return seconds

    monkeypatch.setattr(split, "PhaseTimer", Bench)
    monkeypatch.setattr(split, "find_iterations", lambda run, seconds: 4)
    monkeypatch.setattr(split, "WARM_SAMPLES", warm_samples)
    timed = split.split_round((None,) * 4, (None,) * 4, 2)
    assert all(getattr(timed, name).ms.upper == 1000 for name in of_target) == as_in_a_loop


@pytest.mark.parametrize("ways, window, rows", [(1, 1, [2, 8, 16]), (2, 2, [2, 8, 8])])
def test_products_are_timed_by_the_rows_of_a_shard(monkeypatch, ways, window, rows):
    """A call of one token is as long as the window."""
    timed = []
    monkeypatch.setattr(phases, "stream", lambda loop, matrices, iterations, rows: timed.append(rows))
    loop = types.SimpleNamespace(shards=types.SimpleNamespace(count=ways), window=window)
    for batch, tokens in ((2, 1), (8, 1), (8, 2)):
        assert split.time_products(loop, [], batch, tokens)(3) > 0
    assert timed == rows


def test_the_parts_and_the_unexplained_make_the_round():
    ms = {
        "draft_model": [1.0, 3.0],
        "draft": [1.5, 3.5],
        "score": [5.0, 5.0],
        "verify": [0.25, 0.25],
        "commit": [0.25, 0.25],
        "round": [8.0, 10.0],
        "step": [4.0, 5.0],
        "stream_step": [2.0, 2.0],
        "stream_score": [3.0, 3.0],
    }
    samples = {name: np.array([[at_n, 2 * at_n] for at_n in values]) for name, values in ms.items()}
    summary = split._summary(samples, dict.fromkeys(ms, 4), streamed_bytes=8_000_000)
    assert summary.draft_sampling == Quartiles(median=0.5, lower=0.5, upper=0.5)
    assert summary.unexplained == Quartiles(median=1.0, lower=1.0, upper=1.0)
    assert summary.sampling_share.median == (1 / 8 + 1 / 10) / 2
    assert summary.break_even.median == 2.0
    assert summary.least_round.median == (6 / 4 + 8 / 5) / 2  # of one repeat each, not of medians
    assert summary.stream_gb_per_s.median == 4.0
    assert summary.score.linearity == 0.5


@pytest.mark.parametrize(
    "phase, products, warps",
    [
        (phases.draft, True, True),
        (phases.draft_model, True, False),
        (phases.score, True, False),
        (phases.verify, False, True),
        (phases.commit, False, False),
        (phases.whole_round, True, True),
    ],
)
def test_a_phase_stands_still_and_stays_in_its_loop(setting, buffers, phase, products, warps):
    """However often it runs no row gets longer; its work is in the loop, and the caches are not copied."""
    before = jax.tree.map(np.array, buffers)
    compiled = phases.repeat.lower(phase, *setting, buffers, 7).compile()
    after = compiled(*setting[1:], buffers, 7)
    np.testing.assert_array_equal(after.state.lengths_B, before.state.lengths_B)
    np.testing.assert_array_equal(after.state.finish_B, before.state.finish_B)
    assert jax.tree.map(jnp.shape, after) == jax.tree.map(jnp.shape, before)

    lines = compiled.as_text().splitlines()
    in_loop = " ".join(line for line in lines if "/while/body" in line)
    assert ("dot_general" in in_loop) == products
    assert ("log_softmax" in in_loop) == warps
    shape = ",".join(map(str, before.state.cache.layers[0].values_BMSH.shape))
    assert not [line for line in lines if f"f32[{shape}]" in line.split(" copy(")[0] and " copy(" in line]


def test_the_phases_together_are_a_round(setting, buffers):
    """Run in order, they emit what the loop's own round emits."""
    state = jax.tree.map(jnp.array, buffers.state)
    for phase in (phases.draft, phases.score, phases.verify):
        buffers = phases.repeat(phase, *setting, buffers, 1)
    loop, *arguments = setting
    expected = jax.jit(loop.round)(*arguments, state)
    emitted_B = np.array(buffers.verdict.num_accepted_B) + 1
    np.testing.assert_array_equal(expected.lengths_B - state.lengths_B, emitted_B)
    for row, (start, count) in enumerate(zip(np.array(state.lengths_B), emitted_B)):
        np.testing.assert_array_equal(
            expected.tokens_BS[row, start : start + count], buffers.verdict.tokens_BT[row, :count]
        )


def without_parts(monkeypatch):
    """As under JAX_DISABLE_JIT, but compiled."""
    monkeypatch.setattr(benchmark_module, "_phases", lambda *_: (None, None, None))


def test_phases_that_do_not_fit_are_left_out(pair, monkeypatch):
    """Decoding holds the caches of one side, the phases hold both: what was decoded counts all the same."""

    def fail(message):
        def split(*_):
            raise jax.errors.JaxRuntimeError(message)

        monkeypatch.setattr(benchmark_module, "split_round", split)

    fail("RESOURCE_EXHAUSTED: Out of memory allocating 9 bytes")
    said = []
    result = benchmark(pair, NgramDrafter(K=2), TokenRule(), SAMPLING, WORK, said.append)
    assert result.split is None and result.streaming_share is None and result.acceptance.emitted
    assert "left out" in said[-1]
    fail("INTERNAL: something else")
    with pytest.raises(jax.errors.JaxRuntimeError, match="something else"):
        benchmark(pair, NgramDrafter(K=2), TokenRule(), SAMPLING, WORK)


def test_prompt_lookup(pair, monkeypatch):
    """Proposals without distributions, and sometimes none."""
    without_parts(monkeypatch)
    result = benchmark(pair, NgramDrafter(K=2), BlockRule(), SAMPLING, WORK)
    assert len(result.acceptance.accepted_counts) == 3
    assert result.acceptance.reached[0] <= result.acceptance.rounds
    assert len(tables.result_tables(result)) == 2


def test_greedy_sides_write_the_same_and_sampled_ones_need_not(pair, result, monkeypatch):
    without_parts(monkeypatch)
    same = benchmark(pair, ModelDrafter(pair.draft, K), TokenRule(), chain(temperature(0.0)), WORK).same_tokens
    assert same == WORK.repeats > result.same_tokens


def test_no_drafter(pair, monkeypatch):
    """Both sides are the same: that is how to test a benchmark."""
    without_parts(monkeypatch)
    result = benchmark(pair, NoDrafter(), TokenRule(), greedy(), WORK)
    assert sum(result.acceptance.reached) == 0 and result.acceptance.emitted_per_round == 1
    assert len(tables.result_tables(result)) == 1


def test_without_jit_there_are_no_phases():
    with jax.disable_jit(), pytest.raises(ValueError, match="JAX_DISABLE_JIT"):
        split.split_round(None, None, 1)


def test_workloads_are_checked(pair):
    with pytest.raises(ValueError, match="repeats must be an integer >= 1; got 0"):
        Workload(repeats=0)
    long = dataclasses.replace(WORK, max_new_tokens=60)
    with pytest.raises(ValueError, match="65 positions, but the target has 64"):
        benchmark(pair, NoDrafter(), TokenRule(), SAMPLING, long)


def test_a_target_that_has_no_distribution_is_not_a_quick_one(pair):
    """Its rows end before the first token."""
    broken = dataclasses.replace(pair, target_params=jnp.full_like(pair.target_params, jnp.nan))
    with pytest.raises(ValueError, match="the target's logits hold NaN"):
        benchmark(broken, NoDrafter(), TokenRule(), SAMPLING, WORK)


@pytest.mark.parametrize("document", [{"x": object()}, {"x": float("nan")}])
def test_what_has_no_json_form_leaves_the_old_file(tmp_path, document):
    path = tmp_path / "result.json"
    report.write_json(path, {"x": 1})
    with pytest.raises((TypeError, ValueError)):
        report.write_json(path, document)
    assert os.listdir(tmp_path) == ["result.json"] and json.loads(path.read_text()) == {"x": 1}


def test_a_failed_replacement_leaves_no_partial_file(tmp_path, monkeypatch):
    def fail(*_):
        raise OSError("disk full")

    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(OSError, match="disk full"):
        report.write_json(tmp_path / "result.json", {"x": 1})
    assert os.listdir(tmp_path) == []


WIDE = report.Table(
    title="Cells", header=("", *"abc"), rows=[("greedy", "1", "", "x" * 30), ("sampled", "2", "3", "4")], note="a note"
)


@pytest.mark.parametrize("plain", [True, False])
@pytest.mark.parametrize("width", [30, 120])
def test_a_table_that_does_not_fit_is_shown_row_by_row(plain, width):
    """A pipe has 80 columns: nothing is cut and no word is broken."""
    from rich.console import Console

    console = Console(width=width, file=io.StringIO())
    report.show([WIDE], console, plain)
    lines = [line.rstrip() for line in console.file.getvalue().splitlines()]
    if width == 120:
        assert any(line.split() == ["sampled", "2", "3", "4"] for line in lines)
    else:
        assert lines[1:5] == ["Cells", "greedy", "  a  1", "  c  " + "x" * 30][: len(lines[1:5])] or not plain
        assert {"sampled", "  a  2", "  b  3", "  c  4", "a note"} <= set(lines) and "  b" not in lines


@pytest.mark.parametrize("plain", [True, False])
def test_tables_hold_the_numbers(result, plain):
    from rich.console import Console

    console = Console(width=110, record=True, file=open(os.devnull, "w", encoding="utf-8"))
    with console.file:
        report.show(tables.result_tables(result), console, plain)
        text = console.export_text()
    assert f"{result.acceptance.emitted_per_round:.3f}" in text
    assert f"{result.split.round.ms.median:.3g}" in text
    for words in ("draft: warp and draw", "unexplained", "the whole round", "GB: weights, caches, peak"):
        assert words in text

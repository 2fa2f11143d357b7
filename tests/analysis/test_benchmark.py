"""The benchmark's arithmetic and its file; never its times."""

import dataclasses
import json
import math

import jax
import jax.numpy as jnp
import pytest

from specsamp import (
    Method,
    ModelDrafter,
    NgramDrafter,
    NoDrafter,
    RowStats,
    TokenRule,
    chain,
    greedy,
    machine,
    temperature,
)
from specsamp.analysis import benchmark as benchmark_module
from specsamp.analysis import report, tables
from specsamp.analysis.benchmark import RoundSplit, benchmark, write_profile
from specsamp.analysis.grid import counts_of
from specsamp.analysis.workload import Workload, decoders
from support import fakes
from support.refusals import refusal

K = 3
WORK = Workload(batch=2, prompt_length=5, max_new_tokens=11, repeats=2, seed=4)
SAMPLING = chain(temperature(0.8))


@pytest.fixture(scope="module")
def pair():
    """Returns a pair of table models, which compile fast."""
    return fakes.table_pair(8, max_positions=64)


@pytest.fixture(scope="module")
def result(pair):
    said = []
    method = Method(drafter=ModelDrafter(pair.draft, K), sampling=SAMPLING)
    result = benchmark(pair, method, WORK, said.append)
    assert any("calls of a round" in text for text in said)
    return result


def numbers(tree):
    """Returns all numbers of a JSON document."""
    if isinstance(tree, dict):
        tree = list(tree.values())
    return [n for x in tree for n in numbers(x)] if isinstance(tree, list) else [tree]


def test_every_field_is_finite_and_survives_json(result):
    read = report.as_json({"environment": machine.environment(), "result": result})["result"]
    assert read["acceptance"]["rate"] == result.acceptance.acceptance_rate
    assert counts_of({"result": read}) == result.acceptance
    assert all(math.isfinite(n) for n in numbers(read) if n is not None and not isinstance(n, str))


def test_counts_as_json_and_back():
    """Results include the rates that follow from counts; older files lack the number of drafted
    tokens.
    """
    stats = RowStats(rounds=10, emitted=19, drafted=20, reached=(10, 6), accepted_counts=(4, 3, 3))
    written = json.loads(report.json_text(stats))
    assert written["by_position"] == [0.6, 0.5] and written["rate"] == 9 / 16
    assert counts_of({"result": {"acceptance": written}}) == stats
    del written["drafted"]
    assert counts_of({"result": {"acceptance": written}}) == dataclasses.replace(stats, drafted=16)
    nothing = RowStats(rounds=3, emitted=3, drafted=0, reached=(0,), accepted_counts=(3, 0))
    assert json.loads(report.json_text(nothing))["rate"] is None
    assert tables.rate_with_error(nothing) == ""


def test_calls_of_a_round_are_compared_per_turn():
    split = RoundSplit.of(draft=[1.0, 4.0], score=[3.0, 8.0], step=[2.0, 4.0])
    assert split.least_round.median == (4 / 2 + 12 / 4) / 2 and split.draft.median == 2.5


def test_calls_that_do_not_fit_are_left_out(pair, monkeypatch):
    """The calls need more caches than the decoders alone, whose results still count."""

    def fail(message):
        def split(*_):
            raise jax.errors.JaxRuntimeError(message)

        monkeypatch.setattr(benchmark_module, "split_round", split)

    fail("RESOURCE_EXHAUSTED: Out of memory allocating 9 bytes")
    said = []
    result = benchmark(
        pair,
        Method(drafter=NgramDrafter(K=2), rule=TokenRule(), sampling=SAMPLING),
        WORK,
        said.append,
    )
    assert result.split is None and result.acceptance.emitted
    assert "left out" in said[-1]
    fail("INTERNAL: something else")
    with pytest.raises(jax.errors.JaxRuntimeError, match="something else"):
        benchmark(
            pair, Method(drafter=NgramDrafter(K=2), rule=TokenRule(), sampling=SAMPLING), WORK
        )


def test_profile_names_the_scopes_of_a_round(pair, tmp_path):
    method = Method(drafter=ModelDrafter(pair.draft, K), sampling=SAMPLING)
    (decoder,) = decoders(pair, {"speculative": method}, WORK).values()
    write_profile(decoder, tmp_path)
    assert [*tmp_path.glob("**/*.trace.json.gz")]  # the name that the command prints
    engine = decoder.engine
    state = decoder.prefill(decoder.requests(0))
    lowered = jax.jit(engine.loop.run).lower(engine.weights, state, 1)
    names = lowered.as_text(debug_info=True)
    assert all(f"{scope}/" in names for scope in ("draft", "score", "verify", "commit"))


@pytest.mark.parametrize("K", [0, 3])
def test_greedy_texts_of_both_sides_are_equal(pair, result, monkeypatch, K):
    """Without a draft both sides are also the same program: a test of the benchmark itself."""
    # As under JAX_DISABLE_JIT, but compiled.
    monkeypatch.setattr(benchmark_module, "_split", lambda *_: None)
    drafter = ModelDrafter(pair.draft, K) if K else NoDrafter()
    greedily = benchmark(pair, Method(drafter=drafter, rule=TokenRule(), sampling=greedy()), WORK)
    assert greedily.same_tokens == WORK.repeats > result.same_tokens
    assert len(tables.result_tables(greedily)) == (2 if K else 1)
    if K == 0:
        assert sum(greedily.acceptance.reached) == 0 and greedily.acceptance.emitted_per_round == 1


def test_workloads_are_checked(pair):
    long = dataclasses.replace(WORK, max_new_tokens=60)
    with refusal("65 positions, but the target has 64"):
        benchmark(pair, Method(drafter=NoDrafter(), rule=TokenRule(), sampling=SAMPLING), long)


def test_target_with_nan_logits_is_refused(pair):
    """Its rows end before the first token."""
    broken = dataclasses.replace(pair, target_params=jnp.full_like(pair.target_params, jnp.nan))
    with refusal("the target's logits hold NaN"):
        benchmark(broken, Method(drafter=NoDrafter(), rule=TokenRule(), sampling=SAMPLING), WORK)

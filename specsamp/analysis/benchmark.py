"""Autoregressive against speculative decoding, measured in turn in one process.

    result = benchmark(pair, drafter, rule, sampling, Workload(max_new_tokens=128, repeats=15))

Both sides are the same `Loop`, one with an empty draft. Repeat r gives both the same prompts and seed;
the next repeat has others, so the counts of acceptance come from many texts. Prefill and compilation are
timed apart. Speedup is the median of the ratios within a repeat. The machine may be busy with other
things: believe ratios, not milliseconds.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import operator
import time
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from specsamp.analysis.split import RoundSplit, split_round
from specsamp.analysis.spread import Spread
from specsamp.decoding.drafters import ModelDrafter, NoDrafter
from specsamp.decoding.generate import SLOTS_MULTIPLE, RowStats, decode_window
from specsamp.decoding.loop import Loop
from specsamp.decoding.pair import Pair
from specsamp.decoding.types import DecodeState, Drafter, Request, Rule, Stats, Weights
from specsamp.sampling.rng import row_keys
from specsamp.sampling.warp import Warp, for_rows

UNLIMITED = np.iinfo(np.int32).max


@dataclasses.dataclass(frozen=True, kw_only=True)
class Workload:
    """What both sides decode, and how often."""

    batch: int = 1
    prompt_length: int = 64
    max_new_tokens: int = 128
    repeats: int = 15
    seed: int = 0

    def __post_init__(self):
        for field in dataclasses.fields(self):
            value, least = getattr(self, field.name), 0 if field.name == "seed" else 1
            if not isinstance(value, int) or value < least:
                raise ValueError(f"{field.name} must be an integer >= {least}; got {value!r}")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Side:
    """One way to decode."""

    draft_length: int
    ms_per_token: Spread  # of the loop, over tokens of all rows
    ms_per_round: Spread
    prefill_ms: Spread
    warm_up_seconds: float  # the first call, compilation included


@dataclasses.dataclass(frozen=True, kw_only=True)
class Acceptance:
    """Counts over all rows and repeats; only what was emitted counts. Errors are standard errors.

    Whether a drafted token is accepted is one coin flip given the past, so errors are binomial.
    """

    rounds: int
    emitted: int
    emitted_per_round: float
    rate: float | None  # alpha: accepted per judged token; None if nothing was drafted
    rate_error: float | None
    reached: tuple[int, ...]  # per position, rounds in which it was judged
    by_position: tuple[float | None, ...]  # accepted, of those reached
    by_position_error: tuple[float | None, ...]
    accepted_counts: tuple[int, ...]  # rounds by number of accepted tokens, 0 .. K

    @classmethod
    def of(cls, stats: RowStats) -> Acceptance:
        known = lambda x: None if math.isnan(x) else x
        positions = [known(rate) for rate in stats.acceptance_by_position]
        rate = known(stats.acceptance_rate)
        return cls(
            rounds=stats.rounds, emitted=stats.emitted, emitted_per_round=stats.emitted_per_round,
            rate=rate, rate_error=_binomial_error(rate, sum(stats.reached)), reached=stats.reached,
            by_position=tuple(positions), accepted_counts=stats.accepted_counts,
            by_position_error=tuple(_binomial_error(*pair) for pair in zip(positions, stats.reached, strict=True)),
        )  # fmt: skip


@dataclasses.dataclass(frozen=True, kw_only=True)
class Result:
    """What `benchmark` returns."""

    autoregressive: Side
    speculative: Side
    speedup: Spread  # autoregressive over speculative ms per token
    acceptance: Acceptance
    split: RoundSplit | None  # None under JAX_DISABLE_JIT


def benchmark(
    pair: Pair,
    drafter: Drafter,
    rule: Rule,
    sampling: Warp,
    workload: Workload,
    progress: Callable[[str], None] = lambda text: None,
) -> Result:
    """Measures ``drafter`` under ``rule`` against plain decoding of the same target.

    Args:
      pair: target and draft.
      drafter: `NoDrafter` makes both sides the same: a speedup other than one is then an error of measurement.
      rule: decides what is accepted.
      sampling: the warp of target and draft, scalar numbers.
      workload: what to decode.
      progress: is told what is being measured.

    Raises:
      ValueError: the workload does not fit the models.
    """
    sides = _decoders(pair, drafter, rule, sampling, workload)
    warm_up = []
    for name, side in sides.items():
        progress(f"compiling: {name} loop")
        start = time.perf_counter()
        side.decode(0)
        warm_up.append(time.perf_counter() - start)
    timings = {name: np.zeros((workload.repeats, 3)) for name in sides}  # prefill, loop, rounds of the loop
    counts = {name: [] for name in sides}
    for repeat in range(workload.repeats):
        progress(f"decoding: repeat {repeat + 1} of {workload.repeats}")
        for name, side in sides.items():
            prefill, seconds, stats = side.decode(repeat)
            timings[name][repeat] = prefill, seconds, stats.rounds_B.max()
            counts[name].append(_row_stats(stats))
    split = None
    if not jax.config.jax_disable_jit:
        running = [(side.loop, side.weights, side.request(0), side.warm_state()) for side in sides.values()]
        split = split_round(running[1], running[0], workload.repeats, progress)
    autoregressive, speculative = (
        _side(side, timings[name], seconds) for (name, side), seconds in zip(sides.items(), warm_up)
    )
    loop_seconds = {name: timing[:, 1] for name, timing in timings.items()}
    return Result(
        autoregressive=autoregressive,
        speculative=speculative,
        speedup=Spread.of(loop_seconds["autoregressive"] / loop_seconds["speculative"]),
        acceptance=Acceptance.of(functools.reduce(operator.add, counts["speculative"])),
        split=split,
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Decoder:
    """One side, ready to run."""

    loop: Loop
    weights: Weights
    sampling: Warp
    workload: Workload
    slots: int

    def request(self, repeat: int) -> Request:
        work = self.workload
        sampling = for_rows(self.sampling, work.batch)
        rows_B = jnp.arange(work.batch, dtype=jnp.int32)
        return Request(
            sampling=sampling, draft_sampling=sampling,
            row_keys_B=row_keys(work.seed, repeat * work.batch + rows_B, jnp.zeros_like(rows_B)),
            limits_B=jnp.full(work.batch, work.prompt_length + work.max_new_tokens, jnp.int32),
            stop_ids=jnp.full(4, -1, jnp.int32),
        )  # fmt: skip

    def prefill(self, repeat: int) -> DecodeState:
        work = self.workload
        shape = (work.batch, work.prompt_length)
        tokens_BP = np.random.default_rng([work.seed, repeat]).integers(0, self.loop.target.vocab_size, shape)
        lengths_B = jnp.full(work.batch, work.prompt_length, jnp.int32)
        return self.loop.prefill(
            self.weights, self.request(repeat), jnp.asarray(tokens_BP, jnp.int32), lengths_B, slots=self.slots
        )

    def decode(self, repeat: int) -> tuple[float, float, Stats]:
        """Seconds of prefill, seconds of the loop, and what was counted."""
        request = jax.block_until_ready(self.request(repeat))
        start = time.perf_counter()
        state = jax.block_until_ready(self.prefill(repeat))
        middle = time.perf_counter()
        state = jax.block_until_ready(self.loop.run(self.weights, request, state, UNLIMITED))
        return middle - start, time.perf_counter() - middle, jax.device_get(state.stats)

    def warm_state(self) -> DecodeState:
        """Some rounds into a text, and rows still running: each emits at most K+1 tokens a round."""
        rounds = (self.workload.max_new_tokens - 1) // (self.loop.drafter.K + 1)
        return self.loop.run(self.weights, self.request(0), self.prefill(0), rounds)


def _decoders(
    pair: Pair, drafter: Drafter, rule: Rule, sampling: Warp, workload: Workload
) -> dict[str, _Decoder]:
    longest = workload.prompt_length + workload.max_new_tokens
    models = {"target": pair.target} | ({"draft": drafter.model} if isinstance(drafter, ModelDrafter) else {})
    for name, model in models.items():
        if model.max_positions is not None and longest > model.max_positions:
            raise ValueError(
                f"prompt_length {workload.prompt_length} and max_new_tokens {workload.max_new_tokens} need "
                f"{longest} positions, but the {name} has {model.max_positions}"
            )
    loops = {
        name: Loop(target=pair.target, drafter=kind, rule=rule, window=decode_window())
        for name, kind in (("autoregressive", NoDrafter()), ("speculative", drafter))
    }
    # As many slots on both sides: attention reads all of them.
    slots = -(-(longest + max(loop.headroom for loop in loops.values())) // SLOTS_MULTIPLE) * SLOTS_MULTIPLE
    return {
        name: _Decoder(
            loop=loop, weights=pair.weights(loop.drafter, slots), sampling=sampling, workload=workload, slots=slots
        )
        for name, loop in loops.items()
    }  # fmt: skip


def _side(decoder: _Decoder, timing: np.ndarray, warm_up_seconds: float) -> Side:
    tokens = decoder.workload.batch * decoder.workload.max_new_tokens
    prefill, seconds, rounds = timing.T
    return Side(
        draft_length=decoder.loop.drafter.K, ms_per_token=Spread.of(seconds / tokens * 1e3),
        ms_per_round=Spread.of(seconds / rounds * 1e3), prefill_ms=Spread.of(prefill * 1e3),
        warm_up_seconds=warm_up_seconds,
    )  # fmt: skip


def _row_stats(stats: Stats) -> RowStats:
    """All rows together."""
    total = lambda x: tuple(int(n) for n in x.sum(0))
    return RowStats(
        rounds=int(stats.rounds_B.sum()), emitted=int(stats.emitted_B.sum()), drafted=int(stats.drafted_B.sum()),
        reached=total(stats.reached_BK), accepted_counts=total(stats.accepted_BT),
    )  # fmt: skip


def _binomial_error(rate: float | None, trials: int) -> float | None:
    return None if rate is None else math.sqrt(rate * (1 - rate) / trials)

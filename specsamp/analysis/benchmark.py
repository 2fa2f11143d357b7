"""Autoregressive against speculative decoding, measured in turn in one process.

    result = benchmark(pair, drafter, rule, sampling, Workload(max_new_tokens=128, repeats=15))

Both sides are the same `Loop`, one with an empty draft. Repeat r gives both the same prompts and seed;
the next repeat has others, so the counts of acceptance come from many texts. Prefill and compilation are
timed apart. Speedup is the median of the ratios within a repeat. The machine may be busy with other
things: believe ratios, not milliseconds. This is one cell; `specsamp.analysis.grid` measures many.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import operator
import time
from collections.abc import Callable, Mapping

import jax
import numpy as np

from specsamp.analysis.decoder import Decoder, Workload, decoders
from specsamp.analysis.device import MemoryUse, memory_use, streaming_gb_per_s
from specsamp.analysis.split import RoundSplit, split_round
from specsamp.analysis.spread import Spread
from specsamp.decoding.drafter import Drafter
from specsamp.decoding.drafters import NoDrafter
from specsamp.decoding.pair import Pair
from specsamp.decoding.results import RowStats
from specsamp.models.compiling import is_out_of_memory
from specsamp.sampling.rules import Rule
from specsamp.sampling.warp import Warp

LATENCY_REPEATS = 3  # enough for the 99th percentile of a few hundred tokens
MOST_SPLITS = 9  # repeats of the phases of a round


@dataclasses.dataclass(frozen=True, kw_only=True)
class Percentiles:
    """Of single tokens; those of a round share its time.

    Chen et al. (arXiv 2302.01318, section 5) warn that drafts of many tokens make latency vary.
    """

    p50: float
    p90: float
    p99: float
    tokens: int

    @classmethod
    def of(cls, samples: np.ndarray) -> Percentiles:
        p50, p90, p99 = np.quantile(samples, (0.5, 0.9, 0.99)).tolist()
        return cls(p50=p50, p90=p90, p99=p99, tokens=len(samples))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Side:
    """One way to decode."""

    draft_length: int
    ms_per_token: Spread  # of the loop, over tokens of all rows
    ms_per_round: Spread
    prefill_ms: Spread
    warm_up_seconds: float  # the first call, compilation included
    token_ms: Percentiles  # of single tokens, rounds waited for one by one


@dataclasses.dataclass(frozen=True, kw_only=True)
class Acceptance:
    """Counts over all rows and repeats; only what was emitted counts. Errors are standard errors.

    Whether a drafted token is accepted is one coin flip given the past, so errors are binomial: of the rate on these
    texts. Other texts may differ by more (`specsamp.analysis.acceptance` tells texts apart).
    """

    rounds: int
    emitted: int
    emitted_per_round: float
    rate: float | None  # alpha: accepted per verified token; None if nothing was drafted
    rate_error: float | None
    reached: tuple[int, ...]  # per position, rounds in which it was verified
    by_position: tuple[float | None, ...]  # accepted, of those reached
    by_position_error: tuple[float | None, ...]
    accepted_counts: tuple[int, ...]  # rounds by number of accepted tokens, 0 .. K

    @classmethod
    def of(cls, stats: RowStats) -> Acceptance:
        def known(x):
            return None if math.isnan(x) else x

        positions = [known(rate) for rate in stats.acceptance_by_position]
        rate = known(stats.acceptance_rate)
        return cls(
            rounds=stats.rounds,
            emitted=stats.emitted,
            emitted_per_round=stats.emitted_per_round,
            rate=rate,
            rate_error=_binomial_error(rate, sum(stats.reached)),
            reached=stats.reached,
            by_position=tuple(positions),
            accepted_counts=stats.accepted_counts,
            by_position_error=tuple(_binomial_error(*pair) for pair in zip(positions, stats.reached, strict=True)),
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Result:
    """What `benchmark` returns."""

    autoregressive: Side
    speculative: Side
    speedup: Spread  # autoregressive over speculative ms per token
    acceptance: Acceptance
    split: RoundSplit | None  # None under JAX_DISABLE_JIT, and where the caches of both sides do not fit together
    slots: int  # of the caches, which attention reads
    memory: MemoryUse
    device_gb_per_s: Spread | None  # streaming, measured
    streaming_share: Spread | None  # of it that an autoregressive round reaches, counting its weights alone


def benchmark(
    pair: Pair,
    drafter: Drafter,
    rule: Rule,
    sampling: Warp,
    workload: Workload,
    progress: Callable[[str], None] = lambda text: None,
    *,
    draft_sampling: Warp | None = None,
) -> Result:
    """Measures ``drafter`` under ``rule`` against plain decoding of the same target.

    Args:
      pair: target and draft.
      drafter: `NoDrafter` makes both sides the same: a speedup other than one is then an error of measurement.
      rule: decides what is accepted.
      sampling: the warp of target and draft, scalar numbers.
      workload: what to decode.
      progress: is told what is being measured.
      draft_sampling: the draft's own warp; default the target's.

    Raises:
      ValueError: the workload does not fit the models.
    """
    contenders = {"autoregressive": (NoDrafter(), rule), "speculative": (drafter, rule)}
    sides = decoders(pair, contenders, sampling, workload, draft_sampling)
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
            timing = side.decode(repeat)
            timings[name][repeat] = timing.prefill_seconds, timing.loop_seconds, timing.rounds
            counts[name].append(timing.stats)
    token_seconds = {name: [] for name in sides}
    for repeat in range(min(workload.repeats, LATENCY_REPEATS)):
        progress(f"latency of single tokens: repeat {repeat + 1}")
        for name, side in sides.items():
            token_seconds[name].append(side.token_seconds(repeat))
    warm = sides["speculative"].warm_state()
    memory = memory_use([side.weights for side in sides.values()], (warm.cache, warm.drafter_state))
    del warm
    split, device, share = _phases(sides, workload.repeats, progress)
    autoregressive, speculative = (
        _side(side, timings[name], seconds, np.concatenate(token_seconds[name]))
        for (name, side), seconds in zip(sides.items(), warm_up)
    )
    loop_seconds = {name: timing[:, 1] for name, timing in timings.items()}
    return Result(
        autoregressive=autoregressive,
        speculative=speculative,
        speedup=Spread.of(loop_seconds["autoregressive"] / loop_seconds["speculative"]),
        acceptance=Acceptance.of(functools.reduce(operator.add, counts["speculative"])),
        split=split,
        slots=sides["speculative"].slots,
        memory=memory,
        device_gb_per_s=device,
        streaming_share=share,
    )


def _phases(
    sides: Mapping[str, Decoder], repeats: int, progress: Callable[[str], None]
) -> tuple[RoundSplit | None, Spread | None, Spread | None]:
    """The parts of a round, what the device streams, and the share of it that a plain round reaches.

    They take turns, so the caches of both sides are held at once. Decoding holds one: if that was all there was room
    for, only the phases are left out.
    """
    if jax.config.jax_disable_jit:
        return None, None, None
    try:
        running = [sides[name].running() for name in ("speculative", "autoregressive")]
        split = split_round(*running, min(repeats, MOST_SPLITS), progress)
        device = streaming_gb_per_s(split.streamed_bytes)
    except jax.errors.JaxRuntimeError as error:
        if not is_out_of_memory(error):
            raise
        progress("the phases of a round do not fit beside each other: left out")
        return None, None, None
    reached = dataclasses.asdict(split.step_gb_per_s)
    return split, device, Spread(**{name: value / device.median for name, value in reached.items()})


def _side(decoder: Decoder, timing: np.ndarray, warm_up_seconds: float, token_seconds: np.ndarray) -> Side:
    tokens = decoder.workload.batch * decoder.workload.max_new_tokens
    prefill, seconds, rounds = timing.T
    return Side(
        draft_length=decoder.loop.drafter.K,
        ms_per_token=Spread.of(seconds / tokens * 1e3),
        ms_per_round=Spread.of(seconds / rounds * 1e3),
        prefill_ms=Spread.of(prefill * 1e3),
        warm_up_seconds=warm_up_seconds,
        token_ms=Percentiles.of(token_seconds * 1e3),
    )


def _binomial_error(rate: float | None, trials: int) -> float | None:
    return None if rate is None else math.sqrt(rate * (1 - rate) / trials)

"""Measures speculative against autoregressive decoding, in turn, in one process.

    result = benchmark(pair, Method(drafter=drafter, sampling=sampling),
    Workload(max_new_tokens=128, repeats=15))

Both sides are the same `Loop`, one with an empty draft. Repeat r gives both the same prompts and
seed; the next repeat has other prompts, so acceptance is counted on many texts. Prefill and
compilation are timed separately. The speedup is the median over repeats of the ratio within a
repeat: on a busy machine the ratios mean more than the milliseconds. This is one cell;
`specsamp.analysis.grid` measures many.
"""

from __future__ import annotations

import dataclasses
import os
import resource
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np

from specsamp.analysis.acceptance import expected_tokens
from specsamp.analysis.calls import call_runs
from specsamp.analysis.report import Say, silent
from specsamp.analysis.workload import (
    Quartiles,
    TimedDecoder,
    Timing,
    Workload,
    decoders,
    take_turns,
)
from specsamp.decoding.drafters import NoDrafter
from specsamp.decoding.method import Method
from specsamp.decoding.pair import Pair
from specsamp.decoding.results import RowStats
from specsamp.models.compiling import is_out_of_memory
from specsamp.sampling.rejection import TokenRule

PROFILED_ROUNDS = 8  # few enough to look at
CALL_TURNS = 4  # of the calls of a round, in each repeat


@dataclasses.dataclass(frozen=True, kw_only=True)
class RoundSplit:
    """Milliseconds of the calls of a round, each timed by itself (`specsamp.analysis.calls`), and
    of a plain step.
    """

    draft: Quartiles  # K tokens, with their warps and draws
    score: Quartiles  # the target's call for K + 1 positions
    step: Quartiles  # the target's call for one position
    # (draft + score) / step: the round if only its calls took time, in steps.
    least_round: Quartiles

    @classmethod
    def of(cls, **ms: Sequence[float]) -> RoundSplit:
        """Summarises milliseconds of the three calls by turn."""
        least_round = np.add(ms["draft"], ms["score"]) / ms["step"]
        return cls(
            **{name: Quartiles.of(x) for name, x in ms.items()},
            least_round=Quartiles.of(least_round),
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Side:
    """The times of one way to decode."""

    draft_length: int
    ms_per_token: Quartiles  # of the loop, over tokens of all sequences
    ms_per_round: Quartiles
    prefill_ms: Quartiles
    warm_up_seconds: float  # the first call, compilation included

    @classmethod
    def of(cls, decoder: TimedDecoder, timings: Sequence[Timing], warm_up_seconds: float) -> Side:
        ms = np.array([timing.loop_seconds * 1e3 for timing in timings])
        tokens = decoder.workload.batch * decoder.workload.max_new_tokens
        return cls(
            draft_length=decoder.method.drafter.K,
            ms_per_token=Quartiles.of(ms / tokens),
            ms_per_round=Quartiles.of(ms / [timing.rounds for timing in timings]),
            prefill_ms=Quartiles.of([timing.prefill_seconds * 1e3 for timing in timings]),
            warm_up_seconds=warm_up_seconds,
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Result:
    """Times and counts of both sides of one cell."""

    autoregressive: Side
    speculative: Side
    speedup: Quartiles  # autoregressive over speculative ms per token, within a repeat
    acceptance: RowStats  # counts of the speculative side, over all rows and repeats
    # Repeats in which both sides emitted the same tokens: all of them if greedy, except near-ties.
    same_tokens: int
    # None under JAX_DISABLE_JIT, for adaptive lengths, or where memory does not suffice.
    split: RoundSplit | None
    slots: int  # of the caches, which attention reads
    memory: Mapping[str, Any]  # see `memory_use`
    # Of a lossy rule, see `specsamp.sampling.rules.Meter`; None: not metered.
    variation_per_text: float | None = None

    @property
    def allowed_speedup(self) -> float | None:
        """Returns the speedup that theory allows from the measured acceptance rate and costs; None
        where `split` is.

        ``E(alpha, K) t_target / (K t_draft + t_score)`` with ``E = 1 + alpha + ... + alpha^K``
        (Leviathan et al., arXiv 2211.17192, theorem 3.8, with the measured time of scoring K + 1
        tokens): the speedup if nothing but the models took time and acceptances were independent.
        """
        if self.split is None or not self.speculative.draft_length:
            return None
        alpha = self.acceptance.acceptance_rate if sum(self.acceptance.reached) else 0.0
        return expected_tokens(alpha, self.speculative.draft_length) / self.split.least_round.median


def benchmark(
    pair: Pair,
    method: Method,
    workload: Workload,
    progress: Say = silent,
) -> Result:
    """Measures a method against plain decoding of the same target; ValueError if the workload does
    not fit the models.

    The warps of the method have scalar numbers. With `NoDrafter` both sides are the same, and the
    speedup shows the error.
    """
    # Plain decoding needs no meter, which would take time.
    rule = TokenRule() if method.rule.metered else method.rule
    plain = Method(drafter=NoDrafter(), rule=rule, sampling=method.sampling)
    sides = decoders(pair, {"autoregressive": plain, "speculative": method}, workload)
    warm_up = {}
    for name, side in sides.items():
        progress(f"compiling: {name} loop")
        start = time.perf_counter()
        side.decode(0)
        warm_up[name] = time.perf_counter() - start
    runs = {name: side.decode for name, side in sides.items()}
    timings = take_turns(runs, workload.repeats, lambda text: progress(f"decoding: repeat {text}"))
    state = sides["speculative"].prefill(sides["speculative"].requests(0))
    memory = memory_use(
        [side.engine.weights for side in sides.values()], (state.cache, state.drafter_state)
    )
    del state
    seconds = {name: np.array([timing.loop_seconds for timing in timings[name]]) for name in sides}
    texts = [[timing.texts for timing in timings[name]] for name in sides]
    acceptance = sum(timing.stats for timing in timings["speculative"])
    return Result(
        **{name: Side.of(side, timings[name], warm_up[name]) for name, side in sides.items()},
        speedup=Quartiles.of(seconds["autoregressive"] / seconds["speculative"]),
        acceptance=acceptance,
        same_tokens=sum(plain == drafted for plain, drafted in zip(*texts, strict=True)),
        split=_split(sides, workload.repeats, progress),
        slots=sides["speculative"].engine.slots,
        memory=memory,
        variation_per_text=acceptance.variation
        and acceptance.variation / (workload.repeats * workload.batch),
    )


def _split(sides: Mapping[str, TimedDecoder], repeats: int, progress: Say) -> RoundSplit | None:
    """Times the calls of a round; None if the length adapts, or if they do not fit into memory
    with the decoders.
    """
    if jax.config.jax_disable_jit or sides["speculative"].method.adaptive is not None:
        return None
    try:
        progress("timing the calls of a round")
        return split_round(sides["speculative"], CALL_TURNS * repeats)
    except jax.errors.JaxRuntimeError as error:
        if not is_out_of_memory(error):
            raise
        progress("the calls of a round do not fit into memory: left out")
        return None


def split_round(speculative: TimedDecoder, turns: int) -> RoundSplit:
    """Times the calls of a round, in turn."""
    K = speculative.method.drafter.K
    runs = call_runs({"draft": speculative}, (1, K + 1))
    take_turns(runs, 1)  # the first run of a program is slower
    ms = take_turns(runs, turns)
    return RoundSplit.of(draft=ms["draft"], score=ms[K + 1], step=ms[1])


def write_profile(decoder: TimedDecoder, folder: str | os.PathLike) -> None:
    """Profiles a prefill and the first `PROFILED_ROUNDS` rounds of a workload, for xprof or
    Perfetto.

    Operations carry the `jax.named_scope` that they come from. All processes must call this; each
    writes its own file.
    """

    def decode() -> None:
        requests = decoder.requests(0)
        jax.block_until_ready(decoder.engine.run(decoder.prefill(requests), PROFILED_ROUNDS))

    decode()  # compiles
    options = jax.profiler.ProfileOptions()
    options.python_tracer_level = 0  # calls of Python functions would be most of the events
    with jax.profiler.trace(folder, profiler_options=options):
        decode()


def memory_use(weights: Any, caches: Any) -> dict[str, Any]:
    """Returns the bytes of these arrays on one device, and the peak of the device, on a CPU of
    the process.
    """
    counted = jax.local_devices()[0].memory_stats() or {}
    peak = counted.get("peak_bytes_in_use")
    kilobytes = 1 if sys.platform == "darwin" else 1024
    of_process = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * kilobytes
    return {
        "weights": _bytes(weights),
        "caches": _bytes(caches),
        "peak": of_process if peak is None else peak,
        "peak_is_of": "process" if peak is None else "device",
    }


def _bytes(tree: Any) -> int:
    """Returns the bytes on the first device; arrays that two trees share count once."""
    leaves = {id(leaf): leaf for leaf in jax.tree.leaves(tree) if isinstance(leaf, jax.Array)}
    return sum(
        leaf.addressable_shards[0].data.nbytes
        for leaf in leaves.values()
        if leaf.addressable_shards
    )

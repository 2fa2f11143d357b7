"""Measures speculative against autoregressive decoding, in turn, in one process.

    result = benchmark(pair, drafter, rule, sampling, Workload(max_new_tokens=128, repeats=15))

Both sides are the same `Loop`, one with an empty draft. Repeat r gives both the same prompts and seed; the next repeat
has other prompts, so acceptance is counted on many texts. Prefill and compilation are timed separately. The speedup is
the median over repeats of the ratio within a repeat: on a busy machine the ratios mean more than the milliseconds.
This is one cell; `specsamp.analysis.grid` measures many.
"""

from __future__ import annotations

import dataclasses
import functools
import operator
import resource
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np

from specsamp.analysis.acceptance import expected_tokens
from specsamp.analysis.trace import RoundSplit, split_round
from specsamp.analysis.workload import Decoder, Quartiles, Timing, Workload, decoders, take_turns
from specsamp.decoding.adaptive import Adaptive
from specsamp.decoding.drafter import Drafter
from specsamp.decoding.drafters import NoDrafter
from specsamp.decoding.pair import Pair
from specsamp.decoding.results import RowStats
from specsamp.models.compiling import is_out_of_memory
from specsamp.sampling.rejection import TokenRule
from specsamp.sampling.rules import Rule
from specsamp.sampling.warp import Warp

LATENCY_REPEATS = 3  # enough for the 99th percentile of a few hundred tokens
MOST_SPLITS = 5  # profiles of rounds


@dataclasses.dataclass(frozen=True, kw_only=True)
class Side:
    """The times of one way to decode."""

    draft_length: int
    ms_per_token: Quartiles  # of the loop, over tokens of all rows
    ms_per_round: Quartiles
    prefill_ms: Quartiles
    warm_up_seconds: float  # the first call, compilation included
    token_ms: Mapping[str, float]  # of single tokens, rounds waited for one by one: "p50", "p90", "p99", "tokens"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Result:
    """Times and counts of both sides of one cell."""

    autoregressive: Side
    speculative: Side
    speedup: Quartiles  # autoregressive over speculative ms per token, within a repeat
    overall_speedup: float  # the same of all repeats together: seconds over seconds
    acceptance: RowStats  # counts of the speculative side, over all rows and repeats
    same_tokens: int  # repeats in which both sides emitted the same tokens: all of them if greedy, but for near-ties
    split: RoundSplit | None  # None under JAX_DISABLE_JIT, for adaptive lengths, or where no profile can be made
    slots: int  # of the caches, which attention reads
    memory: Mapping[str, Any]  # see `memory_use`
    variation_per_text: float | None = None  # of a lossy rule, see `specsamp.sampling.rules.Meter`; None: not metered

    @property
    def allowed_speedup(self) -> float | None:
        """Returns the speedup that theory allows from the measured acceptance rate and costs; None where `split` is.

        ``E(alpha, K) t_target / (K t_draft + t_score)`` with ``E = 1 + alpha + ... + alpha^K`` (Leviathan et al., arXiv
        2211.17192, theorem 3.8, with the measured time of scoring K + 1 tokens): the speedup if nothing but the models
        took time and acceptances were independent.
        """
        if self.split is None or not self.speculative.draft_length:
            return None
        alpha = self.acceptance.acceptance_rate if sum(self.acceptance.reached) else 0.0
        return expected_tokens(alpha, self.speculative.draft_length) / self.split.least_round.median


def benchmark(
    pair: Pair,
    drafter: Drafter,
    rule: Rule,
    sampling: Warp,
    workload: Workload,
    progress: Callable[[str], None] = lambda text: None,
    *,
    draft_sampling: Warp | None = None,
    adaptive: Adaptive | None = None,
) -> Result:
    """Measures ``drafter`` under ``rule`` against plain decoding of the same target.

    Args:
      pair: target and draft.
      drafter: `NoDrafter` makes both sides the same; a speedup other than one is then an error of measurement.
      rule: decides what is accepted.
      sampling: the warp of target and draft, scalar numbers.
      workload: what to decode.
      progress: is told what is being measured.
      draft_sampling: the draft's own warp; default the target's.
      adaptive: the draft length, where the drafter's K is only the most; the phases of its rounds are not timed.

    Raises:
      ValueError: the workload does not fit the models.
    """
    # A meter has nothing to say of plain decoding, and would take time.
    contenders = {
        "autoregressive": (NoDrafter(), TokenRule() if rule.metered else rule),
        "speculative": (drafter, rule),
    }
    lengths = {"speculative": adaptive}
    sides = decoders(pair, contenders, sampling, workload, draft_sampling, adaptive=lengths)
    warm_up = {name: compile_seconds(side, f"{name} loop", progress) for name, side in sides.items()}
    timings = take_turns(
        {name: side.decode for name, side in sides.items()},
        workload.repeats,
        lambda text: progress(f"decoding: repeat {text}"),
    )
    token_seconds = take_turns(
        {name: side.token_seconds for name, side in sides.items()},
        min(workload.repeats, LATENCY_REPEATS),
        lambda text: progress(f"latency of single tokens: repeat {text}"),
    )
    state = sides["speculative"].prefill(0)
    memory = memory_use([side.weights for side in sides.values()], (state.cache, state.drafter_state))
    del state
    split = _split(sides, workload.repeats, progress)
    seconds = {name: np.array([timing.loop_seconds for timing in timings[name]]) for name in sides}
    texts = [[timing.texts for timing in timings[name]] for name in sides]
    acceptance = functools.reduce(operator.add, (timing.stats for timing in timings["speculative"]))
    return Result(
        **{
            name: _side(side, timings[name], warm_up[name], np.concatenate(token_seconds[name]))
            for name, side in sides.items()
        },
        speedup=Quartiles.of(seconds["autoregressive"] / seconds["speculative"]),
        overall_speedup=float(seconds["autoregressive"].sum() / seconds["speculative"].sum()),
        acceptance=acceptance,
        same_tokens=sum(plain == drafted for plain, drafted in zip(*texts, strict=True)),
        split=split,
        slots=sides["speculative"].slots,
        memory=memory,
        variation_per_text=acceptance.variation and acceptance.variation / (workload.repeats * workload.batch),
    )


def compile_seconds(side: Decoder, name: str, progress: Callable[[str], None]) -> float:
    """Decodes the first repeat once and returns how long it took, compilation included."""
    progress(f"compiling: {name}")
    start = time.perf_counter()
    side.decode(0)
    return time.perf_counter() - start


def _split(sides: Mapping[str, Decoder], repeats: int, progress: Callable[[str], None]) -> RoundSplit | None:
    """Measures the parts of a round.

    They take turns, so the caches of both sides are held at once, while decoding holds those of one side. If there is no
    room for both, only the parts are left out.
    """
    if jax.config.jax_disable_jit or sides["speculative"].adaptive is not None:
        return None
    try:
        return split_round(sides["speculative"], sides["autoregressive"], min(repeats, MOST_SPLITS), progress)
    except jax.errors.JaxRuntimeError as error:
        if not is_out_of_memory(error):
            raise
        progress("the phases of a round do not fit beside each other: left out")
        return None


def _side(decoder: Decoder, timings: list[Timing], warm_up_seconds: float, token_seconds: np.ndarray) -> Side:
    tokens = decoder.workload.batch * decoder.workload.max_new_tokens
    seconds = np.array([timing.loop_seconds for timing in timings])
    percentiles = {f"p{p}": float(np.percentile(token_seconds, p)) * 1e3 for p in (50, 90, 99)}
    return Side(
        draft_length=decoder.loop.drafter.K,
        ms_per_token=Quartiles.of(seconds / tokens * 1e3),
        ms_per_round=Quartiles.of(seconds / np.array([timing.rounds for timing in timings]) * 1e3),
        prefill_ms=Quartiles.of([timing.prefill_seconds * 1e3 for timing in timings]),
        warm_up_seconds=warm_up_seconds,
        token_ms=percentiles | {"tokens": len(token_seconds)},
    )


def memory_use(weights: Any, caches: Any) -> dict[str, Any]:
    """Returns the bytes of these arrays on one device, and the most that was ever in use, earlier cells included.

    Where a device counts nothing (a CPU), it is the process's.
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
    return sum(leaf.addressable_shards[0].data.nbytes for leaf in leaves.values() if leaf.addressable_shards)

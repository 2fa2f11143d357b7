"""Where a round's time goes: the phases of `specsamp.analysis.phases`, measured in turn.

Every repeat measures every phase once before the next repeat starts, so that a machine which is busy
for a while is busy for all of them; shares and differences are taken within a repeat, and what is
reported is their median. A repeat begins with rounds that do not count, and phases that read the target's weights
follow at once: where these half fit a CPU's last cache, the first ten rounds after something else take twice as
long, which a loop never pays. Whoever measures something else beside the phases takes turns with it:
`PhaseClock.measure` is one repeat. Two checks come with the result. Each phase is measured at n iterations and at
n / 2: per iteration the two agree (`PhaseTime.linearity` is 1) if every iteration did the work. And the
parts are compared with the round as the loop compiles it: `RoundSplit.unexplained`.
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable, Iterable

import jax
import numpy as np
from jax.experimental import multihost_utils

from specsamp.analysis import phases
from specsamp.analysis.spread import Spread
from specsamp.decoding.loop import Loop
from specsamp.decoding.state import DecodeState, Request, Weights

SECONDS_PER_SAMPLE = 0.06  # long against the dispatch of a program, short enough for many repeats
WARM_SAMPLES = 3  # of whole rounds, not counted, before each repeat
MOST_ITERATIONS = 1 << 15

Run = Callable[[int], float]  # iterations -> seconds


@dataclasses.dataclass(frozen=True, kw_only=True)
class PhaseTime:
    """One phase, per round."""

    ms: Spread
    iterations: int  # n, per sample
    linearity: float  # time per iteration at n over that at n / 2


@dataclasses.dataclass(frozen=True, kw_only=True)
class RoundSplit:
    """One round of the speculative loop, and beside it what it competes with.

    The five parts are ``draft_model``, ``draft_sampling``, ``score``, ``verify``, ``commit``.
    """

    draft_model: PhaseTime  # calls of the draft model
    draft: PhaseTime  # the same with warps and draws
    draft_sampling: Spread  # ms: draft less draft_model
    score: PhaseTime  # the call of the target
    verify: PhaseTime  # warping its logits, and the rule
    commit: PhaseTime  # bookkeeping
    round: PhaseTime  # the whole, as the loop compiles it
    unexplained: Spread  # ms: the round less its five parts
    sampling_share: Spread  # (draft_sampling + verify + commit) / round
    step: PhaseTime  # one round of the autoregressive loop
    break_even: Spread  # round / step: emitted per round from which on the draft pays
    least_round: Spread  # (draft_model + score) / step: a round that costs nothing but its models, in steps
    stream_step: PhaseTime  # as many rows as a step feeds, times every matrix of the target: a floor of `step`
    stream_score: PhaseTime  # the same for `score`
    streamed_bytes: int  # of those matrices
    step_gb_per_s: Spread  # streamed_bytes / step
    stream_gb_per_s: Spread  # streamed_bytes / stream_step


class PhaseClock:
    """The phases of two loops, compiled; measures both from states whose rows are running.

    Args:
      speculative, autoregressive: the loops; their states are donated.
      progress: is told what is being compiled.

    Raises:
      ValueError: under ``JAX_DISABLE_JIT``, where there are no programs to time.
    """

    def __init__(
        self,
        speculative: tuple[Loop, Weights, Request, DecodeState],
        autoregressive: tuple[Loop, Weights, Request, DecodeState],
        progress: Callable[[str], None] = lambda text: None,
    ):
        _refuse_without_jit()
        spec, auto = _Bench(*speculative), _Bench(*autoregressive)
        self._runs: dict[str, Run] = {  # in this order: the first five read the target's weights
            "round": spec.run(phases.whole_round),
            "score": spec.run(phases.score),
            "stream_score": spec.run_stream(),
            "step": auto.run(phases.whole_round),
            "stream_step": auto.run_stream(),
            "draft_model": spec.run(phases.draft_model),
            "draft": spec.run(phases.draft),
            "verify": spec.run(phases.verify),
            "commit": spec.run(phases.commit),
        }
        self._streamed_bytes = sum(matrix.nbytes for matrix in spec.matrices)
        self._iterations = {}
        self._ms: dict[str, list[tuple[float, float]]] = {}  # per iteration, at n and at n / 2
        for name, run in self._runs.items():
            progress(f"compiling: {name.replace('_', ' ')}")
            self._iterations[name], self._ms[name] = _iterations(run), []

    def measure(self) -> None:
        """One repeat: every phase once, at n iterations and at n / 2."""
        self._runs["round"](WARM_SAMPLES * self._iterations["round"])
        for name, run in self._runs.items():
            n = self._iterations[name]
            self._ms[name].append((run(n) / n * 1e3, run(n // 2) / (n // 2) * 1e3))

    def split(self) -> RoundSplit:
        """Medians over the repeats so far."""
        ms = {name: np.array(samples) for name, samples in self._ms.items()}
        return _summary(ms, self._iterations, self._streamed_bytes)


def split_round(
    speculative: tuple[Loop, Weights, Request, DecodeState],
    autoregressive: tuple[Loop, Weights, Request, DecodeState],
    repeats: int,
    progress: Callable[[str], None] = lambda text: None,
) -> RoundSplit:
    """A `PhaseClock` read ``repeats`` times in a row."""
    clock = PhaseClock(speculative, autoregressive, progress)
    for repeat in range(repeats):
        progress(f"phases: repeat {repeat + 1} of {repeats}")
        clock.measure()
    return clock.split()


class ProductClock:
    """Products with all of the target's matrices, by rows: the shape of its call.

    Whoever measures something else beside them takes turns with it: `measure` is one sample of each. A target that does
    not say which matrices it multiplies by (``streamed``) has no samples.

    Args:
      calls: ``(batch, tokens)`` of the calls that are meant: each share multiplies its part of ``batch * tokens`` rows.
      seconds: of a sample.
      progress: is told what is being compiled.

    Raises:
      ValueError: under ``JAX_DISABLE_JIT``, where there are no programs to time.
    """

    def __init__(
        self,
        loop: Loop,
        weights: Weights,
        calls: Iterable[tuple[int, int]],
        *,
        seconds: float = SECONDS_PER_SAMPLE,
        progress: Callable[[str], None] = lambda text: None,
    ):
        _refuse_without_jit()
        says = loop.target.streamed(weights.target) is not None
        matrices = phases.matrices_of(loop.target, weights.target) if says else []
        self._runs: dict[int, Run] = {}
        self._iterations: dict[int, int] = {}
        self._ms: dict[int, list[float]] = {}
        for batch, tokens in sorted(calls, key=math.prod) if says else ():
            rows = batch * tokens
            progress(f"compiling: products of {rows} rows")
            self._runs[rows] = _run_stream(loop, matrices, batch, tokens)
            self._iterations[rows], self._ms[rows] = _iterations(self._runs[rows], seconds), []

    def measure(self) -> None:
        for rows, run in self._runs.items():
            n = self._iterations[rows]
            run(n)  # does not count: see the first lines of this module
            self._ms[rows].append(run(n) / n * 1e3)

    def samples_ms(self) -> dict[int, np.ndarray]:
        """Milliseconds, [samples so far], by ``batch * tokens``; on all processes those of the first."""
        return {rows: np.array([of_first_process(ms) for ms in samples]) for rows, samples in self._ms.items()}


def _summary(ms: dict[str, np.ndarray], iterations: dict[str, int], streamed_bytes: int) -> RoundSplit:
    at_n = {name: samples[:, 0] for name, samples in ms.items()}
    sampling = at_n["draft"] - at_n["draft_model"]
    own = sampling + at_n["verify"] + at_n["commit"]
    return RoundSplit(
        **{
            name: PhaseTime(
                ms=Spread.of(at_n[name]),
                iterations=iterations[name],
                linearity=float(np.median(samples[:, 0] / samples[:, 1])),
            )
            for name, samples in ms.items()
        },
        draft_sampling=Spread.of(sampling),
        unexplained=Spread.of(at_n["round"] - at_n["draft_model"] - at_n["score"] - own),
        sampling_share=Spread.of(own / at_n["round"]),
        break_even=Spread.of(at_n["round"] / at_n["step"]),
        least_round=Spread.of((at_n["draft_model"] + at_n["score"]) / at_n["step"]),
        streamed_bytes=streamed_bytes,
        step_gb_per_s=Spread.of(streamed_bytes / at_n["step"] / 1e6),
        stream_gb_per_s=Spread.of(streamed_bytes / at_n["stream_step"] / 1e6),
    )


class _Bench:
    """A loop and the board that its phases hand on."""

    def __init__(self, loop: Loop, weights: Weights, request: Request, state: DecodeState):
        self.loop, self.weights, self.request = loop, weights, request
        self.matrices = phases.matrices_of(loop.target, weights.target)
        self.board = phases.first_board(loop, weights, request, state)

    def run(self, phase: phases.Phase) -> Run:
        def seconds(iterations: int) -> float:
            start = time.perf_counter()
            board = phases.repeat(phase, self.loop, self.weights, self.request, self.board, iterations)
            self.board = jax.block_until_ready(board)
            return time.perf_counter() - start

        return seconds

    def run_stream(self) -> Run:
        return _run_stream(self.loop, self.matrices, *self.board.logits_BTV.shape[:2])


def _run_stream(loop: Loop, matrices: list[jax.Array], batch: int, tokens: int) -> Run:
    """As many rows as each share has in a call of so many tokens; shorter calls are as long as the window."""
    rows = max(batch // loop.shards.count, 1) * max(tokens, loop.window)

    def seconds(iterations: int) -> float:
        start = time.perf_counter()
        jax.block_until_ready(phases.stream(loop, matrices, iterations, rows=rows))
        return time.perf_counter() - start

    return seconds


def of_first_process(seconds: float) -> float:
    """All processes must run the same number of collectives, whatever their clocks say."""
    if jax.process_count() == 1:
        return seconds
    return float(multihost_utils.broadcast_one_to_all(np.float32(seconds)))


def _iterations(run: Run, seconds: float = SECONDS_PER_SAMPLE) -> int:
    """Compiles, then finds how many iterations take about so long; even."""
    run(1)
    n = 2
    while n < MOST_ITERATIONS and (spent := of_first_process(run(n))) < seconds / 2:
        n = 2 * int(n * min(max(seconds / spent, 2), 16) / 2)
    return min(n, MOST_ITERATIONS)


def _refuse_without_jit() -> None:
    if jax.config.jax_disable_jit:
        raise ValueError("phases cannot be timed under JAX_DISABLE_JIT")

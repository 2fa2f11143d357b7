"""Measures where the time of a round goes: the phases of `specsamp.analysis.phases`, in turn.

Shares and differences are taken within a turn, and medians over turns are reported. A turn begins with rounds that are
not counted, and the phases that read the target's weights follow at once. Reason: where these weights half fit a CPU's
last cache, the first ten rounds after anything else take twice as long, and a loop never pays that.

Two checks come with the result. Each phase is measured at n iterations and at n / 2; if every iteration did the work, the
time per iteration is the same (`PhaseTime.linearity` is 1). And the sum of the parts is compared with the round as the
loop compiles it (`RoundSplit.unexplained`).
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable

import jax
import numpy as np

from specsamp.analysis import phases
from specsamp.analysis.timing import Quartiles, take_turns
from specsamp.decoding.loop import Loop
from specsamp.decoding.state import DecodeState, Request, Weights
from specsamp.mesh.distributed import gather_objects

SECONDS_PER_SAMPLE = 0.06  # long against the dispatch of a program, short enough for many turns
WARM_SAMPLES = 3  # of whole rounds, not counted, before each turn
MOST_ITERATIONS = 1 << 15

Run = Callable[[int], float]  # iterations -> seconds
Running = tuple[Loop, Weights, Request, DecodeState]  # a loop in the middle of a text


@dataclasses.dataclass(frozen=True, kw_only=True)
class PhaseTime:
    """The time of one phase, per round."""

    ms: Quartiles
    iterations: int  # n, per sample
    linearity: float  # time per iteration at n over that at n / 2


@dataclasses.dataclass(frozen=True, kw_only=True)
class RoundSplit:
    """One round of the speculative loop, taken apart, and a round of the autoregressive loop beside it.

    The five parts are ``draft_model``, ``draft_sampling``, ``score``, ``verify``, ``commit``.
    """

    draft_model: PhaseTime  # calls of the draft model
    draft: PhaseTime  # the same with warps and draws
    draft_sampling: Quartiles  # ms: draft - draft_model
    score: PhaseTime  # the call of the target
    verify: PhaseTime  # warping its logits, and the rule
    commit: PhaseTime  # bookkeeping
    round: PhaseTime  # the whole, as the loop compiles it
    unexplained: Quartiles  # ms: the round minus its five parts
    sampling_share: Quartiles  # (draft_sampling + verify + commit) / round
    step: PhaseTime  # one round of the autoregressive loop
    break_even: Quartiles  # round / step: tokens that a round must emit for the draft to pay
    least_round: Quartiles  # (draft_model + score) / step: the round if only its models took time, in steps
    stream_step: PhaseTime  # multiplying as many rows as a step has by every matrix of the target: a floor of `step`
    stream_score: PhaseTime  # the same for `score`
    streamed_bytes: int  # of those matrices
    step_gb_per_s: Quartiles  # streamed_bytes / step
    stream_gb_per_s: Quartiles  # streamed_bytes / stream_step


def split_round(
    speculative: Running,
    autoregressive: Running,
    turns: int,
    progress: Callable[[str], None] = lambda text: None,
) -> RoundSplit:
    """Measures the phases of two loops.

    Args:
      speculative, autoregressive: loop, weights, request and a state whose rows are running; the states are donated.
      turns: how often every phase is measured.
      progress: is told what is being compiled, and the number of the turn.

    Raises:
      ValueError: under ``JAX_DISABLE_JIT``, where there are no programs to time.
    """
    if jax.config.jax_disable_jit:
        raise ValueError("phases cannot be timed under JAX_DISABLE_JIT")
    spec, auto = PhaseTimer(*speculative), PhaseTimer(*autoregressive)
    runs: dict[str, Run] = {  # in this order: the first five read the target's weights
        "round": spec.run(phases.whole_round),
        "score": spec.run(phases.score),
        "stream_score": spec.run_products(),
        "step": auto.run(phases.whole_round),
        "stream_step": auto.run_products(),
        "draft_model": spec.run(phases.draft_model),
        "draft": spec.run(phases.draft),
        "verify": spec.run(phases.verify),
        "commit": spec.run(phases.commit),
    }
    iterations = {}
    for name, run in runs.items():
        progress(f"compiling: {name.replace('_', ' ')}")
        iterations[name] = find_iterations(run, SECONDS_PER_SAMPLE)

    def warm_up(turn: int) -> None:
        runs["round"](WARM_SAMPLES * iterations["round"])

    def sample(name: str) -> Callable[[int], tuple[float, float]]:
        def ms_per_iteration(turn: int) -> tuple[float, float]:
            run, n = runs[name], iterations[name]
            return run(n) / n * 1e3, run(n // 2) / (n // 2) * 1e3

        return ms_per_iteration

    measured = take_turns(
        {"warm up": warm_up} | {name: sample(name) for name in runs},
        turns,
        lambda text: progress(f"phases: turn {text}"),
    )
    ms = {name: np.array(measured[name]) for name in runs}
    return _summary(ms, iterations, sum(matrix.nbytes for matrix in spec.matrices))


def _summary(ms: dict[str, np.ndarray], iterations: dict[str, int], streamed_bytes: int) -> RoundSplit:
    at_n = {name: samples[:, 0] for name, samples in ms.items()}
    sampling = at_n["draft"] - at_n["draft_model"]
    own = sampling + at_n["verify"] + at_n["commit"]
    return RoundSplit(
        **{
            name: PhaseTime(
                ms=Quartiles.of(at_n[name]),
                iterations=iterations[name],
                linearity=float(np.median(samples[:, 0] / samples[:, 1])),
            )
            for name, samples in ms.items()
        },
        draft_sampling=Quartiles.of(sampling),
        unexplained=Quartiles.of(at_n["round"] - at_n["draft_model"] - at_n["score"] - own),
        sampling_share=Quartiles.of(own / at_n["round"]),
        break_even=Quartiles.of(at_n["round"] / at_n["step"]),
        least_round=Quartiles.of((at_n["draft_model"] + at_n["score"]) / at_n["step"]),
        streamed_bytes=streamed_bytes,
        step_gb_per_s=Quartiles.of(streamed_bytes / at_n["step"] / 1e6),
        stream_gb_per_s=Quartiles.of(streamed_bytes / at_n["stream_step"] / 1e6),
    )


class PhaseTimer:
    """Times the phases of a loop, and products with its target's matrices, from a state whose rows are running.

    The arguments are those of `Loop.round`; the state is donated.
    """

    def __init__(self, loop: Loop, weights: Weights, request: Request, state: DecodeState):
        self.loop, self.weights, self.request = loop, weights, request
        self.matrices = phases.matrices_of(loop.target, weights.target)
        self.buffers = phases.first_buffers(loop, weights, request, state)

    def run(self, phase: phases.Phase) -> Run:
        """Returns a timer of this phase."""

        def seconds(iterations: int) -> float:
            start = time.perf_counter()
            buffers = phases.repeat(phase, self.loop, self.weights, self.request, self.buffers, iterations)
            self.buffers = jax.block_until_ready(buffers)
            return time.perf_counter() - start

        return seconds

    def run_products(self) -> Run:
        """Returns a timer of the products of one call of the target, see `time_products`."""
        return time_products(self.loop, self.matrices, *self.buffers.logits_BTV.shape[:2])


def time_products(loop: Loop, matrices: list[jax.Array], batch: int, tokens: int) -> Run:
    """Returns a timer of the products of one call: ``batch / num_shards * max(tokens, window)`` rows."""
    rows = max(batch // loop.shards.count, 1) * max(tokens, loop.window)

    def seconds(iterations: int) -> float:
        start = time.perf_counter()
        jax.block_until_ready(phases.stream(loop, matrices, iterations, rows=rows))
        return time.perf_counter() - start

    return seconds


def find_iterations(run: Run, seconds: float) -> int:
    """Compiles ``run``, then returns how many iterations, an even number, take about ``seconds``."""
    run(1)
    n = 2
    while n < MOST_ITERATIONS and (spent := gather_objects(run(n))[0]) < seconds / 2:
        n = 2 * int(n * min(max(seconds / spent, 2), 16) / 2)
    return min(n, MOST_ITERATIONS)

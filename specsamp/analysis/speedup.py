"""Speedup over draft lengths and rules, and how much of what theory allows it is.

    curve = speedup_curve(pair, make_drafter, rules, draft_lengths, sampling, workload)

All contenders decode the same prompts in turn, in one process. A contender's speedup on a prompt is the
ratio of the medians over the passes; what is reported is spread over prompts.

With alpha the measured acceptance, t_target the time of an autoregressive step, t_draft that of a call
of the draft and t_score that of scoring K+1 tokens, all measured between the same prompts (a machine's
memory may be slow for minutes, and that slows a step more than it slows scoring), the loop could at best
reach (Leviathan et al., arXiv 2211.17192, theorem 3.8, with its own time for scoring)

    E(alpha, K) t_target / (K t_draft + t_score),      E = (1 - alpha^(K+1)) / (1 - alpha)

`Point.efficiency` is the measured speedup over that, of all prompts together, as alpha is of all together. E
takes acceptances as independent, so beside it stands the same with the measured number of tokens per round.
"""

from __future__ import annotations

import dataclasses
import functools
import operator
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from specsamp.analysis.acceptance import expected_tokens
from specsamp.analysis.benchmark import Acceptance
from specsamp.analysis.decoder import Decoder, Timing, Workload, decoders
from specsamp.analysis.split import PhaseClock, RoundSplit
from specsamp.analysis.spread import Spread
from specsamp.decoding.drafter import Drafter
from specsamp.decoding.drafters import NoDrafter
from specsamp.decoding.pair import Pair
from specsamp.sampling.rules import Rule
from specsamp.sampling.warp import Warp

BASELINE = "autoregressive"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Costs:
    """Of the parts of a round, measured in turn; ms."""

    target_step: float  # t_target: one whole autoregressive round
    draft_call: float  # t_draft: one call of the draft, without drawing
    score: float  # t_score: K+1 tokens
    least_round: float  # (K t_draft + t_score) / t_target, taken within a repeat
    draws_and_verdict: float  # drawing the draft, verification, bookkeeping
    streaming_share: float  # plain products over the target's matrices / target_step


@dataclasses.dataclass(frozen=True, kw_only=True)
class Point:
    """One rule at one draft length."""

    rule: str
    draft_length: int
    speedup: Spread  # over prompts
    overall: float  # speedup of all prompts together: seconds over seconds
    ms_per_token: Spread
    acceptance: Acceptance
    costs: Costs
    allowed: float  # by theory, from alpha and the costs
    efficiency: float  # overall / allowed
    efficiency_of_rounds: float  # the same with the measured tokens per round for E


@dataclasses.dataclass(frozen=True, kw_only=True)
class Curve:
    """What `speedup_curve` returns."""

    ms_per_token: Spread  # autoregressive
    points: tuple[Point, ...]
    prompts: int
    same_tokens: int | None  # prompts on which all contenders wrote the same; None where they need not

    def best(self, rule: str) -> Point:
        return max((p for p in self.points if p.rule == rule), key=lambda p: p.speedup.median)


def speedup_curve(
    pair: Pair,
    make_drafter: Callable[[int], Drafter],
    rules: Mapping[str, Rule],
    draft_lengths: Sequence[int],
    sampling: Warp,
    workload: Workload,
    *,
    passes: int = 3,
    deterministic: bool = False,
    progress: Callable[[str], None] = lambda text: None,
) -> Curve:
    """Measures every rule at every draft length against plain decoding, and their costs between the prompts.

    Args:
      workload: its ``repeats`` is the number of prompts, decoded one after the other.
      passes: over all prompts and contenders.
      deterministic: the output has one right value (greedy), so contenders are compared.
    """
    contenders = {BASELINE: (NoDrafter(), next(iter(rules.values())))}
    labels = {f"{rule} {K}": (rule, K) for rule in rules for K in draft_lengths}
    contenders |= {label: (make_drafter(K), rules[rule]) for label, (rule, K) in labels.items()}
    sides = decoders(pair, contenders, sampling, workload)
    for name, side in sides.items():
        progress(f"compiling: {name}")
        side.decode(0)
    clocks = {K: _clock(sides[f"{next(iter(rules))} {K}"], sides[BASELINE], progress) for K in draft_lengths}
    timings: dict[str, list[list[Timing]]] = {name: [[] for _ in range(workload.repeats)] for name in sides}
    for number in range(passes):
        for prompt in range(workload.repeats):
            progress(f"pass {number + 1} of {passes}: prompt {prompt + 1} of {workload.repeats}")
            for name, side in sides.items():
                timings[name][prompt].append(side.decode(prompt))
            for clock in clocks.values():
                clock.measure()
    seconds = {
        name: np.array([np.median([t.loop_seconds for t in prompt]) for prompt in prompts])
        for name, prompts in timings.items()
    }
    tokens = workload.batch * workload.max_new_tokens
    costs = {K: _costs(K, clock.split()) for K, clock in clocks.items()}
    points = []
    for label, (rule, K) in labels.items():
        counts = functools.reduce(operator.add, (prompt[0].stats for prompt in timings[label]))
        points.append(
            _point(
                rule,
                K,
                seconds[BASELINE],
                seconds[label],
                Spread.of(seconds[label] / tokens * 1e3),
                Acceptance.of(counts),
                costs[K],
            )
        )

    def texts(name):
        return [prompt[0].texts for prompt in timings[name]]

    same = [all(one == texts(BASELINE)[i] for one in row) for i, row in enumerate(zip(*map(texts, labels)))]
    return Curve(
        ms_per_token=Spread.of(seconds[BASELINE] / tokens * 1e3),
        points=tuple(points),
        prompts=workload.repeats,
        same_tokens=sum(same) if deterministic else None,
    )


def _point(
    rule: str,
    draft_length: int,
    plain_P: np.ndarray,
    drafted_P: np.ndarray,
    ms_per_token: Spread,
    acceptance: Acceptance,
    costs: Costs,
) -> Point:
    overall = float(plain_P.sum() / drafted_P.sum())
    allowed = expected_tokens(acceptance.rate or 0.0, draft_length) / costs.least_round
    return Point(
        rule=rule,
        draft_length=draft_length,
        speedup=Spread.of(plain_P / drafted_P),
        overall=overall,
        ms_per_token=ms_per_token,
        acceptance=acceptance,
        costs=costs,
        allowed=allowed,
        efficiency=overall / allowed,
        efficiency_of_rounds=overall / (acceptance.emitted_per_round / costs.least_round),
    )


def _clock(speculative: Decoder, autoregressive: Decoder, progress: Callable[[str], None]) -> PhaseClock:
    def say(text):
        return progress(f"costs at K = {speculative.loop.drafter.K}: {text}")

    return PhaseClock(speculative.running(), autoregressive.running(), say)


def _costs(draft_length: int, split: RoundSplit) -> Costs:
    return Costs(
        target_step=split.step.ms.median,
        draft_call=split.draft_model.ms.median / draft_length,
        score=split.score.ms.median,
        least_round=split.least_round.median,
        draws_and_verdict=split.draft_sampling.median + split.verify.ms.median + split.commit.ms.median,
        streaming_share=split.stream_step.ms.median / split.step.ms.median,
    )

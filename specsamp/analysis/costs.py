"""Milliseconds of a round, by draft length, batch and context: measured, given per call, or from sizes and rates.

All of them answer the same question, ``round_ms(draft_length, batch, context)``; draft length 0 is a step of plain
decoding. `specsamp.tpu.costs` adds the costs of programs that were compiled for a TPU.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping

import numpy as np

from specsamp.models.config import ExpertsConfig, TransformerConfig

# Relative standard error that a clock has from one session to the next, whatever the errors of the medians: other work on
# the machine, temperature, memory. The least with which 95% bands hold 95% of the 52 points of
# notebooks/results/python_pair_agreement.json; found on three of its four curves, it holds 50 of the 52 (tests).
CLOCK_DRIFT = 0.016


def clock_error(errors: Iterable[float]) -> float:
    """Returns the relative standard error of rounds that were timed, from those of their medians."""
    return math.hypot(float(np.median([*errors])), CLOCK_DRIFT)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Costs:
    """Costs as `specsamp.analysis.planner.make_plan` needs them."""

    error: float = 0.0  # the relative standard error of a round's time; 0 if it is known exactly
    edges: tuple[Costs, ...] = ()  # in the cheapest and the dearest case, where more is open than an error of a clock
    worlds: tuple[Costs, ...] = ()  # in several cases, of which one is true: a speedup is compared within each
    open: bool = False  # no value between the edges is likelier than another

    def round_ms(self, draft_length: int, batch: int = 1, context: int | None = None) -> float:
        """Returns the milliseconds of one round of all rows."""
        raise NotImplementedError


@dataclasses.dataclass(frozen=True, kw_only=True)
class Round:
    """The measured time of one round."""

    draft_length: int
    ms: float
    batch: int = 1

    def __post_init__(self):
        if self.draft_length < 0 or self.batch < 1 or not self.ms > 0:
            raise ValueError(f"a round has draft_length >= 0, batch >= 1 and ms > 0; got {self}")


@dataclasses.dataclass(frozen=True, kw_only=True)
class CostTable(Costs):
    """Measured rounds, interpolated linearly; along the draft length also extrapolated.

    Draft calls add up one by one, and rows and caches nearly so, hence straight lines. Products with the target's
    matrices need not be linear: a kernel may take a step up at some number of rows. Where they were timed alone, the
    lines run through what they leave of the rounds. The batch is never extrapolated: a change of regime (arithmetic
    instead of streaming) could not be foreseen.

    Attributes:
      rounds: the measured rounds.
      context: slots of their caches, which attention reads; None: any number is taken for the measured one.
      products_ms: ``((rows, ms), ...)``, the time of multiplying so many rows by all matrices of the target; a round has
        ``batch * (K + 1)`` rows. Interpolated, and extrapolated beyond the most rows.
    """

    rounds: tuple[Round, ...]
    products_ms: tuple[tuple[int, float], ...] = ()
    context: int | None = None

    def __post_init__(self):
        if not self.rounds:
            raise ValueError("costs need at least one round")

    def round_ms(self, draft_length: int, batch: int = 1, context: int | None = None) -> float:
        """Returns the milliseconds of one round.

        Raises:
          ValueError: the context is another than the measured one, the batch was not measured and lies between no two
            that were, or the K is below all measured ones.
        """
        if None not in (context, self.context) and context != self.context:
            raise ValueError(f"context {context} is not the measured {self.context}: measure it, or take a roofline")
        by_batch: dict[int, dict[int, float]] = {}  # what is left of the rounds, by draft length
        for known in self.rounds:
            left_ms = known.ms - self._products_ms(known.batch * (known.draft_length + 1))
            by_batch.setdefault(known.batch, {})[known.draft_length] = left_ms
        return self._left_ms(by_batch, draft_length, batch) + self._products_ms(batch * (draft_length + 1))

    def _left_ms(self, by_batch: Mapping[int, Mapping[int, float]], draft_length: int, batch: int) -> float:
        """Interpolates linearly between the neighbours of ``batch``."""
        below, above = [one for one in by_batch if one <= batch], [one for one in by_batch if one >= batch]
        if not below or not above:
            listed = ", ".join(map(str, sorted(by_batch)))
            raise ValueError(f"batch {batch} lies beyond the measured {listed}: measure it, or take a roofline")
        ends = max(below), min(above)
        return float(np.interp(batch, ends, [_line(by_batch[end], draft_length) for end in ends]))

    def _products_ms(self, rows: int) -> float:
        known = dict(self.products_ms)
        if len(known) < 2:
            return 0.0  # one number of rows says nothing about the shape
        return _line(known, max(rows, min(known)))


@dataclasses.dataclass(frozen=True)
class PerCall(Costs):
    """A round takes ``target_ms + K * draft_ms``, however many tokens it scores (as Chen et al., arXiv 2302.01318, assume).

    Batch and context are ignored: give milliseconds at the ones you mean.

    Raises:
      ValueError: a call takes no time, or infinitely long.
    """

    target_ms: float
    draft_ms: float

    def __post_init__(self):
        if not (0 < self.target_ms < math.inf and 0 <= self.draft_ms < math.inf):
            raise ValueError(f"calls take time: target {self.target_ms!r} ms, draft {self.draft_ms!r} ms")

    def round_ms(self, draft_length: int, batch: int = 1, context: int | None = None) -> float:
        return self.target_ms + draft_length * self.draft_ms


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelSize:
    """Bytes that a call of a model reads and operations that it computes."""

    weight_bytes: float  # read by a call, whatever its tokens
    parameters: float  # two operations each, per token
    kv_bytes_per_token: float = 0.0  # of the cache, per row
    experts: ExpertsConfig | None = None  # that tokens choose, in each of its layers that has any
    expert_bytes: float = 0.0  # of one expert of all these layers

    @classmethod
    def of(cls, config: TransformerConfig) -> ModelSize:
        """Takes the numbers of a transformer: all its parameters are streamed, but for experts that no token chose."""
        bytes_per_parameter = config.weight_bytes / config.num_parameters
        in_experts = config.num_expert_parameters
        return cls(
            weight_bytes=(config.num_parameters - in_experts) * bytes_per_parameter,
            parameters=config.num_active_parameters,
            kv_bytes_per_token=config.kv_bytes_per_token,
            experts=config.experts,
            expert_bytes=in_experts * bytes_per_parameter / config.experts.num_experts if config.experts else 0.0,
        )

    def read_bytes(self, tokens: int) -> float:
        """Returns the bytes of weights that a call of so many tokens, of all rows, is expected to read."""
        touched = self.experts.expected_touched(tokens) if self.experts else 0.0
        return self.weight_bytes + touched * self.expert_bytes


@dataclasses.dataclass(frozen=True, kw_only=True)
class Roofline(Costs):
    """A lower bound from sizes and rates: a call takes the longer of streaming and arithmetic, plus a constant.

    ``max((W + B S kv) / (n bandwidth), 2 N B T / (n flops)) + call_ms``: weights W are read once for all B rows and all T
    tokens of a row, the cache of S slots once per row (the model of Pope et al., arXiv 2211.05102). Of experts those are
    read that B T tokens are expected to choose (`ExpertsConfig.expected_touched`), so that longer drafts read more.
    """

    target: ModelSize
    draft: ModelSize
    bytes_per_second: float  # of one device
    flops_per_second: float
    devices: int = 1
    call_ms: float = 0.0  # collectives and dispatch, per call
    default_context: int = 1024

    def round_ms(self, draft_length: int, batch: int = 1, context: int | None = None) -> float:
        context = self.default_context if context is None else context
        scored = self.call_time_ms(self.target, draft_length + 1, batch, context)
        return scored + draft_length * self.call_time_ms(self.draft, 1, batch, context)

    def call_time_ms(self, model: ModelSize, tokens: int, batch: int, context: int) -> float:
        """Returns the milliseconds of one call with ``tokens`` tokens in each row."""
        read = model.read_bytes(batch * tokens) + batch * context * model.kv_bytes_per_token
        streamed = read / self.bytes_per_second
        computed = 2 * model.parameters * batch * tokens / self.flops_per_second
        return max(streamed, computed) / self.devices * 1e3 + self.call_ms


def _line(ms: Mapping[int, float], where: int) -> float:
    """Interpolates between known draft lengths (or rows), and extrapolates with the slope of the longest half.

    The slope beyond the longest is never negative: a noisy clock must not make longer rounds ever shorter.
    """
    known = sorted(ms)
    if where < known[0] or (where > known[-1] and len(known) == 1):
        raise ValueError(f"no cost at draft_length {where}: known are {', '.join(map(str, known))}")
    if where <= known[-1]:
        return float(np.interp(where, known, [ms[n] for n in known]))
    far = known[-1]
    near = max(n for n in known if n <= max(far / 2, known[0]))
    return ms[far] + (where - far) * max((ms[far] - ms[near]) / (far - near), 0.0)


def median_rounds(rounds: Iterable[Round]) -> tuple[Round, ...]:
    """Returns one round for each draft length and batch: the median of those given."""
    cells: dict[tuple, list[float]] = {}
    for one in rounds:
        cells.setdefault((one.draft_length, one.batch), []).append(one.ms)
    return tuple(Round(draft_length=K, batch=batch, ms=float(np.median(ms))) for (K, batch), ms in cells.items())

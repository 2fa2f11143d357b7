"""Forecasts that are frozen before anybody has measured them, and the measurements that are added later."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping
from typing import Any

from specsamp.models.config import TransformerConfig
from specsamp.tpu.calibration import Band, estimate
from specsamp.tpu.shapes import Shape
from specsamp.tpu.topology import CHIPS, parse
from specsamp.tpu.work import Work, replica_axes

PROMISED = 0.9  # of the bands that hold their measurement
# Cycles to sample and verify with top-p, per logit and token of a round: of a call, and of each row. Compiled rounds of
# vocabularies of 33k and 152k at batch 1 to 8, less their calls, take 6 to 10 at one row and 24 to 29 at eight.
SAMPLING_CYCLES, SAMPLING_CYCLES_PER_ROW = 5.0, 2.6


@dataclasses.dataclass(frozen=True, kw_only=True)
class Setting:
    """What is forecast: one round of a pair on a slice."""

    config: str  # as --config takes it, such as "configs/hf.py:llama-8b"
    topology: str  # such as "v5e:2x2"; all chips hold one replica together
    batch: int
    draft_length: int  # K; 0 is a step of plain decoding
    slots: int
    drafter: str = "model"  # "none" at K = 0

    @property
    def chip(self) -> str:
        """The name of the chip."""
        return self.topology.partition(":")[0]

    @property
    def devices(self) -> int:
        """The number of devices, as JAX counts them."""
        count = math.prod(int(size) for size in self.topology.partition(":")[2].split("x"))
        return count * (CHIPS[self.chip].devices if self.chip in CHIPS else 1)

    @property
    def name(self) -> str:
        """The setting in words."""
        what = f"K = {self.draft_length}" if self.draft_length else "plain"
        pair = self.config.rpartition(":")[2].removeprefix("configs/").removesuffix(".py")
        return f"{pair}, {self.topology}, batch {self.batch}, {what}"


def works(setting: Setting, target: TransformerConfig, draft: TransformerConfig, draft_chips: int) -> tuple[Work, ...]:
    """Returns the work of a round from shapes alone: a call of the target for K + 1 tokens, K of the draft, and sampling.

    Args:
      draft_chips: that hold one copy of the draft together.
    """
    chip, sizes = parse(setting.topology)
    known: dict[str, Any] = dict(rows=setting.batch, context=setting.slots)
    scoring = Shape.of(target).call(chip, sizes, tokens=setting.draft_length + 1, **known)
    step = Shape.of(draft).call(chip, replica_axes(sizes, draft_chips), **known)
    rows = math.ceil(setting.batch / setting.devices)  # of a device: rows are sampled apart
    per_logit = SAMPLING_CYCLES + SAMPLING_CYCLES_PER_ROW * rows
    cycles = per_logit * target.vocab_size * (setting.draft_length + 1)
    sampling = Work(streaming_ms=0.0, cycles_ms=cycles / chip.clock_hz * 1e3, calls=0)
    return (scoring, *[step] * setting.draft_length, sampling)


def forecast(setting: Setting, target: TransformerConfig, draft: TransformerConfig, draft_chips: int) -> Band:
    """Forecasts the milliseconds of a round."""
    return estimate(setting.chip, *works(setting, target, draft, draft_chips))


def read_entry(entry: Mapping[str, Any]) -> tuple[Setting, Band, list[dict[str, Any]]]:
    """Reads an entry of a ledger: what is forecast, the band, and the scores so far."""
    return Setting(**entry["setting"]), Band(**entry["forecast"]), list(entry["scores"])


@dataclasses.dataclass(frozen=True, kw_only=True)
class Standing:
    """How the scored forecasts of one kind did."""

    scored: int
    within: int
    median_error: float

    @property
    def verdict(self) -> str:
        """What the count says about bands that promise nine of ten."""
        if not self.scored:
            return "nothing scored"
        chance = sum(_binomial(self.scored, hits, PROMISED) for hits in range(self.within + 1))
        kept = "as promised" if chance > 0.05 else "fewer than promised: the bands are too narrow"
        return f"{self.within} of {self.scored} within the band, {kept}; median error {self.median_error:.0%}"


def standing(scores: Iterable[tuple[Band, float]]) -> Standing:
    """Counts the measurements within their bands; the first of each forecast should be given, not the best."""
    scores = list(scores)
    errors = sorted(abs(band.likely / measured - 1) for band, measured in scores)
    return Standing(
        scored=len(scores),
        within=sum(band.covers(measured) for band, measured in scores),
        median_error=errors[len(errors) // 2] if errors else math.nan,
    )


def _binomial(count: int, hits: int, chance: float) -> float:
    return math.comb(count, hits) * chance**hits * (1 - chance) ** (count - hits)

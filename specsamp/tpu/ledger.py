"""Forecasts that are frozen before anybody has measured them, and the measurements that are added later.

    {"kind": "ledger", "batches": [{"frozen": {"date", "commit"}, "chance", "digest", "forecasts": [...]}, ...]}

A forecast is ``{"setting", "forecast", "scores"}``. Forecasts come in batches, each frozen at a commit. A batch that is
frozen is not changed: newer fits make newer batches, beside the old ones. Scores are appended; `digest` covers all else.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
from collections.abc import Iterable, Mapping
from typing import Any

from scipy.special import betaincinv

from specsamp.models.config import TransformerConfig
from specsamp.tpu.calibration import Band, estimate
from specsamp.tpu.shapes import Shape
from specsamp.tpu.topology import parse
from specsamp.tpu.work import Work, replica_axes

# Cycles to sample and verify with top-p, per logit and token of a round: of a call, and of each row. Compiled rounds of
# vocabularies of 33k and 152k at batch 1 to 8, less their calls, take 6 to 10 at one row and 24 to 29 at eight.
SAMPLING_CYCLES, SAMPLING_CYCLES_PER_ROW = 5.0, 2.6
DRAFTERS = {
    "none": "plain",
    "model": "K = {K}",
    "early_exit": "early exit {exit_layer}, K = {K}",
    "head": "head, K = {K}",
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Setting:
    """Holds what is forecast: one round of a pair on a slice."""

    config: str  # as --config takes it, such as "configs/hf.py:llama-8b"
    topology: str  # such as "v5e:2x2"; all chips hold one replica together
    batch: int
    draft_length: int  # K; 0 is a step of plain decoding
    slots: int
    drafter: str = (
        "model"  # one of DRAFTERS, "none" at K = 0; "head" is the one that the configuration names, or EAGLE-3's
    )
    exit_layer: int | None = None  # of an early exit

    @property
    def chip(self) -> str:
        """The name of the chip."""
        return self.topology.partition(":")[0]

    @property
    def sizes(self) -> tuple[int, ...]:
        """Chips along each axis of the slice."""
        return tuple(int(size) for size in self.topology.partition(":")[2].split("x"))

    @property
    def how(self) -> str:
        """The drafter and K in words."""
        return DRAFTERS[self.drafter].format(K=self.draft_length, exit_layer=self.exit_layer)

    @property
    def name(self) -> str:
        """The setting in words."""
        pair = self.config.rpartition(":")[2].removeprefix("configs/").removesuffix(".py")
        return f"{pair}, {self.topology}, batch {self.batch}, {self.how}"


def works(setting: Setting, target: TransformerConfig, draft: Shape | None, draft_chips: int) -> tuple[Work, ...]:
    """Returns the work of a round from shapes alone: a call of the target for K + 1 tokens, K of the draft, and sampling.

    Args:
      draft: of what drafts, called K times; None at K = 0. A head's first call reads K + 1 tokens.
      draft_chips: that hold one copy of the draft together.
    """
    chip, sizes = parse(setting.topology)
    K, known = setting.draft_length, dict(rows=setting.batch, context=setting.slots)
    calls = [Shape.of(target).call(chip, sizes, tokens=K + 1, **known)]
    for i in range(K):
        tokens = K + 1 if setting.drafter == "head" and i == 0 else 1
        calls.append(draft.call(chip, replica_axes(sizes, draft_chips), tokens=tokens, **known))
    devices = math.prod(sizes) * chip.devices
    rows = -(-setting.batch // devices)  # of a device: rows are sampled apart
    cycles = (SAMPLING_CYCLES + SAMPLING_CYCLES_PER_ROW * rows) * target.vocab_size * (K + 1)
    return (*calls, Work(streaming_ms=0.0, cycles_ms=cycles / chip.clock_hz * 1e3, calls=0))


def forecast(setting: Setting, target: TransformerConfig, draft: Shape | None, draft_chips: int) -> Band:
    """Forecasts the milliseconds of a round."""
    return estimate(setting.chip, *works(setting, target, draft, draft_chips))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Entry:
    """A forecast of a ledger, and its scores so far."""

    setting: Setting
    band: Band
    scores: tuple[dict[str, Any], ...]

    @property
    def outcome(self) -> tuple[Band, float | None] | None:
        """The band and the first score, not the best: its milliseconds, or None where it ran out of memory."""
        return (self.band, self.scores[0].get("measured_ms")) if self.scores else None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Batch:
    """Forecasts that were frozen together."""

    date: str
    commit: str
    chance: float  # that a band holds its measurement, as they promise; ranges of all hidden to all added promise none
    entries: tuple[Entry, ...]


def digest(batch: Mapping[str, Any]) -> str:
    """Returns a digest of what is frozen of a batch as JSON: date, commit, chance, settings and forecasts."""
    frozen = [batch["frozen"], batch["chance"], [[one["setting"], one["forecast"]] for one in batch["forecasts"]]]
    return hashlib.sha256(json.dumps(frozen, sort_keys=True).encode()).hexdigest()


def read_ledger(document: Mapping[str, Any]) -> tuple[Batch, ...]:
    """Reads a ledger.

    Raises:
      ValueError: a forecast was edited after it was frozen, or a score has no time that could be.
    """
    batches = []
    for batch in document["batches"]:
        date, commit = batch["frozen"]["date"], batch["frozen"]["commit"]
        if digest(batch) != batch["digest"]:
            raise ValueError(
                f"the forecasts of {date} (commit {commit[:12]}) are not as they were frozen: restore them with git"
            )
        for one in (one for forecast in batch["forecasts"] for one in forecast["scores"]):
            if not 0 < one.get("measured_ms", 1.0) < math.inf:
                raise ValueError(f"a score of {date} says measured_ms = {one['measured_ms']!r}: restore it with git")
        entries = [
            Entry(setting=Setting(**one["setting"]), band=Band(**one["forecast"]), scores=tuple(one["scores"]))
            for one in batch["forecasts"]
        ]
        batches.append(Batch(date=date, commit=commit, chance=batch["chance"], entries=tuple(entries)))
    return tuple(batches)


def with_batch(document: Mapping[str, Any], batch: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a ledger with another batch, frozen as it is.

    Raises:
      ValueError: a forecast was edited, or there is a batch of this commit already.
    """
    commit = batch["frozen"]["commit"]
    if any(one.commit == commit for one in read_ledger(document)):
        raise ValueError(f"the forecasts of commit {commit[:12]} are in this ledger already: what is frozen stays")
    return {**document, "batches": [*document["batches"], dict(batch) | {"digest": digest(batch)}]}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Standing:
    """Says how the scored forecasts of one kind did."""

    scored: int  # out of memory included, which no band holds
    within: int
    out_of_memory: int
    median_error: float | None  # of those with a time

    @property
    def bounds(self) -> tuple[float, float]:
        """The share that such bands hold, with 95% (Clopper and Pearson, 1934)."""
        k, n = self.within, self.scored
        return float(betaincinv(k, n - k + 1, 0.025)) if k else 0.0, float(
            betaincinv(k + 1, n - k, 0.975)
        ) if k < n else 1.0

    def verdict(self, chance: float | None) -> str:
        """Says how many were scored, and what that says about bands that promise a chance; None: ranges, which promise none."""
        if not self.scored:
            return "nothing scored"
        said = f"{self.within} of {self.scored} within"
        said += f", {self.out_of_memory} out of memory" * bool(self.out_of_memory)
        if chance is not None:
            low, high = self.bounds
            kept = "fewer than the" if high < chance else "more than the" if low > chance else "no contradiction to the"
            said += f": they hold {low:.0%} to {high:.0%} (with 95%), {kept} {chance:.0%} that was promised"
        return said + ("" if self.median_error is None else f"; median error {self.median_error:.0%}")


def standing(outcomes: Iterable[tuple[Band, float | None]]) -> Standing:
    """Counts the measurements within their bands; None ran out of memory."""
    outcomes = list(outcomes)
    times = [(band, ms) for band, ms in outcomes if ms is not None]
    errors = sorted(abs(band.likely / ms - 1) for band, ms in times if not band.open)
    return Standing(
        scored=len(outcomes),
        within=sum(band.covers(ms) for band, ms in times),
        out_of_memory=len(outcomes) - len(times),
        median_error=errors[len(errors) // 2] if errors else None,
    )

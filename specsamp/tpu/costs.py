"""Costs of rounds on TPUs, for `specsamp.analysis.planner`: of compiled programs, or from sizes and rates alone."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

from specsamp.analysis.costs import Costs, CostTable, Round
from specsamp.models.config import TransformerConfig
from specsamp.tpu.calibration import Calibration
from specsamp.tpu.report import Report
from specsamp.tpu.topology import CHIPS
from specsamp.tpu.work import Shape


@dataclasses.dataclass(frozen=True, kw_only=True)
class Roofline(Costs):
    """A lower bound from sizes and rates: a call takes the longer of streaming and arithmetic.

    Weights are read once for all sequences and all their tokens, the cache of each sequence once (Pope et al., arXiv
    2211.05102), and of the experts those that the tokens are expected to choose.
    """

    target: TransformerConfig
    draft: TransformerConfig
    chip: str
    devices: int = 1
    default_context: int = 1024

    def round_ms(self, draft_length: int, batch: int = 1, context: int | None = None) -> float:
        context = self.default_context if context is None else context
        scored = self.call_ms(self.target, draft_length + 1, batch, context)
        return scored + draft_length * self.call_ms(self.draft, 1, batch, context)

    def tree_ms(self, depth: int, rows: int, batch: int = 1, context: int | None = None) -> float:
        context = self.default_context if context is None else context
        level = math.ceil((rows - 1) / depth)  # nodes of a level, on average
        drafted = depth * self.call_ms(self.draft, level, batch, context)
        return self.call_ms(self.target, rows, batch, context) + drafted

    def call_ms(self, model: TransformerConfig, tokens: int, batch: int, context: int) -> float:
        """Returns the milliseconds of one call with ``tokens`` tokens in each of ``batch`` sequences."""
        dtypes = {"weights": model.weight_dtype or model.dtype, "cache": model.cache_dtype or model.dtype}
        sizes = {"rows": batch, "context": context, "tokens": tokens}
        work = Shape.of(model).call(CHIPS[self.chip], (self.devices,), **sizes, **dtypes)
        return max(work.streaming_ms, work.cycles_ms)


def compiled_costs(report: dict[str, Any], own: Calibration | None = None) -> CostTable:
    """Returns the times of a plain step and of a round at the report's K, as a calibration estimates them.

    The ends of their bands are the bounds.

    Args:
      report: a `specsamp.tpu.report.Report` as JSON: the entry "report" of a file of ``launch/compile_report.py``.
      own: a calibration of the devices themselves; the published ones otherwise.

    Raises:
      ValueError: it is no such report, or its programs do not fit the slice.
    """

    def table(*times: float) -> CostTable:
        lengths = 0, compiled.draft_length
        rounds = [Round(draft_length=K, ms=ms, batch=compiled.batch) for K, ms in zip(lengths, times, strict=True)]
        return CostTable(rounds=tuple(rounds), context=compiled.slots)

    compiled = Report.from_json(report)
    programs = [compiled["target step"], compiled["round"]]
    if any(program.hbm_bytes is None for program in programs):
        raise ValueError(f"the programs of this compile report do not fit {compiled.topology}: they have no times")
    step, round_ = (compiled.calibrated_ms(program.name, own) for program in programs)
    return dataclasses.replace(
        table(step.likely, round_.likely),
        bounds=(table(step.least, round_.least), table(step.most, round_.most)),
        scenarios=tuple(map(table, step.worlds, round_.worlds)),
        is_range=step.open,
    )

"""Costs of rounds from programs that were compiled for a TPU, for `specsamp.analysis.planner`."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from specsamp.analysis.costs import CostTable, Round
from specsamp.tpu.calibration import Band, Calibration
from specsamp.tpu.program import Memory, Program
from specsamp.tpu.report import Report

_OLD_FIELDS = {"draft_ways": "draft_model_parallelism"}  # of reports that were written before the new name


def compiled_costs(report: dict[str, Any], own: Calibration | None = None) -> CostTable:
    """Returns the times of a plain step and of a round at the report's K, as a calibration estimates them.

    Args:
      report: a `specsamp.tpu.report.Report` as JSON: the entry "report" of what ``launch/compile_report.py`` wrote.
      own: a calibration of the devices themselves; the published ones otherwise.

    Raises:
      ValueError: it is no such report, or its programs do not fit the slice.
    """
    compiled = read_report(report)
    named = [compiled[name] for name in ("target step", "round")]
    if any(program.hbm_bytes is None for program in named):
        raise ValueError(f"the programs of this compile report do not fit {compiled.topology}: they have no times")
    bands = [compiled.calibrated_ms(program.name, own) for program in named]
    return banded_costs((0, compiled.draft_length), bands, compiled.batch, compiled.slots)


def read_report(report: dict[str, Any]) -> Report:
    """Reads a report that was written as JSON.

    Raises:
      ValueError: it is none, or it has no target step and no round.
    """
    try:
        programs = tuple(
            Program(**{**entry, "memory": entry["memory"] and Memory(**entry["memory"])})
            for entry in report["programs"]
        )
        fields = {_OLD_FIELDS.get(name, name): value for name, value in report.items()}
        compiled = Report(**{**fields, "programs": programs})
        for name in ("target step", "round"):
            compiled[name]
    except (KeyError, TypeError, StopIteration) as error:
        told = f"{type(error).__name__}: {error}"
        raise ValueError(f"no compile report with a target step and a round ({told})") from error
    return compiled


def banded_costs(
    lengths: Sequence[int], bands: Sequence[Band], batch: int = 1, context: int | None = None
) -> CostTable:
    """Returns the costs of rounds from estimates with bands: their values, the bands' ends as edges, and their worlds."""

    def of(times: Sequence[float]) -> CostTable:
        rounds = [Round(draft_length=K, ms=ms, batch=batch) for K, ms in zip(lengths, times, strict=True)]
        return CostTable(rounds=tuple(rounds), context=context)

    likely, *edges = (of([getattr(band, name) for band in bands]) for name in ("likely", "least", "most"))
    worlds = tuple(of(times) for times in zip(*(band.worlds for band in bands), strict=True))
    return dataclasses.replace(likely, edges=tuple(edges), worlds=worlds, open=bands[0].open)

"""Costs of rounds from programs that were compiled for a TPU, for `specsamp.analysis.planner`."""

from __future__ import annotations

import math
from typing import Any

from specsamp.analysis.acceptance import NORMAL_95
from specsamp.analysis.costs import CostTable, Round
from specsamp.tpu.report import Program, Report

_OLD_FIELDS = {"draft_ways": "draft_model_parallelism"}  # of reports that were written before the new name


def compiled_costs(report: dict[str, Any], latency_us: float | None = None) -> CostTable:
    """Returns the times of a plain step and of a round at the report's K, as the compiler estimates them.

    Args:
      report: a `specsamp.tpu.report.Report` as JSON: the entry "report" of what ``launch/compile_report.py`` wrote.
      latency_us: the latency of one collective, which the compiler does not know; None takes the one fitted on published
        steps of TPU v4 (`specsamp.tpu.calibration`), with its error.

    Raises:
      ValueError: it is no such report, or its programs do not fit the slice.
    """
    try:
        programs = tuple(Program(**entry) for entry in report["programs"])
        fields = {_OLD_FIELDS.get(name, name): value for name, value in report.items()}
        compiled = Report(**{**fields, "programs": programs})
        named = {name: compiled[name] for name in ("target step", "round")}
    except (KeyError, TypeError, StopIteration) as error:
        told = f"{type(error).__name__}: {error}"
        raise ValueError(f"no compile report with a target step and a round ({told})") from error
    if any(program.hbm_bytes is None for program in named.values()):
        raise ValueError(f"the programs of this compile report do not fit {compiled.topology}: they have no times")
    lengths, error = (0, compiled.draft_length), 0.0
    if latency_us is None:
        bands = [compiled.calibrated_ms(name) for name in named]
        times = [likely for _, likely, _ in bands]
        error = math.log(bands[1][2] / bands[1][0]) / (2 * NORMAL_95)
    else:
        times = [program.milliseconds(compiled.chip, latency_us) for program in named.values()]
    known = {"batch": compiled.batch, "context": compiled.slots}
    return CostTable(
        rounds=tuple(Round(draft_length=K, ms=ms, **known) for K, ms in zip(lengths, times, strict=True)), error=error
    )

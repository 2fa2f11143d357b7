"""Tables of compile reports."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from specsamp.analysis.acceptance import expected_tokens
from specsamp.analysis.report import Table
from specsamp.tpu.calibration import Band, Calibration, band_ratio, fit_published, two_digits
from specsamp.tpu.program import Program
from specsamp.tpu.report import Report

GIB = 2**30


def report_tables(
    report: Report, weights: int, caches: int, acceptance: Sequence[float], own: Calibration | None = None
) -> list[Table]:
    """Tabulates a report: one call on one device, its milliseconds, and milliseconds per token by acceptance rate.

    ``weights`` and ``caches`` of both models are in bytes per device; ``own`` is a calibration of the devices themselves.
    """
    device = report.chip.hbm_bytes // report.chip.devices
    where = f"{report.topology}, mesh {report.mesh}, batch {report.batch}, {report.slots} slots (compiler estimate)"
    held = f"weights and tables {weights / GIB:.2f} GiB, caches {caches / GIB:.2f} GiB, of {device / GIB:.0f} GiB"
    rows = [_traffic(program) for program in report.programs]
    made = [
        Table.of(f"One call on one device: {where}", rows, note=f"{held}; the round is draft, score, verify, commit")
    ]
    fitting = [program for program in report.programs if program.memory is not None]
    if fitting:
        note = basis(report.calibrated_ms(fitting[0].name, own).open, own)
        made.append(Table.of("Milliseconds", [_times(report, program, own) for program in fitting], note=note))
    if len(report.programs) > 1 and all(p.memory is not None and p.memory.fits for p in report.programs):
        rows = [_per_token(report, rate, own) for rate in acceptance]
        made.append(Table.of("Milliseconds per token by acceptance rate", rows))
    for program in report.programs:
        if program.out_of_memory:
            lines = [{"the compiler says": line} for line in program.out_of_memory.splitlines()]
            made.append(Table.of(f"{program.name}: out of memory", lines))
    return made


def _traffic(p: Program) -> dict[str, str]:
    """Returns the traffic of one program."""
    shown = {"": p.name, "tokens": str(p.tokens)}
    if p.memory is None:
        return shown | {"HBM, GiB": "does not fit"}
    live = "" if p.live_over_floor is None else f" ({p.live_over_floor:.3f})"
    return shown | {
        "HBM, GiB": f"{p.memory.total / GIB:.2f}",
        "temporary, MB": f"{p.memory.temporaries / 1e6:.0f}",
        "HBM traffic, MB": f"{p.hbm_bytes / 1e6:,.0f}",
        "floor (half a cache), MB": f"{p.floor_bytes / 1e6:,.0f} ({p.live_floor_bytes / 1e6:,.0f})",
        "over floor (half a cache)": f"{p.over_floor:.3f}{live}",
        "collectives": ", ".join(f"{count} {kind}" for kind, count in sorted(p.collectives.items())) or "none",
        "they carry, MB": f"{sum(p.collective_bytes.values()) / 1e6:.1f}",
        "large copies, host": f"{p.num_copies}, {p.host_transfers}",
    }


def _times(report: Report, p: Program, own: Calibration | None) -> dict[str, str]:
    """Returns the milliseconds of one program."""
    return {
        "": p.name,
        "streaming": two_digits(p.streaming_ms(report.chip)),
        "cycles": two_digits(p.cycles_ms(report.chip)) if report.chip.has_clock else f"{p.cycles:,.0f} cycles",
        "lower bound": two_digits(p.lower_bound_ms(report.chip)),
        "collectives": str(sum(p.collectives.values())),
        "calibrated": str(report.calibrated_ms(p.name, own)),
    }


def _per_token(report: Report, rate: float, own: Calibration | None) -> dict[str, str]:
    """Returns milliseconds per token at one acceptance rate."""
    emitted = expected_tokens(rate, report.draft_length)
    drafted, alone = report.calibrated_ms("round", own) / emitted, report.calibrated_ms("target step", own)
    return {
        "acceptance": f"{rate:.2f}",
        "alone": str(alone),
        "with the draft": str(drafted),
        "speedup": faster(band_ratio(alone, drafted)),
    }


def lower_bound(streaming_ms: float, cycles_ms: float) -> str:
    """Formats the longer of two times, below which a call cannot take, and both."""
    return f"{max(streaming_ms, cycles_ms):.2f} ({streaming_ms:.2f}, {cycles_ms:.2f})"


def faster(found: Band) -> str:
    """Formats how much faster one program is than another."""
    least, most = two_digits(found.least), two_digits(found.most)
    if least == most:
        return f"{least}x"
    return f"{least}x to {most}x" if found.open else f"{two_digits(found.likely)}x ({least} to {most})"


def basis(open: bool, own: Calibration | None = None) -> str:
    """Returns the basis of an estimate in words."""
    if own is not None:
        return f"calibrated on these devices; steps that were left out within {math.expm1(own.error):.0%}"
    if open:
        return (
            "no program of today was measured on this chip: from streaming and cycles alone (all collectives hidden) to "
            "the sum that held for programs of 2022 and 2023 on TPU v4 (all added)"
        )
    fit = fit_published().hidden
    return (
        f"calibrated on {fit.points} published steps of TPU v5e; those of {fit.layouts} layouts, each left out once, were "
        f"within {math.expm1(fit.error):.0%}"
    )


def fits_table(grid: Sequence[Mapping[str, Any]], topology: str) -> Table:
    """Tabulates the share of a device's memory by batch and context, and how many sequences fit."""
    rows: dict[int, dict[str, str]] = {}
    for cell in grid:
        row = rows.setdefault(cell["context"], {"slots": f"{cell['context']:,}"})
        row[f"batch {cell['batch']}"] = f"{cell['share']:.0%}" if cell["share"] < 10 else ">1000%"
    for cell in grid:
        rows[cell["context"]]["sequences that fit"] = str(cell["most_rows"])
    title = f"Weights and caches, share of a device's memory: {topology}"
    return Table.of(title, list(rows.values()), note="temporaries come on top")

"""Tables of compile reports."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from specsamp.analysis.acceptance import expected_tokens
from specsamp.analysis.report import Table
from specsamp.tpu.calibration import Band, Calibration, calibrate, ratio, two_digits
from specsamp.tpu.program import Program
from specsamp.tpu.report import LATENCIES_US, Report

GIB = 2**30


def report_tables(
    report: Report, weights: int, caches: int, acceptance: Sequence[float], own: Calibration | None = None
) -> list[Table]:
    """Tabulates a report: one call on one device, its milliseconds, and milliseconds per token.

    Args:
      weights, caches: of both models, in bytes per device.
      acceptance: acceptance rates for which a token is priced.
      own: a calibration of the devices themselves.
    """
    chip = report.chip
    where = f"{report.topology}, mesh {report.mesh}, batch {report.batch}, {report.slots} slots (compiler estimate)"
    fitting = [program for program in report.programs if program.memory is not None]
    made = [
        Table(
            title=f"One call on one device: {where}",
            header=(
                "",
                "tokens",
                "HBM, GiB",
                "temporary, MB",
                "HBM traffic, MB",
                "floor (half a cache), MB",
                "over floor (half a cache)",
                "collectives",
                "they carry, MB",
                "large copies, host",
            ),
            rows=[_traffic(program) for program in report.programs],
            note=f"weights and tables {weights / GIB:.2f} GiB, caches {caches / GIB:.2f} GiB, of "
            f"{chip.hbm_bytes // chip.devices / GIB:.0f} GiB; the round is draft, score, verify, commit",
        ),
        Table(
            title="Milliseconds: the longer of streaming and cycles, and collectives one after another",
            header=(
                "",
                "streaming",
                "cycles",
                "collectives",
                *(f"at {latency} us" for latency in LATENCIES_US),
                "calibrated",
            ),
            rows=[_times(report, program, own) for program in fitting],
            note=basis(report.calibrated_ms(fitting[0].name, own).open, own) if fitting else "",
        ),
    ]
    if report.fits and len(fitting) > 1:
        made.append(
            Table(
                title="Milliseconds per token, speculative (and alone), by acceptance rate and latency of a collective",
                header=(
                    "acceptance",
                    *(f"at {latency} us" for latency in LATENCIES_US),
                    "calibrated",
                    "alone",
                    "speedup",
                ),
                rows=[_per_token(report, rate, own) for rate in acceptance],
            )
        )
    for program in report.programs:
        if program.out_of_memory:
            lines = [(line,) for line in program.out_of_memory.splitlines()]
            made.append(Table(title=f"{program.name}: out of memory", header=("the compiler says",), rows=lines))
    return made


def _traffic(p: Program) -> tuple[str, ...]:
    """Formats the traffic of one program."""
    if p.memory is None:
        return (p.name, str(p.tokens), "does not fit", *[""] * 7)
    kinds = ", ".join(f"{count} {kind}" for kind, count in sorted(p.collectives.items())) or "none"
    return (
        p.name,
        str(p.tokens),
        f"{p.memory.total / GIB:.2f}",
        f"{p.memory.temporaries / 1e6:.0f}",
        f"{p.hbm_bytes / 1e6:,.0f}",
        f"{p.floor_bytes / 1e6:,.0f} ({p.live_floor_bytes / 1e6:,.0f})",
        f"{p.over_floor:.3f}" + ("" if p.live_over_floor is None else f" ({p.live_over_floor:.3f})"),
        kinds,
        f"{sum(p.collective_bytes.values()) / 1e6:.1f}",
        f"{p.num_copies}, {p.host_transfers}",
    )


def _times(report: Report, p: Program, own: Calibration | None) -> tuple[str, ...]:
    """Formats the milliseconds of one program."""
    chip = report.chip
    return (
        p.name,
        two_digits(p.streaming_ms(chip)),
        two_digits(p.cycles / chip.clock_hz * 1e3),
        str(sum(p.collectives.values())),
        *(two_digits(p.milliseconds(chip, latency)) for latency in LATENCIES_US),
        str(report.calibrated_ms(p.name, own)),
    )


def _per_token(report: Report, rate: float, own: Calibration | None) -> tuple[str, ...]:
    """Formats milliseconds per token at one acceptance rate."""
    emitted = expected_tokens(rate, report.draft_length)
    pairs = (report.ms_per_token(emitted, latency) for latency in LATENCIES_US)
    drafted, alone = report.calibrated_ms("round", own) / emitted, report.calibrated_ms("target step", own)
    return (
        f"{rate:.2f}",
        *(f"{two_digits(fast)} ({two_digits(plain)})" for plain, fast in pairs),
        str(drafted),
        str(alone),
        faster(ratio(alone, drafted)),
    )


def faster(found: Band) -> str:
    """Formats how much faster one program is than another."""
    least, most = two_digits(found.least), two_digits(found.most)
    if least == most:
        return f"{least}x"
    return f"{least}x to {most}x" if found.open else f"{two_digits(found.likely)}x ({least} to {most})"


def basis(open: bool, own: Calibration | None = None) -> str:
    """Says in words what an estimate rests on."""
    if own is not None:
        return f"calibrated on these devices; steps that were left out within {math.expm1(own.error):.0%}"
    if open:
        return (
            "no program of today was measured on this chip: from streaming and cycles alone (all collectives hidden) to "
            "the sum that held for programs of 2022 and 2023 on TPU v4 (all added)"
        )
    fit = calibrate().hidden
    return (
        f"calibrated on {fit.points} published steps of TPU v5e; those of {fit.layouts} layouts, each left out once, were "
        f"within {math.expm1(fit.error):.0%}"
    )


def fits_table(grid: Sequence[Mapping[str, Any]], topology: str) -> Table:
    """Tabulates the share of a device's memory by batch and context, and how many sequences fit."""
    cells = {(g["context"], g["batch"]): g for g in grid}
    contexts, batches = (sorted({g[name] for g in grid}) for name in ("context", "batch"))

    def percent(share):
        return f"{share:.0%}" if share < 10 else ">1000%"

    return Table(
        title=f"Weights and caches, share of a device's memory: {topology}",
        header=("slots", *(f"batch {batch}" for batch in batches), "sequences that fit"),
        rows=[
            (
                f"{context:,}",
                *(percent(cells[context, batch]["share"]) for batch in batches),
                str(cells[context, batches[0]]["most_rows"]),
            )
            for context in contexts
        ],
        note="temporaries come on top",
    )

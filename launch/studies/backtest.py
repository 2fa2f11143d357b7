"""Predicts every published TPU measurement from the others: what milliseconds of this package are worth.

    python launch/studies/backtest.py --output=runs/tpu_backtest.json --figure=runs/tpu_backtest.png

Each layout and each source is left out of the fits once; rows that no fit explains are compared, too. A few seconds,
no TPU.
"""

import io
import math
from typing import Any

from absl import flags

from launch.lib import entry
from launch.studies import held_out
from launch.studies.held_out import Check
from specsamp import storage
from specsamp.analysis.figures import COLOURS, axes_of
from specsamp.analysis.report import Table
from specsamp.tpu.calibration import calibrate, two_digits

_OUTPUT = entry.define_output()
_FIGURE = flags.DEFINE_string(
    "figure", None, "PNG file for a figure: forecast against published milliseconds, with bands."
)
SHOWN = {  # in the figure; the rest is of other programs than ours
    "v5e, layout left out": ("step", "v5e"),
    "v4, layout left out": ("step", "v4"),
    "served": ("served", ""),
    "launched call by call": ("launched", ""),
}


def main() -> None:
    console = entry.make_console()
    entry.check_output(_OUTPUT.value)
    entry.check_output(_FIGURE.value, "figure")
    layouts, sources, others = held_out.held_out("layout"), held_out.held_out("source"), held_out.unfitted()
    summaries, fits = held_out.summaries(), calibrate()
    title = "what was left out of the fit"
    entry.show([checks_table(part, title) for part in (layouts, sources)], console)
    entry.show([checks_table(others, "programs that no fit is of"), summary_table(summaries)], console)
    for name, fit in (("added (v4, 2022 and 2023)", fits.added), ("hidden (v5e)", fits.hidden)):
        console.print(
            f"{name}: {fit.efficiency:.0%} of the HBM's rate, {fit.call_ms:.2f} ms per call, {fit.sequence_us:.1f} us per "
            f"layer and sequence, collectives of {fit.collective_us:.1f} us + {fit.hop_us:.1f} us per hop, overlap "
            f"{fit.overlap:g}; {fit.points} steps of {fit.layouts} layouts, none left out beyond {math.expm1(fit.error):.0%}"
        )
    if _FIGURE.value:
        picture = io.BytesIO()
        draw(layouts + others).savefig(picture, format="png", dpi=140)
        storage.write(_FIGURE.value, picture.getvalue())
    checks = [as_json(check) for check in (*layouts, *sources, *others)]
    document = {"kind": "backtest", "calibration": fits, "summaries": summaries, "checks": checks}
    entry.write_result(_OUTPUT.value, document, console)


def as_json(check: Check) -> dict[str, Any]:
    """Returns a check with what follows from it."""
    return {"check": check, "error": check.error, "covered": check.covered}


def checks_table(checks: list[Check], title: str) -> Table:
    """Returns a row for each measurement."""
    rows = [
        (
            c.source,
            c.name,
            f"{c.measured_ms:g}",
            str(c.forecast),
            "" if c.forecast.open else f"{c.error:+.0%}",
            "" if c.covered else "outside",
        )
        for c in checks
    ]
    header = ("", "", "published, ms", "forecast, ms", "error", "band")
    return Table(title=f"{checks[0].left_out} left out: {title}", header=header, rows=rows, left=2)


def summary_table(summaries: dict[str, held_out.Summary]) -> Table:
    """Returns how each group of rows did."""
    rows = [
        (
            name,
            str(s.rows),
            "" if s.median_error is None else f"{s.median_error:.0%}",
            "" if s.worst_error is None else f"{s.worst_error:.0%}",
            f"{s.covered} of {s.rows}",
            "" if s.covered >= held_out.COVERED * s.rows else f"x{two_digits(s.factor)}",
        )
        for name, s in summaries.items()
    ]
    header = ("", "rows", "median error", "worst", "within the band", "the band would have to be wider by")
    return Table(title="How forecasts did", header=header, rows=rows)


def draw(checks: list[Check]) -> Any:
    """Draws forecast against published milliseconds, with bands and the line on which both are equal."""
    figure, (axis,) = axes_of(1, "published, ms")
    for colour, (label, (kind, chip)) in zip(COLOURS, SHOWN.items()):
        shown = [c for c in checks if c.kind == kind and c.layout.startswith(chip)]
        likely = [c.forecast.likely for c in shown]
        lower = [c.forecast.likely - c.forecast.least for c in shown]
        upper = [c.forecast.most - c.forecast.likely for c in shown]
        measured = [c.measured_ms for c in shown]
        style = dict(fmt="o", markersize=3, elinewidth=0.7, color=colour)
        axis.errorbar(measured, likely, [lower, upper], label=f"{label} ({len(shown)})", **style)
    axis.plot([1, 100], [1, 100], color="black", linewidth=0.8)
    axis.set_xscale("log")
    axis.set_yscale("log")
    for one in (axis.xaxis, axis.yaxis):
        one.set_major_formatter(lambda ms, _: f"{ms:g}")
    axis.set_title("forecast, ms, of steps on TPUs", fontsize=10)
    axis.legend(fontsize=7, frameon=False)
    return figure


if __name__ == "__main__":
    entry.run(main)

"""Predicts every published TPU measurement from all other ones: the error of our milliseconds.

    python launch/study.py backtest --output=runs/tpu_backtest.json

Each layout and each source is left out of the fits once; rows that no fit explains are compared,
too. Seconds, no TPU.
"""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from launch.lib.study import Document, Published, Study
from specsamp.analysis.report import Table
from specsamp.tpu.calibration import Band, fit_published, held_out, two_digits
from specsamp.tpu.measurements import published

LLAMA_70B = "meta-llama/Llama-3.1-70B"
COVERED = 0.9  # the share of rows that a band should cover


def measure(options, say) -> dict[str, Any]:
    """Predicts the published rows."""
    # The kind of the left-out rows, the row, and its forecast.
    found = [(by, *pair) for by in ("layout", "source") for pair in held_out(by)]
    others = [row for row in published() if row.kind not in ("step", "collective")]
    found += [("kind", row, fit_published().of_row(row)) for row in others]
    checks = [
        {"name": row.name, "source": row.source, "kind": row.kind, "layout": row.layout}
        | {"left_out": left_out, "measured_ms": row.milliseconds, "forecast": forecast}
        for left_out, row, forecast in found
    ]
    return {"kind": "backtest", "calibration": fit_published(), "checks": checks}


def checks_of(document: Document) -> list[Document]:
    """Reads the checks of a result, with their bands; older files nest them."""
    checks = [check.get("check", check) for check in document["checks"]]
    return [{**check, "band": Band(**check["forecast"])} for check in checks]


def parts_of(checks: Sequence[Document]) -> dict[str, list[Document]]:
    """Returns the checks of both ways of leaving out, of Llama 3.1 70B on v5e-16, and of each kind
    that is not fitted.
    """
    layouts, sources, others = (
        [c for c in checks if c["left_out"] == by] for by in ("layout", "source", "kind")
    )
    parts = {
        "Llama 3.1 70B on v5e-16, its layout left out": [
            c for c in layouts if c["name"].startswith(LLAMA_70B)
        ],
        "v4, layout left out": [c for c in layouts if c["layout"].startswith("v4 ")],
        "v4, source left out": [c for c in sources if c["layout"].startswith("v4 ")],
        "all steps, layout left out": layouts,
        "all steps, source left out, where fits remain": [c for c in sources if not c["band"].open],
        "all steps, source left out, where only a range remains": [
            c for c in sources if c["band"].open
        ],
    }
    for check in others:
        parts.setdefault(f"not fitted: {check['kind']}", []).append(check)
    return parts


def summary(checks: Sequence[Document]) -> dict[str, str]:
    """Returns the errors of forecasts by column: rows, median and worst error, the number of bands
    that hold, and the factor for nine of ten.
    """
    bands = [(check["band"], check["measured_ms"]) for check in checks]
    errors = [abs(band.likely / ms - 1) for band, ms in bands]
    has_values = not any(band.open for band, _ in bands)
    beyond = sorted(
        max(0.0, math.log(ms / band.most), math.log(band.least / ms)) for band, ms in bands
    )
    factor = beyond[math.ceil(COVERED * len(beyond)) - 1]
    return {
        "rows": f"{len(bands)}",
        "median error": f"{np.median(errors):.0%}" if has_values else "",
        "worst error": f"{max(errors):.0%}" if has_values else "",
        "within the band": f"{sum(band.covers(ms) for band, ms in bands)} of {len(bands)}",
        "wider by, to hold 90%": two_digits(math.exp(factor)) if factor else "",
    }


def backtest_table(document: Document) -> Table:
    """Returns how forecasts of each part did."""
    checks = checks_of(document)
    rows = [{"": name} | summary(part) for name, part in parts_of(checks).items()]
    every = summary([check for check in checks if check["left_out"] != "source"])
    whole = {name: every[name] for name in ("rows", "within the band")}
    rows.append({"": "all of these, steps by layout"} | whole)
    return Table.of("Published steps, forecast from the others", rows)


STUDY = Study(
    question="What are forecasts of milliseconds on TPUs worth?",
    measure=measure,
    tables={"backtest": Published(["tpu_backtest"], backtest_table)},
)

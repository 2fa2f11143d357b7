"""Predicts every published TPU measurement from the others: what milliseconds of this package are worth.

    python launch/study.py backtest --output=runs/tpu_backtest.json --figures=runs
    python launch/study.py backtest --compile --output=runs/compile_in_flight.json

Each layout and each source is left out of the fits once; rows that no fit explains are compared, too. Seconds, no TPU.
--compile asks the TPU's compiler instead what is prefetched while collectives run: steps of eight layers at full width,
one token for each row; minutes on two cores. A collective costs nothing while weights that take longer are on their way.
--results also shows the forecasts of rounds that were frozen in November 2026, before anybody had measured them.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np

from launch.lib.study import Document, Option, Published, Study
from specsamp.analysis.figures import COLOURS, axes_of
from specsamp.analysis.report import Table
from specsamp.checkpoints.published import published_config
from specsamp.machine import version
from specsamp.models.compiling import FEWEST_COLLECTIVES
from specsamp.tpu.calibration import Band, calibrate, held_out, two_digits
from specsamp.tpu.measurements import published
from specsamp.tpu.programs import WINDOW
from specsamp.tpu.stack import Stack
from specsamp.tpu.topology import described_mesh, parse
from specsamp.tpu.traffic import in_flight
from specsamp.tpu.work import hops, replica_axes

LLAMA_70B = "meta-llama/Llama-3.1-70B"
COVERED = 0.9  # of the rows, what bands are measured by
SHOWN = {  # in the figure, by kind and chip; the rest is of other programs than ours
    "v5e, layout left out": ("step", "v5e"),
    "v4, layout left out": ("step", "v4"),
    "served": ("served", ""),
    "launched call by call": ("launched", ""),
}
LAYERS = 8
PROGRAMS = (
    dict(model=LLAMA_70B, weights="int8", topology="v5e:4x4", data=1, batch=8),
    dict(model=LLAMA_70B, weights="int8", topology="v5e:4x4", data=2, batch=8),
    dict(model=LLAMA_70B, weights="bfloat16", topology="v5e:4x4", data=1, batch=1),
    dict(model="meta-llama/Llama-3.1-8B", weights="bfloat16", topology="v5e:2x2", data=1, batch=1),
    dict(model="meta-llama/Llama-3.2-1B", weights="bfloat16", topology="v5e:2x2", data=1, batch=1),
)


def measure(options, key, say) -> dict[str, Any]:
    """Predicts the published rows, or compiles the programs of `PROGRAMS`."""
    if options.compile:
        jax.config.update("jax_platforms", "cpu")  # arrays are kept there: only the compiler is a TPU's
        cells = [compiled(name, say) for name in PROGRAMS]
        return {"kind": "compiler estimate", "libtpu": version("libtpu"), "layers": LAYERS, "programs": cells}
    # What of a row's own was not fitted, the row, and its forecast.
    found = [(by, *pair) for by in ("layout", "source") for pair in held_out(by)]
    others = [row for row in published() if row.kind not in ("step", "collective")]
    found += [("kind", row, calibrate().of_row(row)) for row in others]
    checks = [
        {"name": row.name, "source": row.source, "kind": row.kind, "layout": row.layout}
        | {"left_out": left_out, "measured_ms": row.milliseconds, "forecast": forecast}
        for left_out, row, forecast in found
    ]
    return {"kind": "backtest", "calibration": calibrate(), "checks": checks}


def compiled(name: Mapping[str, Any], say) -> dict[str, Any]:
    """Compiles a step, and returns what is in flight at each of its collectives with a layer after it."""
    say(f"compiling: {', '.join(map(str, name.values()))}")
    dtype = None if name["weights"] == "bfloat16" else name["weights"]
    config = dataclasses.replace(published_config(name["model"]), num_layers=LAYERS, weight_dtype=dtype)
    batch, data, topology = name["batch"], name["data"], name["topology"]
    mesh = described_mesh(topology, data, num_kv_heads=config.num_kv_heads, rows=batch // data)
    programs = Stack(config, mesh, topology, batch=batch).programs(LAYERS)
    lowered = programs.call(programs.target, WINDOW if batch == data else 1)
    sizes = in_flight(lowered.compile(compiler_options=dict(FEWEST_COLLECTIVES)).as_text())
    us = [size / parse(topology)[0].hbm_bytes_per_second * 1e6 for size in sizes[: 2 * LAYERS]]
    return {"name": name, "bytes_in_flight": sizes, "streaming_us": us}


def checks_of(document: Document) -> list[Document]:
    """Reads the checks of a result, with their bands; older files say what follows from each beside it."""
    checks = [check.get("check", check) for check in document["checks"]]
    return [{**check, "band": Band(**check["forecast"])} for check in checks]


def parts_of(checks: Sequence[Document]) -> dict[str, list[Document]]:
    """Returns the checks of both ways of leaving out, of Llama 3.1 70B on v5e-16, and of each kind that is not fitted."""
    layouts, sources, others = ([c for c in checks if c["left_out"] == by] for by in ("layout", "source", "kind"))
    parts = {
        "Llama 3.1 70B on v5e-16, its layout left out": [c for c in layouts if c["name"].startswith(LLAMA_70B)],
        "v4, layout left out": [c for c in layouts if c["layout"].startswith("v4 ")],
        "v4, source left out": [c for c in sources if c["layout"].startswith("v4 ")],
        "all steps, layout left out": layouts,
        "all steps, source left out, where fits remain": [c for c in sources if not c["band"].open],
        "all steps, source left out, where only a range remains": [c for c in sources if c["band"].open],
    }
    for check in others:
        parts.setdefault(f"not fitted: {check['kind']}", []).append(check)
    return parts


def summary(checks: Sequence[Document]) -> tuple[str, ...]:
    """Returns how forecasts did: rows, median and worst error, how many bands hold, and what nine of ten would need."""
    bands = [(check["band"], check["measured_ms"]) for check in checks]
    errors = [] if any(band.open for band, _ in bands) else [abs(band.likely / ms - 1) for band, ms in bands]
    told = [f"{error:.0%}" for error in (np.median(errors), max(errors))] if errors else ["", ""]  # of values alone
    beyond = sorted(max(0.0, math.log(ms / band.most), math.log(band.least / ms)) for band, ms in bands)
    factor = beyond[math.ceil(COVERED * len(beyond)) - 1]
    held = f"{sum(band.covers(ms) for band, ms in bands)} of {len(bands)}"
    return (str(len(bands)), *told, held, two_digits(math.exp(factor)) if factor else "")


def backtest_table(document: Document) -> Table:
    """Returns how forecasts of each part did."""
    checks = checks_of(document)
    rows = [(name, *summary(part)) for name, part in parts_of(checks).items()]
    number, *_, held, _ = summary([check for check in checks if check["left_out"] != "source"])
    rows.append(("all of these, steps by layout", number, "", "", held, ""))
    header = ("", "rows", "median error", "worst error", "within the band", "wider by, to hold 90%")
    return Table(title="Published steps, forecast from the others", header=header, rows=rows)


def checks_table(document: Document) -> Table:
    """Returns a row for each forecast."""
    rows = []
    for c in checks_of(document):
        ms, band = c["measured_ms"], c["band"]
        rows.append((c["left_out"], c["source"], c["name"], f"{ms:g}", str(band), "" if band.covers(ms) else "outside"))
    header = ("left out", "", "", "published, ms", "forecast, ms", "band")
    return Table(title="Each forecast", header=header, rows=rows, left=3)


def in_flight_table(document: Document) -> Table:
    """Returns what is prefetched while collectives of compiled steps run, beside what one of them takes."""
    rows, fit = [], calibrate().hidden
    for cell in document["programs"]:
        name, us = cell["name"], cell["streaming_us"]
        sizes = parse(name["topology"])[1]
        chips = replica_axes(sizes, math.prod(sizes) // name["data"])
        row = {
            "": f"{name['model']}, {name['weights']}",
            "chips": f"{name['topology']}, tensor {math.prod(chips)} x data {name['data']}",
            "batch": name["batch"],
            "all-reduces of eight layers": len(us),
            "one takes, us, by the traces": f"{fit.collective_us + hops(chips) * fit.hop_us:.0f}",
            "in flight, us of streaming: least": f"{min(us):.0f}",
            "median": f"{np.median(us):.0f}",
        }
        rows.append(row)
    return Table.of("What is prefetched while collectives run (compiler estimate)", rows)


HOW = {"none": "plain", "model": "K = {}", "early_exit": "early exit, K = {}", "head": "head, K = {}"}


def frozen_table(document: Document, number: int) -> Table:
    """Returns the frozen forecasts of a batch of `forecasts.json`, a row for each pair and slice."""
    batch, rows = document["batches"][number], {}
    for one in batch["forecasts"]:
        setting = one["setting"]
        pair = setting["config"].rpartition(":")[2].removeprefix("configs/").removesuffix(".py")
        column = f"batch {setting['batch']}, {HOW[setting['drafter']].format(setting['draft_length'])}"
        where = f"{pair}, {setting['topology']}"
        rows.setdefault(where, {"ms of a round": where})[column] = Band(**one["forecast"])
    when = f"{batch['frozen']['date']} at commit `{batch['frozen']['commit'][:12]}`"
    note = f"Frozen {when}; bands promise {batch['chance']:.0%}; scored: 0 of {len(batch['forecasts'])}."
    return Table.of(f"Forecasts, frozen {when}", [*rows.values()], note=note)


def draw(document: Document) -> Any:
    """Draws forecast against published milliseconds, with bands and the line on which both are equal."""
    figure, (axis,) = axes_of(1, "published, ms")
    checks = [check for check in checks_of(document) if check["left_out"] != "source"]
    for colour, (label, (kind, chip)) in zip(COLOURS, SHOWN.items()):
        shown = [c for c in checks if c["kind"] == kind and c["layout"].startswith(chip)]
        likely, least, most = ([getattr(c["band"], name) for c in shown] for name in ("likely", "least", "most"))
        look = {"label": f"{label} ({len(shown)})", "fmt": "o", "color": colour, "markersize": 3, "elinewidth": 0.7}
        bars = np.subtract(likely, least), np.subtract(most, likely)
        axis.errorbar([c["measured_ms"] for c in shown], likely, bars, **look)
    axis.plot([1, 100], [1, 100], color="black", linewidth=0.8)
    axis.loglog()
    for one in (axis.xaxis, axis.yaxis):
        one.set_major_formatter(lambda ms, _: f"{ms:g}")
    axis.set_title("forecast, ms, of steps on TPUs", fontsize=10)
    axis.legend(fontsize=7, frameon=False)
    return figure


STUDY = Study(
    question="What are forecasts of milliseconds on TPUs worth?",
    options={"compile": Option(False, "Compile for a TPU what is prefetched while collectives run, and nothing else.")},
    measure=measure,
    shown=lambda options: ["in_flight"] if options.compile else ["backtest_checks", "backtest", "tpu_backtest"],
    tables={
        "backtest_checks": Published(["tpu_backtest"], checks_table),
        "backtest": Published(["tpu_backtest"], backtest_table),
        "in_flight": Published(["compile_in_flight"], in_flight_table),
        "forecasts": Published(["forecasts"], functools.partial(frozen_table, number=0)),
        "forecasts_later": Published(["forecasts"], functools.partial(frozen_table, number=1)),
    },
    figures={"tpu_backtest": Published(["tpu_backtest"], draw)},
)

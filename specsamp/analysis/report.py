"""A benchmark's result as tables and as JSON."""

from __future__ import annotations

import dataclasses
import datetime
import importlib.metadata
import json
import os
import platform
from collections.abc import Iterable, Sequence
from typing import Any

import jax
from rich import box
from rich.console import Console
from rich.table import Table as RichTable
from rich.text import Text

from specsamp import storage
from specsamp.analysis.acceptance import Band
from specsamp.analysis.benchmark import Acceptance, Percentiles, Result
from specsamp.analysis.machine import machine
from specsamp.analysis.memory import LoopMemory
from specsamp.analysis.speedup import Curve, Point
from specsamp.analysis.split import PhaseTime, RoundSplit
from specsamp.analysis.spread import Spread

BAR, BAR_WIDTH = "█", 16


@dataclasses.dataclass(frozen=True, kw_only=True)
class Table:
    """Cells of text; the first column (or the first few) is aligned to the left, the others to the right."""

    title: str
    header: Sequence[str]
    rows: Sequence[Sequence[str]]
    note: str = ""
    left: int = 1  # columns aligned to the left


def environment() -> dict[str, Any]:
    """Versions, device and date, for a result that is kept."""
    device = jax.devices()[0]
    here = machine()
    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "python": platform.python_version(),
        **{name: version(name) for name in ("jax", "jaxlib", "flax", "specsamp")},
        "platform": device.platform,
        "device_kind": device.device_kind,
        "devices": jax.device_count(),
        "machine": here["platform"],
        "cpu": here["cpu"],
        "cores": here["cores"],
        "memory_gib": here["memory_gib"],
        "machine_id": here["id"],
        "load_average": os.getloadavg()[0] if hasattr(os, "getloadavg") else None,
    }


def write_json(path: str | os.PathLike, document: Any) -> None:
    """Writes ``document`` (dataclasses allowed) all at once or not at all, creating the folder.

    Raises:
      TypeError, ValueError: it has no JSON form (NaN has none); nothing was written.
    """
    storage.write(path, to_json(document) + "\n")


def to_json(document: Any) -> str:
    """Dataclasses are written as their fields."""
    return json.dumps(document, default=_as_json, indent=1, allow_nan=False)


def result_tables(result: Result, label: str = "") -> list[Table]:
    """All that is known of one cell; ``label`` goes before every title."""
    tables = [_speed_table(result)]
    if result.speculative.draft_length:
        tables.append(_acceptance_table(result.acceptance))
    if result.split is not None:
        tables += [_split_table(result.split), _target_table(result.split, result.speculative.draft_length + 1)]
    return [dataclasses.replace(table, title=f"{label}: {table.title}" if label else table.title) for table in tables]


def memory_table(grid: Iterable[LoopMemory]) -> Table:
    def megabytes(size):
        return f"{size / 1e6:.2f}"

    return Table(
        title="Memory of the loop beside weights and state, MB, as compiled",
        header=("B, K, V", "loop", "B(K+1)V floats", "ratio", "caches, in the state"),
        rows=[
            (
                f"{point.batch}, {point.draft_length}, {point.vocab_size}",
                megabytes(point.temp_bytes),
                megabytes(point.logits_bytes),
                f"{point.temp_bytes / point.logits_bytes:.1f}",
                megabytes(point.cache_bytes),
            )
            for point in grid
        ],
    )


def curve_table(law: str, curve: Curve) -> Table:
    """One row per rule and draft length; the best of each rule is starred."""
    best = {point.rule: curve.best(point.rule) for point in curve.points}

    def row(point: Point) -> tuple[str, ...]:
        costs, counts = point.costs, point.acceptance
        return (
            f"{point.rule}, K = {point.draft_length}{' *' if point is best[point.rule] else ''}",
            spread(point.ms_per_token),
            spread(point.speedup, "x"),
            f"{counts.rate or 0:.3f}",
            f"{counts.emitted_per_round:.2f}",
            f"{costs.draft_call / costs.target_step:.3f}",
            f"{costs.score / costs.target_step:.2f}",
            f"{point.allowed:.2f}x",
            f"{point.efficiency:.0%}",
            f"{point.efficiency_of_rounds:.0%}",
        )

    same = "" if curve.same_tokens is None else f"; the same tokens on {curve.same_tokens} of {curve.prompts} prompts"
    return Table(
        title=f"{law}: autoregressive {spread(curve.ms_per_token)} ms per token{same}",
        header=(
            "",
            "ms per token",
            "speedup",
            "acceptance",
            "per round",
            "draft call",
            "scoring",
            "allowed",
            "reached",
            "by rounds",
        ),
        rows=[row(point) for point in curve.points],
        note="median over prompts ± half the distance of the quartiles; draft call and scoring in steps of the target; "
        "allowed by the measured acceptance and costs; * is best",
    )


def show(tables: Iterable[Table], console: Console, plain: bool = False) -> None:
    """Prints tables, drawn by rich or as aligned text."""
    for table in tables:
        console.print()
        if plain:
            console.print(_plain(table), markup=False, highlight=False, soft_wrap=True)
            continue
        drawn = RichTable(
            title=Text(table.title), title_justify="left", title_style="bold", box=box.SIMPLE_HEAD, pad_edge=False
        )
        for i, name in enumerate(table.header):
            drawn.add_column(Text(name), justify="left" if i < table.left else "right", style="bold" if i == 0 else "")
        for row in table.rows:
            drawn.add_row(*(Text(cell, style="green" if BAR in cell else "") for cell in row))
        console.print(drawn)
        if table.note:
            console.print(Text(table.note, style="dim"))


def _speed_table(result: Result) -> Table:
    one, many = result.autoregressive, result.speculative
    memory = result.memory.weights, result.memory.caches, result.memory.peak
    return Table(
        title="Decoding: median ± half the distance of the quartiles",
        header=("", "autoregressive", f"speculative, K={many.draft_length}", "ratio"),
        rows=[
            ("ms per token", spread(one.ms_per_token), spread(many.ms_per_token), spread(result.speedup, "x")),
            ("ms per round", spread(one.ms_per_round), spread(many.ms_per_round), ""),
            ("emitted per round", "1.000", f"{result.acceptance.emitted_per_round:.3f}", ""),
            ("a token, ms: p50, p90, p99", _percentiles(one.token_ms), _percentiles(many.token_ms), ""),
            ("prefill ms", spread(one.prefill_ms), spread(many.prefill_ms), ""),
            ("first call, seconds", f"{one.warm_up_seconds:.2f}", f"{many.warm_up_seconds:.2f}", ""),
            ("GB: weights, caches, peak", "", ", ".join(f"{size / 1e9:.3g}" for size in memory), ""),
        ],
        note=f"peak: of the {result.memory.peak_is_of} so far, earlier cells included",
    )


def _acceptance_table(counts: Acceptance) -> Table:
    positions = list(zip(counts.reached, counts.by_position, counts.by_position_error, strict=True))
    rows = [
        (f"{i + 1}", str(reached), with_error(rate, error), f"{counts.accepted_counts[i + 1] / counts.rounds:.1%}")
        for i, (reached, rate, error) in enumerate(positions)
    ]
    return Table(
        title="Drafted tokens: accepted where judged, ± standard error",
        header=("position", "judged", "accepted", "rounds with so many"),
        rows=[
            ("0", "", "", f"{counts.accepted_counts[0] / counts.rounds:.1%}"),
            *rows,
            ("all", str(sum(counts.reached)), with_error(counts.rate, counts.rate_error), f"of {counts.rounds}"),
        ],
    )


def _split_table(split: RoundSplit) -> Table:
    whole = split.round.ms.median

    def row(name: str, ms: Spread) -> tuple[str, ...]:
        share = ms.median / whole
        return name, spread(ms), f"{share:.1%}", (BAR * round(BAR_WIDTH * min(max(share, 0), 1))).ljust(BAR_WIDTH)

    linearities = [value.linearity for value in vars(split).values() if isinstance(value, PhaseTime)]
    return Table(
        title="One round",
        header=("", "ms", "of the round", ""),
        rows=[
            row("draft: model calls", split.draft_model.ms),
            row("draft: warp and draw", split.draft_sampling),
            row("score: target call", split.score.ms),
            row("verify: warp and rule", split.verify.ms),
            row("commit: bookkeeping", split.commit.ms),
            row("unexplained", split.unexplained),
            row("the whole round", split.round.ms),
            ("all but the two models", "", spread(split.sampling_share, "%"), ""),
        ],
        note=f"time per iteration at n over that at n/2: {min(linearities):.2f} to {max(linearities):.2f}",
    )


def _target_table(split: RoundSplit, tokens: int) -> Table:
    return Table(
        title="Calls of the target",
        header=("", "ms", "weights, GB/s"),
        rows=[
            ("one autoregressive round", spread(split.step.ms), spread(split.step_gb_per_s)),
            ("  products with its matrices alone", spread(split.stream_step.ms), spread(split.stream_gb_per_s)),
            (f"scoring {tokens} tokens of each row", spread(split.score.ms), ""),
            ("  products with its matrices alone", spread(split.stream_score.ms), ""),
        ],
        note=f"a round takes {spread(split.break_even)} autoregressive rounds: so many tokens it must emit to pay",
    )


def band(value: Band, unit: str = "") -> str:
    """The value, and what it may be in brackets unless it is certain."""
    number = f"{value.value:.3g}{unit}"
    return number if value.lower == value.upper else f"{number} ({value.lower:.3g} to {value.upper:.3g})"


def spread(spread: Spread, unit: str = "") -> str:
    """Median ± half the distance of the quartiles."""
    scale, suffix = (100, "%") if unit == "%" else (1, unit)
    half = (spread.upper - spread.lower) / 2
    return f"{spread.median * scale:.3g}{suffix} ± {half * scale:.2g}"


def _percentiles(of: Percentiles) -> str:
    return f"{of.p50:.3g}, {of.p90:.3g}, {of.p99:.3g}"


def with_error(rate: float | None, error: float | None) -> str:
    return "" if rate is None or error is None else f"{rate:.3f} ± {error:.3f}"


def _plain(table: Table) -> str:
    cells = [tuple(table.header), *map(tuple, table.rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]

    def align(row):
        return "  ".join(
            cell.ljust(width) if i < table.left else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths))
        ).rstrip()

    return "\n".join([table.title, *map(align, cells), *([table.note] if table.note else [])])


def _as_json(value: Any) -> Any:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return dataclasses.asdict(value)
    raise TypeError(f"{type(value).__name__} has no JSON form: {value!r}")


def version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None

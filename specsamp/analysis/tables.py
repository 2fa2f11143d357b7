"""Tables of measurements: one benchmark in full, or many cells with one row each."""

import dataclasses
from collections.abc import Iterable, Mapping, Sequence

from specsamp.analysis.acceptance import Interval, rate_error
from specsamp.analysis.benchmark import Result
from specsamp.analysis.grid import Measured, counts_of, distribution_of, setting
from specsamp.analysis.report import Table
from specsamp.analysis.workload import Quartiles
from specsamp.decoding.results import RowStats

PRICE = ("bias per token", "per text, at most", "acceptance bought")
PRICE_NOTE = (
    "bias: the total variation of a lossy rule's distribution of a token from the target's; per "
    "text: the mean of its sums over texts, which bounds their total variation; bought: the share "
    "of verified tokens accepted beyond the token rule's"
)


def result_tables(result: Result, label: str = "") -> list[Table]:
    """Returns all numbers of one cell as tables; ``label`` goes before every title."""
    tables = [_speed_table(result)]
    if result.speculative.draft_length:
        tables.append(_acceptance_table(result.acceptance))
    if result.variation_per_text is not None:
        price = dict(zip(PRICE, prices(result.acceptance, result.variation_per_text)))
        tables.append(
            Table.of("Price of the lossy rule, metered", [{"": ""} | price], note=PRICE_NOTE)
        )
    return [
        dataclasses.replace(table, title=f"{label}: {table.title}" if label else table.title)
        for table in tables
    ]


def grid_table(title: str, cells: Iterable[Measured], *, best: bool = False) -> Table:
    """Returns a table of cells of `specsamp.analysis.grid`, one row each; the best of each
    distribution is starred.

    Args:
      best: only the best K of each drafter, rule, distribution and batch, and 0 where no draft
        pays.
    """
    cells = best_cells(cells) if best else list(cells)
    fastest: dict[tuple, float] = {}
    for cell in cells:
        if "result" in cell:
            speedup = cell["result"]["speedup"]["median"]
            fastest[_group(cell)] = max(fastest.get(_group(cell), 0.0), speedup)
    is_lossy = any(
        "result" in cell and cell["result"].get("variation_per_text") is not None for cell in cells
    )

    def row(cell: Measured) -> dict[str, str]:
        key = cell["key"]
        result = cell.get("result")
        length = ("" if key.get("adaptive") is None else "up to ") + str(key["draft_length"])
        named = {"": setting(key), "batch": str(key["batch"]), "best K" if best else "K": length}
        if result is None:
            return named | {"alone, ms per token": "out of memory"}
        counts = counts_of(cell)
        speedup = result["speedup"]["median"]
        per_text = result.get("variation_per_text")
        if best and speedup <= 1:
            named["best K"] = f"0 (of drafts: {length})"
        starred = not best and speedup == fastest[_group(cell)]
        named[""] += ", LOSSY" * (per_text is not None) + " *" * starred
        numbers = {
            "alone, ms per token": f"{result['autoregressive']['ms_per_token']['median']:.2f}",
            "with drafts": f"{result['speculative']['ms_per_token']['median']:.2f}",
            "speedup": ratio(result["speedup"]),
            "acceptance": f"{counts.acceptance_rate:.3f}" if best else rate_with_error(counts),
            "tokens per round": f"{counts.emitted_per_round:.2f}",
        }
        return named | numbers | (dict(zip(PRICE, prices(counts, per_text))) if is_lossy else {})

    note = "medians (quartiles); ms per token over all rows; acceptance: of verified tokens"
    note += "" if best else ", ± standard error; * is the best of its distribution and batch"
    note += f"; {PRICE_NOTE}" if is_lossy else ""
    return Table.of(title, [row(cell) for cell in cells], note=note)


def best_cells(cells: Iterable[Measured]) -> list[Measured]:
    """Returns the cell of the fastest K >= 1 of each drafter, rule, batch and temperature; drafts
    at the target's own.
    """
    groups: dict[tuple, list[Measured]] = {}
    for cell in cells:
        key = cell["key"]
        if "result" in cell and key["draft_temperature"] is None and key["draft_length"]:
            groups.setdefault(
                (key["drafter"], key["rule"] != "token", key["batch"], key["temperature"]), []
            ).append(cell)
    return [
        max(groups[group], key=lambda cell: cell["result"]["speedup"]["median"])
        for group in sorted(groups)
    ]


def prices(counts: RowStats, per_text: float | None) -> tuple[str, ...]:
    """Formats the columns of `PRICE`; empty where nothing was metered."""
    if counts.variation is None or per_text is None:
        return ("",) * len(PRICE)
    bought = counts.extra_accepted / sum(counts.reached) if sum(counts.reached) else 0.0
    return f"{counts.variation_per_token:.5f}", f"{per_text:.3f}", f"{bought:+.4f}"


def _group(cell: Measured) -> tuple:
    return distribution_of(cell["key"]), cell["key"]["batch"]


def shares(counts: RowStats) -> str:
    """Formats the shares of the rounds that drafted 0, 1, 2, ... tokens; empty where the length
    does not adapt.
    """
    return " ".join(f"{rounds / counts.rounds:.0%}" for rounds in counts.lengths)


def _speed_table(result: Result) -> Table:
    one = result.autoregressive
    many = result.speculative
    memory = ", ".join(f"{result.memory[name] / 1e9:.3g}" for name in ("weights", "caches", "peak"))
    note = f"peak: of the {result.memory['peak_is_of']} so far, earlier cells included"
    if (allowed := result.allowed_speedup) is not None:
        note += f"; theory allows {allowed:.2f}x with this acceptance rate and these calls"
    rows = [
        (
            "ms per token",
            quartiles(one.ms_per_token),
            quartiles(many.ms_per_token),
            quartiles(result.speedup, "x"),
        ),
        ("ms per round", quartiles(one.ms_per_round), quartiles(many.ms_per_round), ""),
        ("emitted per round", "1.000", f"{result.acceptance.emitted_per_round:.3f}", ""),
        ("prefill ms", quartiles(one.prefill_ms), quartiles(many.prefill_ms), ""),
        ("first call, seconds", f"{one.warm_up_seconds:.2f}", f"{many.warm_up_seconds:.2f}", ""),
        ("GB: weights, caches, peak", "", memory, ""),
    ]
    if (split := result.split) is not None:  # each timed by itself
        of_target = ("a call of the target, ms", quartiles(split.step), quartiles(split.score), "")
        rows[2:2] = [("a draft, ms", "", quartiles(split.draft), ""), of_target]
    if result.acceptance.lengths:
        rows.insert(-3, ("rounds by drafted tokens, from 0 on", "", shares(result.acceptance), ""))
    return Table(
        title="Decoding: median ± half the interquartile range",
        header=("", "autoregressive", f"speculative, K={many.draft_length}", "ratio"),
        rows=rows,
        note=note,
    )


def _acceptance_table(counts: RowStats) -> Table:
    header = ("position", "verified", "accepted", "rounds with so many")
    first, *others = [f"{rounds / counts.rounds:.1%}" for rounds in counts.accepted_counts]
    rows = [("0", "", "", first)]
    positions = zip(counts.reached, counts.acceptance_by_position, others, strict=True)
    for i, (reached, rate, share) in enumerate(positions, 1):
        rows.append((str(i), str(reached), with_error(rate, rate_error(rate, reached)), share))
    rows.append(("all", str(sum(counts.reached)), rate_with_error(counts), f"of {counts.rounds}"))
    return Table(
        title="Drafted tokens: accepted where verified, ± standard error", header=header, rows=rows
    )


def interval(value: Interval, unit: str = "", digits: int = 3) -> str:
    """Formats the value, and its interval in brackets unless the value is exact."""
    number = f"{float(f'{value.value:.{digits}g}'):g}{unit}"
    return number if value.lower == value.upper else f"{number} ({span(value, '', digits)})"


def span(value: Interval, unit: str = "", digits: int = 2) -> str:
    """Formats the interval alone, for a range in which no value is likelier than another."""
    lower, upper = (f"{float(f'{edge:.{digits}g}'):g}{unit}" for edge in (value.lower, value.upper))
    return lower if lower == upper else f"{lower} to {upper}"


def band(likely: float, edges: Sequence[float], digits: int) -> str:
    """Formats a value with its edges in brackets: "14.7 (12.9 to 15.9)"."""
    low, high = edges
    return f"{likely:.{digits}f} ({low:.{digits}f} to {high:.{digits}f})"


def ratio(value: Mapping[str, float]) -> str:
    """Formats a ratio's median with its quartiles, as JSON has them: "1.85x (1.55 to 2.29)"."""
    return f"{value['median']:.2f}x ({value['lower']:.2f} to {value['upper']:.2f})"


def quartiles(value: Quartiles, unit: str = "") -> str:
    """Formats the median ± half the interquartile range."""
    return f"{value.median:.3g}{unit} ± {(value.upper - value.lower) / 2:.2g}"


def rate_with_error(counts: RowStats) -> str:
    """Formats the acceptance rate ± its standard error; empty if nothing was verified."""
    rate = counts.acceptance_rate
    return with_error(rate, rate_error(rate, sum(counts.reached)))


def with_error(rate: float, error: float) -> str:
    """Formats a rate ± its standard error; empty where it is nan."""
    return "" if rate != rate else f"{rate:.3f} ± {error:.3f}"

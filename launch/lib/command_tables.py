"""Tables of what commands measured: launch/evaluate.py shows its own, the pages those of committed results."""

from __future__ import annotations

import dataclasses
import itertools
import statistics
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from launch.lib.shapes import looked_up_parameters
from launch.lib.study import Document, Published
from launch.studies.compile_tables import forecast
from specsamp.analysis.grid import counts_of
from specsamp.analysis.report import Table
from specsamp.analysis.tables import PRICE, PRICE_NOTE, band, best_cells, grid_table, prices, ratio, words
from specsamp.evaluation.audit.table import audit_table
from specsamp.models.config import TransformerConfig
from specsamp.tpu import calibration
from specsamp.tpu.tables import faster

QUALITY = (
    "Differences are on the same problems, with an interval of 95% and the size that four of five such runs would see. "
    "log_prob: per token, under the target at temperature 1. A speedup is the median over blocks of problems, with the "
    "range."
)
SPEED = "Rows busy: while requests waited. Past a stop: decoded before a stop text was found, and dropped."
POSITIONS = "Of the rounds that reached a position, the share in which its token was accepted."


def quality(rows: Sequence[Mapping[str, Any]], title: str = "Quality and speed") -> Table:
    """Returns the scores of each way to decode, their differences from plain decoding, and its speed.

    Args:
      rows: those of an evaluation, as JSON has them.
    """
    cells = []
    for row in rows:
        scores = [band(one["mean"], (one["low"], one["high"]), 3) for one in row["scores"].values()]
        others = [
            f"{one['mean']:+.3f} ({one['low']:+.3f} to {one['high']:+.3f}), sees {one['detectable']:.3f}"
            for one in row["differences"].values()
        ]
        ratios = sorted(row["speedups"])
        faster = "" if not ratios else band(statistics.median(ratios), (ratios[0], ratios[-1]), 2)
        compared = itertools.chain(*zip(scores, others or [""] * len(scores)))
        cells.append(
            (
                name_of(row),
                *compared,
                known(row["ms_per_token"], ".2f"),
                faster,
                f"{row['counts']['emitted_per_round']:.2f}",
            )
        )
    columns = itertools.chain(*((measure, "less plain's") for measure in rows[0]["scores"]))
    header = ("", *columns, "ms per token", "speedup", "tokens per round")
    return Table(title=title, header=header, rows=cells, note=QUALITY)


def evaluation_tables(task: str, rows: Sequence[Mapping[str, Any]]) -> list[Table]:
    """Returns all that the console shows of an evaluation, whose rows are as JSON has them."""
    queue = [(name_of(row), known(row["occupancy"], ".0%"), known(row["dropped"], ".1%")) for row in rows]
    found = [
        quality(rows, f"{task}: quality and speed over {rows[0]['problems']} problems"),
        Table(title="The queue", header=("", "rows busy", "past a stop"), rows=queue, note=SPEED),
    ]
    totals = [counts_of({"result": {"acceptance": row["counts"]}}) for row in rows]
    lossy = [(row, counts) for row, counts in zip(rows, totals) if counts.variation is not None]
    if lossy:
        costs = [(name_of(row), *prices(counts, row["variation_per_text"])) for row, counts in lossy]
        found.append(Table(title="Price of lossy rules, metered", header=("", *PRICE), rows=costs, note=PRICE_NOTE))
    drafted = []
    for row in (row for row in rows if row["counts"]["drafted"]):
        by_category = row["counts_by_category"] if len(row["counts_by_category"]) > 1 else {}
        for category, counts in (by_category | {"all": row["counts"]}).items():
            shares = [known(share, ".3f") for share in counts["by_position"]]
            drafted.append([row["name"], category, known(counts["emitted_per_round"], ".2f"), *shares])
    if drafted:
        width = max(map(len, drafted))
        cells = [[*row, *[""] * (width - len(row))] for row in drafted]
        header = ("", "category", "tokens per round", *map(str, range(1, width - 2)))
        found.append(Table(title="Acceptance by position", header=header, rows=cells, note=POSITIONS, left=2))
    return found


def name_of(row: Mapping[str, Any]) -> str:
    """Returns the name of a way to decode; a control is marked."""
    return row["name"] if row["exact"] else f"{row['name']} (control, not exact)"


def known(value: float | None, form: str) -> str:
    """Formats a number; what is not known is empty."""
    return "" if value is None else format(value, form)


def trained(pair: Document) -> Table:
    """Returns how both models of the pair were trained, and what they are worth on held-out text."""
    rows = []
    for side in ("target", "draft"):
        run, held_out = pair["provenance"][side], pair["provenance"]["held_out"]["float32"][side]
        minutes, acceptance = run["last_metrics"]["training_seconds"] / 60, held_out.get("acceptance (temperature 1)")
        share = "" if acceptance is None else f"{acceptance:.3f}"
        trained = (str(run["step"]), str(run["config"]["recipe"]["batch"]), f"{minutes:.0f}")
        rows.append((side, *trained, f"{held_out['loss']:.2f}", share))
    header = ("", "steps", "rows a step", "minutes of training", "held-out loss, nats per token", "acceptance at T = 1")
    return Table(title="Training of the shipped pair", header=header, rows=rows)


def stored(pair: Document) -> Table:
    """Returns the held-out loss and the acceptance of the pair before its weights were stored in int8, and after."""
    rows = []
    for precision, sides in pair["provenance"]["held_out"].items():
        values = sides["target"]["loss"], sides["draft"]["loss"], sides["draft"]["acceptance (temperature 1)"]
        rows.append((precision, *(f"{value:.5f}" for value in values)))
    header = ("stored in", "held-out loss of the target", "of the draft", "acceptance at T = 1")
    return Table(title="What storing the pair in int8 changed", header=header, rows=rows)


def draft_temperatures(grid: Document) -> Table:
    """Returns what a draft gains that has a temperature of its own."""
    rows = []
    for cell in (cell for cell in grid["cells"] if cell["key"]["draft_temperature"] is not None):
        counts, speedup = cell["result"]["acceptance"], ratio(cell["result"]["speedup"])
        rate = f"{counts['rate']:.3f} ± {counts['rate_error']:.3f}"
        temperature = f"{cell['key']['draft_temperature']:g}"
        rows.append((temperature, rate, f"{counts['emitted_per_round']:.2f}", speedup))
    header = ("temperature of the draft", "acceptance", "tokens per round", "speedup")
    return Table(title="Temperatures of the draft", header=header, rows=rows)


def random_pair(*documents: Document) -> Table:
    """Returns what a round costs whose draft is hardly ever right."""
    rows = []
    for document in documents:
        result, split, temperature = document["result"], document["result"]["split"], document["config"]["sampling"]
        parts = split["draft_sampling"]["median"], *(split[part]["ms"]["median"] for part in ("verify", "commit"))
        share = split["sampling_share"]
        rows.append(
            (
                words(f"temperature {temperature['temperature']}") if temperature["temperature"] else "greedy",
                f"{result['autoregressive']['ms_per_token']['median']:.2f}",
                f"{result['speculative']['ms_per_round']['median']:.2f}",
                f"{split['round']['ms']['median']:.2f}",
                ", ".join(f"{ms:.3f}" for ms in parts),
                f"{share['median']:.1%} ({share['lower']:.1%} to {share['upper']:.1%})",
                f"{result['speedup']['median']:.2f}x",
            )
        )
    header = ("", "plain, ms per token", "ms per round", "a round timed beside its parts, ms")
    header += ("draft sampling, verification, bookkeeping, ms", "share of the round", "speedup")
    return Table(title="A round of a random pair", header=header, rows=rows)


def best_lengths(grid: Document) -> Table:
    """Returns the best K of every drafter, rule, batch and temperature."""
    return grid_table("Best draft lengths", grid["cells"], best=True)


def headline(speedup: Document, slices: Document) -> Table:
    """Returns the three numbers of the first screen of the main README."""
    sizes = " + ".join(f"{streamed(speedup['models'][side]) / 1e6:.1f}M" for side in ("target", "draft"))
    batch, cores, rows = speedup["config"]["batch"], speedup["environment"]["cores"], []
    for setting, point, curve in best_points(speedup):
        where = f"{sizes} parameters, float32, batch {batch}, {cores} CPU cores, {curve['prompts']} prompts"
        if curve["same_tokens"]:
            where += f"; greedy tokens equal on {curve['same_tokens']} of {curve['prompts']} prompts"
        rows.append((f"**{point['speedup']['median']:.2f}x**", f"measured: {setting}, token rule; {where}"))
    alone, drafted = forecast(slices, "v4:2x2x4", 1)
    where = "70B + 4B (Chinchilla), K = 4, acceptance 0.8, bfloat16, batch 1, 16 TPU v4 chips"
    faster_by = faster(calibration.ratio(alone, drafted))
    rows.append((f"**{faster_by}**", f"forecast from a compiler estimate, nothing ran: {where}"))
    return Table(title="In short", header=("speedup over plain decoding", "conditions"), rows=rows)


def summary(speedup: Document, grid: Document, audit: Document, agreement: Document, slices: Document) -> Table:
    """Returns the table of results of the main README."""
    cpu = f"{speedup['environment']['cores']} CPU cores"
    rows = [
        (f"shipped pair, {setting}, batch 1", cpu, ratio(point["speedup"]))
        for setting, point, _ in best_points(speedup)
    ]
    for cell in best_cells(grid["cells"]):
        key = cell["key"]
        if (key["rule"], key["temperature"], key["batch"]) == ("token", 0.0, 4):
            drafter = {"model": "shipped pair", "ngram": "shipped target, prompt lookup"}[key["drafter"]]
            rows.append(
                (f"{drafter}, greedy, K = {key['draft_length']}, batch 4", cpu, ratio(cell["result"]["speedup"]))
            )
    passed = sum(check["verdict"] == "passed" for check in audit["checks"])
    rows.append(("audit of the shipped pair", cpu, f"{passed} of {len(audit['checks'])} checks passed"))
    worst = [cell["result"]["worst_error"] for cell in agreement["cells"]]
    rows.append((f"forecast ms per token, worst error of {len(worst)} curves", cpu, f"{max(worst):.1%}"))
    for topology, batch in (("v4:2x2x4", 1), ("v4:2x2x4", 8), ("v5e:4x4", 1), ("v6e:4x4", 32)):
        alone, drafted = forecast(slices, topology, batch)
        where = f"16 TPU {topology.partition(':')[0]}, compiler estimate"
        faster_by = faster(calibration.ratio(alone, drafted))
        rows.append((f"70B + 4B, K = 4, acceptance 0.8, batch {batch}", where, faster_by))
    return Table(title="Results", header=("what", "where", "result"), rows=rows, left=3)


def best_points(document: Document) -> Iterator[tuple[str, Mapping[str, Any], Mapping[str, Any]]]:
    """Yields setting, point and curve of the best K of the token rule: greedy and sampled."""
    for name, best in document["best_draft_length"].items():
        curve, K = document["curves"][name], best["token"]
        point = next(point for point in curve["points"] if (point["rule"], point["draft_length"]) == ("token", K))
        yield f"{words(name)}, K = {K}", point, curve


def streamed(model: Mapping[str, Any]) -> int:
    """Returns the parameters that a call streams; tables of n-grams are only looked up."""
    known = {field.name for field in dataclasses.fields(TransformerConfig)}  # older files have fields that are gone
    config = TransformerConfig(**{name: value for name, value in model.items() if name in known})
    return config.num_parameters - looked_up_parameters(config)


TABLES = {
    "pair": Published(["pair"], trained),
    "int8_stored": Published(["pair"], stored),
    "grid": Published(["python_pair_grid"], best_lengths),
    "draft_temperature": Published(["python_pair_grid"], draft_temperatures),
    "audit": Published(["python_pair_audit"], lambda audit: audit_table(audit["checks"])),
    "quality": Published(["python_pair_tasks"], lambda found: quality(found["evaluation"])),
    "humaneval": Published(["python_pair_humaneval"], lambda found: quality(found["evaluation"])),
    "random_pair": Published(["random_38m_sampled", "random_38m_greedy"], random_pair),
}

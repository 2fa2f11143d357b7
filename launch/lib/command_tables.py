"""Tables of measurements by commands: for launch/evaluate.py, and of committed results for the pages."""

import itertools
import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from launch.lib.study import Document, Published, answers, law
from specsamp.analysis.acceptance import expected_tokens
from specsamp.analysis.grid import counts_of
from specsamp.analysis.report import Table
from specsamp.analysis.tables import PRICE, PRICE_NOTE, band, grid_table, prices, ratio
from specsamp.evaluation.audit import audit_table
from specsamp.tpu import calibration
from specsamp.tpu.pair_report import GIB, Report, faster, lower_bound
from specsamp.tpu.topology import parse

QUALITY = (
    "Differences are on the same problems, with an interval of 95% and the size that four of five such runs would see. "
    "log_prob: per token, under the target at temperature 1. A speedup is the median over blocks of problems, with the "
    "range."
)
POSITIONS = "Of the rounds that reached a position, the share in which its token was accepted."
PUBLIC_PAIRS = {
    "qwen_3b": "Qwen2.5 3B + 0.5B, bfloat16",
    "qwen_30b_a3b": "Qwen3 30B-A3B + 0.6B, bfloat16",
    "llama_70b": "Llama 3.1 70B + 3.2 1B, bfloat16",
    "llama_70b_int8": "Llama 3.1 70B + 3.2 1B, int8 weights",
}


def quality(rows: Sequence[Mapping[str, Any]], title: str = "Quality and speed") -> Table:
    """Returns scores, differences from plain decoding and speed of each way to decode; rows are as JSON has them."""
    cells = []
    for row in rows:
        scores = [band(one["mean"], (one["low"], one["high"]), 3) for one in row["scores"].values()]
        others = [
            f"{one['mean']:+.3f} ({one['low']:+.3f} to {one['high']:+.3f}), sees {one['detectable']:.3f}"
            for one in row["differences"].values()
        ]
        compared = itertools.chain(*zip(scores, others or [""] * len(scores)))
        ratios = sorted(row["speedups"])
        faster = band(statistics.median(ratios), (ratios[0], ratios[-1]), 2) if ratios else ""
        emitted = f"{row['counts']['emitted_per_round']:.2f}"
        cells.append((label_of(row), *compared, known(row["ms_per_token"], ".2f"), faster, emitted))
    columns = itertools.chain(*((measure, "less plain's") for measure in rows[0]["scores"]))
    header = ("", *columns, "ms per token", "speedup", "tokens per round")
    return Table(title=title, header=header, rows=cells, note=QUALITY)


def evaluation_tables(task: str, rows: Sequence[Mapping[str, Any]]) -> list[Table]:
    """Returns the tables of an evaluation; rows are as JSON has them."""
    found = [quality(rows, f"{task}: quality and speed over {rows[0]['problems']} problems")]
    totals = [counts_of({"result": {"acceptance": row["counts"]}}) for row in rows]
    lossy = [(row, counts) for row, counts in zip(rows, totals) if counts.variation is not None]
    if lossy:
        costs = [(label_of(row), *prices(counts, row["variation_per_text"])) for row, counts in lossy]
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


def label_of(row: Mapping[str, Any]) -> str:
    """Returns the name of a way to decode; a control is marked."""
    return row["name"] if row["exact"] else f"{row['name']} (control, not exact)"


def known(value: float | None, form: str) -> str:
    """Formats a number; an unknown number is empty."""
    return "" if value is None else format(value, form)


def trained(pair: Document) -> Table:
    """Returns the training of both models of the pair, and their loss on held-out text."""
    rows = []
    for side in ("target", "draft"):
        run, held_out = pair["provenance"][side], pair["provenance"]["held_out"]["float32"][side]
        minutes, acceptance = run["last_metrics"]["training_seconds"] / 60, held_out.get("acceptance (temperature 1)")
        share = "" if acceptance is None else f"{acceptance:.3f}"
        trained = (str(run["step"]), str(run["config"]["recipe"]["batch"]), f"{minutes:.0f}")
        rows.append((side, *trained, f"{held_out['loss']:.2f}", share))
    header = ("", "steps", "rows a step", "minutes of training", "held-out loss, nats per token", "acceptance at T = 1")
    return Table(title="Training of the shipped pair", header=header, rows=rows)


def public_pairs(*documents: Document) -> Table:
    """Returns public pairs on TPU v5e, in the order of `PUBLIC_PAIRS`."""
    rows = []
    for label, document in zip(PUBLIC_PAIRS.values(), documents, strict=True):
        report = Report.from_json(document["report"])
        memory, K = report["round"].memory, report.draft_length
        alone, drafted = report.calibrated_ms("target step"), report.calibrated_ms("round")
        emitted = expected_tokens(0.8, K)
        row = {
            "": label,
            "K": K,
            "batch": report.batch,
            "chips": f"{math.prod(parse(report.topology)[1])} v5e",
            "memory, GiB": f"{memory.total / GIB:.1f} of {memory.capacity / GIB:.0f}",
            **{
                f"{name}, at least": lower_bound(
                    report[name].streaming_ms(report.chip), report[name].cycles_ms(report.chip)
                )
                for name in ("target step", "round")
            },
            "step, over the floor": f"{report['target step'].over_floor:.3f}",
            "scoring, over the floor": f"{report['score'].over_floor:.3f}",
            "a step, ms": alone,
            "a round, ms": drafted,
            "ms per token at acceptance 0.8": drafted / emitted / report.batch,
            "speedup": faster(calibration.band_ratio(alone, drafted / emitted)),
        }
        rows.append(row)
    return Table.of("Public pairs on TPU v5e (compiler estimate)", rows)


def drafters(document: Document) -> Table:
    """Returns what each drafter of one target gains, by distribution and K; a draft costs proposing and reading it."""
    rows = []
    for key, result in answers(document):
        K, split, counts = key["draft_length"], result["split"], result["acceptance"]
        spent = sum(split[part]["ms"]["median"] for part in ("draft", "commit") if part in split)
        row = {
            "drafter": key["drafter"],
            "sampling": law(key),
            "K": K,
            "tokens per round": f"{counts['emitted'] / counts['rounds']:.2f}",
            **dict.fromkeys((f"accepted at {i + 1}" for i in range(4)), ""),
            **{f"accepted at {i}": f"{share:.2f}" for i, share in enumerate(counts["by_position"], 1)},
            "a draft, in steps": f"{spent / (K * split['step']['ms']['median']):.2f}",
            "ms per token": f"{result['speculative']['ms_per_token']['median']:.2f}",
            "speedup": ratio(result["speedup"]),
        }
        rows.append(row)
    return Table.of("Drafters of one target, on the same prompts", rows)


TABLES = {
    "drafters": Published(["python_drafters"], drafters),
    "pair": Published(["pair"], trained),
    "grid": Published(["python_pair_grid"], lambda grid: grid_table("Best draft lengths", grid["cells"], best=True)),
    "audit": Published(["python_pair_audit"], lambda audit: audit_table(audit["checks"])),
    "quality": Published(["python_pair_tasks"], lambda found: quality(found["evaluation"])),
    "humaneval": Published(["python_pair_humaneval"], lambda found: quality(found["evaluation"])),
}
REPORTS = {"public_pairs": Published([f"compile_{name}_v5e" for name in PUBLIC_PAIRS], public_pairs)}

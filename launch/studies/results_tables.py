"""Makes the tables of notebooks/results/README.md, each from one file there; no number is typed by hand.

Every function takes the documents by name and returns Markdown. Milliseconds per token are over all rows of a batch.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from specsamp.analysis.tables import ratio

Documents = Mapping[str, Any]

ESTIMATE = "A compiler estimate: nothing ran on a TPU. "

MS = ("mean", "p90")
EMITTED = sum(0.8**i for i in range(5))  # tokens of a round at an acceptance rate of 0.8 and K = 4


def table(header: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    """Returns a table of Markdown."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(str(cell) for cell in line) + " |" for line in lines)


def words(distribution: str) -> str:
    """Returns a distribution in the words of the other tables."""
    return re.sub(r"T = |temperature ", "T = ", distribution).replace("top_p", "top-p")


def head(documents: Documents) -> str:
    """Returns the acceptance of the pair's head by position, beside that of its draft model."""
    document = documents["python_head"]
    held_out, rows = document["held_out"], []
    last = document["curve"][-1]
    for warp in ("temperature 1", "temperature 0.8, top-p 0.95"):
        found, start = held_out["head"], "acceptance/position_"
        values = [found[name] for name in sorted(found) if name.startswith(start) and name.endswith(f"({warp})")]
        beside = held_out["draft_model"][f"acceptance ({warp})"]
        rows.append((f"head, {words(warp)}", f"{last['tokens']:,}", *(f"{value:.3f}" for value in values)))
        rows.append((f"draft model, {words(warp)}", "", *[f"{beside:.3f}"] * len(values)))
    for point in document["curve"][:-1]:
        names = [name for name in sorted(point) if name.startswith(start) and name.endswith("(temperature 1)")]
        cells = [f"{point[name]:.3f}" for name in names]
        rows.append(("head, T = 1, on the way", f"{point['tokens']:,}", *cells, *[""] * (len(values) - len(cells))))
    return table(("", "tokens seen", *(f"position {i + 1}" for i in range(len(values)))), rows)


def speedup(documents: Documents) -> str:
    """Returns the speedup of every rule and K, and how much of it theory allows."""
    rows = []
    document = documents["python_pair_speedup"]
    for name, curve in document["curves"].items():
        for point in curve["points"]:
            K, rule, costs = point["draft_length"], point["rule"], point["costs"]
            mark = "**" if document["best_draft_length"][name][rule] == K else ""
            rows.append(
                (
                    f"{mark}{words(name)}, {rule} rule, K = {K}{mark}",
                    f"{curve['ms_per_token']['median']:.2f}",
                    f"{point['ms_per_token']['median']:.2f}",
                    f"{mark}{ratio(point['speedup'])}{mark}",
                    f"{point['acceptance']['rate']:.3f}",
                    f"{point['acceptance']['emitted_per_round']:.2f}",
                    f"{costs['draft_call'] / costs['target_step']:.3f}",
                    f"{costs['score'] / costs['target_step']:.2f}",
                    f"{point['efficiency']:.0%}",
                )
            )
    header = ("", "alone, ms per token", "with the draft", "speedup", "acceptance", "tokens per round")
    return table((*header, "draft call, in steps", "scoring, in steps", "of what theory allows"), rows)


def best_cells(documents: Documents) -> list[dict]:
    """Returns the cell of the best K >= 1 of each setting of the grid."""
    groups: dict[tuple, list[dict]] = {}
    cells = [cell for cell in documents["python_pair_grid"]["cells"] if "result" in cell]
    cells = [cell for cell in cells if cell["key"]["draft_temperature"] is None and cell["key"]["draft_length"]]
    for cell in cells:
        key = cell["key"]
        groups.setdefault((key["drafter"], key["rule"], key["batch"], key["temperature"]), []).append(cell)
    order = sorted(groups, key=lambda group: (group[0], group[1] != "token", group[2], group[3]))
    return [max(groups[group], key=lambda cell: cell["result"]["speedup"]["median"]) for group in order]

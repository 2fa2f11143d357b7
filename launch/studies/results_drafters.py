"""Makes the tables of notebooks/results/README.md about ways to draft for one target; see results_tables.py."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from launch.studies.drafters_on_chips import FORECAST_HEADER, costs_of_drafters, forecast_rows
from launch.studies.results_tables import Documents, ratio, table

TEXTS = {"held out": "python_voting", "repeated": "python_voting_repeated"}


def cost_of_a_draft(result: Mapping[str, Any], K: int) -> float | None:
    """Returns the steps of the target that a drafted token costs; a head also reads what was accepted."""
    split = result["split"]
    if split is None:
        return None
    return sum(split[part]["ms"]["median"] for part in ("draft", "commit")) / (K * split["step"]["ms"]["median"])


def drafters(documents: Documents) -> str:
    """Returns what each drafter of one target gains, by distribution and K."""
    cells = [cell for cell in documents["python_drafters"]["cells"] if "result" in cell]
    most = max(cell["key"]["draft_length"] for cell in cells)
    rows = []
    for cell in cells:
        result = cell["result"]
        cost = cost_of_a_draft(result, cell["key"]["draft_length"])
        rows.append(
            (
                *_counted(cell, most),
                "" if cost is None else f"{cost:.2f}",
                f"{result['speculative']['ms_per_token']['median']:.2f}",
                ratio(result["speedup"]),
            )
        )
    return table((*_header(most), "a draft, in steps", "ms per token", "speedup"), rows)


def drafters_on_chips(documents: Documents) -> str:
    """Returns what the acceptance of `drafters` would be worth on a chip, by the costs of compiled rounds."""
    costs = costs_of_drafters(documents["compile_heads"], "Llama 3.1 8B", "v5e:2x2", "compile_heads.json")
    return table(FORECAST_HEADER, forecast_rows(documents["python_drafters"]["cells"], costs))


def voting(documents: Documents) -> str:
    """Returns the counts of two drafters alone, chosen and voting, on texts that repeat themselves and on others."""
    cells = [(text, cell) for text, name in TEXTS.items() for cell in documents[name]["cells"] if "result" in cell]
    most = max(cell["key"]["draft_length"] for _, cell in cells)
    return table(("text", *_header(most)), [(text, *_counted(cell, most)) for text, cell in cells])


def _header(most: int) -> Iterable[str]:
    return "drafter", "sampling", "K", "tokens per round", *[f"accepted at {i + 1}" for i in range(most)]


def _counted(cell: Mapping[str, Any], most: int) -> Iterable[Any]:
    """Returns what was counted of a cell, which no clock enters, as `_header` names it."""
    key, counts = cell["key"], cell["result"]["acceptance"]
    shares = ["" if share is None else f"{share:.2f}" for share in counts["by_position"]]
    return (
        key["drafter"],
        "greedy" if key["temperature"] == 0 else f"T = {key['temperature']:g}, top-p {key['top_p']:g}",
        key["draft_length"],
        f"{counts['emitted'] / counts['rounds']:.2f}",
        *shares,
        *[""] * (most - key["draft_length"]),
    )

"""Draws committed results: figure 1 of Chen et al. with our curves, speedup against batch, and acceptance by task.

    python launch/study.py figures --results=notebooks/results --figures=runs
    python launch/study.py figures --cells=runs/mine.json --batch=4 --figures=runs
    python launch/study.py figures --evaluations=runs/python.json,runs/humaneval.json --figures=runs

Cells are those of launch/benchmark.py, evaluations those of launch/evaluate.py. Our curves are lines, with quartiles; the
points are those of Chen et al. (arXiv 2302.01318). Nothing is measured here. The tables are those of the same commands.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from launch.lib import command_tables
from launch.lib.study import Document, Option, Published, Study
from specsamp.analysis import grid
from specsamp.analysis.figures import COLOURS, STYLES, axes_of
from specsamp.analysis.grid import distribution_of
from specsamp.analysis.tables import setting

WIDTH = 0.8  # of the bars of a task
TOKENS = 128  # whose time the paper shows


# Figure 1 of the paper, read off to about 2%: Chinchilla 70B and 4B, 16 TPU v4, batch 1, K = 0 to 7.
PAPER_MS = {  # for `TOKENS` tokens
    "HumanEval": (1805, 1108, 875, 777, 735, 710, 697, 675),
    "XSum": (1805, 1197, 993, 935, 943, 965, 990, 1002),
}
PAPER_EMITTED = {  # tokens per round over K + 1
    "HumanEval": (1, 0.945, 0.887, 0.838, 0.797, 0.752, 0.712, 0.677),
    "XSum": (1, 0.875, 0.78, 0.695, 0.618, 0.553, 0.50, 0.455),
}
PAPER_ROUND_MS = (14.1, 16.3, 18.2, 20.3, 22.8, 25.0, 27.1, 28.5)


def read(options) -> dict[str, Any]:
    """Reads the cells that the figures are asked to show, or the evaluations."""
    if not options.figures:
        raise ValueError("--figures: name the folder that the figures are drawn into, or give --results")
    documents = [grid.read_document(path) for path in options.evaluations or options.cells]
    if options.evaluations:
        return {"evaluations": documents}
    return {"batch": options.batch, "cells": [cell for document in documents for cell in document["cells"]]}


def drafted(document: Document) -> list[Mapping[str, Any]]:
    """Returns the measured cells with a draft model and the token rule, by draft length."""
    wanted = {"rule": "token", "drafter": "model"}.items()
    cells = [cell for cell in document["cells"] if "result" in cell and wanted <= cell["key"].items()]
    return sorted((cell for cell in cells if cell["key"]["draft_length"]), key=lambda cell: cell["key"]["draft_length"])


def grouped(cells: Sequence[Mapping[str, Any]], *fields: str) -> dict[str, list[Mapping[str, Any]]]:
    """Returns the cells by distribution and by the named fields of their keys."""
    groups: dict[str, list[Mapping[str, Any]]] = {}
    for cell in cells:
        named = [f"{field} {cell['key'][field]}" for field in fields if cell["key"].get(field) is not None]
        groups.setdefault(", ".join([distribution_of(cell["key"]), *named]), []).append(cell)
    return groups


def draw_paper(document: Document) -> Any:
    """Draws the three panels of figure 1, ours as lines and the published points beside them.

    Each value is divided by that of the plain decoding that took turns with it, since cells are measured minutes apart.

    Raises:
      ValueError: no cell has a draft at this batch.
    """
    batch = document.get("batch", 1)
    cells = [cell for cell in drafted(document) if cell["key"]["batch"] == batch]
    groups = grouped([cell for cell in cells if cell["key"].get("draft_temperature") is None])
    if not groups:
        raise ValueError(f"no curve: no distribution has a draft model at batch {batch} under the token rule")
    figure, (total, share, rounds) = axes_of(3, "K, drafted tokens per round")
    for number, (name, group) in enumerate(groups.items()):
        look = {"color": COLOURS[number % len(COLOURS)], "linestyle": STYLES[number % len(STYLES)]}
        lengths, results = [0, *(cell["key"]["draft_length"] for cell in group)], [cell["result"] for cell in group]
        plain_ms = TOKENS * batch * results[0]["autoregressive"]["ms_per_token"]["median"]
        speedups = [result["speedup"] for result in results]
        middle, low, high = ([1, *(1 / one[edge] for one in speedups)] for edge in ("median", "upper", "lower"))
        total.plot(lengths, middle, **look, label=f"{name} ({plain_ms:.0f} ms at K = 0)")
        total.fill_between(lengths, low, high, color=look["color"], alpha=0.1, linewidth=0, zorder=0)
        emitted = [result["acceptance"]["emitted_per_round"] for result in results]
        share.plot(lengths, [1, *(e / (K + 1) for K, e in zip(lengths[1:], emitted))], **look, label=name)
        rounds.plot(lengths, [1, *map(round_over_plain, results)], **look, label=name)
        if number == 0 and all(result["split"] for result in results):
            for marker, part in zip("^vx", ("draft", "score", "verify")):
                steps = [result["split"]["step"]["ms"]["median"] for result in results]
                parts = [result["split"][part]["ms"]["median"] / step for result, step in zip(results, steps)]
                look = {"color": COLOURS[0], "marker": marker, "markersize": 3, "linewidth": 0.6}
                rounds.plot(lengths, [float(part == "score"), *parts], **look, label=f"{name}: {part}")
    points = {"color": "black", "linestyle": "none", "markersize": 4, "zorder": 0}
    for marker, (task, ms) in zip("os", PAPER_MS.items()):
        total.plot([one / ms[0] for one in ms], **points, marker=marker, label=f"Chen et al., {task} ({ms[0]} ms)")
        share.plot(PAPER_EMITTED[task], **points, marker=marker, label=f"Chen et al., {task}")
    plain = PAPER_ROUND_MS[0]
    rounds.plot([ms / plain for ms in PAPER_ROUND_MS], **points, marker="o", label=f"Chen et al. ({plain} ms)")
    titles = (f"time for {TOKENS} tokens", "tokens emitted per round", "time of a round")
    for axis, title, label in zip(figure.axes, titles, ("over plain decoding", "over K + 1", "over a plain round")):
        axis.set_title(title, fontsize=10)
        axis.set(ylabel=label, ylim=(0, None))
        axis.legend(fontsize=7, frameon=False)
    return figure


def round_over_plain(result: Mapping[str, Any]) -> float:
    """Returns the time of a round over that of a plain round."""
    return result["speculative"]["ms_per_round"]["median"] / result["autoregressive"]["ms_per_round"]["median"]


def draw_batches(document: Document) -> Any:
    """Draws the speedup over plain decoding of the same batch, a panel for each draft length.

    Raises:
      ValueError: nothing was measured at two batch sizes.
    """
    groups = grouped(drafted(document), "draft_length", "draft_temperature").values()
    groups = [sorted(group, key=lambda cell: cell["key"]["batch"]) for group in groups if len(group) > 1]
    if not groups:
        raise ValueError("no curve over batch sizes: nothing was measured at two of them")
    panels = list(dict.fromkeys(group[0]["key"]["draft_length"] for group in groups))
    figure, axes = axes_of(len(panels), "batch size", sharey=True)
    names = list(dict.fromkeys(setting(group[0]["key"]) for group in groups))
    for group in groups:
        axis, name = axes[panels.index(group[0]["key"]["draft_length"])], setting(group[0]["key"])
        colour, style = COLOURS[names.index(name) % len(COLOURS)], STYLES[names.index(name) % len(STYLES)]
        at, speedups = [cell["key"]["batch"] for cell in group], [cell["result"]["speedup"] for cell in group]
        middle, low, high = ([one[edge] for one in speedups] for edge in ("median", "lower", "upper"))
        axis.plot(at, middle, style, marker="o", markersize=3, color=colour, label=name)
        axis.fill_between(at, low, high, color=colour, alpha=0.1, linewidth=0)
    batches = sorted({cell["key"]["batch"] for group in groups for cell in group})
    for axis, panel in zip(axes, panels, strict=True):
        axis.axhline(1, color="black", linewidth=0.8)
        axis.set_xscale("log", base=2)
        axis.set_xticks(batches, map(str, batches))
        axis.set_title(f"K = {panel}", fontsize=10)
        axis.legend(fontsize=7, frameon=False)
    axes[0].set(ylabel="speedup over plain decoding", ylim=(0, None))  # of all: they share it
    return figure


def by_batch(document: Document) -> list[str]:
    """Names the figure over batch sizes, if two of them were measured."""
    return ["speedup_by_batch"] * (len({cell["key"]["batch"] for cell in drafted(document)}) > 1)


def draw_tasks(*documents: Document) -> Any:
    """Draws the accepted share of verified tokens by task or category, with twice the standard error."""
    found: dict[str, dict[str, tuple[float, float]]] = {}
    for document in (one for document in documents for one in document.get("evaluations", [document])):
        task = document["identity"]["task"]["name"]
        for row in (row for row in document["evaluation"] if row["exact"]):
            for category, counts in row["counts_by_category"].items():
                if counts["rate"] is not None:
                    bar = counts["rate"], 2 * counts["rate_error"]
                    found.setdefault(f"{task}: {category}" if category else task, {})[row["name"]] = bar
    methods = list(dict.fromkeys(name for bars in found.values() for name in bars))
    figure, (axis,) = axes_of(1, "")
    figure.set_size_inches(2 + 1.6 * len(found), 3.6)
    for number, method in enumerate(methods):
        at = [place + (number - (len(methods) - 1) / 2) * WIDTH / len(methods) for place in range(len(found))]
        rates, errors = zip(*(bars.get(method, (0.0, 0.0)) for bars in found.values()))
        look = {"color": COLOURS[number % len(COLOURS)], "label": method, "width": WIDTH / len(methods) * 0.9}
        axis.bar(at, rates, yerr=errors, **look)
    axis.set(ylabel="accepted share of verified tokens", ylim=(0, 1), xticks=range(len(found)))
    axis.set_xticklabels(found, rotation=0 if len(found) < 6 else 30)
    axis.legend(fontsize="small", frameon=False)
    return figure


STUDY = Study(
    question="How do our curves compare with those of the paper, and what did the commands measure?",
    prepare=read,
    options={
        "cells": Option(("notebooks/results/python_pair_grid.json",), "Draw the cells of these files."),
        "evaluations": Option((), "Draw acceptance by task of these files instead."),
        "batch": Option(1, "Draw the paper's figure at this batch size.", least=1),
    },
    measure=lambda document, key, say: document,
    tables=command_tables.TABLES,
    figures={
        "figure_1": Published(["python_pair_grid"], draw_paper),
        "speedup_by_batch": Published(["python_pair_grid"], draw_batches),
        "acceptance_by_task": Published(["python_pair_tasks", "python_pair_humaneval"], draw_tasks),
    },
    shown=lambda document: ["acceptance_by_task"] if "evaluations" in document else ["figure_1", *by_batch(document)],
)

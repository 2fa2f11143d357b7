"""The table and the figure of lossy.py: what a lossy rule gains, beside the bias that it meters."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from launch.studies.results_tables import Documents, table
from specsamp.analysis.figures import GREY, STYLES, axes_of, to_png

COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#787e85")
HEADER = (
    "rule",
    "tokens per round",
    "speedup over plain",
    "bias per token",
    "bias per text, at most",
    "acceptance",
    "of it bought",
)
NOTE = (
    "bias: total variation of a token's distribution under the rule from the target's, metered while decoding; per text: "
    "the mean of its sums over texts, which bounds their total variation (beyond 1 it says nothing); bought: the share of "
    "verified tokens that are accepted beyond what the token rule would accept there"
)
Point = Mapping[str, Any]


def rows(points: Sequence[Point]) -> list[tuple[str, ...]]:
    """Returns a row of text for each point."""
    return [
        (
            point["rule"] if point["exact"] else f"{point['rule']} (lossy)",
            f"{point['tokens_per_round']:.2f}",
            f"{point['speedup']['median']:.2f}x ({point['speedup']['lower']:.2f} to {point['speedup']['upper']:.2f})",
            f"{point['variation_per_token']:.4f}",
            f"{point['variation_per_text']:.2f}",
            f"{point['acceptance']:.3f}",
            f"{point['bought']:+.3f}",
        )
        for point in points
    ]


def section(documents: Documents) -> str:
    """Returns the table of the committed study, one distribution after the other, for the page of results."""
    points = [cell["result"] for cell in documents["python_lossy"]["cells"]]
    samplings = dict.fromkeys((point["temperature"], point["top_p"]) for point in points)
    parts = []
    for heat, share in samplings:
        chosen = [point for point in points if (point["temperature"], point["top_p"]) == (heat, share)]
        parts.append(
            f"T = {heat:g}, top-p {share:g}, K = {chosen[0]['draft_length']}:\n\n{table(HEADER, rows(chosen))}"
        )
    return "\n\n".join(parts)


def family(rule: str) -> str:
    """Returns the rule without its constants: the name of a curve."""
    return " ".join(part for part in rule.split(":") if not re.fullmatch(r"[\d.]+", part))


def draw(points: Sequence[Point]) -> bytes:
    """Returns the figure as PNG: tokens per round and speedup by bias per token, a curve for each rule.

    Every curve begins at the token rule, which has no bias.
    """
    figure, axes = axes_of(2, "bias: total variation per token, metered")
    exact = [point for point in points if point["exact"]]
    token = next(point for point in points if point["rule"] == "token")
    for axis, label, value in zip(axes, ("tokens per round", "speedup over plain decoding"), (_tokens, _speedup)):
        axis.set_ylabel(label)
        names = dict.fromkeys(family(point["rule"]) for point in points if not point["exact"])
        for number, name in enumerate(names):
            curve = [point for point in points if family(point["rule"]) == name]
            curve = [token, *sorted(curve, key=lambda point: point["variation_per_token"])]
            axis.plot(
                [point["variation_per_token"] for point in curve],
                [value(point) for point in curve],
                STYLES[number % len(STYLES)],
                color=COLOURS[number % len(COLOURS)],
                marker="o",
                markersize=3,
                label=name,
            )
        for point in exact:
            axis.plot([0], [value(point)], "s", color=GREY, markersize=4)
            axis.annotate(f" {point['rule']}", (0, value(point)), fontsize=7, color=GREY)
        axis.set_xscale("symlog", linthresh=0.01)
        axis.set_xlim(left=-0.001)
    axes[0].legend(fontsize=7, frameon=False)
    return to_png(figure)


def _tokens(point: Point) -> float:
    return point["tokens_per_round"]


def _speedup(point: Point) -> float:
    return point["speedup"]["median"]

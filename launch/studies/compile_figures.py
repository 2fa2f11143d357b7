"""Draws the answers of compile_study.py, where a study has a figure; ``pip install specsamp[figures]``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from specsamp.analysis.figures import COLOURS, axes_of
from specsamp.tpu.calibration import Band, estimate
from specsamp.tpu.work import Work

Cells = Sequence[Mapping[str, Any]]


def calibrated(cell: Mapping[str, Any]) -> Band:
    """Estimates the program of a cell."""
    return estimate(cell["name"].get("topology", "v4:2x2x4").partition(":")[0], Work(**cell["work"]))


def draw_shapes(cells: Cells) -> Any:
    """Draws milliseconds of a draft step against layers, beside the paper's draft.

    For each number of chips a line where all collectives are added, and a broken one where all are hidden.
    """
    figure, (axis,) = axes_of(1, "layers")
    for colour, chips in zip(COLOURS, sorted({cell["name"]["chips"] for cell in cells})):
        of_chips = [cell for cell in cells if cell["name"]["chips"] == chips and "work" in cell]
        drafts = sorted((c for c in of_chips if "7B" not in c["name"]["shape"]), key=lambda cell: cell["layers"])
        if not drafts:
            continue
        layers = [cell["layers"] for cell in drafts]
        label = f"{chips} chip{'s' if chips > 1 else ''}"
        bands = [calibrated(cell) for cell in drafts]
        low, high = [band.least for band in bands], [band.most for band in bands]
        axis.fill_between(layers, low, high, color=colour, alpha=0.15, linewidth=0)
        axis.plot(layers, high, marker="o", markersize=3, color=colour, label=label)
        axis.plot(layers, low, marker="o", markersize=3, color=colour, linestyle="--")
    axis.plot([8], [1.8], "s", color="black", markersize=5, label="Chen et al., 4B on 16")
    axis.set_title(
        "step of a 4B draft, ms (compiler estimate):\ncollectives all added, or all hidden (broken lines)", fontsize=10
    )
    axis.set_ylim(bottom=0)
    axis.legend(fontsize=7, frameon=False)
    return figure


def draw_scoring(cells: Cells) -> Any:
    """Draws the calibrated time of a call of the target, over that of a call of two tokens, against its tokens."""
    figure, (axis,) = axes_of(1, "tokens in one call")
    for colour, topology in zip(COLOURS, dict.fromkeys(cell["name"]["topology"] for cell in cells)):
        calls = [c for c in cells if c["name"]["topology"] == topology and c["name"]["tokens"] > 1 and c["fits"]]
        if not calls:
            continue
        tokens = [cell["name"]["tokens"] for cell in calls]
        axis.plot(
            tokens,
            [calibrated(cell).likely / calibrated(calls[0]).likely for cell in calls],
            marker="o",
            markersize=3,
            color=colour,
            label=f"{topology} (ridge {calls[0]['ridge_tokens']:.0f})",
        )
    axis.axhline(1, color="black", linewidth=0.8)
    axis.set_xscale("log", base=2)
    axis.set_yscale("log", base=2)
    axis.yaxis.set_major_formatter(lambda ratio, _: f"{ratio:g}")
    axis.set_title("scoring call over a step of two tokens\n(calibrated compiler estimate)", fontsize=10)
    axis.legend(fontsize=7, frameon=False)
    return figure


PICTURES = {"shapes": draw_shapes, "scoring": draw_scoring}

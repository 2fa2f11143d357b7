"""Curves of measured cells, and their figures: the panels of figure 1 of the paper, and speedup against batch size."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from launch.studies import published
from specsamp.analysis.figures import COLOURS, STYLES, axes_of
from specsamp.analysis.measured import distribution_of

Cells = Sequence[Mapping[str, Any]]


@dataclasses.dataclass(frozen=True, kw_only=True)
class PaperCurve:
    """One distribution over draft lengths, relative to plain decoding.

    Each value is divided by that of the plain decoding that took turns with it, since cells are measured minutes apart, on
    a machine that may be busier by then.
    """

    name: str
    draft_lengths: tuple[int, ...]
    plain_ms: float  # of plain decoding of `published.TOKENS` tokens of a row
    total: tuple[float, ...]  # time for as many tokens
    quartiles: tuple[tuple[float, float], ...]  # of it
    emitted_share: tuple[float, ...]  # tokens per round over K + 1
    round: tuple[float, ...]  # time of a round, over a plain round
    parts: Mapping[str, tuple[float, ...]]  # of a round, over a plain round; timed beside each other


@dataclasses.dataclass(frozen=True, kw_only=True)
class BatchCurve:
    """One drafter, rule, distribution and draft length over batch sizes."""

    panel: str  # drafter, rule and draft length
    name: str  # the distribution
    batches: tuple[int, ...]
    speedup: tuple[float, ...]
    quartiles: tuple[tuple[float, float], ...]


def curves(cells: Cells, *, batch: int = 1, rule: str = "token", drafter: str = "model") -> list[PaperCurve]:
    """Returns one curve for each distribution, from the cells of this batch, rule and drafter.

    Raises:
      ValueError: there are none.
    """
    wanted = [
        cell
        for cell in cells
        if "result" in cell
        and cell["key"]["batch"] == batch
        and cell["key"].get("draft_temperature") is None
        and (cell["key"]["drafter"] == "none" or (cell["key"]["drafter"], cell["key"]["rule"]) == (drafter, rule))
    ]
    groups = _grouped(wanted, distribution_of).items()
    found = [_curve(name, group) for name, group in groups if any(cell["key"]["draft_length"] for cell in group)]
    if not found:
        raise ValueError(f"no curve: no distribution has a draft at batch {batch}, {drafter} drafter, {rule} rule")
    return found


def batch_curves(cells: Cells) -> list[BatchCurve]:
    """Returns a curve for each drafter, rule, distribution and K that was measured at two batch sizes or more.

    Raises:
      ValueError: there are none.
    """
    drafted = [cell for cell in cells if "result" in cell and cell["key"]["draft_length"]]
    found = []
    for group in _grouped(drafted, lambda key: f"{_panel(key)}; {_distribution(key)}").values():
        group = sorted(group, key=lambda cell: cell["key"]["batch"])
        if len(group) < 2:
            continue
        speedups = [cell["result"]["speedup"] for cell in group]
        found.append(
            BatchCurve(
                panel=_panel(group[0]["key"]),
                name=_distribution(group[0]["key"]),
                batches=tuple(cell["key"]["batch"] for cell in group),
                speedup=tuple(one["median"] for one in speedups),
                quartiles=tuple((one["lower"], one["upper"]) for one in speedups),
            )
        )
    if not found:
        raise ValueError("no curve over batch sizes: nothing was measured at two of them")
    return found


def draw_paper(curves: Sequence[PaperCurve]) -> Any:
    """Draws the three panels of figure 1, relative to plain decoding: ours as lines, the published points beside them."""
    figure, (total, share, rounds) = axes_of(3, "K, drafted tokens per round")
    for number, curve in enumerate(curves):
        look = {"color": COLOURS[number % len(COLOURS)], "linestyle": STYLES[number % len(STYLES)]}
        label = f"{curve.name} ({curve.plain_ms:.0f} ms at K = 0)"
        total.plot(curve.draft_lengths, curve.total, **look, label=label)
        total.fill_between(
            curve.draft_lengths, *zip(*curve.quartiles), color=look["color"], alpha=0.1, linewidth=0, zorder=0
        )
        share.plot(curve.draft_lengths, curve.emitted_share, **look, label=curve.name)
        rounds.plot(curve.draft_lengths, curve.round, **look, label=curve.name)
    first = curves[0]
    for marker, (part, of_round) in zip("^vx", first.parts.items()):
        rounds.plot(
            first.draft_lengths,
            of_round,
            color=COLOURS[0],
            marker=marker,
            markersize=3,
            linewidth=0.6,
            label=f"{first.name}: {part}",
        )
    for marker, task in zip("os", published.TASKS):
        points = range(len(task.total_ms))
        options = {"color": "black", "marker": marker, "linestyle": "none", "markersize": 4, "zorder": 0}
        label, plain = f"Chen et al., {task.name}", task.total_ms[0]
        total.plot(points, [ms / plain for ms in task.total_ms], **options, label=f"{label} ({plain} ms)")
        share.plot(points, task.emitted_share, **options, label=label)
    plain = published.ROUND_MS[0]
    rounds.plot(
        range(len(published.ROUND_MS)),
        [ms / plain for ms in published.ROUND_MS],
        "o",
        color="black",
        markersize=4,
        label=f"Chen et al. ({plain} ms)",
        zorder=0,
    )
    total.set_title(f"time for {published.TOKENS} tokens", fontsize=10)
    total.set_ylabel("over plain decoding")
    share.set_title("tokens emitted per round", fontsize=10)
    share.set_ylabel("over K + 1")
    rounds.set_title("time of a round", fontsize=10)
    rounds.set_ylabel("over a plain round")
    for axis in (total, share, rounds):
        axis.set_ylim(bottom=0)
        axis.legend(fontsize=7, frameon=False)
    return figure


def draw_batches(curves: Sequence[BatchCurve]) -> Any:
    """Draws the speedup over plain decoding of the same batch, a panel for each drafter, rule and draft length."""
    panels = list(dict.fromkeys(curve.panel for curve in curves))
    figure, axes = axes_of(len(panels), "batch size", sharey=True)
    names = list(dict.fromkeys(curve.name for curve in curves))
    batches = sorted({batch for curve in curves for batch in curve.batches})
    for axis, panel in zip(axes, panels, strict=True):
        for curve in (curve for curve in curves if curve.panel == panel):
            number = names.index(curve.name)
            colour, style = COLOURS[number % len(COLOURS)], STYLES[number % len(STYLES)]
            axis.plot(curve.batches, curve.speedup, style, marker="o", markersize=3, color=colour, label=curve.name)
            low, high = zip(*curve.quartiles)
            axis.fill_between(curve.batches, low, high, color=colour, alpha=0.1, linewidth=0)
        axis.axhline(1, color="black", linewidth=0.8)
        axis.set_xscale("log", base=2)
        axis.set_xticks(batches, [str(batch) for batch in batches])
        axis.set_title(panel, fontsize=10)
        axis.legend(fontsize=7, frameon=False)
    axes[0].set_ylabel("speedup over plain decoding")
    axes[0].set_ylim(bottom=0)  # of all: they share it
    return figure


def _curve(name: str, group: Cells) -> PaperCurve:
    group = sorted(group, key=lambda cell: cell["key"]["draft_length"])
    results = [cell["result"] for cell in group]
    lengths = tuple(cell["key"]["draft_length"] for cell in group)
    if lengths[0] != 0:  # its baseline is in every cell
        lengths = (0, *lengths)
        itself = dict.fromkeys(("median", "lower", "upper"), 1.0)
        alone = {"speculative": results[0]["autoregressive"], "speedup": itself, "split": None}
        results = [results[0] | alone, *results]
    sides = ("speculative", "autoregressive")
    rounds = [[result[side]["ms_per_round"]["median"] for side in sides] for result in results]
    emitted = [1.0 if K == 0 else result["acceptance"]["emitted_per_round"] for K, result in zip(lengths, results)]
    return PaperCurve(
        name=name,
        draft_lengths=lengths,
        plain_ms=published.TOKENS * group[0]["key"]["batch"] * results[0]["autoregressive"]["ms_per_token"]["median"],
        total=tuple(1 / result["speedup"]["median"] for result in results),
        quartiles=tuple((1 / result["speedup"]["upper"], 1 / result["speedup"]["lower"]) for result in results),
        emitted_share=tuple(e / (K + 1) for K, e in zip(lengths, emitted)),
        round=tuple(drafted / plain for drafted, plain in rounds),
        parts=_parts(lengths, results),
    )


def _parts(lengths: Sequence[int], results: Sequence[Mapping[str, Any]]) -> dict[str, tuple[float, ...]]:
    """Returns the time of each part of a round over a plain round; nothing where rounds were not taken apart."""
    if any(result["split"] is None for K, result in zip(lengths, results) if K):
        return {}

    def share(K: int, result: Mapping[str, Any], part: str) -> float:
        if K == 0:
            return float(part == "score")
        return result["split"][part]["ms"]["median"] / result["split"]["step"]["ms"]["median"]

    return {
        part: tuple(share(K, result, part) for K, result in zip(lengths, results))
        for part in ("draft", "score", "verify")
    }


def _grouped(cells: Iterable[Mapping[str, Any]], name: Any) -> dict[str, list[Mapping[str, Any]]]:
    groups: dict[str, list[Mapping[str, Any]]] = {}
    for cell in cells:
        groups.setdefault(name(cell["key"]), []).append(cell)
    return groups


def _panel(key: Mapping[str, Any]) -> str:
    return f"{key['drafter']} drafter, {key['rule']} rule, K = {key['draft_length']}"


def _distribution(key: Mapping[str, Any]) -> str:
    temperature = key.get("draft_temperature")
    return distribution_of(key) + ("" if temperature is None else f", draft T = {temperature:g}")

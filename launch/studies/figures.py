"""Draws committed results: figure 1 of Chen et al. with our curves.

    python launch/study.py figures --results=notebooks/results --figures=runs

Our curves are lines, with quartiles; the points are those of Chen et al. (arXiv
2302.01318). Nothing is measured here. The tables are those of commands.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from launch.lib.evaluation_tables import quality
from launch.lib.study import Document, Published, Study
from specsamp.analysis import grid
from specsamp.analysis.figures import COLOURS, STYLES
from specsamp.analysis.grid import distribution_of
from specsamp.analysis.report import Table
from specsamp.analysis.tables import grid_table
from specsamp.evaluation.audit import audit_table

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


def drafted(document: Document) -> list[Mapping[str, Any]]:
    """Returns the measured cells of batch 1 with a draft model, by draft length; drafts at the target's temperature."""
    wanted = {"rule": "token", "drafter": "model", "draft_temperature": None}
    cells = grid.chosen(document["cells"], batch=1, **wanted)
    return sorted((cell for cell in cells if cell["key"]["draft_length"]), key=lambda cell: cell["key"]["draft_length"])


def draw_paper(document: Document) -> Any:
    """Draws the three panels of figure 1: our cells of batch 1 as lines, and the published points.

    Each value is divided by that of the plain decoding that took turns with it, since cells are measured minutes apart.
    """
    from matplotlib.figure import Figure  # no window, no global state

    groups: dict[str, list[Mapping[str, Any]]] = {}
    for cell in drafted(document):
        groups.setdefault(distribution_of(cell["key"]), []).append(cell)
    if not groups:
        raise ValueError("no curve: no distribution has a draft model at batch 1 under the token rule")
    figure = Figure(figsize=(12.6, 3.6), layout="constrained")
    total, share, rounds = figure.subplots(1, 3)
    for number, (name, group) in enumerate(groups.items()):
        look = {"color": COLOURS[number % len(COLOURS)], "linestyle": STYLES[number % len(STYLES)]}
        lengths, results = [0, *(cell["key"]["draft_length"] for cell in group)], [cell["result"] for cell in group]
        plain_ms = TOKENS * results[0]["autoregressive"]["ms_per_token"]["median"]
        sides = [(result["speculative"], result["autoregressive"]) for result in results]
        paces = [ours["ms_per_round"]["median"] / plain["ms_per_round"]["median"] for ours, plain in sides]
        speedups = [result["speedup"] for result in results]
        middle, low, high = ([1, *(1 / one[edge] for one in speedups)] for edge in ("median", "upper", "lower"))
        total.plot(lengths, middle, **look, label=f"{name} ({plain_ms:.0f} ms at K = 0)")
        total.fill_between(lengths, low, high, color=look["color"], alpha=0.1, linewidth=0, zorder=0)
        emitted = [result["acceptance"]["emitted_per_round"] for result in results]
        share.plot(lengths, [1, *(e / (K + 1) for K, e in zip(lengths[1:], emitted))], **look, label=name)
        rounds.plot(lengths, [1, *paces], **look, label=name)
    points = {"color": "black", "linestyle": "none", "markersize": 4, "zorder": 0}
    for marker, (task, ms) in zip("os", PAPER_MS.items()):
        total.plot([one / ms[0] for one in ms], **points, marker=marker, label=f"Chen et al., {task} ({ms[0]} ms)")
        share.plot(PAPER_EMITTED[task], **points, marker=marker, label=f"Chen et al., {task}")
    plain = PAPER_ROUND_MS[0]
    rounds.plot([ms / plain for ms in PAPER_ROUND_MS], **points, marker="o", label=f"Chen et al. ({plain} ms)")
    titles = (f"time for {TOKENS} tokens", "tokens emitted per round", "time of a round")
    for axis, title, label in zip(figure.axes, titles, ("over plain decoding", "over K + 1", "over a plain round")):
        axis.set_title(title, fontsize=10)
        axis.set(xlabel="K, drafted tokens per round", ylabel=label, ylim=(0, None))
        axis.spines[["top", "right"]].set_visible(False)
        axis.legend(fontsize=7, frameon=False)
    return figure


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


def domains(rows: Sequence[Mapping[str, Any]]) -> Table:
    """Returns tokens per round by kind of text and drafter."""
    drafting = {
        row["name"]: row["counts_by_category"] | {"all": row["counts"]} for row in rows if row["counts"]["drafted"]
    }
    found = [
        {"": kind} | {name: f"{counts[kind]['emitted_per_round']:.2f}" for name, counts in drafting.items()}
        for kind in next(iter(drafting.values()))
    ]
    return Table.of("Tokens per round, by kind of text", found)


STUDY = Study(
    question="How do our curves compare with those of the paper, and what did the commands measure?",
    tables={
        "pair": Published(["pair"], trained),
        "grid": Published(
            ["python_pair_grid"], lambda grid: grid_table("Best draft lengths", grid["cells"], best=True)
        ),
        "audit": Published(["python_pair_audit"], lambda audit: audit_table(audit["checks"])),
        "quality": Published(["python_pair_tasks"], lambda found: quality(found["evaluation"])),
        "domains": Published(["python_domains"], lambda found: domains(found["evaluation"])),
        "humaneval": Published(["python_pair_humaneval"], lambda found: quality(found["evaluation"])),
    },
    figures={"figure_1": Published(["python_pair_grid"], draw_paper)},
)

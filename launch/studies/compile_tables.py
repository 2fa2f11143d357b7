"""Tables and figures of what the study compile was answered."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from launch.lib.study import Document
from specsamp.analysis.figures import COLOURS, axes_of
from specsamp.analysis.report import Table
from specsamp.tpu.calibration import Band, estimate, ratio
from specsamp.tpu.tables import GIB, faster
from specsamp.tpu.topology import parse
from specsamp.tpu.work import Work, calls_of_round

K = 4
EMITTED = sum(0.8**i for i in range(K + 1))  # tokens of a round at an acceptance rate of 0.8
Facts = Mapping[str, Any]  # of a program, see `specsamp.tpu.stack.facts`


def answers(document: Document) -> Iterator[tuple[Mapping[str, Any], Mapping[str, Any]]]:
    """Yields what tells each cell from the others, and its answer; older files hold both side by side."""
    for cell in document["cells"]:
        if "name" in cell:
            yield cell["name"], cell
        elif "result" in cell:
            yield cell["key"], cell["result"]


def estimated(facts: Facts, topology: str) -> Band:
    """Returns the calibrated milliseconds of a program."""
    return estimate(chip_of(topology), Work(**facts["work"]))


def chip_of(topology: str) -> str:
    return topology.partition(":")[0]


def memory_of(facts: Facts, topology: str) -> str:
    """Returns the memory of a device that is taken, such as "8.7 of 32"."""
    return f"{facts['memory_bytes'] / GIB:.1f} of {parse(topology)[0].hbm_bytes / GIB:.0f}"


def table(title: str, header: tuple[str, ...], rows: list[tuple], left: int = 1) -> Table:
    """Returns a table of an estimate; cells may be bands and numbers."""
    texts = [tuple(map(str, row)) for row in rows]
    return Table(title=f"{title} (compiler estimate)", header=header, rows=texts, left=left)


def shapes(document: Document) -> Table:
    """Returns a step of drafts of 4B parameters, by their shape and the chips."""
    cells = {tuple(name.values()): answer for name, answer in answers(document)}
    names, chips = (dict.fromkeys(key[i] for key in cells) for i in (0, 1))
    rows = [(name, *(estimated(cells[name, n], "v4") if (name, n) in cells else "" for n in chips)) for name in names]
    return table("A step of a draft", ("a step, ms", *(f"{n} chip{'s' * (n > 1)}" for n in chips)), rows)


def complements(document: Document) -> Table:
    """Returns what int8, fewer kv heads and drafting save together."""
    kinds = {64: "64 (Chinchilla)", 8: "8 (grouped)", 1: "1 (multi-query)"}
    rows = []
    for name, answer in answers(document):
        (form, kv_heads, batch), programs = name.values(), answer["programs"]
        works = {program: Work(**facts["work"]) for program, facts in programs.items()}
        alone, row = estimate("v4", works["step"]), []
        for drafter in ("draft", "head"):
            whole = works.get(f"round with the {drafter}")
            if whole is None:  # the sum of its calls
                round_ = estimate("v4", works["score"], *[works[f"{drafter} step"]] * K)
            else:
                round_ = estimate("v4", *calls_of_round(whole, works[f"{drafter} step"], K))
            row += [ratio(round_, alone), faster(ratio(alone, round_ / EMITTED))]
        step = programs["step"]
        traffic = f"{step['hbm_bytes'] / 1e9:.2f}", f"{step['over_floor']:.3f}"
        rows.append((batch, kinds.get(kv_heads, kv_heads), form, *traffic, alone / batch, *row))
    sides = [f"{who}: {side}" for who in ("draft model", "EAGLE-3") for side in ("a round, in steps", "speedup at 0.8")]
    header = ("batch", "kv heads", "form", "a step moves, GB", "over the floor", "alone, ms per token", *sides)
    return table("Int8, fewer kv heads and drafting", header, rows, left=3)


def forecast(document: Document, topology: str, batch: int) -> tuple[Band, Band]:
    """Returns milliseconds per token of the paper's pair, alone and drafting: acceptance 0.8, top-p, token rule, K = 4."""
    programs = next(
        answer["programs"] for name, answer in answers(document) if name == {"topology": topology, "batch": batch}
    )
    names = "target step", "round, top-p, token", "draft step"
    step, whole, draft_step = (Work(**programs[name]["work"]) for name in names)
    drafted = estimate(chip_of(topology), *calls_of_round(whole, draft_step, K))
    return estimate(chip_of(topology), step) / batch, drafted / EMITTED / batch


def slices(document: Document) -> Table:
    """Returns the paper's pair on four slices, by batch."""
    rows = []
    for name, answer in answers(document):
        (topology, batch), programs = name.values(), answer["programs"]
        step, score, drafted = (programs[program] for program in ("target step", "score", "round, top-p, token"))
        if not drafted["fits"]:
            rows.append((topology, batch, f"does not fit: {drafted['why']}", *[""] * 5))
            continue
        alone, together = forecast(document, topology, batch)
        floors = [f"{program['over_floor']:.2f}" for program in (step, score)]
        rows.append(
            (topology, batch, memory_of(drafted, topology), *floors, alone, together, faster(ratio(alone, together)))
        )
    header = ("chips", "batch", "memory, GiB", "step, over the floor", "scoring, over the floor")
    return table("The paper's pair", (*header, "alone, ms per token", "with the draft", "speedup"), rows)


def kernels(document: Document) -> Table:
    """Returns what programs move whose caches are read by kernels, by how much of a cache is alive."""
    rows = []
    for name, answer in answers(document):
        asked = *(name[field] for field in ("model", "topology", "program", "batch")), f"{name['slots']:,}"
        if not answer["fits"]:
            rows.append((*asked, f"does not fit: {answer['why']}", *[""] * 5))
            continue
        whole = f"{answer['hbm_bytes'] / 1e9:.2f}", f"{answer['over_floor']:.3f}"
        alive = f"{answer['live_hbm_bytes'] / 1e9:.2f}", f"{answer['live_over_floor']:.3f}"
        rows.append((*asked, memory_of(answer, name["topology"]), *whole, f"{name['live']:,}", *alive))
    header = ("target", "chips", "program", "batch", "slots", "memory, GiB", "HBM traffic, GB", "over the floor")
    return table("With kernels", (*header, "alive", "HBM traffic, GB", "over the floor"), rows, left=3)


def scoring(document: Document) -> Table:
    """Returns what a call for more tokens takes, over a step."""
    cells = {tuple(name.values()): answer for name, answer in answers(document)}
    tokens, rows = (5, 9, 17, 33, 65, 129), []
    for topology in dict.fromkeys(topology for topology, _ in cells):
        bands = {n: estimated(answer, topology) for (t, n), answer in cells.items() if t == topology and answer["fits"]}
        ridge = round(parse(topology)[0].ridge)
        over = [faster(ratio(bands[n], bands[2])) if {n, 2} <= set(bands) else "" for n in (*tokens, ridge)]
        rows.append((topology, *over[:-1], f"{over[-1]} ({ridge})"))
    header = ("one call, over a step of two tokens", *(f"{n} tokens" for n in tokens), "at the ridge (tokens)")
    return table("A call for more tokens", header, rows)


def heads(document: Document) -> Table:
    """Returns what a draft and a round take with a head or an early exit, beside a draft model."""
    rows = []
    for name, answer in answers(document):
        chip, programs = chip_of(name["topology"]), answer["programs"]
        works = {program: Work(**facts["work"]) for program, facts in programs.items()}
        step, draft_step = estimate(chip, works["target step"]), estimate(chip, works["draft step"])
        whole = estimate(chip, *calls_of_round(works["round"], works["draft step"], K))
        floors = [f"{programs[program]['over_floor']:.3f}" for program in ("score", "draft step", "round")]
        serial = [round(sum(programs[program]["collectives"].values())) for program in ("draft step", "round")]
        rows.append((*name.values(), *floors, *serial, draft_step, whole, faster(ratio(whole, step))))
    floors = [f"{program}, over the floor" for program in ("scoring", "a draft step", "a round")]
    serial = ["serial collectives of a draft step", "of a round"]
    times = ("a draft step, ms", "a round, ms", "a round, over a step of the target")
    return table("What drafts", ("target", "chips", "drafter", *floors, *serial, *times), rows, left=3)


def variants(document: Document) -> Table:
    """Returns the traffic and the cycles of each way to write the same work."""
    header = ("question", "form", "HBM traffic per chip, MB", "streaming, ms", "cycles, ms", "copies")
    rows = [
        (
            *name.values(),
            f"{answer['hbm_bytes'] / 1e6:,.0f}",
            *(f"{answer[part]:.2f}" for part in ("streaming_ms", "cycles_ms")),
            answer["copies"],
        )
        for name, answer in answers(document)
    ]
    return table("Ways to write the same work", header, rows, left=2)


def draw_shapes(document: Document) -> Any:
    """Draws milliseconds of a draft step against layers, beside the paper's draft.

    For each number of chips a line where all collectives are added, and a broken one where all are hidden.
    """
    figure, (axis,) = axes_of(1, "layers")
    drafts = [(name["chips"], each) for name, each in answers(document) if "7B" not in name["shape"] and each["fits"]]
    for colour, chips in zip(COLOURS, sorted({chips for chips, _ in drafts})):
        steps = sorted((each for count, each in drafts if count == chips), key=lambda each: each["layers"])
        layers, bands = [each["layers"] for each in steps], [estimated(each, "v4") for each in steps]
        low, high = [band.least for band in bands], [band.most for band in bands]
        axis.fill_between(layers, low, high, color=colour, alpha=0.15, linewidth=0)
        label = f"{chips} chip{'s' * (chips > 1)}"
        axis.plot(layers, high, marker="o", markersize=3, color=colour, label=label)
        axis.plot(layers, low, marker="o", markersize=3, color=colour, linestyle="--")
    axis.plot([8], [1.8], "s", color="black", markersize=5, label="Chen et al., 4B on 16")
    title = "step of a 4B draft, ms (compiler estimate):\ncollectives all added, or all hidden (broken lines)"
    axis.set_title(title, fontsize=10)
    axis.set_ylim(bottom=0)
    axis.legend(fontsize=7, frameon=False)
    return figure


def draw_scoring(document: Document) -> Any:
    """Draws the calibrated time of a call of the target, over that of a call of two tokens, against its tokens."""
    figure, (axis,) = axes_of(1, "tokens in one call")
    cells = [(name, answer) for name, answer in answers(document) if name["tokens"] > 1 and answer["fits"]]
    for colour, topology in zip(COLOURS, dict.fromkeys(name["topology"] for name, _ in cells)):
        calls = {name["tokens"]: answer for name, answer in cells if name["topology"] == topology}
        times = [estimated(answer, topology).likely for answer in calls.values()]
        label = f"{topology} (ridge {parse(topology)[0].ridge:.0f})"
        over = [ms / times[0] for ms in times]
        axis.plot(list(calls), over, marker="o", markersize=3, color=colour, label=label)
    axis.axhline(1, color="black", linewidth=0.8)
    axis.set_xscale("log", base=2)
    axis.set_yscale("log", base=2)
    axis.yaxis.set_major_formatter(lambda ratio, _: f"{ratio:g}")
    axis.set_title("scoring call over a step of two tokens\n(calibrated compiler estimate)", fontsize=10)
    axis.legend(fontsize=7, frameon=False)
    return figure

"""Tables and figures of what the study compile was answered."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from launch.lib.estimates import EMITTED, K, estimated, forecast
from launch.lib.study import Document, answers
from specsamp.analysis.figures import COLOURS, axes_of
from specsamp.analysis.report import Table
from specsamp.checkpoints.published import published_config
from specsamp.tpu.calibration import Band, estimate, ratio
from specsamp.tpu.tables import GIB, faster
from specsamp.tpu.topology import parse
from specsamp.tpu.work import Work

DOTS = {"marker": "o", "markersize": 3}


def memory_of(facts: Document, topology: str) -> str:
    """Returns the memory of a device that is taken, such as "8.7 of 32"."""
    return f"{facts['memory_bytes'] / GIB:.1f} of {parse(topology)[0].hbm_bytes / GIB:.0f}"


def over_floor(facts: Document, digits: int = 3) -> str:
    return f"{facts['over_floor']:.{digits}f}"


def table(title: str, rows: Iterable[Mapping[str, Any]], left: int = 1) -> Table:
    """Returns a table of an estimate; cells may be bands and numbers."""
    return Table.of(f"{title} (compiler estimate)", list(rows), left=left)


def shapes(document: Document) -> Table:
    """Returns a step of drafts of 4B parameters, by their shape and the chips."""
    rows: dict[str, dict[str, Any]] = {}
    for name, answer in answers(document):
        row = rows.setdefault(name["shape"], {"a step, ms": name["shape"]})
        row[f"{name['chips']} chip{'s' * (name['chips'] > 1)}"] = estimated(answer, "v4")
    return table("A step of a draft", rows.values())


def complements(document: Document) -> Table:
    """Returns what int8, fewer kv heads and drafting save together."""
    kinds, rows = {64: "64 (Chinchilla)", 8: "8 (grouped)", 1: "1 (multi-query)"}, []
    for name, answer in answers(document):
        programs = answer["programs"]
        alone = estimated(programs["step"], "v4")
        row = {
            "batch": name["batch"],
            "kv heads": kinds.get(name["kv_heads"], name["kv_heads"]),
            "form": name["form"],
            "a step moves, GB": f"{programs['step']['hbm_bytes'] / 1e9:.2f}",
            "over the floor": over_floor(programs["step"]),
            "alone, ms per token": alone / name["batch"],
        }
        for label, drafter in (("draft model", "draft"), ("EAGLE-3", "head")):
            whole, step = programs.get(f"round with the {drafter}"), programs[f"{drafter} step"]
            calls = [Work(**facts["work"]) for facts in (programs["score"], *[step] * K)]
            round_ = estimated(whole, "v4", step) if whole else estimate("v4", *calls)
            row[f"{label}: a round, in steps"] = ratio(round_, alone)
            row[f"{label}: speedup at 0.8"] = faster(ratio(alone, round_ / EMITTED))
        rows.append(row)
    return table("Int8, fewer kv heads and drafting", rows, left=3)


def slices(document: Document) -> Table:
    """Returns the paper's pair on four slices, by batch."""
    rows = []
    for name, answer in answers(document):
        (topology, batch), programs = name.values(), answer["programs"]
        row, drafted = {"chips": topology, "batch": batch}, programs["round, top-p, token"]
        if not drafted["fits"]:
            rows.append(row | {"memory, GiB": f"does not fit: {drafted['why']}"})
            continue
        alone, together = forecast(document, topology, batch)
        row |= {
            "memory, GiB": memory_of(drafted, topology),
            "step, over the floor": over_floor(programs["target step"], 2),
            "scoring, over the floor": over_floor(programs["score"], 2),
            "alone, ms per token": alone,
            "with the draft": together,
            "speedup": faster(ratio(alone, together)),
        }
        rows.append(row)
    return table("The paper's pair", rows)


def kernels(document: Document) -> Table:
    """Returns what programs move whose caches are read by kernels, by how much of a cache is alive."""
    rows = []
    for name, answer in answers(document):
        *asked, slots, live = name.values()
        asked = *map(str, asked), f"{slots:,}"
        if not answer["fits"]:
            rows.append((*asked, f"does not fit: {answer['why']}", *[""] * 5))
            continue
        whole = f"{answer['hbm_bytes'] / 1e9:.2f}", over_floor(answer)
        alive = f"{answer['live_hbm_bytes'] / 1e9:.2f}", f"{answer['live_over_floor']:.3f}"
        rows.append((*asked, memory_of(answer, name["topology"]), *whole, f"{live:,}", *alive))
    header = ("target", "chips", "program", "batch", "slots", "memory, GiB", "HBM traffic, GB", "over the floor")
    header += ("alive", "HBM traffic, GB", "over the floor")
    return Table(title="With kernels (compiler estimate)", header=header, rows=rows, left=3)


def scoring(document: Document) -> Table:
    """Returns what a call for more tokens takes, over a step."""
    bands: dict[str, dict[int, Band]] = {}
    for name, answer in answers(document):
        if answer["fits"]:
            bands.setdefault(name["topology"], {})[name["tokens"]] = estimated(answer, name["topology"])
    rows = []
    for topology, by_tokens in bands.items():
        ridge = round(parse(topology)[0].ridge)
        over = {n: faster(ratio(band, by_tokens[2])) for n, band in by_tokens.items() if 2 in by_tokens}
        row = {"one call, over a step of two tokens": topology}
        row |= {f"{n} tokens": over.get(n, "") for n in (5, 9, 17, 33, 65, 129)}
        rows.append(row | {"at the ridge (tokens)": f"{over.get(ridge, '')} ({ridge})"})
    return table("A call for more tokens", rows)


def heads(document: Document) -> Table:
    """Returns what a draft and a round take with a head or an early exit, beside a draft model."""
    rows = []
    for name, answer in answers(document):
        topology, programs = name["topology"], answer["programs"]
        serial = {program: round(sum(facts["collectives"].values())) for program, facts in programs.items()}
        whole = estimated(programs["round"], topology, programs["draft step"])
        row = {
            **dict(zip(("target", "chips", "drafter"), name.values(), strict=True)),
            "scoring, over the floor": over_floor(programs["score"]),
            "a draft step, over the floor": over_floor(programs["draft step"]),
            "a round, over the floor": over_floor(programs["round"]),
            "serial collectives of a draft step": serial["draft step"],
            "of a round": serial["round"],
            "a draft step, ms": estimated(programs["draft step"], topology),
            "a round, ms": whole,
            "a round, over a step of the target": faster(ratio(whole, estimated(programs["target step"], topology))),
        }
        rows.append(row)
    return table("What drafts", rows, left=3)


def head_training(document: Document) -> Table:
    """Returns the memory of a training step of a head, per device."""
    if "memory" in document:  # an older file: one answer, which holds its key
        target, task = document["target"], document["task"]
        key = {"target": target["name"], "layers": target["config"]["num_layers"], "test_steps": task["test_steps"]}
        document = {"cells": [{"key": key | document["train"], "result": document}]}
    rows = []
    for cell in document["cells"]:
        key, memory = cell["key"], cell["result"]["memory"] if "result" in cell else None
        layers = published_config(key["target"]).num_layers
        row = {
            "layers of the target": f"{min(key['layers'], layers)} of {layers}",
            "steps of the test": key["test_steps"],
            "rows x tokens": f"{key['rows']} x {key['length']}",
        }
        if memory:
            row |= {f"{part}, GB": f"{memory[part] / 1e9:.2f}" for part in ("arguments", "temporaries", "code")}
        rows.append(row | {"a device has, GB": f"{memory['capacity'] / 1e9:.0f}" if memory else "does not fit"})
    return table("A training step of an EAGLE-3 head, per device", rows)


def variants(document: Document) -> Table:
    """Returns the traffic and the cycles of each way to write the same work."""
    rows = [
        {
            "question": name["question"],
            "form": name["form"],
            "HBM traffic per chip, MB": f"{answer['hbm_bytes'] / 1e6:,.0f}",
            "streaming, ms": f"{answer['streaming_ms']:.2f}",
            "cycles, ms": f"{answer['cycles_ms']:.2f}",
            "copies": answer["copies"],
        }
        for name, answer in answers(document)
    ]
    return table("Ways to write the same work", rows, left=2)


def draw_shapes(document: Document) -> Any:
    """Draws milliseconds of a draft step against layers, with collectives added and hidden, beside the paper's draft."""
    figure, (axis,) = axes_of(1, "layers")
    drafts = [(name["chips"], each) for name, each in answers(document) if "7B" not in name["shape"] and each["fits"]]
    for colour, chips in zip(COLOURS, sorted({chips for chips, _ in drafts})):
        steps = sorted((each for count, each in drafts if count == chips), key=lambda each: each["layers"])
        layers, bands = [each["layers"] for each in steps], [estimated(each, "v4") for each in steps]
        low, high = zip(*((band.least, band.most) for band in bands))
        axis.fill_between(layers, low, high, color=colour, alpha=0.15, linewidth=0)
        axis.plot(layers, high, **DOTS, color=colour, label=f"{chips} chip{'s' * (chips > 1)}")
        axis.plot(layers, low, **DOTS, color=colour, linestyle="--")
    axis.plot([8], [1.8], "s", color="black", markersize=5, label="Chen et al., 4B on 16")
    axis.set_ylim(bottom=0)
    axis.set_title("step of a 4B draft, ms (estimate):\ncollectives all added, or all hidden (broken)", fontsize=10)
    axis.legend(fontsize=7, frameon=False)
    return figure


def draw_scoring(document: Document) -> Any:
    """Draws the calibrated time of a call of the target, over that of a call of two tokens, against its tokens."""
    figure, (axis,) = axes_of(1, "tokens in one call")
    cells = [(name, answer) for name, answer in answers(document) if name["tokens"] > 1 and answer["fits"]]
    for colour, topology in zip(COLOURS, dict.fromkeys(name["topology"] for name, _ in cells)):
        calls = {name["tokens"]: estimated(each, topology) for name, each in cells if name["topology"] == topology}
        times = [band.likely for band in calls.values()]
        label = f"{topology} (ridge {parse(topology)[0].ridge:.0f})"
        axis.plot(list(calls), [ms / times[0] for ms in times], **DOTS, color=colour, label=label)
    axis.axhline(1, color="black", linewidth=0.8)
    axis.loglog(base=2)
    axis.yaxis.set_major_formatter(lambda ratio, _: f"{ratio:g}")
    axis.set_title("scoring call over a step of two tokens\n(calibrated compiler estimate)", fontsize=10)
    axis.legend(fontsize=7, frameon=False)
    return figure


FIGURES = {"shapes": draw_shapes, "scoring": draw_scoring}

"""Makes the tables of notebooks/results/README.md that the TPU's compiler answers; see results_tables.py."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from launch.studies.results_tables import EMITTED, Documents, table
from specsamp.checkpoints.published import published_config
from specsamp.tpu.calibration import ROUNDS_MS, Band, calibrate, estimate, ratio, two_digits
from specsamp.tpu.costs import read_report
from specsamp.tpu.measurements import published
from specsamp.tpu.tables import faster
from specsamp.tpu.topology import parse
from specsamp.tpu.work import Work, calls_of_round

GIB, K = 2**30, 4
COUNTED = ("streaming_ms", "cycles_ms")


def calibrated(facts: Mapping[str, Any], topology: str) -> Band:
    """Estimates a program of a study."""
    return estimate(topology.partition(":")[0], Work(**facts["work"]))


def head_training(documents: Documents) -> str:
    """Returns the memory of a training step of a head, per device."""
    document = documents["compile_head_training"]
    memory, task, rows = document["memory"], document["task"], document["train"]
    whole = published_config(document["target"]["name"]).num_layers
    layers = document["target"]["config"]["num_layers"]
    parts = [f"{memory[name] / 1e9:.2f}" for name in ("arguments", "temporaries", "code")]
    shape = f"{layers} of {whole}", task["test_steps"], f"{rows['rows']} x {rows['length']}"
    header = (
        "layers of the target",
        "steps of the test",
        "rows x tokens",
        "arguments, GB",
        "temporaries, GB",
        "code, GB",
    )
    return table((*header, "a device has, GB"), [(*shape, *parts, f"{memory['capacity'] / 1e9:.0f}")])


def chinchilla(documents: Documents) -> str:
    """Returns the programs of the paper's pair on 16 TPU v4 chips."""
    report = read_report(documents["compile_chinchilla_v4"]["report"])
    steps = {row.model: row.milliseconds for row in published() if row.source == "Chen et al."}
    measured = {"draft step": steps["draft 4B"], "target step": steps["Chinchilla 70B"], "round": ROUNDS_MS[4]}
    shown = {"draft step": "draft, one token", "target step": "target, one token", "score": "target, 5 tokens"}
    rows = []
    for name, label in (shown | {"round": "a round"}).items():
        program = report[name]
        rows.append(
            (
                label,
                f"{program.hbm_bytes / 1e9:.2f}",
                f"{program.over_floor:.3f}",
                f"{program.memory.temporaries / 1e6:.0f}",
                two_digits(program.streaming_ms(report.chip)),
                two_digits(program.cycles / report.chip.clock_hz * 1e3),
                sum(program.collectives.values()),
                report.calibrated_ms(name),
                calibrate().added.estimate(*report.works(name)),
                measured.get(name, ""),
            )
        )
    header = ("", "HBM traffic per chip, GB", "over the floor", "temporaries, MB", "streaming, ms", "cycles, ms")
    times = ("serial collectives", "as a program of today, ms", "as one of 2022 and 2023, ms", "published, ms")
    return table((*header, *times), rows)


def shapes(documents: Documents) -> str:
    """Returns a step of drafts of 4B parameters, by their shape and the chips."""
    cells = {(c["name"]["shape"], c["name"]["chips"]): c for c in documents["compile_shapes"]["cells"]}
    names, chips = [list(dict.fromkeys(key[i] for key in cells)) for i in (0, 1)]
    rows = [(name, *(calibrated(cells[name, count], "v4") for count in chips)) for name in names]
    return table(("a step, ms", *(f"{n} chip{'s' * (n > 1)}" for n in chips)), rows)


def complements(documents: Documents) -> str:
    """Returns what int8, fewer kv heads and drafting save together."""
    kinds = {64: "64 (Chinchilla)", 8: "8 (grouped)", 1: "1 (multi-query)"}
    rows = []
    for cell in documents["compile_complements"]["cells"]:
        (form, kv_heads, batch), programs = cell["name"].values(), cell["programs"]
        works = {name: Work(**facts["work"]) for name, facts in programs.items()}
        alone, row = estimate("v4", works["step"]), []
        for drafter in ("draft", "head"):
            whole = works.get(f"round with the {drafter}")
            if whole is None:  # the sum of its calls
                round_ = estimate("v4", works["score"], *[works[f"{drafter} step"]] * K)
            else:
                round_ = estimate("v4", *calls_of_round(whole, works[f"{drafter} step"], K))
            row += [f"{ratio(round_, alone)}", faster(ratio(alone, round_ / EMITTED))]
        step = programs["step"]
        traffic = f"{step['hbm_bytes'] / 1e9:.2f}", f"{step['over_floor']:.3f}"
        rows.append((batch, kinds[kv_heads], form, *traffic, alone / batch, *row))
    sides = [
        f"{name}: {side}" for name in ("draft model", "EAGLE-3") for side in ("a round, in steps", "speedup at 0.8")
    ]
    header = ("batch", "kv heads", "form", "a step moves, GB", "over the floor", "alone, ms per token")
    return table((*header, *sides), rows)


def forecast(cell: Mapping[str, Any]) -> tuple[Band, Band]:
    """Returns milliseconds per token alone and with the draft at an acceptance rate of 0.8: top-p, token rule, K = 4."""
    chip, batch = cell["name"]["topology"].partition(":")[0], cell["name"]["batch"]
    step, whole, draft_step = (
        Work(**cell["programs"][name]["work"]) for name in ("target step", "round, top-p, token", "draft step")
    )
    drafted = estimate(chip, *calls_of_round(whole, draft_step, K))
    return estimate(chip, step) / batch, drafted / EMITTED / batch


def slices(documents: Documents) -> str:
    """Returns the paper's pair on four slices, by batch."""
    rows = []
    for cell in documents["compile_slices"]["cells"]:
        topology, batch, programs = cell["name"]["topology"], cell["name"]["batch"], cell["programs"]
        step, score, drafted = (programs[name] for name in ("target step", "score", "round, top-p, token"))
        capacity = parse(topology)[0].hbm_bytes / GIB
        if not drafted["fits"]:
            rows.append((topology, batch, f"does not fit: {drafted['why']}", *[""] * 5))
            continue
        alone, together = forecast(cell)
        rows.append(
            (
                topology,
                batch,
                f"{drafted['memory_bytes'] / GIB:.1f} of {capacity:.0f}",
                f"{step['over_floor']:.2f}",
                f"{score['over_floor']:.2f}",
                alone,
                together,
                faster(ratio(alone, together)),
            )
        )
    header = ("chips", "batch", "memory, GiB", "step, over the floor", "scoring, over the floor")
    return table((*header, "alone, ms per token", "with the draft", "speedup"), rows)


def kernels(documents: Documents) -> str:
    """Returns what programs move whose caches are read by kernels, by how much of a cache is alive."""
    rows = []
    for cell in documents["compile_kernels"]["cells"]:
        name = cell["name"]
        asked = name["model"], name["topology"], name["program"], name["batch"]
        if not cell["fits"]:
            rows.append((*asked, f"{name['slots']:,}", f"does not fit: {cell['why']}", *[""] * 5))
            continue
        capacity = parse(name["topology"])[0].hbm_bytes / GIB
        rows.append(
            (
                *asked,
                f"{name['slots']:,}",
                f"{cell['memory_bytes'] / GIB:.1f} of {capacity:.0f}",
                f"{cell['hbm_bytes'] / 1e9:.2f}",
                f"{cell['over_floor']:.3f}",
                f"{name['live']:,}",
                f"{cell['live_hbm_bytes'] / 1e9:.2f}",
                f"{cell['live_over_floor']:.3f}",
            )
        )
    header = ("target", "chips", "program", "batch", "slots", "memory, GiB", "HBM traffic, GB", "over the floor")
    return table((*header, "alive", "HBM traffic, GB", "over the floor"), rows)


def scoring(documents: Documents) -> str:
    """Returns what a call for more tokens takes, over a step."""
    cells = {(c["name"]["topology"], c["name"]["tokens"]): c for c in documents["compile_scoring"]["cells"]}
    tokens, rows = (5, 9, 17, 33, 65, 129), []
    for topology in dict.fromkeys(key[0] for key in cells):
        step, ridge = calibrated(cells[topology, 2], topology), round(cells[topology, 2]["ridge_tokens"])
        over = [faster(ratio(calibrated(cells[topology, n], topology), step)) for n in (*tokens, ridge)]
        rows.append((topology, *over[:-1], f"{over[-1]} ({ridge})"))
    header = ("one call, over a step of two tokens", *(f"{n} tokens" for n in tokens), "at the ridge (tokens)")
    return table(header, rows)


def public_pairs(documents: Documents) -> str:
    """Returns public pairs on TPU v5e."""
    rows = []
    labels = {"qwen_3b": "Qwen2.5 3B + 0.5B, bfloat16", "qwen_30b_a3b": "Qwen3 30B-A3B + 0.6B, bfloat16"}
    labels["llama_70b"] = "Llama 3.1 70B + 3.2 1B, bfloat16"
    labels["llama_70b_int8"] = "Llama 3.1 70B + 3.2 1B, int8 weights"
    for name, label in labels.items():
        document = documents[f"compile_{name}_v5e"]
        report = read_report(document["report"])
        memory = report["round"].memory
        alone, drafted = report.calibrated_ms("target step"), report.calibrated_ms("round")
        emitted = sum(0.8**i for i in range(report.draft_length + 1))
        rows.append(
            (
                label,
                report.draft_length,
                report.batch,
                f"{math.prod(parse(report.topology)[1])} v5e",
                f"{memory.total / GIB:.1f} of {memory.capacity / GIB:.0f}",
                *(f"{report[name].over_floor:.3f}" for name in ("target step", "score")),
                alone,
                drafted,
                drafted / emitted / report.batch,
                faster(ratio(alone, drafted / emitted)),
            )
        )
    header = ("", "K", "batch", "chips", "memory, GiB", "step, over the floor", "scoring, over the floor", "a step, ms")
    return table((*header, "a round, ms", "ms per token at acceptance 0.8", "speedup"), rows)


def heads(documents: Documents) -> str:
    """Returns what a draft and a round take with a head or an early exit, beside a draft model."""
    rows = []
    for cell in documents["compile_heads"]["cells"]:
        name, programs = cell["name"], cell["programs"]
        chip = name["topology"].partition(":")[0]
        works = {program: Work(**facts["work"]) for program, facts in programs.items()}
        step, draft_step = estimate(chip, works["target step"]), estimate(chip, works["draft step"])
        whole = estimate(chip, *calls_of_round(works["round"], works["draft step"], K))
        rows.append(
            (
                *name.values(),
                *(f"{programs[program]['over_floor']:.3f}" for program in ("score", "draft step", "round")),
                *(round(sum(programs[program]["collectives"].values())) for program in ("draft step", "round")),
                draft_step,
                whole,
                faster(ratio(whole, step)),
            )
        )
    floors = [f"{program}, over the floor" for program in ("scoring", "a draft step", "a round")]
    serial = ["serial collectives of a draft step", "of a round"]
    times = ("a draft step, ms", "a round, ms", "a round, over a step of the target")
    return table(("target", "chips", "drafter", *floors, *serial, *times), rows)


def variants(documents: Documents) -> str:
    """Returns the traffic and the cycles of each way to write the same work."""
    rows = []
    for cell in documents["compile_variants"]["cells"]:
        name = cell["name"]
        times = [f"{cell[part]:.2f}" for part in COUNTED]
        rows.append((name["question"], name["form"], f"{cell['hbm_bytes'] / 1e6:,.0f}", *times, cell["copies"]))
    return table(("question", "form", "HBM traffic per chip, MB", "streaming, ms", "cycles, ms", "copies"), rows)

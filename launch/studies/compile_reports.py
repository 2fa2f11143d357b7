"""Shows what launch/compile_report.py was answered of the paper's pair, and of public ones; it measures nothing itself."""

from __future__ import annotations

import math

from launch.lib.study import Document, Published, Study
from launch.studies.compile_tables import table
from specsamp.analysis.report import Table
from specsamp.tpu.calibration import ROUNDS_MS, calibrate, ratio, two_digits
from specsamp.tpu.costs import read_report
from specsamp.tpu.measurements import published
from specsamp.tpu.tables import GIB, faster
from specsamp.tpu.topology import parse

PUBLIC_PAIRS = {
    "qwen_3b": "Qwen2.5 3B + 0.5B, bfloat16",
    "qwen_30b_a3b": "Qwen3 30B-A3B + 0.6B, bfloat16",
    "llama_70b": "Llama 3.1 70B + 3.2 1B, bfloat16",
    "llama_70b_int8": "Llama 3.1 70B + 3.2 1B, int8 weights",
}


def chinchilla(document: Document) -> Table:
    """Returns the programs of the paper's pair on 16 TPU v4 chips."""
    report = read_report(document["report"])
    steps = {row.model: row.milliseconds for row in published() if row.source == "Chen et al."}
    measured = {"draft step": steps["draft 4B"], "target step": steps["Chinchilla 70B"], "round": ROUNDS_MS[4]}
    shown = {"draft step": "draft, one token", "target step": "target, one token", "score": "target, 5 tokens"}
    rows = []
    for name, label in (shown | {"round": "a round"}).items():
        program = report[name]
        times = program.streaming_ms(report.chip), program.cycles / report.chip.clock_hz * 1e3
        rows.append(
            (
                label,
                f"{program.hbm_bytes / 1e9:.2f}",
                f"{program.over_floor:.3f}",
                f"{program.memory.temporaries / 1e6:.0f}",
                *map(two_digits, times),
                sum(program.collectives.values()),
                report.calibrated_ms(name),
                calibrate().added.estimate(*report.works(name)),
                measured.get(name, ""),
            )
        )
    header = ("", "HBM traffic per chip, GB", "over the floor", "temporaries, MB", "streaming, ms", "cycles, ms")
    times = ("serial collectives", "as a program of today, ms", "as one of 2022 and 2023, ms", "published, ms")
    return table("The paper's pair on 16 TPU v4 chips", (*header, *times), rows)


def public_pairs(*documents: Document) -> Table:
    """Returns public pairs on TPU v5e, in the order of `PUBLIC_PAIRS`."""
    rows = []
    for label, document in zip(PUBLIC_PAIRS.values(), documents, strict=True):
        report = read_report(document["report"])
        memory, K = report["round"].memory, report.draft_length
        alone, drafted = report.calibrated_ms("target step"), report.calibrated_ms("round")
        emitted = sum(0.8**i for i in range(K + 1))
        chips = f"{math.prod(parse(report.topology)[1])} v5e"
        shape = label, K, report.batch, chips, f"{memory.total / GIB:.1f} of {memory.capacity / GIB:.0f}"
        floors = [f"{report[name].over_floor:.3f}" for name in ("target step", "score")]
        per_token = drafted / emitted / report.batch, faster(ratio(alone, drafted / emitted))
        rows.append((*shape, *floors, alone, drafted, *per_token))
    header = ("", "K", "batch", "chips", "memory, GiB", "step, over the floor", "scoring, over the floor", "a step, ms")
    header += ("a round, ms", "ms per token at acceptance 0.8", "speedup")
    return table("Public pairs on TPU v5e", header, rows)


STUDY = Study(
    question="What does the compiler say of the paper's pair, and of public ones?",
    tables={
        "chinchilla": Published(["compile_chinchilla_v4"], chinchilla),
        "public_pairs": Published([f"compile_{name}_v5e" for name in PUBLIC_PAIRS], public_pairs),
    },
)

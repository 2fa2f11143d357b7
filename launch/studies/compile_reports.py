"""Shows answers of the compiler that no grid of the study compile asks for; it measures nothing itself.

They are those of launch/compile_report.py on the paper's pair and on public ones, and those on forms of the loop, whose
programs are gone: what they said is beside their table on the page of results.
"""

from __future__ import annotations

import math

from launch.lib.study import Document, Published, Study
from launch.studies.compile_tables import answers, table
from specsamp.analysis.acceptance import expected_tokens
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
        row = {
            "": label,
            "HBM traffic per chip, GB": f"{program.hbm_bytes / 1e9:.2f}",
            "over the floor": f"{program.over_floor:.3f}",
            "temporaries, MB": f"{program.memory.temporaries / 1e6:.0f}",
            "streaming, ms": two_digits(program.streaming_ms(report.chip)),
            "cycles, ms": two_digits(program.cycles_ms(report.chip)),
            "serial collectives": sum(program.collectives.values()),
            "as a program of today, ms": report.calibrated_ms(name),
            "as one of 2022 and 2023, ms": calibrate().added.estimate(*report.works(name)),
            "published, ms": measured.get(name, ""),
        }
        rows.append(row)
    return table("The paper's pair on 16 TPU v4 chips", rows)


def public_pairs(*documents: Document) -> Table:
    """Returns public pairs on TPU v5e, in the order of `PUBLIC_PAIRS`."""
    rows = []
    for label, document in zip(PUBLIC_PAIRS.values(), documents, strict=True):
        report = read_report(document["report"])
        memory, K = report["round"].memory, report.draft_length
        alone, drafted = report.calibrated_ms("target step"), report.calibrated_ms("round")
        emitted = expected_tokens(0.8, K)
        row = {
            "": label,
            "K": K,
            "batch": report.batch,
            "chips": f"{math.prod(parse(report.topology)[1])} v5e",
            "memory, GiB": f"{memory.total / GIB:.1f} of {memory.capacity / GIB:.0f}",
            "step, over the floor": f"{report['target step'].over_floor:.3f}",
            "scoring, over the floor": f"{report['score'].over_floor:.3f}",
            "a step, ms": alone,
            "a round, ms": drafted,
            "ms per token at acceptance 0.8": drafted / emitted / report.batch,
            "speedup": faster(ratio(alone, drafted / emitted)),
        }
        rows.append(row)
    return table("Public pairs on TPU v5e", rows)


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


STUDY = Study(
    question="What does the compiler say of the paper's pair, of public ones, and of other forms of the loop?",
    tables={
        "chinchilla": Published(["compile_chinchilla_v4"], chinchilla),
        "public_pairs": Published([f"compile_{name}_v5e" for name in PUBLIC_PAIRS], public_pairs),
        "variants": Published(["compile_variants"], variants),
    },
)

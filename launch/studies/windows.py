"""Compiles rounds of Llama 3.1 8B in which the target drafts with a window, beside rounds with a
draft model of 1B and with an EAGLE-3 head.

    python launch/study.py windows --output=runs/compile_windows.json

A run that was killed goes on. All numbers are compiler estimates.
"""

import itertools
from typing import Any

from launch.lib.shapes import eagle3_of
from launch.lib.study import Document, Published, Study, answers
from specsamp import TokenRule, TransformerLM, chain, temperature, top_p
from specsamp.analysis.report import Table
from specsamp.checkpoints.architectures import parse_config
from specsamp.checkpoints.published import CONFIGS
from specsamp.mesh.layout import Layout
from specsamp.mesh.sharded import shard_model
from specsamp.models.kernels.dispatch import choose_kernels
from specsamp.tpu.calibration import Band, band_ratio
from specsamp.tpu.lowering import Programs, WindowStep, sharded_head_model
from specsamp.tpu.pair_report import compile_report, faster
from specsamp.tpu.topology import described_mesh

TARGET, DRAFT = "meta-llama/Llama-3.1-8B", "meta-llama/Llama-3.2-1B"
K, WINDOW, SINKS = 4, 500, 4
SIZES = ((131072, 1), (32768, 8), (8192, 32), (131072, 8))
DRAFTERS = "window", "1B", "EAGLE-3"
KEYS = [
    {"topology": topology, "slots": slots, "batch": batch, "drafter": drafter}
    for topology, (slots, batch), drafter in itertools.product(
        ("v5e:2x2", "v5e:4x4"), SIZES, DRAFTERS
    )
]


def measure(options, say, *, topology: str, slots: int, batch: int, drafter: str) -> dict[str, Any]:
    """Compiles a round, and the step of a draft or, beside a window, of the target."""
    kernels = choose_kernels("auto", backend="tpu")
    target, draft = (
        TransformerLM(parse_config(name, CONFIGS[name], "bfloat16")[1], kernels=kernels)
        for name in (TARGET, DRAFT)
    )
    mesh = described_mesh(topology, num_kv_heads=target.config.num_kv_heads, rows=batch)
    layout = Layout.tensor_parallel(mesh)
    if drafter == "window":
        draft = WindowStep(target.config, kernels=kernels, window=WINDOW, sinks=SINKS)
    programs = Programs(
        target=shard_model(target, layout),
        draft=shard_model(draft, layout)
        if drafter != "EAGLE-3"
        else sharded_head_model(target, eagle3_of(target.config).head(), layout),
        mesh=mesh,
        sampling=chain(temperature(0.8), top_p(0.95)),
        batch=batch,
        slots=slots,
        inside=drafter == "window",
    )
    names = ["target step" if drafter == "window" else "draft step", "round"]
    report = compile_report(
        programs, topology=topology, size=K, rule=TokenRule(), names=names, progress=say
    )
    fitting = [program.name for program in report.programs if program.memory is not None]
    return {
        "programs": report.programs,
        "calibrated_ms": {name: report.calibrated_ms(name) for name in fitting},
    }


def windows_table(document: Document) -> Table:
    """Returns the times of plain steps, and of rounds in plain steps."""
    rows: dict[str, dict[str, str]] = {}
    steps: dict[str, Band] = {}
    for (topology, slots, batch, drafter), ms in (
        (key.values(), answer["calibrated_ms"]) for key, answer in answers(document)
    ):
        place = f"{topology}, {slots // 1024}k slots, batch {batch}"
        row = rows.setdefault(place, {"": place, "a step, ms": "does not fit"})
        if "target step" in ms:
            steps[place] = Band(**ms["target step"])
            row["a step, ms"] = str(steps[place])
        if "round" in ms:
            ratio = band_ratio(Band(**ms["round"]), steps[place])
            row[f"a round over a step, {drafter}"] = faster(ratio)
    note = f"K = {K}, {SINKS} sinks and the last {WINDOW} tokens; compiler estimates"
    return Table.of("Rounds of Llama 3.1 8B at long contexts", list(rows.values()), note=note)


STUDY = Study(
    question="How many tokens must a round emit to pay, with a window, a draft model or a head?",
    measure=measure,
    keys=KEYS,
    tables={"windows": Published(["compile_windows"], windows_table)},
)

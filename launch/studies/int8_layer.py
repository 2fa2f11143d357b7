"""Compiles a layer of the paper's target with weights and caches in bfloat16 and in int8.

    python launch/study.py int8_layer --topology=v4:2x2x4 --output=runs/compile_int8_v4.json

A layer is the difference of two layers and one; it scores five tokens, with 2048 slots. Its time is
the longer of streaming and cycles. All numbers are compiler estimates; `specsamp.tpu.int8_time` has
their ratios.
"""

from typing import Any

from launch.lib.study import Document, Published, Study
from specsamp import TransformerLM
from specsamp.analysis.report import Table
from specsamp.machine import version
from specsamp.mesh.layout import Layout
from specsamp.mesh.sharded import shard_model
from specsamp.models.config import chinchilla_70b
from specsamp.models.kernels.dispatch import choose_kernels
from specsamp.tpu.lowering import Programs
from specsamp.tpu.program import Program, measure_program
from specsamp.tpu.topology import described_mesh, parse

BATCHES, SLOTS, TOKENS = (1, 8, 32), 2048, 5
IN_INT8 = {"weight_dtype": "int8", "cache_dtype": "int8"}


def measure(options: Any, say: Any) -> dict[str, Any]:
    """Compiles every call with one layer and with two."""
    chip, _ = parse(options.topology)
    rows = []
    for batch in BATCHES:
        row = {"batch": batch}
        for name, changes in {"bfloat16": {}, "int8": IN_INT8}.items():
            say(f"batch {batch}, {name}")
            one, two = (
                _program(options.topology, batch, num_layers=count, **changes) for count in (1, 2)
            )
            row[name] = {
                "streaming_us": (two.streaming_ms(chip) - one.streaming_ms(chip)) * 1e3,
                "cycles_us": (two.cycles_ms(chip) - one.cycles_ms(chip)) * 1e3,
            }
        rows.append(row)
    return {"kind": "compiler estimate", "libtpu": version("libtpu"), "rows": rows}


def _program(topology: str, batch: int, **changes: Any) -> Program:
    config = chinchilla_70b(**changes)
    mesh = described_mesh(topology, num_kv_heads=config.num_kv_heads, rows=batch)
    model = TransformerLM(config, kernels=choose_kernels("kernel", backend="tpu"))
    model = shard_model(model, Layout.tensor_parallel(mesh))
    programs = Programs(
        target=model, draft=model, mesh=mesh, sampling=None, batch=batch, slots=SLOTS
    )
    return measure_program(
        "layer",
        TOKENS,
        lambda live: 0.0,
        lambda: programs.call(model, TOKENS),
        topology,
        layers=config.num_layers,
    )


def ratio(row: Document) -> float:
    """Returns the time of a layer in int8 over that in bfloat16."""
    return max(row["int8"].values()) / max(row["bfloat16"].values())


def int8_table(*documents: Document) -> Table:
    """Returns the microseconds of a layer, and their ratio."""
    rows = []
    for document in documents:
        for row in document["rows"]:
            shown = {"": f"{document['options']['topology']}, batch {row['batch']}"}
            for name in ("bfloat16", "int8"):
                shown |= {f"{name}, {part[:-3]}": f"{us:.1f}" for part, us in row[name].items()}
            rows.append(shown | {"int8 / bfloat16": f"{ratio(row):.2f}"})
    return Table.of("Microseconds of a layer (compiler estimate)", rows)


STUDY = Study(
    question="Where is a layer with weights and caches in int8 faster than in bfloat16?",
    measure=measure,
    options={"topology": ("v4:2x2x4", "The slice to compile for.")},
    tables={"int8_time": Published(["compile_int8_v4", "compile_int8_v5e"], int8_table)},
)

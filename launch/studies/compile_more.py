"""Parts of the study compile beside its grids of programs: the training step of a head, and tables of other answers.

The training step of an EAGLE-3 head is that of launch/train.py, with AdamW: what it computes it makes again for the
gradient, and logits exist for a ``chunk`` of positions at a time. The other answers are those of launch/compile_report.py,
and those on forms of the loop, whose programs are gone: what they said is on the page of results.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from launch.lib.shapes import eagle3_of
from launch.lib.study import Document, Published, answers
from launch.studies.compile_tables import table
from specsamp.analysis.acceptance import expected_tokens
from specsamp.analysis.report import Table
from specsamp.checkpoints.published import CONFIGS, published_config
from specsamp.decoding.data_shards import DATA
from specsamp.mesh.layout import Layout
from specsamp.models.compiling import is_out_of_memory
from specsamp.models.heads import FeatureHead
from specsamp.models.transformer import TransformerLM
from specsamp.tpu.calibration import ROUNDS_MS, calibrate, ratio, two_digits
from specsamp.tpu.costs import read_report
from specsamp.tpu.measurements import published
from specsamp.tpu.program import Memory
from specsamp.tpu.tables import GIB, faster
from specsamp.tpu.topology import described_mesh, parse
from specsamp.training.eagle import TrainHead
from specsamp.training.trainer import TrainConfig, init_state, state_shardings, train_step

PUBLIC_PAIRS = {
    "qwen_3b": "Qwen2.5 3B + 0.5B, bfloat16",
    "qwen_30b_a3b": "Qwen3 30B-A3B + 0.6B, bfloat16",
    "llama_70b": "Llama 3.1 70B + 3.2 1B, bfloat16",
    "llama_70b_int8": "Llama 3.1 70B + 3.2 1B, int8 weights",
}


def training(
    target: str,
    topology: str,
    data: int,
    rows: int,
    length: int,
    layers: int,
    test_steps: int,
    chunk: int,
    draft_vocab_size: int,
) -> dict[str, Any]:
    """Returns the memory of a device, or why it is not enough.

    Args:
      target: a public checkpoint, cut to ``layers``.
      data: data shards; the devices of one hold a copy together.
      rows, length: of a step, and tokens of a row.
      test_steps: of the training-time test.
    """
    if target not in CONFIGS:
        raise ValueError(f"--change=target={target}: its shape is not known here; choose one of {', '.join(CONFIGS)}")
    whole, mesh = published_config(target), described_mesh(topology, data)
    model = TransformerLM(whole).first(min(layers, whole.num_layers))
    head = dataclasses.replace(eagle3_of(model.config), draft_vocab_size=draft_vocab_size)
    task = TrainHead(head=FeatureHead(head), target=model, test_steps=test_steps, chunk=chunk)
    config = TrainConfig(steps=10_000, batch=rows)
    arguments = step_arguments(task, config, mesh, length)
    outputs = jax.tree.map(lambda x: x.sharding, arguments[0]), NamedSharding(mesh, PartitionSpec())
    step = jax.jit(train_step, static_argnums=(0, 1), donate_argnums=2, out_shardings=outputs)
    chip, _ = parse(topology)
    memory, problem = None, None
    try:
        memory = Memory.of(step.lower(task, config, *arguments).compile(), chip.hbm_bytes // chip.devices)
    except jax.errors.JaxRuntimeError as error:
        if not is_out_of_memory(error):
            raise
        problem = str(error).splitlines()[0]
    return {
        "mesh": dict(mesh.shape),
        "target": {"name": target, "config": model.config},
        "head": head,
        "task": {name: getattr(task, name) for name in ("objective", "test_steps", "decay", "chunk")},
        "train": {"rows": rows, "length": length},
        "memory": memory,
        "fits": memory is not None and memory.fits,
        "out_of_memory": problem,
    }


def step_arguments(task: TrainHead, config: TrainConfig, mesh: jax.sharding.Mesh, length: int) -> tuple:
    """Returns the shapes and shardings of state, teacher and tokens, as the trainer places them."""
    layout = Layout.tensor_parallel(mesh)
    state = jax.eval_shape(lambda: init_state(task, config))
    ids = jnp.arange(task.head.config.draft_vocab_size)
    teacher = jax.eval_shape(lambda key: task.teacher(task.target.init(key), ids), jax.random.key(0))
    tokens = jax.ShapeDtypeStruct((1, config.batch, length + 1), jnp.int32)

    def placed(tree, shardings):
        return jax.tree.map(lambda x, at: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=at), tree, shardings)

    return (
        placed(state, state_shardings(task, config, mesh)),
        placed(teacher, layout.shardings(task.teacher_axes(), teacher)),
        placed(tokens, NamedSharding(mesh, PartitionSpec(None, DATA))),
    )


def head_training(document: Document) -> Table:
    """Returns the memory of a training step of a head, per device."""
    rows = []
    for cell in [document] if "memory" in document else [answer for _, answer in answers(document)]:
        memory, train, target = cell["memory"], cell["train"], cell["target"]
        row = {
            "layers of the target": f"{target['config']['num_layers']} of {published_config(target['name']).num_layers}",
            "steps of the test": cell["task"]["test_steps"],
            "rows x tokens": f"{train['rows']} x {train['length']}",
        }
        if memory:
            row |= {f"{part}, GB": f"{memory[part] / 1e9:.2f}" for part in ("arguments", "temporaries", "code")}
        rows.append(row | {"a device has, GB": f"{memory['capacity'] / 1e9:.0f}" if memory else "does not fit"})
    return table("A training step of an EAGLE-3 head, per device", rows)


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


TABLES = {
    "chinchilla": Published(["compile_chinchilla_v4"], chinchilla),
    "head_training": Published(["compile_head_training"], head_training),
    "public_pairs": Published([f"compile_{name}_v5e" for name in PUBLIC_PAIRS], public_pairs),
    "variants": Published(["compile_variants"], variants),
}

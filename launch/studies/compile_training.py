"""Compiles the training step of an EAGLE-3 head, its target's forward pass in it; a grid of the study compile.

The step is that of launch/train.py, with AdamW: what it computes it makes again for the gradient, and logits exist for
a ``chunk`` of positions at a time. Memory is the compiler's, per device; nothing runs.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from launch.lib.shapes import eagle3_of
from launch.lib.study import Document
from launch.studies.compile_tables import answers, table
from specsamp.analysis.report import Table
from specsamp.checkpoints.published import CONFIGS, published_config
from specsamp.decoding.data_shards import DATA
from specsamp.mesh.layout import Layout
from specsamp.models.compiling import is_out_of_memory
from specsamp.models.heads import FeatureHead
from specsamp.models.transformer import TransformerLM
from specsamp.tpu.program import Memory
from specsamp.tpu.topology import described_mesh, parse
from specsamp.training.eagle import TrainHead
from specsamp.training.trainer import TrainConfig, init_state, state_shardings, train_step


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
        parts = {"arguments, GB": "arguments", "temporaries, GB": "temporaries", "code, GB": "code"}
        if memory:
            row |= {label: f"{memory[name] / 1e9:.2f}" for label, name in parts.items()}
        rows.append(row | {"a device has, GB": f"{memory['capacity'] / 1e9:.0f}" if memory else "does not fit"})
    return table("A training step of an EAGLE-3 head, per device", rows)

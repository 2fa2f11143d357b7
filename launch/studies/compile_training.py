"""Compiles the training step of an EAGLE-3 head, its target's forward pass in it, for a TPU slice that is described.

    python launch/studies/compile_training.py --topology=v5p:2x2x4 --output=runs/compile_head_training.json
    python launch/studies/compile_training.py --layers=7     # a target of seven layers, sooner
    python launch/studies/compile_training.py --test_steps=1    # beside the first: what a step of the test takes

The step is that of launch/train.py, with AdamW: what it computes it makes again for the gradient (``test_time.chunk``), and
logits exist for a chunk of positions at a time. Memory is the compiler's, per device; nothing ran.
"""

import dataclasses
import time

import jax
import jax.numpy as jnp
from absl import flags

jax.config.update("jax_platforms", "cpu")  # arrays stay here; only the compiler is a TPU's

from jax.sharding import NamedSharding, PartitionSpec

from launch.lib import entry
from specsamp.analysis.report import Table, version
from specsamp.checkpoints.published import published_config
from specsamp.decoding.data_shards import DATA
from specsamp.mesh.layout import Layout
from specsamp.models.compiling import is_out_of_memory
from specsamp.models.eagle import Eagle3Config, default_layers
from specsamp.models.heads import FeatureHead
from specsamp.models.transformer import TransformerLM
from specsamp.tpu.program import Memory
from specsamp.tpu.topology import described_mesh, parse
from specsamp.training.eagle import TrainHead
from specsamp.training.trainer import TrainConfig, init_state, state_shardings, train_step

_TARGET = flags.DEFINE_string("target", "meta-llama/Llama-3.1-8B", "The target, by its public name.")
_TOPOLOGY = flags.DEFINE_string("topology", "v5p:2x2x4", "The slice: a chip and the number of chips along each axis.")
_DATA = flags.DEFINE_integer("data", 4, "Data shards; the devices of one hold a copy together.", lower_bound=1)
_BATCH = flags.DEFINE_integer("batch", 16, "Rows per step.", lower_bound=1)
_LENGTH = flags.DEFINE_integer("length", 2048, "Tokens of a row.", lower_bound=2)
_STEPS = flags.DEFINE_integer("test_steps", 7, "Steps of the training-time test.", lower_bound=1)
_CHUNK = flags.DEFINE_integer("chunk", 256, "Positions whose logits exist at a time.", lower_bound=1)
_DRAFT_VOCAB = flags.DEFINE_integer("draft_vocab_size", 32000, "Tokens that the head can draft.", lower_bound=1)
_LAYERS = flags.DEFINE_integer("layers", None, "Cut the target to so many layers. Default: all.", lower_bound=7)
_OUTPUT = entry.define_output()


def main() -> None:
    console = entry.make_console()
    entry.check_output(_OUTPUT.value)
    try:
        mesh = described_mesh(_TOPOLOGY.value, _DATA.value)
    except RuntimeError as error:  # no libtpu
        raise ValueError(str(error)) from error
    task, config = make_task(), TrainConfig(steps=10_000, batch=_BATCH.value)
    arguments = step_arguments(task, config, mesh)
    replicated = NamedSharding(mesh, PartitionSpec())
    outputs = (jax.tree.map(lambda x: x.sharding, arguments[0]), replicated)
    step = jax.jit(train_step, static_argnums=(0, 1), donate_argnums=2, out_shardings=outputs)
    chip, _ = parse(_TOPOLOGY.value)
    with entry.progress(console, "compiling"):
        start, start_cpu = time.perf_counter(), time.process_time()
        lowered = step.lower(task, config, *arguments)
        memory, problem = None, None
        try:
            memory = memory_of(lowered.compile(), chip.hbm_bytes // chip.devices)
        except jax.errors.JaxRuntimeError as error:
            if not is_out_of_memory(error):
                raise
            problem = str(error).splitlines()[0]
        seconds, cpu_seconds = time.perf_counter() - start, time.process_time() - start_cpu
    document = {
        "kind": "compiler estimate",
        "libtpu": version("libtpu"),
        "topology": _TOPOLOGY.value,
        "mesh": dict(mesh.shape),
        "target": {"name": _TARGET.value, "config": task.target.config},
        "head": task.head.config,
        "task": {name: getattr(task, name) for name in ("objective", "test_steps", "decay", "chunk")},
        "train": {"rows": _BATCH.value, "length": _LENGTH.value},
        "memory": memory,
        "fits": memory is not None and memory.fits,
        "out_of_memory": problem,
        "compile_seconds": seconds,
        "compile_cpu_seconds": cpu_seconds,  # of all cores, whatever else the machine does
    }
    entry.show([table(document, memory)], console)
    entry.write_result(_OUTPUT.value, document, console)


def make_task() -> TrainHead:
    """Returns the training of a head of the target's own shape, with one layer and a reduced vocabulary."""
    target = published_config(_TARGET.value)
    layers = _LAYERS.value or target.num_layers
    layer = dataclasses.replace(target, num_layers=1, tied=False)
    head = Eagle3Config(
        layer=layer,
        target_layers=layers,
        hidden_layers=default_layers(layers),
        draft_vocab_size=_DRAFT_VOCAB.value,
        own_output=True,
    )
    model = TransformerLM(dataclasses.replace(target, num_layers=layers))
    return TrainHead(head=FeatureHead(head), target=model, test_steps=_STEPS.value, chunk=_CHUNK.value)


def step_arguments(task: TrainHead, config: TrainConfig, mesh: jax.sharding.Mesh) -> tuple:
    """Returns the shapes and shardings of state, teacher and tokens, as the trainer places them."""
    layout = Layout.tensor_parallel(mesh)
    state = jax.eval_shape(lambda: init_state(task, config))
    ids = jnp.arange(task.head.config.draft_vocab_size)
    teacher = jax.eval_shape(lambda key: task.teacher(task.target.init(key), ids), jax.random.key(0))
    tokens = jax.ShapeDtypeStruct((1, _BATCH.value, _LENGTH.value + 1), jnp.int32)

    def placed(tree, shardings):
        return jax.tree.map(lambda x, at: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=at), tree, shardings)

    return (
        placed(state, state_shardings(task, config, mesh)),
        placed(teacher, layout.shardings(task.teacher_axes(), teacher)),
        placed(tokens, NamedSharding(mesh, PartitionSpec(None, DATA))),
    )


def memory_of(compiled: jax.stages.Compiled, capacity: int) -> Memory:
    """Returns the bytes that a device needs."""
    told = compiled.memory_analysis()
    return Memory(
        arguments=told.argument_size_in_bytes,
        temporaries=told.temp_size_in_bytes,
        outputs=told.output_size_in_bytes - told.alias_size_in_bytes,
        code=told.generated_code_size_in_bytes,
        capacity=capacity,
    )


def table(document: dict, memory: Memory | None) -> Table:
    """Returns the memory of a device, or that it is not enough."""
    title = f"A training step of an EAGLE-3 head for {_TARGET.value}, {_TOPOLOGY.value}, per device"
    if memory is None:
        return Table(title=title, header=("", "GB"), rows=[("does not fit", document["out_of_memory"])])
    parts = dataclasses.asdict(memory) | {"together": memory.total}
    return Table(title=title, header=("", "GB"), rows=[(name, f"{size / 1e9:.2f}") for name, size in parts.items()])


if __name__ == "__main__":
    entry.run(main)

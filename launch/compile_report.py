"""Compiles a pair for a TPU slice, without the slice: memory, traffic, collectives, and an estimate
of the time.

    pip install libtpu                                            # Linux on x86-64
    python launch/compile_report.py --config=configs/chinchilla.py --topology=v4:2x2x4
    python launch/compile_report.py --config=configs/hf.py:qwen-3b --topology=v5e:1x1
    python launch/compile_report.py --config=configs/chinchilla.py --config.drafter=early_exit \\
        --config.exit_layer=10
    python launch/compile_report.py --config=configs/hf.py:llama-8b-eagle3 --topology=v5e:2x2
    python launch/compile_report.py --config=configs/hf.py:llama-8b-eagle3 --topology=v5e:2x2 \\
        --config.tree=4,2,1 --config.rule=recursive
    python launch/compile_report.py --config=configs/chinchilla.py --config.target.num_layers=4

The shape of a head comes from its folder, from this package, or from the published checkpoint of
its target; any other head has the shape of EAGLE-3, with the 32,000 most frequent tokens. The mesh
has all devices of the topology: ``config.mesh.data`` data shards, with one replica of the target
over the devices of a shard. All numbers are compiler estimates: nothing runs. launch/plan.py
--compile_report reads the file of --output, and forecasts milliseconds per token by acceptance.
"""

import dataclasses
import math

import jax
from absl import flags
from rich.console import Console

jax.config.update("jax_platforms", "cpu")  # arrays stay here; only the compiler is a TPU's

from launch.lib import entry
from launch.lib.fields import NOT_COMPILED, ExperimentConfig, ExperimentFlag
from launch.lib.rules import make_rule
from launch.lib.shapes import head_of, target_and_draft
from specsamp import TransformerLM
from specsamp.machine import version
from specsamp.mesh.layout import Layout
from specsamp.mesh.sharded import draft_layout, shard_model
from specsamp.models.kernels.dispatch import choose_kernels
from specsamp.tpu import pair_report
from specsamp.tpu.calibration import fit_published
from specsamp.tpu.lowering import Programs, WindowStep, sharded_head_model
from specsamp.tpu.topology import CHIPS, described_mesh, parse

_CONFIG = ExperimentFlag("configs/chinchilla.py")
_TOPOLOGY = flags.DEFINE_string(
    "topology",
    "v4:2x2x4",
    "The slice to compile for: a chip and the number of chips along each axis.",
)
_SLOTS = flags.DEFINE_integer(
    "slots", 2048, "Slots of the caches, which is the longest text in tokens.", lower_bound=16
)
_OUTPUT = entry.define("output")


def main() -> None:
    console = entry.make_console()
    config = _CONFIG.read(NOT_COMPILED, "a report is of --slots, and nothing is decoded")
    if config.word.draft is None:
        why = f"drafter={config.drafter} lies as the target"
        _CONFIG.refuse_fields(["mesh.draft_model_parallelism"], why)
    entry.check_result(_OUTPUT.value)
    programs = programs_of(config, console)
    head, prefills = programs.head, config.word.draft == "model"
    with entry.progress(console, "compiling") as say:
        report = pair_report.compile_report(
            programs,
            topology=_TOPOLOGY.value,
            size=config.size,
            rule=make_rule(config.rule),
            names=[name for name in pair_report.NAMES if prefills or name != "draft prefill"],
            progress=lambda text: say(f"compiling: {text}"),
        )
    entry.show(pair_report.report_tables(report, *programs.bytes_of_state()), console)
    models = programs.target, programs.draft
    if any(model.kernels and model.config.window for model in models):
        told = "layers with a window are counted with all slots; kernels read the window alone"
        console.print(told, style="yellow")
    document = {
        "kind": "compiler estimate",
        "config": config.recorded,
        "libtpu": version("libtpu"),
        "models": {"target": programs.target.config, "draft": (head or programs.draft).config},
        "head": None if head is None else head.config.kind,
        "report": report,
        "calibration": fit_published(),
        "calibrated_ms": {
            p.name: report.calibrated_ms(p.name) for p in report.programs if p.memory is not None
        },
    }
    entry.write_result(_OUTPUT.value, document, console)


def programs_of(config: ExperimentConfig, console: Console) -> Programs:
    """Returns the programs of the configuration's pair on the slice; ValueError for unsupported
    drafters.
    """
    word = config.word
    if not word.compiled:
        raise ValueError(
            "a report is of a draft model, a head, an early exit or a window; --config.drafter is "
            f"{config.drafter}"
        )
    target, draft = (model and with_kernels(model, config) for model in target_and_draft(config))
    shape = head_of(config, target.config) if word.draft == "head" else None
    head = shape and shape.head()
    if config.drafter == "window":
        fields = target.config, target.weight_order, target.kernels
        draft = WindowStep(*fields, window=config.window, sinks=config.sinks)
    chip, sizes = parse(_TOPOLOGY.value)
    num_devices = math.prod(sizes) * chip.devices // config.mesh.data
    if "mesh.model" in _CONFIG.fields_set and config.mesh.model != num_devices:
        raise ValueError(
            f"--config.mesh.model={config.mesh.model}: a mesh of data {config.mesh.data} has "
            f"{num_devices} of the devices of --topology={_TOPOLOGY.value} for each copy"
        )
    parallelism = config.mesh.draft_model_parallelism
    if not parallelism and word.draft == "model":
        heads = draft.config.num_heads
        parallelism = math.gcd(heads, num_devices)
        if parallelism < num_devices:
            console.print(
                f"the draft's {heads} heads go over {parallelism} of the {num_devices} devices"
            )
    parallelism = None if parallelism in (0, num_devices) else parallelism
    mesh = described_mesh(
        _TOPOLOGY.value,
        config.mesh.data,
        draft_model_parallelism=parallelism,
        num_kv_heads=target.config.kv_heads_of_all,
        rows=config.batch // config.mesh.data,
    )
    if head is not None:
        console.print(f"the head is of the kind {head.config.kind}")
    layout = draft_layout(mesh, parallelism if word.draft else None)
    return Programs(
        target=shard_model(target, Layout.tensor_parallel(mesh)),
        draft=shard_model(draft, layout)
        if head is None
        else sharded_head_model(target, head, layout),
        mesh=mesh,
        sampling=config.sampling.warp(),
        batch=config.batch,
        slots=_SLOTS.value,
        inside=word.draft is None,
    )


def with_kernels(model: TransformerLM, config: ExperimentConfig) -> TransformerLM:
    """Returns the model with the attention of ``config.attention`` on a TPU."""
    # Whose compiler refuses them.
    is_old = config.attention == "auto" and parse(_TOPOLOGY.value)[0] == CHIPS["v3"]
    kernels = None if is_old else choose_kernels(config.attention, backend="tpu")
    return dataclasses.replace(model, weight_order="default", kernels=kernels)


if __name__ == "__main__":
    entry.run(main, _CONFIG)

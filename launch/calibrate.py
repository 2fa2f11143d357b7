"""Measures on the devices at hand what estimates for a TPU rest on; compile_report.py and plan.py then prefer it.

    python launch/calibrate.py --output=runs/calibration.json
    python launch/compile_report.py --config=configs/hf.py:qwen-3b --topology=v5e:1x1 --calibration=runs/calibration.json
    python launch/calibrate.py --dry_run --topology=v5e:4x4      # says what it would do there

Measured are the bandwidth that is reached, the launch of a call, all-reduces by size and along each axis of the slice,
and steps of small decoders with random weights. Each step stands beside what the calibration makes of it, and on a TPU
beside the forecast from published measurements. Minutes on a TPU, less than one on a CPU. What is measured on one slice
serves that slice: another chip or another shape is refused.
"""

import dataclasses
import math
from collections.abc import Sequence

import jax
from absl import flags

from launch.lib import entry
from launch.lib.experiment import bare_pair
from specsamp import machine
from specsamp.analysis.report import Table
from specsamp.mesh.layout import make_mesh
from specsamp.models.config import TransformerConfig
from specsamp.models.transformer import TransformerLM
from specsamp.tpu import own
from specsamp.tpu.calibration import estimate
from specsamp.tpu.shapes import Shape
from specsamp.tpu.topology import CHIPS, Chip, parse

_DRY_RUN = flags.DEFINE_bool("dry_run", False, "Print what would be measured, and measure nothing.")
_TOPOLOGY = flags.DEFINE_string(
    "topology", None, "The slice to assume, such as v5e:4x4; goes with --dry_run. Default: the devices at hand."
)
_OUTPUT = entry.define_output()

SIZES = (16 * 2**10, 2**20)  # bytes of an all-reduce: of one row's activations, and of many rows'
SLOTS = 512


@dataclasses.dataclass(frozen=True, kw_only=True)
class Scale:
    """Says how large the measured programs are."""

    read_bytes: int  # of each device, in one turn
    width: int
    layers: tuple[int, ...]
    batches: tuple[int, ...]
    dtype: str
    repeats: int


USELESS = 0.5  # relative error of steps that were left out
ON_TPU = Scale(read_bytes=2**29, width=4096, layers=(2, 6), batches=(1, 4, 16), dtype="bfloat16", repeats=7)
ON_CPU = Scale(read_bytes=2**23, width=256, layers=(2, 6), batches=(1, 4), dtype="float32", repeats=3)


def main() -> None:
    console = entry.make_console()
    entry.check_output(_OUTPUT.value)
    if _TOPOLOGY.value and not _DRY_RUN.value:
        raise ValueError(f"--topology={_TOPOLOGY.value} goes with --dry_run: what is measured are the devices at hand")
    if _TOPOLOGY.value:
        described, sizes = parse(_TOPOLOGY.value)
        entry.show([plan_table(ON_TPU, math.prod(sizes) * described.devices, sizes, _TOPOLOGY.value)], console)
        return
    device, sizes = jax.devices()[0], machine.extent(jax.devices())
    scale, chip = ON_TPU if device.platform == "tpu" else ON_CPU, machine.chip_of(device)
    entry.show([plan_table(scale, jax.device_count(), sizes, devices_here())], console)
    if _DRY_RUN.value:
        return
    with entry.progress(console, "calibrating") as say:
        say("bandwidth")
        reached, launch = own.bandwidth(scale.read_bytes), own.launch_ms()
        known = CHIPS.get(chip) or Chip(
            0, reached, math.inf, reached, math.nan
        )  # what is no TPU has no data sheet here
        collectives = []
        for along in own.groups(sizes):
            for size in SIZES:
                say(f"all-reduce of {size} bytes over {over(sizes, along)}")
                collectives.append(own.all_reduce(sizes, along, size))
        steps = []
        for layers in scale.layers:
            pair, config = small_decoder(scale, layers, jax.device_count())
            for batch in scale.batches:
                say(f"decoding, {layers} layers, batch {batch}")
                took = own.step_ms(pair, batch, SLOTS, scale.repeats)
                work = Shape.of(config).call(
                    known, sizes, rows=batch, context=SLOTS, weights=scale.dtype, cache=scale.dtype
                )
                steps.append({"layers": layers, "batch": batch, "ms": took, "work": work})
    rate = known.hbm_bytes_per_second / known.devices
    timed = [(step["work"], step["ms"].median) for step in steps]
    found = own.fit_own(reached, rate, known.link_bytes_per_second, collectives, timed)
    fitted = [(step, found.milliseconds(step["work"])) for step in steps]
    entry.show([measured_table(chip, reached, rate, launch, sizes, collectives, fitted)], console)
    hiding = f", overlap {found.overlap:g} ({found.least_overlap:g} at least)" if collectives else ""
    console.print(
        f"{found.efficiency:.0%} of the rate, {found.call_ms:.3f} ms per call, {found.sequence_us:.2f} us per layer and "
        f"sequence, collectives of {found.collective_us:.1f} us + {found.hop_us:.1f} us per hop + {found.wire:.2f} x the "
        f"time of their bytes{hiding}; steps that were left out within {math.expm1(found.error):.0%}"
    )
    if found.error > math.log1p(USELESS):
        told = "these numbers are of little use: leave the devices idle, and run again"
        console.print(f"Steps that were left out are off by more than {USELESS:.0%}: {told}", style="bold red")
    if chip not in CHIPS:
        console.print(f"{chip} is no TPU: compile reports are of TPUs and will refuse this calibration")
    document = {
        "kind": "calibration",
        "devices": {"chip": chip, "count": jax.device_count(), "slice": list(sizes)},
        "measured": {
            "bytes_per_second": reached,
            "launch_ms": launch,
            "all_reduces": collectives,
            "steps": steps,
        },
        "calibration": found,
    }
    entry.write_result(_OUTPUT.value, document, console)


def over(sizes: Sequence[int], along: Sequence[int]) -> str:
    """Names the chips of an all-reduce: "4x4 chips (axes 0, 1)"."""
    return f"{'x'.join(str(sizes[axis]) for axis in along)} chips (axes {', '.join(map(str, along))})"


def small_decoder(scale: Scale, layers: int, devices: int) -> tuple:
    """Makes a decoder with random weights over all devices; its draft is not called."""
    heads = math.lcm(scale.width // 64, devices)
    config = TransformerConfig(
        vocab_size=4096,
        width=scale.width,
        num_layers=layers,
        num_heads=heads,
        head_size=64,
        feedforward_width=math.lcm(4 * scale.width, devices),
        positions="rotary",
        gated=True,
        activation="silu",
        dtype=scale.dtype,
    )
    model = TransformerLM.for_backend(config)
    mesh = make_mesh(1, devices) if devices > 1 else None
    return bare_pair(model, TransformerLM.for_backend(dataclasses.replace(config, num_layers=1)), 0, mesh=mesh), config


def devices_here() -> str:
    """Names the devices at hand, for people."""
    return f"{jax.device_count()} x {jax.devices()[0].device_kind}"


def plan_table(scale: Scale, devices: int, sizes: tuple[int, ...], where: str) -> Table:
    """Returns what is going to be measured."""
    groups = ", ".join(over(sizes, along) for along in own.groups(sizes)) or "none: one chip"
    rows = [
        ("bandwidth", f"{scale.read_bytes / 2**20:.0f} MiB on each device, read for {own.SECONDS} s"),
        ("launch", "a program of one addition, 200 times"),
        ("all-reduces", f"of {' and '.join(f'{size // 1024} KiB' for size in SIZES)} over {groups}"),
        (
            "decoding",
            f"width {scale.width}, {' and '.join(map(str, scale.layers))} layers, {scale.dtype}, batch "
            f"{', '.join(map(str, scale.batches))}, {SLOTS} slots, over {devices} devices, {scale.repeats} times",
        ),
    ]
    return Table(title=f"Calibration of {where}", header=("", "what is measured"), rows=rows, left=2)


def measured_table(
    chip: str, reached: float, rate: float, launch: float, sizes: tuple[int, ...], collectives: list, steps: list
) -> Table:
    """Returns what was measured; steps beside what the calibration makes of them, and beside the published forecast."""
    rows = [
        ("bandwidth of a device", f"{reached / 1e9:.3g} GB/s of {rate / 1e9:.3g}", "", ""),
        ("launch of a program", f"{launch * 1e3:.3g} us", "", ""),
    ]
    rows += [
        (f"all-reduce of {one.bytes // 1024} KiB, {over(sizes, one.along)}", f"{one.microseconds:.3g} us", "", "")
        for one in collectives
    ]
    for step, fitted in steps:
        name, ms = f"a step, {step['layers']} layers, batch {step['batch']}", step["ms"].median
        band = estimate(chip, step["work"]) if chip in CHIPS else None
        forecast = "" if band is None else f"{band} ms" + ", outside" * (not band.covers(ms))
        rows.append((name, f"{ms:.3g} ms", f"{fitted:.3g} ms", forecast))
    header = ("", "measured", "fitted", "forecast, from published measurements")
    return Table(title=f"Measured on {devices_here()}", header=header, rows=rows)


if __name__ == "__main__":
    entry.run(main)

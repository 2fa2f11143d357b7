"""Measures the numbers behind estimates on the devices at hand; compile_report.py and plan.py then prefer them.

    python launch/calibrate.py --output=runs/calibration.json
    python launch/compile_report.py --config=configs/hf.py:qwen-3b --topology=v5e:1x1 --calibration=runs/calibration.json

It measures the memory bandwidth, all-reduces by size and along each axis of the slice, and steps of small decoders
with random weights. It shows each step with its fit, and on a TPU with the forecast from
published measurements. That takes minutes on a TPU, less than one on a CPU. A calibration serves the slice that it was
measured on: another chip or another shape is refused.
"""

import dataclasses
import math
from collections.abc import Sequence

import jax

from launch.lib import entry
from launch.lib.experiment import bare_pair
from specsamp import machine
from specsamp.analysis.report import Table
from specsamp.mesh.layout import make_mesh
from specsamp.models.config import TransformerConfig
from specsamp.models.transformer import TransformerLM
from specsamp.tpu import own
from specsamp.tpu.calibration import estimate
from specsamp.tpu.topology import CHIPS, Chip
from specsamp.tpu.work import Shape

_OUTPUT = entry.define_output()

SIZES = (16 * 2**10, 2**20)  # bytes of an all-reduce: of one row's activations, and of many rows'
SLOTS, LAYERS = 512, (2, 6)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Scale:
    """The sizes of the measured programs."""

    read_bytes: int  # of each device, in one turn
    width: int
    batches: tuple[int, ...]
    dtype: str
    repeats: int


USELESS = 0.5  # relative error of steps that were left out of the fit
ON_TPU = Scale(read_bytes=2**29, width=4096, batches=(1, 4, 16), dtype="bfloat16", repeats=7)
ON_CPU = Scale(read_bytes=2**23, width=256, batches=(1, 4), dtype="float32", repeats=3)


def main() -> None:
    console = entry.make_console()
    entry.check_output(_OUTPUT.value)
    device, sizes = jax.devices()[0], machine.extent(jax.devices())
    scale, chip = ON_TPU if device.platform == "tpu" else ON_CPU, machine.chip_of(device)
    reductions = [(along, size) for along in own.groups(sizes) for size in SIZES]
    with entry.progress(console, "calibrating") as say:
        say("bandwidth")
        reached = own.bandwidth(scale.read_bytes)
        known = CHIPS.get(chip) or Chip(0, reached, math.inf, reached, math.nan)  # no data sheet here
        collectives = []
        for along, size in reductions:
            say(f"all-reduce of {size} bytes over {over(sizes, along)}")
            collectives.append(own.all_reduce(sizes, along, size))
        steps = []
        for layers in LAYERS:
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
    entry.show([measured_table(chip, reached, rate, sizes, collectives, fitted)], console)
    console.print(f"steps that were left out of the fit are off by up to {math.expm1(found.error):.0%}")
    if found.error > math.log1p(USELESS):
        console.print("These numbers are of little use: leave the devices idle, and run again", style="bold red")
    if chip not in CHIPS:
        console.print(f"{chip} is no TPU: compile reports are of TPUs and will refuse this calibration")
    document = {
        "kind": "calibration",
        "devices": {"chip": chip, "count": jax.device_count(), "slice": list(sizes)},
        "measured": {"bytes_per_second": reached, "all_reduces": collectives, "steps": steps},
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


def measured_table(
    chip: str, reached: float, rate: float, sizes: tuple[int, ...], collectives: list, steps: list
) -> Table:
    """Returns the measurements; steps with the fitted calibration and the published forecast."""
    rows = [
        ("bandwidth of a device", f"{reached / 1e9:.3g} GB/s of {rate / 1e9:.3g}", "", ""),
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
    return Table(title=f"Measured on {jax.device_count()} x {jax.devices()[0].device_kind}", header=header, rows=rows)


if __name__ == "__main__":
    entry.run(main)

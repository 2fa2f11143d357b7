"""Fits the numbers behind estimates on the devices at hand; compile_report.py and plan.py then prefer them.

    python launch/calibrate.py --output=runs/calibration.json
    python launch/compile_report.py --config=configs/hf.py:qwen-3b --topology=v5e:1x1 --calibration=runs/calibration.json

It times steps of small decoders with random weights, and fits the formula of `specsamp.tpu.calibration` on them. It shows
each step with its fit, and on a TPU with the forecast from published measurements. That takes minutes on a TPU, less than
one on a CPU. A calibration serves the slice that it was measured on: another chip or another shape is refused.
"""

import dataclasses
import math
from collections.abc import Sequence

import jax

from launch.lib import entry
from launch.lib.experiment import bare_pair
from specsamp import machine
from specsamp.analysis.report import Table
from specsamp.analysis.workload import Quartiles, Workload, decode_in_turns, decoders
from specsamp.decoding.drafters import NoDrafter
from specsamp.decoding.method import Method
from specsamp.decoding.pair import Pair
from specsamp.mesh.layout import make_mesh
from specsamp.models.config import TransformerConfig
from specsamp.models.transformer import TransformerLM
from specsamp.sampling.warp import chain, temperature, top_p
from specsamp.tpu.calibration import estimate, fit_own
from specsamp.tpu.topology import CHIPS, Chip
from specsamp.tpu.work import Shape

_OUTPUT = entry.define_output()

PROMPT, NEW_TOKENS, SLOTS, LAYERS = 16, 64, 512, (2, 6)
NO_DATA_SHEET = Chip(0, 1e12, math.inf, 1e12, math.nan)  # faster than any CPU


@dataclasses.dataclass(frozen=True, kw_only=True)
class Scale:
    """The sizes of the measured programs."""

    width: int
    batches: tuple[int, ...]
    dtype: str
    repeats: int


USELESS = 0.5  # relative error of steps that were left out of the fit
ON_TPU = Scale(width=4096, batches=(1, 4, 16), dtype="bfloat16", repeats=7)
ON_CPU = Scale(width=256, batches=(1, 4), dtype="float32", repeats=3)


def main() -> None:
    console = entry.make_console()
    entry.check_output(_OUTPUT.value)
    device, sizes = jax.devices()[0], machine.extent(jax.devices())
    scale, chip = ON_TPU if device.platform == "tpu" else ON_CPU, machine.chip_of(device)
    known, steps = CHIPS.get(chip, NO_DATA_SHEET), []
    with entry.progress(console, "calibrating") as say:
        for layers in LAYERS:
            pair, config = small_decoder(scale, layers, jax.device_count())
            for batch in scale.batches:
                say(f"decoding, {layers} layers, batch {batch}")
                types = {"weights": scale.dtype, "cache": scale.dtype}
                work = Shape.of(config).call(known, sizes, rows=batch, context=SLOTS, **types)
                steps.append(
                    {"layers": layers, "batch": batch, "ms": step_ms(pair, batch, scale.repeats), "work": work}
                )
    found = fit_own([(step["work"], step["ms"].median) for step in steps])
    entry.show([measured_table(chip, [(step, found.milliseconds(step["work"])) for step in steps])], console)
    console.print(f"steps that were left out of the fit are off by up to {math.expm1(found.error):.0%}")
    if found.error > math.log1p(USELESS):
        console.print("These numbers are of little use: leave the devices idle, and run again", style="bold red")
    if chip not in CHIPS:
        console.print(f"{chip} is no TPU: compile reports are of TPUs and will refuse this calibration")
    document = {
        "kind": "calibration",
        "devices": {"chip": chip, "count": jax.device_count(), "slice": list(sizes)},
        "measured": {"steps": steps},
        "calibration": found,
    }
    entry.write_result(_OUTPUT.value, document, console)


def step_ms(pair: Pair, batch: int, repeats: int) -> Quartiles:
    """Returns the milliseconds of a step of plain decoding, nothing but the loop in them."""
    work = Workload(batch=batch, prompt_length=PROMPT, max_new_tokens=NEW_TOKENS, repeats=repeats)
    plain = Method(drafter=NoDrafter(), sampling=chain(temperature(0.8), top_p(0.95)))
    sides = decoders(pair, {"plain": plain}, work, least_length=SLOTS - NEW_TOKENS)
    timings = decode_in_turns(sides, repeats)["plain"]
    return Quartiles.of([timing.loop_seconds / timing.rounds * 1e3 for timing in timings])


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


def measured_table(chip: str, steps: Sequence[tuple[dict, float]]) -> Table:
    """Returns the measured steps, with the fitted calibration and the published forecast."""
    rows = []
    for step, fitted in steps:
        name, ms = f"a step, {step['layers']} layers, batch {step['batch']}", step["ms"].median
        band = estimate(chip, step["work"]) if chip in CHIPS else None
        forecast = "" if band is None else f"{band} ms" + ", outside" * (not band.covers(ms))
        rows.append((name, f"{ms:.3g} ms", f"{fitted:.3g} ms", forecast))
    header = ("", "measured", "fitted", "forecast, from published measurements")
    return Table(title=f"Measured on {jax.device_count()} x {jax.devices()[0].device_kind}", header=header, rows=rows)


if __name__ == "__main__":
    entry.run(main)

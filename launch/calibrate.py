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

_OUTPUT = entry.define("output")

WIDTH, NARROW = 4096, 256  # of a decoder; of one on a CPU, where the command can be tried
LAYERS, BATCHES, DTYPE, REPEATS = (2, 6), (1, 4, 16), "bfloat16", 7
PROMPT, NEW_TOKENS, SLOTS = 16, 64, 512
NO_DATA_SHEET = Chip(0, 1e12, math.inf, 1e12, math.nan)  # faster than any CPU
USELESS = 0.5  # relative error of steps that were left out of the fit


def main() -> None:
    console = entry.make_console()
    entry.check_output(_OUTPUT.value)
    chip, sizes, steps = machine.chip_of(jax.devices()[0]), machine.extent(jax.devices()), []
    known, width = (CHIPS[chip], WIDTH) if chip in CHIPS else (NO_DATA_SHEET, NARROW)
    with entry.progress(console, "calibrating") as say:
        for layers in LAYERS:
            pair, config = small_decoder(width, layers, jax.device_count())
            for batch in BATCHES:
                say(f"decoding, {layers} layers, batch {batch}")
                work = Shape.of(config).call(known, sizes, rows=batch, context=SLOTS, weights=DTYPE, cache=DTYPE)
                steps.append({"layers": layers, "batch": batch, "ms": step_ms(pair, batch), "work": work})
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


def step_ms(pair: Pair, batch: int) -> Quartiles:
    """Returns the milliseconds of a step of plain decoding, nothing but the loop in them."""
    work = Workload(batch=batch, prompt_length=PROMPT, max_new_tokens=NEW_TOKENS, repeats=REPEATS)
    plain = Method(drafter=NoDrafter(), sampling=chain(temperature(0.8), top_p(0.95)))
    sides = decoders(pair, {"plain": plain}, work, least_length=SLOTS - NEW_TOKENS)
    timings = decode_in_turns(sides, REPEATS)["plain"]
    return Quartiles.of([timing.loop_seconds / timing.rounds * 1e3 for timing in timings])


def small_decoder(width: int, layers: int, devices: int) -> tuple:
    """Makes a decoder with random weights over all devices; its draft is not called."""
    heads = math.lcm(width // 64, devices)
    config = TransformerConfig(
        vocab_size=4096,
        width=width,
        num_layers=layers,
        num_heads=heads,
        head_size=64,
        feedforward_width=math.lcm(4 * width, devices),
        positions="rotary",
        gated=True,
        activation="silu",
        dtype=DTYPE,
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

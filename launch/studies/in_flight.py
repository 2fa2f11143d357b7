"""Asks the compiler what is prefetched while collectives run: are they hidden under the streaming of weights?

    python launch/studies/in_flight.py --output=runs/compile_in_flight.json

Steps of eight layers at full width, one token for each row. A collective during which weights are on their way for
longer than it takes costs nothing. Minutes on two cores; nothing runs on a TPU.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax

jax.config.update("jax_platforms", "cpu")  # arrays stay here; only the compiler is a TPU's

import numpy as np

from launch.lib import entry
from specsamp.analysis.report import Table, version
from specsamp.checkpoints.published import published_config
from specsamp.models.compiling import FEWEST_COLLECTIVES
from specsamp.tpu.programs import WINDOW
from specsamp.tpu.stack import Stack
from specsamp.tpu.topology import CHIPS, described_mesh
from specsamp.tpu.traffic import in_flight

_OUTPUT = entry.define_output()

LAYERS = 8
PROGRAMS = (
    dict(model="meta-llama/Llama-3.1-70B", weights="int8", topology="v5e:4x4", data=1, batch=8),
    dict(model="meta-llama/Llama-3.1-70B", weights="int8", topology="v5e:4x4", data=2, batch=8),
    dict(model="meta-llama/Llama-3.1-70B", weights="bfloat16", topology="v5e:4x4", data=1, batch=1),
    dict(model="meta-llama/Llama-3.1-8B", weights="bfloat16", topology="v5e:2x2", data=1, batch=1),
    dict(model="meta-llama/Llama-3.2-1B", weights="bfloat16", topology="v5e:2x2", data=1, batch=1),
)


def main() -> None:
    console = entry.make_console()
    entry.check_output(_OUTPUT.value)
    cells = []
    with entry.progress(console, "compiling") as say:
        for name in PROGRAMS:
            say(f"{name['model']}, {name['weights']}, {name['topology']}, data {name['data']}, batch {name['batch']}")
            found = compiled(**name)
            cells.append(
                {"name": name, "bytes_in_flight": found, "streaming_us": streaming_us(found, name["topology"])}
            )
    entry.show([table(cells)], console)
    document = {"kind": "compiler estimate", "libtpu": version("libtpu"), "layers": LAYERS, "programs": cells}
    entry.write_result(_OUTPUT.value, document, console)


def compiled(model: str, weights: str, topology: str, data: int, batch: int) -> list[float]:
    """Compiles a step, and returns the bytes in flight at each of its collectives."""
    weight_dtype = None if weights == "bfloat16" else weights
    config = dataclasses.replace(published_config(model), num_layers=LAYERS, weight_dtype=weight_dtype)
    mesh = described_mesh(topology, data, num_kv_heads=config.num_kv_heads, rows=batch // data)
    stack = Stack(config, mesh, topology, batch=batch)
    programs = stack.programs(LAYERS)
    lowered = programs.call(programs.target, WINDOW if batch == data else 1)
    return in_flight(lowered.compile(compiler_options=dict(FEWEST_COLLECTIVES)).as_text())


def streaming_us(bytes_in_flight: Sequence[float], topology: str) -> list[float]:
    """Returns the microseconds that streaming what is in flight takes, at each collective with a layer after it."""
    rate = CHIPS[topology.partition(":")[0]].hbm_bytes_per_second
    return [size / rate * 1e6 for size in bytes_in_flight[: 2 * LAYERS]]


def table(cells: list[dict[str, Any]]) -> Table:
    """Returns a row for each program."""
    rows = [
        (*map(str, cell["name"].values()), f"{min(us):.0f}", f"{np.median(us):.0f}")
        for cell in cells
        for us in [cell["streaming_us"]]
    ]
    header = (*PROGRAMS[0], "in flight at a collective, us of streaming: least", "median")
    return Table(title="What is prefetched while collectives run (compiler estimate)", header=header, rows=rows)


if __name__ == "__main__":
    entry.run(main)

"""Programs of deep models from shallow ones: a layer costs what the next one costs.

    program = Stack(chinchilla_70b(), described_mesh("v4:2x2x4"), "v4:2x2x4").call(tokens=5)
    facts(program, "v4:2x2x4")["work"]     # for `specsamp.tpu.calibration.estimate`

Programs of two and of four layers are compiled at full width and continued in a straight line to all layers; fixed
costs stay fixed.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Sequence
from typing import Any

from jax.sharding import Mesh

from specsamp.mesh.layout import Layout
from specsamp.mesh.sharded import draft_layout, shard_model
from specsamp.models.config import TransformerConfig
from specsamp.models.kernels.cache import Kernels
from specsamp.models.transformer import TransformerLM
from specsamp.sampling.warp import Warp
from specsamp.tpu.program import Memory, Program
from specsamp.tpu.programs import WINDOW, Programs
from specsamp.tpu.report import measure
from specsamp.tpu.topology import parse

FEW, MANY = 2, 4  # layers that are compiled
COUNTED = ("floor_bytes", "live_floor_bytes", "hbm_bytes", "live_hbm_bytes", "cycles")


@dataclasses.dataclass(frozen=True)
class Stack:
    """One model on one mesh, compiled at two depths."""

    config: TransformerConfig
    mesh: Mesh
    topology: str
    batch: int = 1
    slots: int = 2048
    kernels: Kernels | None = None  # of attention over the caches
    live: float = 0.5  # see `specsamp.tpu.report.measure`

    def programs(self, layers: int, sampling: Warp | None = None, other: TransformerConfig | None = None) -> Programs:
        """Returns the programs of a pair of ``layers`` layers: this model the target, another (or itself) the draft."""

        def model(config):
            return TransformerLM(dataclasses.replace(config, num_layers=layers), kernels=self.kernels)

        return Programs(
            target=shard_model(model(self.config), Layout.tensor_parallel(self.mesh)),
            draft=shard_model(model(other or self.config), draft_layout(self.mesh)),
            mesh=self.mesh,
            sampling=sampling,
            batch=self.batch,
            slots=self.slots,
        )

    def call(self, tokens: int) -> Program:
        """Measures a call of the whole model."""
        return continued(self.at(FEW, tokens), self.at(MANY, tokens), self.config.num_layers)

    def at(self, layers: int, tokens: int) -> Program:
        """Compiles and measures a call of a model with so many layers."""
        programs = self.programs(layers)
        model = programs.target

        def floor(live):
            return programs.floor(model, live, tokens=tokens)

        name = f"{tokens} tokens, {layers} layers"
        floors = floor(1.0), floor(self.live)
        made = measure(name, tokens, *floors, lambda: programs.call(model, tokens), self.capacity, self.live)
        return dataclasses.replace(made, layers=layers)

    @property
    def capacity(self) -> int:
        """Bytes of HBM on a device."""
        chip, _ = parse(self.topology)
        return chip.hbm_bytes // chip.devices

    def bytes_of_state(self) -> int:
        """Returns the bytes per device of weights and caches, all layers."""
        programs = self.programs(self.config.num_layers)
        return sum(programs.bytes_of(programs.target))

    def step(self) -> Program:
        """Measures a call of one new token per row, at the fastest window; with one row never at 1."""
        chip, _ = parse(self.topology)
        windows = (WINDOW,) if self.batch == 1 else (1, WINDOW)
        tried = [self.call(window) for window in windows]
        fitting = [program for program in tried if program.memory is not None]
        return min(fitting, key=lambda program: program.busy_ms(chip), default=tried[0])


def linear(*terms: tuple[float, Program]) -> Program:
    """Adds weighted programs: all that is counted, and their memory. One that does not fit is the result itself."""
    first = terms[0][1]
    unfit = next((program for _, program in terms if program.memory is None), None)
    if unfit is not None:
        return unfit

    def counts(name: str) -> dict[str, float]:
        total = collections.Counter()
        for weight, program in terms:
            total.update({kind: weight * count for kind, count in getattr(program, name).items()})
        return {kind: round(count) for kind, count in total.items() if round(count)}

    def total(name):
        return sum(weight * getattr(program, name) for weight, program in terms)

    numbers = {name: total(name) for name in COUNTED}
    whole = {name: round(total(name)) for name in ("num_copies", "host_transfers", "open_loops", "layers")}
    parts = {
        name: max(round(sum(weight * getattr(program.memory, name) for weight, program in terms)), 0)
        for name in ("arguments", "temporaries", "outputs", "code")
    }
    memory = dataclasses.replace(first.memory, **parts)
    return dataclasses.replace(
        first,
        **numbers,
        **whole,
        memory=memory,
        collectives=counts("collectives"),
        collective_bytes=counts("collective_bytes"),
    )


def continued(few: Program, many: Program, layers: int) -> Program:
    """Continues programs of `FEW` and `MANY` layers to ``layers``."""
    slope = (layers - FEW) / (MANY - FEW)
    return linear((1 - slope, few), (slope, many))


def facts(
    program: Program, topology: str, *, sequences: int = 1, calls: int = 1, chips: Sequence[int] | None = None
) -> dict[str, Any]:
    """Returns what a study reports of a program, times in milliseconds; or why it does not fit.

    Args:
      sequences: rows of a data shard.
      calls: of models in one run, each with the fixed time of the calibration.
      chips: along each axis, of those that share the model; default: the whole slice.
    """
    if program.memory is None or not program.memory.fits:
        return {"fits": False, "why": program.out_of_memory or _needs(program.memory)}
    chip, sizes = parse(topology)
    work = program.work(chip, tuple(chips or sizes), sequences=sequences, calls=calls)
    return {
        "hbm_bytes": program.hbm_bytes,
        "over_floor": program.over_floor,
        "cycles": program.cycles,
        "collectives": program.collectives,
        "collective_bytes": program.collective_bytes,
        "copies": program.num_copies,
        "host_transfers": program.host_transfers,
        "fits": True,
        "memory_bytes": program.memory.total,
        "temporary_bytes": program.memory.temporaries,
        "streaming_ms": work.streaming_ms,
        "cycles_ms": work.cycles_ms,
        "work": work,
    }


def _needs(memory: Memory) -> str:
    return (
        f"weights and caches {memory.arguments / 2**30:.1f} GiB, temporaries {memory.temporaries / 2**30:.1f} GiB, "
        f"program {memory.code / 2**30:.1f} GiB, of {memory.capacity / 2**30:.0f} GiB"
    )

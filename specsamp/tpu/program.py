"""Measures a program that is compiled for a described slice: its traffic, memory and
collectives.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Callable, Sequence

import jax

from specsamp.models.compiling import ON_TPU, is_out_of_memory
from specsamp.tpu import schedules
from specsamp.tpu.kernels import COUNTS
from specsamp.tpu.topology import Chip, parse
from specsamp.tpu.traffic import traffic_of
from specsamp.tpu.work import Work, hops, wire_ms

MOST_LINES = 24  # of a message of the compiler: eight buffers
USABLE = 0.98  # share of the memory of a chip that programs can have


@dataclasses.dataclass(frozen=True, kw_only=True)
class Memory:
    """Bytes of HBM on each device."""

    arguments: int  # weights, tables, state
    temporaries: int
    outputs: int  # except outputs that reuse the memory of arguments
    code: int = 0
    capacity: int

    @classmethod
    def of(cls, compiled: jax.stages.Compiled, capacity: int) -> Memory:
        """Takes the bytes of a compiled program on a device of ``capacity`` bytes."""
        sizes = compiled.memory_analysis()
        return cls(
            arguments=sizes.argument_size_in_bytes,
            temporaries=sizes.temp_size_in_bytes,
            outputs=sizes.output_size_in_bytes - sizes.alias_size_in_bytes,
            code=sizes.generated_code_size_in_bytes,
            capacity=capacity,
        )

    @property
    def total(self) -> int:
        """Bytes of all parts."""
        return self.arguments + self.temporaries + self.outputs + self.code


@dataclasses.dataclass(frozen=True, kw_only=True)
class Program:
    """One compiled program, or why it does not fit.

    Traffic is per device and call, of the loop per round. Unknown numbers of a program that does
    not fit are None.
    """

    name: str
    tokens: int  # fed per row and call
    floor_bytes: float
    live_floor_bytes: float  # the same with caches of which half is alive
    memory: Memory | None
    # From the compiler's message: how much is missing, and the largest contributors.
    out_of_memory: str | None
    hbm_bytes: float | None = None
    cycles: float | None = None
    kernel_cycles: float | None = None  # of these; None in reports of before they were counted
    collectives: dict[str, int] | None = None
    collective_bytes: dict[str, float] | None = None
    num_copies: int = 0  # of 1 MB or more, HBM to HBM
    open_loops: int = 0  # loops counted once, because their bound is data
    host_transfers: int = 0
    # Bytes and cycles of each loop, and of all else; (): not counted apart.
    parts: Sequence[tuple[float, float]] = ()
    # The traffic with caches as live_floor_bytes has them; None: not counted.
    live_hbm_bytes: float | None = None
    layers: int = 0  # of all calls of models in one run; 0 in reports of before this was counted
    # Of models in one run; 0 in reports of before this was counted: a round had one for each token.
    calls: int = 0

    @property
    def over_floor(self) -> float | None:
        """Traffic as a multiple of the floor."""
        return None if self.hbm_bytes is None else self.hbm_bytes / self.floor_bytes

    @property
    def live_over_floor(self) -> float | None:
        """Traffic as a multiple of the floor, both with caches of which half is alive."""
        return None if self.live_hbm_bytes is None else self.live_hbm_bytes / self.live_floor_bytes

    def cycles_ms(self, chip: Chip) -> float:
        """Returns the milliseconds that computing takes."""
        return self.cycles / chip.clock_hz * 1e3

    def streaming_ms(self, chip: Chip) -> float:
        """Returns the milliseconds that the traffic takes at the rate of the HBM."""
        return self.hbm_bytes * chip.devices / chip.hbm_bytes_per_second * 1e3

    def lower_bound_ms(self, chip: Chip) -> float:
        """Returns the least milliseconds of a call: of each part the longer of streaming and
        computing.
        """
        parts = self.parts or [(self.hbm_bytes, self.cycles)]
        streams = [bytes_ * chip.devices / chip.hbm_bytes_per_second for bytes_, _ in parts]
        computes = [cycles / chip.clock_hz for _, cycles in parts]
        return 1e3 * sum(map(max, streams, computes))

    def work(self, chip: Chip, chips: Sequence[int], *, sequences: int) -> Work:
        """Returns the work of a run on one device, from which `specsamp.tpu.calibration` estimates
        milliseconds.

        Each collective crosses all ``chips`` of a replica; ``sequences`` are of a data shard.
        """
        # An all-reduce scatters sums and gathers them; a reduce-scatter delivers one part of its
        # sums.
        times = {"all-reduce": 2.0, "reduce-scatter": float(math.prod(chips) * chip.devices)}
        carried = sum(times.get(kind, 1.0) * size for kind, size in self.collective_bytes.items())
        serial = sum(self.collectives.values())
        return Work(
            streaming_ms=self.streaming_ms(chip),
            cycles_ms=self.cycles_ms(chip),
            collectives=serial,
            collective_hops=serial * hops(chips),
            wire_ms=wire_ms(carried, chips, chip.link_bytes_per_second),
            layer_sequences=self.layers * sequences,
            calls=self.calls or (self.tokens if self.name == "round" else 1),
        )


def measure_program(
    name: str,
    tokens: int,
    floor: Callable[[float], float],
    lowered: Callable[[], jax.stages.Lowered],
    topology: str,
    *,
    layers: int,
    calls: int = 1,
) -> Program:
    """Compiles one program and counts its traffic; a program that does not fit is a result, too.

    Args:
      floor: returns the bytes per device that are read at least, by the share of the slots of
        caches that is alive.
    """
    chip, _ = parse(topology)
    known = dict(name=name, tokens=tokens, layers=layers, calls=calls)
    known |= dict(floor_bytes=floor(1.0), live_floor_bytes=floor(0.5))
    schedules.take()  # removes those of programs that were compiled elsewhere in this process
    try:
        compiled = lowered().compile(compiler_options=dict(ON_TPU))
    except jax.errors.JaxRuntimeError as error:
        if not is_out_of_memory(error):
            raise
        return Program(**known, memory=None, out_of_memory=largest_buffers(str(error)))
    text = compiled.as_text()
    traffic = traffic_of(text, schedules=schedules.take(*COUNTS))
    return Program(
        **known,
        memory=Memory.of(compiled, chip.hbm_bytes // chip.devices),
        out_of_memory=None,
        hbm_bytes=traffic.bytes,
        live_hbm_bytes=traffic_of(text, 0.5).bytes,
        cycles=traffic.cycles,
        parts=traffic.parts,
        kernel_cycles=traffic.kernel_cycles,
        collectives=dict(traffic.collectives),
        collective_bytes=dict(traffic.collective_bytes),
        num_copies=len(traffic.copies),
        host_transfers=traffic.host_transfers,
        open_loops=traffic.open_loops,
    )


def largest_buffers(message: str) -> str:
    """Picks the lines of the compiler's message with the missing bytes and the largest buffers."""
    wanted = re.compile(
        r"Ran out of memory|Exceeded|Total hbm|Program|Arguments|Size:|Shape:|Operator:", re.I
    )
    lines = [line.strip() for line in message.splitlines() if wanted.search(line)]
    return "\n".join(lines[:MOST_LINES])

"""One program that was compiled for a described slice: what it moves, holds and waits for."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import jax

from specsamp.tpu.topology import Chip
from specsamp.tpu.work import Work, hops, wire_ms

USABLE = 0.98  # share of the memory of a chip that programs can have


@dataclasses.dataclass(frozen=True, kw_only=True)
class Memory:
    """Bytes of HBM on each device."""

    arguments: int  # weights, tables, state
    temporaries: int
    outputs: int  # without those that reuse the memory of arguments
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

    @property
    def fits(self) -> bool:
        """Returns whether a device has room for it."""
        return self.total <= USABLE * self.capacity


@dataclasses.dataclass(frozen=True, kw_only=True)
class Program:
    """One compiled program, or why it does not fit.

    Traffic is per device and call, that of the loop per round. What is not known of a program that does not fit is
    None.
    """

    name: str
    tokens: int  # fed per row and call
    floor_bytes: float
    live_floor_bytes: float  # the same with caches of which only a part is alive: half, unless a study says otherwise
    memory: Memory | None
    out_of_memory: str | None  # from the compiler's message: how much is missing, and the largest contributors
    hbm_bytes: float | None = None
    cycles: float | None = None
    collectives: dict[str, int] | None = None
    collective_bytes: dict[str, float] | None = None
    copies: tuple[tuple[str, float], ...] = ()  # of 1 MB or more, HBM to HBM: scope and bytes
    num_copies: int = 0
    open_loops: int = 0  # loops counted once, because their bound is data
    host_transfers: int = 0
    compile_seconds: float = 0.0
    live_hbm_bytes: float | None = None  # the traffic with caches as live_floor_bytes has them; None: not counted
    layers: int = 0  # of all calls of models in one run; 0 in reports of before this was counted

    @property
    def over_floor(self) -> float | None:
        """Traffic as a multiple of the floor."""
        return None if self.hbm_bytes is None else self.hbm_bytes / self.floor_bytes

    @property
    def live_over_floor(self) -> float | None:
        """Traffic as a multiple of the floor, both with caches of which only a part is alive."""
        return None if self.live_hbm_bytes is None else self.live_hbm_bytes / self.live_floor_bytes

    def busy_ms(self, chip: Chip) -> float:
        """Returns the longer of streaming and computing, in milliseconds."""
        return max(self.streaming_ms(chip), self.cycles_ms(chip))

    def cycles_ms(self, chip: Chip) -> float:
        """Returns the milliseconds that computing takes."""
        return self.cycles / chip.clock_hz * 1e3

    def streaming_ms(self, chip: Chip) -> float:
        """Returns the milliseconds that the traffic takes at the rate of the HBM."""
        return self.hbm_bytes * chip.devices / chip.hbm_bytes_per_second * 1e3

    def work(self, chip: Chip, chips: Sequence[int], *, sequences: int, calls: int = 1) -> Work:
        """Returns what decides the milliseconds of a run on one device, see `specsamp.tpu.calibration`.

        Args:
          chips: of one replica along each axis of the slice; each collective crosses all of them.
          sequences: rows of a data shard.
          calls: of models in one run.
        """
        # An all-reduce scatters sums and gathers them; a reduce-scatter delivers one part of what it sums.
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
            calls=calls,
        )

    def milliseconds(self, chip: Chip, latency_us: float) -> float:
        """Adds collectives of a latency each, one after another, to the longer of streaming and computing."""
        return self.busy_ms(chip) + sum(self.collectives.values()) * latency_us / 1e3


def fastest(programs: Sequence[Program], chip: Chip) -> Program:
    """Returns the program that streams and computes fastest of those that fit; the first where none does."""
    fitting = [program for program in programs if program.memory is not None]
    return min(fitting, key=lambda program: program.busy_ms(chip), default=programs[0])

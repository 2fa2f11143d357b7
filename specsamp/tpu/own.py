"""Calibrations of the devices at hand, preferred to the published one: measured, fitted and read.

launch/calibrate.py measures and writes them. Each program here is one jitted loop, timed at two lengths: the difference
holds no launch and no compilation. A calibration serves the slice that it was measured on, and no other.
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from specsamp import validate
from specsamp.analysis.workload import Quartiles, Workload, decode_in_turns, decoders
from specsamp.decoding.drafters import NoDrafter
from specsamp.decoding.method import Method
from specsamp.decoding.pair import Pair
from specsamp.mesh.distributed import gather_objects
from specsamp.sampling.warp import chain, temperature, top_p
from specsamp.tpu.calibration import Calibration, Steps, fit, fits_by_overlap, nearly_best
from specsamp.tpu.topology import parse, same_slice
from specsamp.tpu.work import Work, hops, wire_ms

SECONDS = 0.25  # of a loop: long against a launch and the clock
MOST_TURNS = 1 << 15
PROMPT, NEW_TOKENS, SAMPLING = 16, 64, chain(temperature(0.8), top_p(0.95))  # of steps that are decoded
LEAST_ERROR = 0.03  # of a calibration: clocks and other programs differ by as much


@dataclasses.dataclass(frozen=True, kw_only=True)
class AllReduce:
    """The time of one all-reduce over some axes of the slice, all groups at once."""

    along: tuple[int, ...]  # the axes
    chips: tuple[int, ...]  # along each of them
    bytes: int  # of a device
    microseconds: float

    def work(self, link_rate: float) -> Work:
        """Returns its work; ``link_rate`` is that of the data sheet, in bytes per second of a link."""
        wire = wire_ms(2 * self.bytes, self.chips, link_rate)
        return Work(streaming_ms=0.0, collectives=1, collective_hops=hops(self.chips), wire_ms=wire)


def seconds_per_turn(run: Callable[[int], jax.Array], repeats: int = 7) -> float:
    """Returns the median seconds of one turn of ``run(turns)``; raises ValueError if twice as many take no longer."""

    def seconds(count: int) -> float:
        start = time.perf_counter()
        jax.block_until_ready(run(count))
        return time.perf_counter() - start

    seconds(1)  # compiles
    turns = 2
    while turns < MOST_TURNS and gather_objects(seconds(turns))[0] < SECONDS / 2:  # all processes run as many
        turns *= 2
    median = float(np.median([seconds(2 * turns) - seconds(turns) for _ in range(repeats)]))
    if median > 0:
        return median / turns
    raise ValueError(f"the times of loops of {turns} turns scatter too much: leave this machine idle, and run again")


def bandwidth(size: int) -> float:
    """Returns the bytes per second that one device reads while all devices read arrays of ``size`` bytes."""

    def read(array_N, turns):
        def turn(_, total):
            return total + jnp.max(array_N + total)  # depends on the turn before: read again

        return jax.lax.fori_loop(0, turns, turn, jnp.float32(0))[None]

    mesh = Mesh(np.array(jax.devices()), ("all",))
    return size / seconds_on_all_devices(read, mesh, PartitionSpec("all"), size)


def seconds_on_all_devices(run: Callable[..., jax.Array], mesh: Mesh, spec: PartitionSpec, size: int) -> float:
    """Returns the median seconds of a turn of ``run(array_N, turns)``, with ``size`` bytes of float32 on each device."""
    whole = jax.jit(jax.shard_map(run, mesh=mesh, in_specs=(spec, PartitionSpec()), out_specs=spec, check_vma=False))
    count = jax.device_count() * (size // 4)
    array = jax.jit(lambda: jnp.ones(count, jnp.float32), out_shardings=NamedSharding(mesh, spec))()
    return seconds_per_turn(lambda turns: whole(array, turns))


def groups(sizes: Sequence[int]) -> list[tuple[int, ...]]:
    """Returns the axes of all-reduces: each axis with several chips, and all of these together."""
    several = tuple(axis for axis, size in enumerate(sizes) if size > 1)
    return list(dict.fromkeys([(axis,) for axis in several] + [several])) if several else []


def all_reduce(sizes: Sequence[int], along: Sequence[int], size: int) -> AllReduce:
    """Measures an all-reduce of ``size`` bytes of each device along some axes of a slice of ``sizes`` chips.

    Devices of one chip always take part together.
    """
    devices = sorted(
        jax.devices(), key=lambda one: (*(getattr(one, "coords", None) or ()), getattr(one, "core_on_chip", 0), one.id)
    )
    names = (*(f"axis {i}" for i in range(len(sizes))), "core")
    mesh = Mesh(np.array(devices).reshape(*sizes, -1), names)
    together = (*(names[axis] for axis in along), "core")
    taking_part = math.prod(mesh.shape[name] for name in together)

    def reduce(x_N, turns):
        def turn(_, x):
            return jax.lax.psum(x, together) / taking_part

        return jax.lax.fori_loop(0, turns, turn, x_N)

    seconds = seconds_on_all_devices(reduce, mesh, PartitionSpec(names), size)
    return AllReduce(
        along=tuple(along), chips=tuple(sizes[axis] for axis in along), bytes=size, microseconds=seconds * 1e6
    )


def step_ms(pair: Pair, batch: int, slots: int, repeats: int) -> Quartiles:
    """Returns the milliseconds of a step of plain decoding, nothing but the loop in them."""
    work = Workload(batch=batch, prompt_length=PROMPT, max_new_tokens=NEW_TOKENS, repeats=repeats)
    plain = Method(drafter=NoDrafter(), sampling=SAMPLING)
    sides = decoders(pair, {"plain": plain}, work, least_length=slots - NEW_TOKENS)
    timings = decode_in_turns(sides, repeats)["plain"]
    return Quartiles.of([timing.loop_seconds / timing.rounds * 1e3 for timing in timings])


def fit_own(
    reached: float, rate: float, link_rate: float, collectives: Sequence[AllReduce], steps: Steps
) -> Calibration:
    """Fits a calibration of the devices at hand; its error is the worst of a step that was left out of all of the fit.

    Args:
      reached: bytes per second that a device streams.
      rate: that of its data sheet, which `Work.streaming_ms` assumes.
      link_rate: bytes per second of a link by the data sheet, which `Work.wire_ms` assumes.
    """
    base = Calibration(efficiency=min(reached / rate, 1.0), call_ms=0.0, layouts=1, points=len(steps))
    if collectives:
        several = len({hops(one.chips) for one in collectives}) > 1  # otherwise hops are part of a collective's time
        reductions = [(one.work(link_rate), one.microseconds / 1e3) for one in collectives]
        base = fit(base, reductions, "collective_us", "wire", *["hop_us"] * several)
    errors = []
    for i, (work, ms) in enumerate(steps):
        rest = _fit_steps(base, [*steps[:i], *steps[i + 1 :]])
        errors.append(abs(math.log(max(rest.milliseconds(work), 1e-9) / ms)))
    return dataclasses.replace(_fit_steps(base, steps), error=max(*errors, LEAST_ERROR))


def _fit_steps(base: Calibration, steps: Steps) -> Calibration:
    """Fits the times of a call and of a layer and sequence, at the middle of the overlaps that explain the steps well."""
    nearly = nearly_best(fits_by_overlap(base, steps, "call_ms", "sequence_us"), steps)
    return dataclasses.replace(nearly[len(nearly) // 2], least_overlap=nearly[0].overlap)


def read_calibration(document: Mapping[str, Any], topology: str, path: str = "this calibration") -> Calibration:
    """Reads a file of launch/calibrate.py for a slice such as "v5e:2x4".

    Raises:
      ValueError: the file is of another chip or slice, no calibration, or a number of it is missing or wrong.
    """
    try:
        chip, sizes = document["devices"]["chip"], [int(size) for size in document["devices"]["slice"]]
        numbers = document["calibration"]
        found = Calibration(**numbers)
        for name in ("call_ms", "sequence_us", "collective_us", "hop_us", "wire"):
            validate.number(name, numbers[name], 0)
        for name in ("points", "layouts"):
            validate.integer(name, numbers[name], 0)
        validate.number("efficiency", numbers["efficiency"], 0, 1, above=True)
        validate.number("error", numbers["error"], 0, above=True)
        overlap = validate.number("overlap", numbers["overlap"], 0, 1)
        validate.number("least_overlap", numbers["least_overlap"], 0, overlap)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        reason = f"{type(error).__name__}: {error}"
        raise ValueError(f"{path} is no calibration of launch/calibrate.py ({reason})") from error
    if chip != topology.partition(":")[0] or not same_slice(sizes, parse(topology)[1]):
        of = f"{chip}:{'x'.join(map(str, sizes))}"
        raise ValueError(
            f"{path} is a calibration of {of}, and {topology} is asked about: run launch/calibrate.py there"
        )
    return found

"""Small programs that measure what `specsamp.tpu.calibration` needs, on the devices at hand.

Each is one jitted loop, timed at two lengths: the difference holds no launch and no compilation.
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import mesh_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from scipy.optimize import nnls

from specsamp.tpu.calibration import Calibration, reach
from specsamp.tpu.work import Work, hops

SHARES = (0.0, 0.2, 0.4, 0.6, 0.8, 1.0)  # of streaming that hides collectives: those that are tried
LEAST_ERROR = 0.03  # of a calibration: clocks and other programs differ by as much


@dataclasses.dataclass(frozen=True, kw_only=True)
class AllReduce:
    """The time of one all-reduce over so many neighbouring chips."""

    chips: int
    axes: tuple[int, ...]  # chips along each axis of the slice
    bytes: int  # of a device
    microseconds: float


def seconds_per_turn(run: Callable[[int], jax.Array], turns: int, repeats: int = 5) -> float:
    """Returns the median seconds of one turn of a loop.

    Args:
      run: runs so many turns on the devices; it is compiled once for all numbers of turns.
    """
    jax.block_until_ready(run(1))

    def seconds(count: int) -> float:
        start = time.perf_counter()
        jax.block_until_ready(run(count))
        return time.perf_counter() - start

    samples = [(seconds(2 * turns) - seconds(turns)) / turns for _ in range(repeats)]
    return max(float(np.median(samples)), 1e-9)


def bandwidth(size: int, turns: int) -> float:
    """Returns the bytes per second that one device reads while all devices read arrays of ``size`` bytes."""
    mesh = Mesh(np.array(jax.devices()), ("all",))
    count = jax.device_count() * (size // 4)
    where = NamedSharding(mesh, PartitionSpec("all"))
    array = jax.jit(lambda: jnp.ones(count, jnp.float32), out_shardings=where)()

    def read(array_N, turns):
        def turn(_, total):
            return total + jnp.max(array_N + total)  # depends on the turn before: read again

        return jax.lax.fori_loop(0, turns, turn, jnp.float32(0))[None]

    whole = jax.jit(
        jax.shard_map(
            read,
            mesh=mesh,
            in_specs=(PartitionSpec("all"), PartitionSpec()),
            out_specs=PartitionSpec("all"),
            check_vma=False,
        )
    )
    return size / seconds_per_turn(lambda n: whole(array, n), turns)


def launch_ms(calls: int = 200) -> float:
    """Returns the milliseconds that the host needs to launch a small program."""
    step = jax.jit(lambda x: x + 1)
    x = jax.block_until_ready(step(jnp.zeros(())))
    start = time.perf_counter()
    for _ in range(calls):
        x = step(x)
    jax.block_until_ready(x)
    return (time.perf_counter() - start) / calls * 1e3


def all_reduce(chips: int, sizes: Sequence[int], size: int, turns: int) -> AllReduce:
    """Measures an all-reduce of ``size`` bytes over groups of ``chips`` neighbours, all groups at once.

    Args:
      sizes: chips along each axis of the slice.
    """
    per_chip = jax.device_count() // math.prod(sizes)
    grouped = mesh_utils.create_device_mesh((jax.device_count() // (chips * per_chip), chips * per_chip))
    mesh = Mesh(grouped, ("apart", "together"))

    def reduce(x_N, turns):
        def turn(_, x):
            return jax.lax.psum(x, "together") / (chips * per_chip)

        return jax.lax.fori_loop(0, turns, turn, x_N)

    spec = PartitionSpec(("apart", "together"))
    whole = jax.jit(jax.shard_map(reduce, mesh=mesh, in_specs=(spec, PartitionSpec()), out_specs=spec, check_vma=False))
    count, where = jax.device_count() * (size // 4), NamedSharding(mesh, spec)
    array = jax.jit(lambda: jnp.ones(count, jnp.float32), out_shardings=where)()
    seconds = seconds_per_turn(lambda n: whole(array, n), turns)
    return AllReduce(chips=chips, axes=extent(grouped[0].tolist()), bytes=size, microseconds=seconds * 1e6)


def extent(devices: Sequence[jax.Device]) -> tuple[int, ...]:
    """Returns the chips along each axis of the part of a slice; devices without coordinates are in a row."""
    coordinates = [getattr(device, "coords", None) for device in devices]
    if not coordinates[0]:
        return (len(devices),)
    return tuple(int(edge) for edge in np.ptp(np.array(coordinates), axis=0) + 1)


def fit_own(
    reached: float, rate: float, collectives: Sequence[AllReduce], steps: Sequence[tuple[Work, float]]
) -> Calibration:
    """Fits a calibration of the devices at hand.

    Args:
      reached: bytes per second that a device streams.
      rate: what its data sheet says, which `Work.streaming_ms` assumes.
      collectives: of few bytes.
      steps: the work of decode steps, and their milliseconds.
    """
    least = min(one.bytes for one in collectives) if collectives else 0
    small = [one for one in collectives if one.bytes == least]
    collective_us = hop_us = 0.0
    if small:
        measured = np.array([one.microseconds for one in small])
        columns = np.array([[1.0, hops(one.axes)] for one in small]) / measured[:, None]
        collective_us, hop_us = nnls(columns, np.ones(len(small)))[0].tolist()
    base = Calibration(efficiency=min(reached / rate, 1.0), call_ms=0.0, collective_us=collective_us, hop_us=hop_us)
    fits = [fit_steps(dataclasses.replace(base, overlap=share), steps) for share in SHARES]
    best = min(fits, key=lambda fit: sum(error**2 for error in _errors(fit, steps)))
    rest = [abs(_errors(fit_steps(best, [s for s in steps if s is not left]), [left])[0]) for left in steps]
    return dataclasses.replace(best, error=max(reach(rest), LEAST_ERROR), points=len(steps))


def fit_steps(base: Calibration, steps: Sequence[tuple[Work, float]]) -> Calibration:
    """Fits the time of a call and that of a layer and sequence to decode steps; all else is known."""
    bare = dataclasses.replace(base, call_ms=0.0, sequence_us=0.0)
    measured = np.array([ms for _, ms in steps])
    columns = np.array([[work.calls, work.layer_sequences / 1e3] for work, _ in steps]) / measured[:, None]
    left = (measured - [bare.milliseconds(work) for work, _ in steps]) / measured
    call_ms, sequence_us = nnls(columns, left)[0].tolist()
    return dataclasses.replace(base, call_ms=call_ms, sequence_us=sequence_us)


def _errors(fit: Calibration, steps: Sequence[tuple[Work, float]]) -> list[float]:
    return [math.log(max(fit.milliseconds(work), 1e-9) / ms) for work, ms in steps]

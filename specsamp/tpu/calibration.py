"""Turns a compiler's estimate into milliseconds, with the cost of collectives fitted on published measurements.

    milliseconds = max(streaming / efficiency, cycles) + collectives * hops * hop_us + carried + call_ms

The compiler says what a call streams and how many collectives wait for one another, not how long a collective
takes. Six published step times at batch 1 in bfloat16 on TPU v4 leave three numbers to fit: the share of the
HBM's rate that is reached, the time of one hop of a collective, and a fixed time per call (dispatch,
sampling). Collectives are those of Megatron's layout, two all-reduces per layer, one for the embedding and
one gather of the logits; hops are those across the devices of one copy of the model, where no axis wraps around.
Streamed is what this compiler moves for such shapes, 4 to 5% more than weights and caches (of the 7B, 7%).

A round has the fixed time as often as it calls a model: so the paper's rounds agree within 6%, which were not fitted.
They were launched call by call; a loop that is one program may lose less, and the lower edge loses none.

    python -m specsamp.tpu.calibration     # the fit, and each measurement predicted from the others

Collectives are synchronous: at batch 1 each waits for the product before it, and the next product waits for it. Still,
transfers of later weights are in flight meanwhile: in the programs compiled for the paper's pair a median of 67 MB at
each of the 162 collectives of a target step, and 25 to 29 MB at those of a draft step. So streaming may overlap
collectives, while the estimate adds the two. Whatever overlap there was in the fitted steps shortens the fitted time of
a hop and cannot be told from it.

What comes out is a **compiler estimate, calibrated on six points of TPU v4**, of programs of 2022 and 2023.
Other chips are beyond it: their links are faster or slower, and nothing here has been measured on them.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Sequence

import numpy as np


@dataclasses.dataclass(frozen=True, kw_only=True)
class Measurement:
    """A published step time at batch 1."""

    name: str
    source: str
    streamed_gb: float  # by all chips: weights without tables that are only looked up, caches, and the excess
    layers: int
    shape: tuple[int, ...]  # chips along each axis of the slice
    milliseconds: float

    @property
    def streaming_ms(self) -> float:
        """Milliseconds of streaming at the full rate of the HBM."""
        return self.streamed_gb / np.prod(self.shape) / V4_GB_PER_MS

    @property
    def collectives(self) -> int:
        """Collectives of a step, one after another."""
        return 2 * self.layers + 2


V4_GB_PER_MS = 1.2  # HBM of one chip
CHEN = "Chen et al., arXiv 2302.01318"
LLAMA = "pytorch.org/blog/path-achieve-low-inference-latency, June 2023: LLaMA on TPU v4, 256 slots"
MEASUREMENTS = (
    Measurement(name="Chinchilla 70B", source=CHEN, streamed_gb=143.5, layers=80, shape=(2, 2, 4), milliseconds=14.1),
    Measurement(name="draft 4B", source=CHEN, streamed_gb=8.53, layers=8, shape=(2, 2, 4), milliseconds=1.8),
    # Its shape was not published: that of the 7B of Rae et al. (arXiv 2112.11446) is taken.
    Measurement(name="a 7B", source=CHEN, streamed_gb=15.3, layers=32, shape=(2, 2, 1), milliseconds=5.0),
    Measurement(name="LLaMA 7B, 4 chips", source=LLAMA, streamed_gb=13.9, layers=32, shape=(2, 2, 1), milliseconds=4.7),
    Measurement(name="LLaMA 7B, 8 chips", source=LLAMA, streamed_gb=13.9, layers=32, shape=(2, 2, 2), milliseconds=3.8),
    Measurement(name="LLaMA 65B", source=LLAMA, streamed_gb=136.5, layers=80, shape=(2, 2, 4), milliseconds=14.5),
)
# Chen et al., Figure 1, read off to about 2%: a round at K = 1 .. 7. Not fitted: a check.
ROUNDS_MS = {1: 16.3, 2: 18.2, 3: 20.3, 4: 22.8, 5: 25.0, 6: 27.1, 7: 28.5}


def hops(shape: Sequence[int], devices: int | None = None) -> int:
    """Returns the hops between the two chips of a slice that are farthest apart: 5 for (2, 2, 4).

    Args:
      shape: chips along each axis; no axis wraps around.
      devices: chips that are used, along the first axes first; default: all. 4 of (2, 2, 4) are 2 hops apart.
    """
    left, farthest = devices or math.prod(shape), 0
    for edge in shape:
        used = min(edge, left)
        left //= used
        farthest += used - 1
    return farthest


@dataclasses.dataclass(frozen=True, kw_only=True)
class Calibration:
    """The three fitted numbers, and how far off they were on measurements that were left out."""

    efficiency: float  # of streaming, at most 1
    hop_us: float
    call_ms: float
    error: float  # the largest relative error of a measurement that was left out
    points: int

    def milliseconds(
        self,
        streaming_ms: float,
        collective_hops: float,
        *,
        cycles_ms: float = 0.0,
        wire_ms: float = 0.0,
        calls: int = 1,
    ) -> float:
        """Estimates the time of a program.

        Args:
          streaming_ms: of its traffic, at the full rate of the HBM.
          collective_hops: its collectives, each times the hops it crosses.
          cycles_ms: of its computation, as the compiler estimates it.
          wire_ms: time of the bytes that collectives carry, next to nothing in what was fitted.
          calls: of a model, each with the fixed time.
        """
        busy = max(streaming_ms / self.efficiency, cycles_ms)
        return busy + collective_hops * self.hop_us / 1e3 + wire_ms + calls * self.call_ms

    def estimate(
        self, streaming_ms: float, collective_hops: float, *, calls: int = 1, **others: float
    ) -> tuple[float, float, float]:
        """Returns the least, the likely and the most milliseconds of a program; arguments as in `milliseconds`.

        The least has no fixed time per call. Both edges are moved out by the largest error of a measurement that was
        left out.
        """
        least, likely = (self.milliseconds(streaming_ms, collective_hops, calls=n, **others) for n in (0, calls))
        return least * (1 - self.error), likely, likely * (1 + self.error)


@functools.cache
def calibrate(measurements: tuple[Measurement, ...] = MEASUREMENTS) -> Calibration:
    """Fits the three numbers, and their error by leaving one measurement out at a time.

    Raises:
      ValueError: fewer than four measurements: three numbers would fit them whatever they are.
    """
    if len(measurements) < 4:
        raise ValueError(f"{len(measurements)} measurements for three numbers: give at least 4")
    errors = [relative_error(_fit(tuple(x for x in measurements if x is not left)), left) for left in measurements]
    return dataclasses.replace(_fit(measurements), error=max(map(abs, errors)), points=len(measurements))


def relative_error(calibration: Calibration, measured: Measurement) -> float:
    """Returns the relative error of the prediction of a measurement."""
    return predict(calibration, measured) / measured.milliseconds - 1


def predict(calibration: Calibration, measured: Measurement) -> float:
    """Predicts the milliseconds of a measured step."""
    return calibration.milliseconds(measured.streaming_ms, measured.collectives * hops(measured.shape))


def _fit(measurements: tuple[Measurement, ...]) -> Calibration:
    """Fits least squares of relative errors; no number is negative, and nothing streams faster than the HBM."""
    measured = np.array([x.milliseconds for x in measurements])
    streaming = np.array([x.streaming_ms for x in measurements])
    columns = np.array([[x.collectives * hops(x.shape) / 1e3, 1.0] for x in measurements])
    best = None
    for slowdown, used in itertools.product(np.arange(1.0, 2.0, 0.005), ((), (0,), (1,), (0, 1))):
        numbers = np.zeros(2)
        rest = (measured - slowdown * streaming) / measured
        if used:
            numbers[list(used)] = np.linalg.lstsq(columns[:, used] / measured[:, None], rest)[0]
        error = np.sum((columns @ numbers / measured - rest) ** 2)
        if (numbers >= 0).all() and (best is None or error < best[0]):
            best = error, slowdown, numbers
    _, slowdown, (hop_us, call_ms) = best
    return Calibration(
        efficiency=float(1 / slowdown),
        hop_us=float(hop_us),
        call_ms=float(call_ms),
        error=float("nan"),
        points=len(measurements),
    )


def leave_one_out(measurements: tuple[Measurement, ...] = MEASUREMENTS) -> list[tuple[Measurement, float]]:
    """Predicts each measurement from the others, in milliseconds."""
    return [(x, predict(_fit(tuple(y for y in measurements if y is not x)), x)) for x in measurements]


def rounds_from_steps(calibration: Calibration) -> dict[int, float]:
    """Predicts the paper's rounds by K, in milliseconds: one call of the target and K of the draft."""
    target, draft = (predict(calibration, x) for x in MEASUREMENTS[:2])
    return {K: target + K * draft for K in ROUNDS_MS}


if __name__ == "__main__":
    found = calibrate()
    print(f"{found.efficiency:.0%} of the HBM's rate, {found.hop_us:.1f} us per hop, {found.call_ms:.2f} ms per call")
    for measurement, predicted in leave_one_out():
        published = measurement.milliseconds
        off = predicted / published - 1
        print(f"{measurement.name:18} {published:5.1f} ms, from the others {predicted:5.2f} ({off:+.0%})")
    for K, predicted in rounds_from_steps(found).items():
        off = predicted / ROUNDS_MS[K] - 1
        print(f"a round at K = {K}   {ROUNDS_MS[K]:5.1f} ms, predicted {predicted:5.2f} ({off:+.0%})")

"""From a compiler's estimate to milliseconds: what collectives cost, fitted on published measurements.

    milliseconds = streaming / efficiency + collectives * hops * hop_us + call_ms

The compiler says what a call streams and how many collectives wait for one another, not how long a collective
takes. Six published step times at batch 1 in bfloat16 on TPU v4 leave three numbers to fit: the share of the
HBM's rate that is reached, the time of one hop of a collective, and a fixed time per call (dispatch,
sampling). Collectives are those of Megatron's layout, two all-reduces per layer, one for the embedding and
one gather of the logits; hops are those across the slice, on which no axis wraps around.

    python -m specsamp.tpu.calibration     # the fit, and each measurement predicted from the others

What comes out is a **compiler estimate, calibrated on six points of TPU v4**, of programs of 2022 and 2023.
Other chips are beyond it: their links are faster or slower, and nothing here has been measured on them.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Sequence

import numpy as np


@dataclasses.dataclass(frozen=True, kw_only=True)
class Measurement:
    """A published step at batch 1."""

    name: str
    source: str
    streamed_gb: float  # by all chips: weights without the tables that are only looked up, and caches
    layers: int
    shape: tuple[int, ...]  # chips along each axis of the slice
    milliseconds: float

    @property
    def streaming_ms(self) -> float:
        return self.streamed_gb / np.prod(self.shape) / V4_GB_PER_MS

    @property
    def collectives(self) -> int:
        return 2 * self.layers + 2


V4_GB_PER_MS = 1.2  # HBM of one chip
CHEN, LLAMA = "Chen et al., arXiv 2302.01318", "PyTorch/XLA team, June 2023, LLaMA on TPU v4, 256 slots"
MEASUREMENTS = (
    Measurement(name="Chinchilla 70B", source=CHEN, streamed_gb=137.5, layers=80, shape=(2, 2, 4), milliseconds=14.1),
    Measurement(name="draft 4B", source=CHEN, streamed_gb=8.26, layers=8, shape=(2, 2, 4), milliseconds=1.8),
    # Its shape was not published: that of the 7B of Rae et al. (arXiv 2112.11446) is taken.
    Measurement(name="a 7B", source=CHEN, streamed_gb=14.2, layers=32, shape=(2, 2, 1), milliseconds=5.0),
    Measurement(name="LLaMA 7B, 4 chips", source=LLAMA, streamed_gb=13.35, layers=32, shape=(2, 2, 1), milliseconds=4.7),
    Measurement(name="LLaMA 7B, 8 chips", source=LLAMA, streamed_gb=13.35, layers=32, shape=(2, 2, 2), milliseconds=3.8),
    Measurement(name="LLaMA 65B", source=LLAMA, streamed_gb=130.8, layers=80, shape=(2, 2, 4), milliseconds=14.5),
)  # fmt: skip
# Chen et al., Figure 1, read off to about 2%: a round at K = 1 .. 7. Not fitted: a check.
ROUNDS_MS = {1: 16.3, 2: 18.2, 3: 20.3, 4: 22.8, 5: 25.0, 6: 27.1, 7: 28.5}


def hops(shape: Sequence[int]) -> int:
    """Between the two chips that are farthest apart: (2, 2, 4) -> 5."""
    return sum(edge - 1 for edge in shape)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Calibration:
    """Three numbers, and how far off they were on what they had not seen."""

    efficiency: float  # of streaming, at most 1
    hop_us: float
    call_ms: float
    error: float  # the largest relative error of a measurement that was left out
    points: int

    def milliseconds(self, streaming_ms: float, collectives: float, hops: int, calls: int = 1) -> float:
        """Of a program that makes ``calls`` calls of models."""
        return streaming_ms / self.efficiency + collectives * hops * self.hop_us / 1e3 + calls * self.call_ms

    def band(self, streaming_ms: float, collectives: float, hops: int, calls: int = 1) -> tuple[float, float]:
        """From the best that may be hoped for, nothing lost per call, to the worst error that was seen."""
        most = self.milliseconds(streaming_ms, collectives, hops, calls)
        return (most - calls * self.call_ms) * (1 - self.error), most * (1 + self.error)


@functools.cache
def calibrate(measurements: tuple[Measurement, ...] = MEASUREMENTS) -> Calibration:
    """Fitted, with the error of leaving one out.

    Raises:
      ValueError: fewer than four measurements: three numbers would fit them whatever they are.
    """
    if len(measurements) < 4:
        raise ValueError(f"{len(measurements)} measurements for three numbers: give at least 4")
    errors = [relative_error(_fit(tuple(x for x in measurements if x is not left)), left) for left in measurements]
    return dataclasses.replace(_fit(measurements), error=max(map(abs, errors)), points=len(measurements))


def relative_error(calibration: Calibration, measured: Measurement) -> float:
    """Of the prediction."""
    return predict(calibration, measured) / measured.milliseconds - 1


def predict(calibration: Calibration, measured: Measurement) -> float:
    return calibration.milliseconds(measured.streaming_ms, measured.collectives, hops(measured.shape))


def _fit(measurements: tuple[Measurement, ...]) -> Calibration:
    """Least squares of relative errors; no number below zero, and nothing streams faster than the HBM."""
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
        efficiency=float(1 / slowdown), hop_us=float(hop_us), call_ms=float(call_ms), error=float("nan"),
        points=len(measurements),
    )  # fmt: skip


def leave_one_out(measurements: tuple[Measurement, ...] = MEASUREMENTS) -> list[tuple[Measurement, float]]:
    """Each measurement with what the others predict for it, in milliseconds."""
    return [(x, predict(_fit(tuple(y for y in measurements if y is not x)), x)) for x in measurements]


def rounds_from_steps(calibration: Calibration) -> dict[int, float]:
    """The paper's rounds, predicted from its two models: one call of the target and K of the draft."""
    target, draft = (predict(calibration, x) for x in MEASUREMENTS[:2])
    return {K: target + K * draft for K in ROUNDS_MS}


if __name__ == "__main__":
    found = calibrate()
    print(f"{found.efficiency:.0%} of the HBM's rate, {found.hop_us:.1f} us per hop, {found.call_ms:.2f} ms per call")
    for measurement, predicted in leave_one_out():
        off = predicted / measurement.milliseconds - 1
        print(f"{measurement.name:18} measured {measurement.milliseconds:5.1f} ms, from the others {predicted:5.2f} ({off:+.0%})")
    for K, predicted in rounds_from_steps(found).items():
        print(f"round at K = {K}: measured {ROUNDS_MS[K]:5.1f} ms, predicted {predicted:5.2f} ({predicted / ROUNDS_MS[K] - 1:+.0%})")

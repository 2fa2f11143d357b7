"""Milliseconds of work: exposed collectives, bands and ranges."""

import dataclasses
import math

import pytest

from specsamp.tpu.calibration import Band, Calibration, band_ratio, estimate, two_digits
from specsamp.tpu.work import Work

HIDDEN = Calibration(
    efficiency=0.9, call_ms=0.2, sequence_us=2.0, collective_us=8.0, hop_us=1.0, overlap=1.0
)


def test_only_what_outlasts_the_streaming_is_exposed():
    work = Work(streaming_ms=10.0, collectives=100, collective_hops=600)
    hidden = dataclasses.replace(HIDDEN, error=0.1)
    free = hidden.milliseconds(dataclasses.replace(work, collectives=0, collective_hops=0))
    assert hidden.milliseconds(work) == free
    longer = dataclasses.replace(work, collectives=1000, collective_hops=6000)
    assert hidden.milliseconds(longer) == pytest.approx(free + 1000 * 14e-3 - 10)
    half = dataclasses.replace(hidden, least_overlap=0.5)  # the upper edge hides less
    assert half.milliseconds(longer) == hidden.milliseconds(longer)
    assert half.estimate(longer).most == pytest.approx(
        (free + 1000 * 14e-3 - 0.5 * 10) * math.exp(0.1)
    )
    # What is computed for longer than it is streamed takes that long; the least has no time per
    # call.
    computed = dataclasses.replace(work, cycles_ms=30.0)
    assert hidden.milliseconds(computed) == pytest.approx(30 + hidden.call_ms)
    band = hidden.estimate(work)
    assert (
        band.least == pytest.approx((free - hidden.call_ms) * math.exp(-0.1))
        and band.most > band.likely == free
    )


def test_chips_without_measurements_get_a_range_of_two_digits():
    work = Work(streaming_ms=5.4321, collectives=162, collective_hops=972)
    for chip in ("v4", "v5p", "v6e", "tpu7x"):
        band = estimate(chip, work)
        assert band.open and band.least == 5.4321 and band.most > 5.4321 + 0.972 * 5
        assert str(band) == f"5.4 to {two_digits(band.most)}"
    assert not estimate("v5e", work).open


def test_a_ratio_compares_within_each_world():
    slow, fast = (
        Band(least=a, likely=b, most=c, open=True, worlds=(a, c))
        for a, b, c in ((6, 10, 20), (2, 4, 10))
    )
    assert (band_ratio(slow, fast).least, band_ratio(slow, fast).most) == (2, 3)
    closed, other = (dataclasses.replace(band, open=False) for band in (slow, fast))
    assert band_ratio(closed, other) == Band(least=2, likely=2.5, most=3)
    bare = [dataclasses.replace(band, worlds=()) for band in (closed, other)]
    assert band_ratio(*bare).least == band_ratio(*bare).most == 2.5
    halved = slow / 2
    assert halved.worlds == (3, 10) and halved.most == 10


@pytest.mark.parametrize(
    "chip, written",
    [
        ("v5e", (5.36332, 6.57930, 8.63895, 6.49121, 7.08839)),
        ("v4", (4.4, 8.55628, 16.63861, 4.4, 15.05804)),
    ],
)
def test_estimates_are_those_of_the_fit_on_published_measurements(chip, written):
    """The fit of commit 7525f05c gave these milliseconds."""
    work = Work(
        streaming_ms=4.4,
        collectives=162,
        collective_hops=972,
        wire_ms=0.4,
        layer_sequences=1280,
        cycles_ms=1.0,
    )
    band = estimate(chip, work)
    found = band.least, band.likely, band.most, min(band.worlds), max(band.worlds)
    assert found == pytest.approx(written, rel=2e-4)

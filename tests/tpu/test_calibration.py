"""The fits recover the parameters behind the data, and hold for measurements that were left out."""

import dataclasses
import json
import math

import numpy as np
import pytest

from launch.studies import backtest
from specsamp.tpu.calibration import (
    Band,
    Calibration,
    band_ratio,
    estimate,
    fit_published,
    held_out,
    two_digits,
)
from specsamp.tpu.measurements import FILE, published, read_measurements
from specsamp.tpu.work import Work
from support.refusals import refused_calls

ADDED = Calibration(efficiency=0.8, hop_us=5.0, call_ms=0.3)
HIDDEN = Calibration(
    efficiency=0.9, call_ms=0.2, sequence_us=2.0, collective_us=8.0, hop_us=1.0, overlap=1.0
)
LLAMA = [
    row
    for row in published()
    if row.model == backtest.LLAMA_70B and row.chip == "v5e" and row.kind == "step"
]


def made_by(added, hidden):
    """Returns the published rows, with the milliseconds that two calibrations give them."""

    def exact(row):
        one = dataclasses.replace(hidden, efficiency=math.inf, call_ms=0.0, overlap=0.0)
        fit = one if row.kind == "collective" else added if row.chip == "v4" else hidden
        return dataclasses.replace(row, milliseconds=fit.milliseconds(row.work()))

    return tuple(exact(row) for row in published())


def numbers(made):
    return [made.efficiency, made.call_ms, made.sequence_us, made.collective_us, made.hop_us]


def test_fits_find_the_simulated_parameters():
    found = fit_published(made_by(ADDED, HIDDEN))
    assert numbers(found.added) == pytest.approx(numbers(ADDED))
    assert numbers(found.hidden) == pytest.approx(numbers(HIDDEN))
    assert found.added.error < 1e-6 and found.hidden.error < 1e-6


def test_wrong_measurement_raises_the_error():
    rows = made_by(ADDED, HIDDEN)
    wrong = [
        r
        if r.chip != "v4" or r.batch > 1
        else dataclasses.replace(r, milliseconds=1.4 * r.milliseconds)
        for r in rows
    ]
    assert fit_published(tuple(wrong)).added.error > 0.1


def test_v5e_16_70b_is_predicted_from_others():
    """Without the row's own layout in the fit, the median error is at most 10%, the largest 25%."""
    assert len(LLAMA) == 24 and len({row.layout for row in LLAMA}) == 2
    found = [(row.milliseconds, band) for row, band in held_out("layout") if row in LLAMA]
    errors = [abs(band.likely / ms - 1) for ms, band in found]
    assert np.median(errors) <= 0.10
    assert max(errors) <= 0.25
    assert all(band.covers(ms) for ms, band in found)


@pytest.mark.parametrize("by", ["layout", "source"])
def test_bands_cover_left_out_steps(by):
    found = held_out(by)
    assert len(found) == len([row for row in published() if row.kind == "step"])
    assert sum(band.covers(row.milliseconds) for row, band in found) >= 0.9 * len(found)

    def halved(row, band):
        return all(
            math.log(edge / band.likely) * side
            >= 2 * math.log(row.milliseconds / band.likely) * side
            for edge, side in ((band.most, 1), (band.least, -1))
        )

    assert sum(halved(*one) for one in found) < 0.9 * len(found)  # the control: bands half as wide


def test_exposed_time_exceeds_streaming_alone():
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
    # Computation that outlasts the streaming decides the time; the least has no time per call.
    computed = dataclasses.replace(work, cycles_ms=30.0)
    assert hidden.milliseconds(computed) == pytest.approx(30 + hidden.call_ms)
    band = hidden.estimate(work)
    assert band.least == pytest.approx((free - hidden.call_ms) * math.exp(-0.1))
    assert band.most > band.likely == free


def test_unmeasured_chips_get_a_range():
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


FOUND = json.loads(FILE.read_text(encoding="utf-8"))
GROUP = FOUND["groups"][0]
STRANGE_ROW = GROUP["rows"][0] | {"colour": "red"}
WITHOUT_SOFTWARE = {name: x for name, x in GROUP.items() if name != "software"}

test_refused_measurements = refused_calls(
    {
        "colour": lambda: read_measurements(FOUND | {"groups": [GROUP | {"rows": [STRANGE_ROW]}]}),
        "software": lambda: read_measurements(FOUND | {"groups": [WITHOUT_SOFTWARE]}),
    }
)

"""A calibration of one's own finds what made the data, and serves the slice that it was measured on."""

import dataclasses
import math
import types

import pytest

from specsamp import machine
from specsamp.tpu import calibration
from specsamp.tpu.calibration import estimate, fit_own, read_calibration
from specsamp.tpu.work import Work

TRUE = dataclasses.replace(  # all-reduces take what they take in published traces
    calibration.fit_published().hidden, efficiency=0.8, call_ms=0.3, sequence_us=4.0, overlap=0.6, layouts=1
)


def steps(factor=1.0):
    works = [
        Work(streaming_ms=s, collectives=n, collective_hops=6 * n, wire_ms=n * 2e-3, layer_sequences=layers)
        for s, n, layers in (
            (0.2, 40, 2),
            (2.0, 40, 20),
            (0.1, 100, 40),
            (4.0, 100, 400),
            (1.0, 80, 100),
            (3.0, 60, 30),
        )
    ]
    return [(work, TRUE.milliseconds(work) * (factor if i == 0 else 1)) for i, work in enumerate(works)]


def test_the_fit_finds_what_made_the_data():
    found = fit_own(steps())
    for name in ("efficiency", "call_ms", "sequence_us", "collective_us", "hop_us", "overlap"):
        assert getattr(found, name) == pytest.approx(getattr(TRUE, name), rel=1e-2), name
    assert found.error == calibration.LEAST_ERROR and found.points == 6 and found.least_overlap == found.overlap


def test_a_step_that_is_left_out_is_left_out_of_the_choice_of_the_overlap(monkeypatch):
    """Each time the overlap is chosen, every step but the one that is checked is seen."""
    seen = []

    def nearly_best(fits, of):
        seen.append(len(of))
        return fits[-1:]

    calibration.fit_published()  # keeps its own
    monkeypatch.setattr(calibration, "nearly_best", nearly_best)
    fit_own(steps())
    assert seen == [5] * 6 + [6]


def test_a_step_that_does_not_belong_widens_the_band():
    assert fit_own(steps(factor=2.0)).error > 0.1


def test_one_chip_has_no_collectives():
    alone = [dataclasses.replace(work, collectives=0, collective_hops=0, wire_ms=0) for work, _ in steps()]
    found = fit_own([(work, TRUE.milliseconds(work)) for work in alone])
    assert found.error == calibration.LEAST_ERROR and found.efficiency == pytest.approx(0.8)


def test_the_extent_of_a_slice():
    chips = [types.SimpleNamespace(coords=(x, y, 0)) for x in (2, 3) for y in (0, 1, 2, 3)]
    assert machine.extent(chips) == (2, 4, 1)
    assert machine.extent([types.SimpleNamespace(coords=None)] * 3) == (3,)


def document(chip="v5e", sizes=(2, 2, 1)):
    fitted = dataclasses.asdict(TRUE) | {"error": 0.05, "least_overlap": 0.5}
    return {"devices": {"chip": chip, "count": 4, "slice": list(sizes)}, "calibration": fitted}


def test_a_calibration_is_preferred_to_the_published_one():
    found = read_calibration(document(), "v5e:2x2")
    work = Work(streaming_ms=3.0, collectives=10, collective_hops=20)
    band = estimate("v5e", work, own=found)
    assert band.likely == found.milliseconds(work) != estimate("v5e", work).likely
    assert band.most == pytest.approx(band.likely * math.exp(0.05))


@pytest.mark.parametrize("topology", ["v4:2x2x1", "v5e:1x1", "v5e:4x1", "v5e:4x4"])
def test_a_calibration_of_another_slice_is_refused_by_name(topology):
    with pytest.raises(ValueError, match=f"mine.json is a calibration of v5e:2x2x1, and {topology} is asked about"):
        read_calibration(document(), topology, "mine.json")


def test_a_slice_may_be_turned():
    assert read_calibration(document(sizes=(4, 2, 1)), "v5e:2x4").overlap == TRUE.overlap


def test_what_is_no_calibration_is_refused():
    damaged = document()
    del damaged["calibration"]["hop_us"]
    crossed, sure = document(), document()
    crossed["calibration"] |= {"overlap": 0.5, "least_overlap": 0.9}
    sure["calibration"]["error"] = 0
    for wrong in ({"cells": []}, document(sizes="no"), damaged, crossed, sure):
        with pytest.raises(ValueError, match="mine.json is no calibration of launch/calibrate.py"):
            read_calibration(wrong, "v5e:2x2", "mine.json")


def test_chips_have_the_names_of_their_slices():
    device = types.SimpleNamespace(device_kind="TPU v5 lite")
    assert machine.chip_of(device) == "v5e" and machine.chip_of(types.SimpleNamespace(device_kind="cpu")) == "cpu"

"""A calibration of one's own finds what made the data, and serves the slice that it was measured on."""

import dataclasses
import math
import types

import jax
import pytest

from specsamp import machine
from specsamp.tpu import own
from specsamp.tpu.calibration import Calibration, estimate
from specsamp.tpu.own import AllReduce, fit_own, read_calibration
from specsamp.tpu.work import Work, hops, wire_ms

TRUE = Calibration(
    efficiency=0.8, call_ms=0.3, sequence_us=4.0, collective_us=6.0, hop_us=1.5, wire=1.25, overlap=0.6, layouts=1
)
LINK = 50e9


def steps(factor=1.0):
    works = [
        Work(streaming_ms=s, collectives=n, collective_hops=6 * n, wire_ms=n * 2e-3, layer_sequences=layers)
        for s, n, layers in ((0.2, 40, 2), (2.0, 40, 20), (0.1, 100, 40), (4.0, 100, 400), (1.0, 80, 100))
    ]
    return [(work, TRUE.milliseconds(work) * (factor if i == 0 else 1)) for i, work in enumerate(works)]


def all_reduce(along, chips, size):
    microseconds = 6 + 1.5 * hops(chips) + 1.25 * 1e3 * wire_ms(2 * size, chips, LINK)
    return AllReduce(along=along, chips=chips, bytes=size, microseconds=microseconds)


COLLECTIVES = [
    all_reduce(along, chips, size)
    for along, chips in (((0,), (2,)), ((1,), (4,)), ((0, 1), (2, 4)))
    for size in (2**14, 2**20)
]


def test_the_fit_finds_what_made_the_data():
    """The time of the bytes is in the all-reduces that are measured: it is told from their latency, and counts once."""
    found = fit_own(0.8e12, 1e12, LINK, COLLECTIVES, steps())
    for name in ("efficiency", "call_ms", "sequence_us", "collective_us", "hop_us", "wire", "overlap"):
        assert getattr(found, name) == pytest.approx(getattr(TRUE, name), rel=1e-2), name
    assert found.error == own.LEAST_ERROR and found.points == 5 and found.least_overlap == found.overlap


def test_a_step_that_is_left_out_is_left_out_of_the_choice_of_the_overlap(monkeypatch):
    """Each time the overlap is chosen, every step but the one that is checked is seen."""
    seen = []

    def nearly_best(fits, of):
        seen.append(len(of))
        return fits[-1:]

    monkeypatch.setattr(own, "nearly_best", nearly_best)
    fit_own(0.8e12, 1e12, LINK, COLLECTIVES, steps())
    assert seen == [4] * 5 + [5]


def test_a_step_that_does_not_belong_widens_the_band():
    assert fit_own(0.8e12, 1e12, LINK, COLLECTIVES, steps(factor=2.0)).error > 0.1


def test_one_chip_has_no_collectives_and_one_axis_no_hops():
    found = fit_own(2e12, 1e12, LINK, [], steps())
    assert found.collective_us == found.hop_us == 0 and found.efficiency == 1
    found = fit_own(0.8e12, 1e12, LINK, COLLECTIVES[:2], steps())
    assert found.collective_us == pytest.approx(7.5) and found.hop_us == 0 and found.wire == pytest.approx(1.25)


def test_all_reduces_are_measured_along_each_axis_and_over_all():
    assert own.groups((2, 4, 1)) == [(0,), (1,), (0, 1)]
    assert own.groups((8,)) == [(0,)] and own.groups((1, 1)) == []


def test_an_all_reduce_along_an_axis_sums_over_its_chips(monkeypatch):
    """Eight devices as 2x4 chips: the value stays what it was, the sum over the mean of those that take part."""
    results = []
    monkeypatch.setattr(own, "seconds_per_turn", lambda run: (results.append(run(2)), 1e-6)[1])
    made = own.all_reduce((2, 4), (1,), 64)
    assert (made.along, made.chips, made.microseconds) == ((1,), (4,), 1.0)
    assert results[0].shape == (16 * jax.device_count(),) and float(abs(results[0] - 1).max()) == 0


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
    del damaged["calibration"]["wire"]
    crossed, sure = document(), document()
    crossed["calibration"] |= {"overlap": 0.5, "least_overlap": 0.9}
    sure["calibration"]["error"] = 0
    for wrong in ({"cells": []}, document(sizes="no"), damaged, crossed, sure):
        with pytest.raises(ValueError, match="mine.json is no calibration of launch/calibrate.py"):
            read_calibration(wrong, "v5e:2x2", "mine.json")


def test_chips_have_the_names_of_their_slices():
    device = types.SimpleNamespace(device_kind="TPU v5 lite")
    assert machine.chip_of(device) == "v5e" and machine.chip_of(types.SimpleNamespace(device_kind="cpu")) == "cpu"


@pytest.fixture
def clock(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(own.time, "perf_counter", lambda: now[0])
    monkeypatch.setattr(own.jax, "block_until_ready", lambda x: x)
    return now


def test_a_loop_is_timed_without_its_launch(clock):
    """A program that takes 5 s to launch and 0.1 s a turn; one whose turns take no time is refused."""

    def run(turns):
        clock[0] += 5 + 0.1 * turns

    assert own.seconds_per_turn(run) == pytest.approx(0.1)
    with pytest.raises(ValueError, match="leave this machine idle"):
        own.seconds_per_turn(lambda turns: clock.append(clock.pop() + 1))

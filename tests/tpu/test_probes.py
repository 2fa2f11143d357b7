"""A calibration of one's own finds what made the data, and is refused for other devices."""

import dataclasses
import math
import types

import pytest

from specsamp.tpu import probes
from specsamp.tpu.calibration import Calibration, estimate
from specsamp.tpu.own import chip_of, read_calibration
from specsamp.tpu.probes import AllReduce, fit_own
from specsamp.tpu.work import Work

TRUE = Calibration(efficiency=0.8, call_ms=0.3, sequence_us=4.0, collective_us=6.0, hop_us=1.5, overlap=0.6)


def steps(factor=1.0):
    works = [
        Work(streaming_ms=s, collectives=n, collective_hops=6 * n, layer_sequences=layers)
        for s, n, layers in ((0.2, 40, 2), (2.0, 40, 20), (0.1, 100, 40), (4.0, 100, 400), (1.0, 80, 100))
    ]
    return [(work, TRUE.milliseconds(work) * (factor if i == 0 else 1)) for i, work in enumerate(works)]


COLLECTIVES = [
    AllReduce(chips=2**n, axes=axes, bytes=size, microseconds=6 + 1.5 * hops + size / 2**20)
    for n, axes, hops in ((1, (2, 1), 1), (2, (2, 2), 2), (4, (4, 4), 6))
    for size in (2**10, 2**20)
]


def test_the_fit_finds_what_made_the_data():
    found = fit_own(0.8e12, 1e12, COLLECTIVES, steps())
    for name in ("efficiency", "call_ms", "sequence_us", "collective_us", "hop_us", "overlap"):
        assert getattr(found, name) == pytest.approx(getattr(TRUE, name), rel=1e-2), name
    assert found.error == probes.LEAST_ERROR and found.points == 5


def test_a_step_that_does_not_belong_widens_the_band():
    assert fit_own(0.8e12, 1e12, COLLECTIVES, steps(factor=2.0)).error > 0.1


def test_one_chip_has_no_collectives():
    found = fit_own(2e12, 1e12, [], steps())
    assert found.collective_us == found.hop_us == 0 and found.efficiency == 1


def test_the_extent_of_a_part_of_a_slice():
    chips = [types.SimpleNamespace(coords=(x, y, 0)) for x in (2, 3) for y in (0, 1, 2, 3)]
    assert probes.extent(chips) == (2, 4, 1)
    assert probes.extent([types.SimpleNamespace(coords=None)] * 3) == (3,)


def document(chip="v5e"):
    return {"devices": {"chip": chip, "count": 4}, "calibration": dataclasses.asdict(TRUE) | {"error": 0.05}}


def test_a_calibration_is_preferred_to_the_published_one():
    own = read_calibration(document(), "v5e")
    work = Work(streaming_ms=3.0, collectives=10, collective_hops=20)
    band = estimate("v5e", work, own=own)
    assert band.likely == own.milliseconds(work) != estimate("v5e", work).likely
    assert band.most == pytest.approx(band.likely * math.exp(0.05))


def test_a_calibration_of_other_devices_is_refused_by_name():
    with pytest.raises(ValueError, match=r"mine.json is a calibration of 4 x v5e, and v4 is asked about"):
        read_calibration(document(), "v4", "mine.json")
    with pytest.raises(ValueError, match="mine.json is no calibration of launch/calibrate.py"):
        read_calibration({"cells": []}, "v4", "mine.json")


def test_chips_have_the_names_of_their_slices():
    device = types.SimpleNamespace(device_kind="TPU v5 lite")
    assert chip_of(device) == "v5e" and chip_of(types.SimpleNamespace(device_kind="cpu")) == "cpu"


def test_a_loop_is_timed_without_its_launch(monkeypatch):
    """A program that takes 5 s to launch and 0.1 s a turn."""
    now = [0.0]
    monkeypatch.setattr(probes.time, "perf_counter", lambda: now[0])
    monkeypatch.setattr(probes.jax, "block_until_ready", lambda x: x)

    def run(turns):
        now[0] += 5 + 0.1 * turns

    assert probes.seconds_per_turn(run, 10) == pytest.approx(0.1)

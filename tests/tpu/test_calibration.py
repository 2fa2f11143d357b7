"""The fit finds what made the data, says how far off it is, and the published measurements agree with it."""

import dataclasses

import pytest

from specsamp.tpu import calibration
from specsamp.tpu.calibration import MEASUREMENTS, Calibration, calibrate, hops, leave_one_out, rounds_from_steps

TRUE = Calibration(efficiency=0.8, hop_us=5.0, call_ms=0.3, error=0.0, points=0)


def made_by(model, factor=(1.0,) * 6):
    def exact(x):
        return calibration.predict(model, x)

    return tuple(dataclasses.replace(x, milliseconds=exact(x) * f) for x, f in zip(MEASUREMENTS, factor))


def test_the_fit_finds_what_made_the_data():
    found = calibrate(made_by(TRUE))
    assert found.efficiency == pytest.approx(0.8) and found.hop_us == pytest.approx(5.0)
    assert found.call_ms == pytest.approx(0.3) and found.error < 1e-6 and found.points == 6


def test_a_measurement_that_does_not_belong_shows_in_the_error():
    assert calibrate(made_by(TRUE, (1, 1, 1, 1, 1, 1.5))).error > 0.2


def test_no_number_is_negative_and_nothing_streams_faster_than_the_memory():
    found = calibrate(made_by(dataclasses.replace(TRUE, efficiency=1.4, hop_us=9.0)))
    assert found.efficiency <= 1 and found.hop_us >= 0 and found.call_ms >= 0


def test_published_measurements():
    """Chen et al. and LLaMA on PyTorch/XLA were different programs by different people: one fit holds both."""
    found = calibrate()
    assert 0.9 < found.efficiency <= 1 and 6 < found.hop_us < 9 and found.error < 0.1
    for measured, predicted in leave_one_out():
        assert abs(predicted / measured.milliseconds - 1) <= found.error + 1e-9
    # Figure 1 of the paper was not fitted.
    for K, predicted in rounds_from_steps(found).items():
        assert predicted == pytest.approx(calibration.ROUNDS_MS[K], rel=0.07)


def test_a_band_holds_the_estimate():
    found = calibrate()
    least, likely, most = found.estimate(9.0, 234 * 5, calls=5)
    assert likely == found.milliseconds(9.0, 234 * 5, calls=5)
    assert least == pytest.approx((likely - 5 * found.call_ms) * (1 - found.error))
    assert most == pytest.approx(likely * (1 + found.error))
    # What is computed for longer than it is streamed takes that long.
    assert found.milliseconds(9.0, 0, cycles_ms=20.0) == pytest.approx(20.0 + found.call_ms)


def test_hops():
    assert (hops((2, 2, 4)), hops((2, 2)), hops((1,)), hops((4, 4))) == (5, 2, 0, 6)
    assert [hops((2, 2, 4), devices) for devices in (1, 2, 4, 8, 16)] == [0, 1, 2, 3, 5]


def test_too_few_measurements():
    with pytest.raises(ValueError, match="3 measurements for three numbers"):
        calibrate(MEASUREMENTS[:3])

"""Calibrations of the devices at hand, which are preferred to the published one; launch/calibrate.py measures them."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import jax

from specsamp.tpu.calibration import Calibration

# How JAX names devices, and how this package names chips.
KINDS = {
    "TPU v4": "v4",
    "TPU v5 lite": "v5e",
    "TPU v5e": "v5e",
    "TPU v5": "v5p",
    "TPU v5p": "v5p",
    "TPU v6 lite": "v6e",
    "TPU v6e": "v6e",
    "TPU7x": "v7x",
}


def chip_of(device: jax.Device) -> str:
    """Returns the name of a device's chip: one of `specsamp.tpu.topology.CHIPS`, or JAX's name for what is no TPU."""
    return KINDS.get(device.device_kind, device.device_kind)


def read_calibration(document: Mapping[str, Any], chip: str, path: str = "this calibration") -> Calibration:
    """Reads what launch/calibrate.py wrote.

    Args:
      chip: of the devices that it is asked about.

    Raises:
      ValueError: it is of other devices, which are named, or no calibration, or one with a number that is missing or wrong.
    """
    try:
        devices = document["devices"]
        fields = {field.name for field in dataclasses.fields(Calibration)}
        found = Calibration(**{name: value for name, value in document["calibration"].items() if name in fields})
        of = f"{devices['count']} x {devices['chip']}"
        _check_numbers(document["calibration"])
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(
            f"{path} is no calibration of launch/calibrate.py ({type(error).__name__}: {error})"
        ) from error
    if devices["chip"] != chip:
        raise ValueError(f"{path} is a calibration of {of}, and {chip} is asked about: run launch/calibrate.py there")
    return found


def _check_numbers(numbers: Mapping[str, Any]) -> None:
    """Raises TypeError unless all numbers of the formula are there, finite and not negative, with 0 < efficiency <= 1."""
    for name in ("efficiency", "call_ms", "sequence_us", "collective_us", "hop_us", "overlap", "error"):
        value = numbers[name]
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < math.inf:
            raise TypeError(f"{name} must be a finite number >= 0; got {value!r}")
    if not 0 < numbers["efficiency"] <= 1:
        raise TypeError(f"efficiency must be in (0, 1]; got {numbers['efficiency']!r}")

"""The fuzzer finds no difference in a few streams, and finds a planted fault; `tests/fuzz.py` runs
for longer.

It has its own processes, since it computes everything in float64.
"""

import pathlib
import subprocess
import sys

import pytest

from support.extras import slow_but
from support.fuzz.faults import FAULTS, MOVED, changed

FUZZ = pathlib.Path(__file__).parents[1] / "fuzz.py"
SETTINGS = ("queue, none", "service, early exit")


def fuzz(*arguments):
    found = subprocess.run(
        [sys.executable, FUZZ, *arguments], capture_output=True, text=True, timeout=1500
    )
    return found.returncode, found.stdout + found.stderr


@pytest.mark.parametrize("setting", slow_but(SETTINGS, SETTINGS[0]))
def test_fuzzed_streams_equal_texts_decoded_alone(setting):
    status, output = fuzz(f"--only={setting}", "--seed=1", "--streams=6")
    assert status == 0, output[-2000:]


# A few streams of one setting show this fault; `tests/fuzz.py --fault` plants any fault.
FAULT = "a prefix is copied two tokens too long"


def test_planted_fault_is_found():
    status, output = fuzz(f"--fault={FAULT}", "--seed=1", "--streams=240")
    assert status == 0 and "found: " in output, output[-2000:]


def test_every_fault_can_be_planted():
    """Every fault still matches the code that it changes."""
    for fault in FAULTS.values():
        for change in fault.changes:
            assert change is MOVED or callable(changed(change))

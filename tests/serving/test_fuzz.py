"""The fuzzer finds no difference in a few streams, and finds every planted fault; `tests/fuzz.py` runs for longer.

It has processes of its own, since everything computes in float64 there.
"""

import pathlib
import subprocess
import sys

import pytest

FUZZ = pathlib.Path(__file__).parents[1] / "fuzz.py"
QUICK = ("queue, none", "service, early exit")
FAULTS = (
    "a row is read in as many calls as others",
    "a paused drafter is taken for one that has read all",
    "a prefix is copied two tokens too long",
    "rows change places when the size changes",
    "a chunk begins one token late",
    "rows are inserted in another order",
    "another row ends with a caller that has left",
    "prompts that are read together have each other's numbers",
    "a waiting request goes with a caller that has left",
)


def fuzz(*arguments):
    found = subprocess.run([sys.executable, FUZZ, *arguments], capture_output=True, text=True, timeout=1500)
    return found.returncode, found.stdout + found.stderr


@pytest.mark.parametrize("setting", QUICK)
def test_streams_of_requests_have_the_texts_that_they_have_alone(setting):
    status, output = fuzz(f"--only={setting}", "--seed=1", "--streams=12")
    assert status == 0, output[-2000:]


@pytest.mark.slow
def test_streams_of_every_setting_have_the_texts_that_they_have_alone():
    status, output = fuzz("--seed=1", "--streams=120")
    assert status == 0, output[-2000:]


@pytest.mark.parametrize(
    "fault", [pytest.param(name, marks=pytest.mark.slow if at else ()) for at, name in enumerate(FAULTS)]
)
def test_planted_fault_is_found(fault):
    status, output = fuzz(f"--fault={fault}", "--seed=1", "--streams=60")
    assert status == 0 and "found: " in output, output[-2000:]

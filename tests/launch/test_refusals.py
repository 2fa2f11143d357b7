"""Bad command lines are refused: one line that names the fault, exit status 2, and no traceback."""

import pathlib
import re
import shlex

import pytest

from support import extras
from support.run_script import refuse

TABLE = pathlib.Path(__file__).with_name("refusals.txt").read_text()
SECTIONS = dict(re.findall(r"^\[(.*)\]\n((?:.+\n)+)", TABLE, re.MULTILINE))


def cases(section, *marks):
    """Returns the commands of a section, each with the text that its refusal contains."""
    pairs = [line.split(" => ") for line in SECTIONS[section].splitlines()]
    return [pytest.param(command, message, marks=marks) for command, message in pairs]


OF_THE_ENDPOINT = cases(
    "of the endpoint, before a pair is read", extras.needs("starlette", "uvicorn", "pydantic")
)


def refused(command, message):
    error = refuse(*shlex.split(command))
    assert message in error and error.count("\n") == 1


@pytest.mark.parametrize("command, message", cases("before a pair is read") + OF_THE_ENDPOINT)
def test_command_is_refused_before_reading_the_pair(no_pair, command, message):
    refused(command, message)


@pytest.mark.parametrize("command, message", cases("after a pair was read"))
def test_command_is_refused_after_reading_the_pair(command, message):
    refused(command, message)

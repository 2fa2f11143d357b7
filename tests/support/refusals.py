"""Tests that bad values are refused, beside the other tests of a feature."""

import contextlib
import functools

import pytest

REFUSALS = ValueError, TypeError, NotImplementedError, FileNotFoundError


@contextlib.contextmanager
def refusal(message, kind=ValueError):
    """Checks that the code inside raises an error of one line, which matches this pattern."""
    with pytest.raises(kind, match=message) as error:
        yield error
    assert "\n" not in str(error.value)


def refused_calls(calls):
    """Returns a test that each call raises an error of one line, which matches the call's pattern.

    A message names field, value and fix. The calls run in an empty folder.

    Args:
      calls: functions without arguments, by the pattern of the message.
    """

    @pytest.mark.parametrize("message", calls)
    def test(message, tmp_path, monkeypatch):
        monkeypatch.chdir(tmp_path)
        with refusal(message, REFUSALS):
            calls[message]()

    return test


def refused_arguments(function, arguments):
    """Returns the test of `refused_calls` for one function: its arguments, by pattern."""
    return refused_calls(
        {message: functools.partial(function, **given) for message, given in arguments.items()}
    )

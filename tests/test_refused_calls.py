"""Calls with bad values are refused by an error of one line that names the field, the value and the
fix.

The calls of a folder are in its ``refused_calls.txt``. A paragraph has imports and definitions,
then lines ``CALL => PATTERN OF THE MESSAGE``; ``tmp_path`` is an empty folder.
"""

import pathlib

import pytest


def cases():
    found = []
    for path in sorted(pathlib.Path(__file__).parent.glob("*/refused_calls.txt")):
        for paragraph in path.read_text().split("\n\n"):
            lines = paragraph.splitlines()
            first = "\n".join(line for line in lines if " => " not in line)
            for line in lines:
                if " => " in line:
                    found.append(
                        pytest.param(first, *line.split(" => "), id=f"{path.parent.name}: {line}")
                    )
    return found


@pytest.mark.parametrize("first, call, message", cases())
def test_a_bad_value_is_named(tmp_path, first, call, message):
    scope = {"tmp_path": tmp_path}
    exec(first, scope)
    with pytest.raises(
        (ValueError, TypeError, NotImplementedError, FileNotFoundError), match=message
    ) as error:
        eval(call, scope)
    assert "\n" not in str(error.value)

"""Python that a budget cut off parses; other text does not."""

import pytest

from specsamp.evaluation.python_syntax import ParseResult, parse_python, parses

DEF = "def f(x):\n"


@pytest.mark.parametrize(
    "text, verdict",
    [
        ("", ParseResult.COMPLETE),
        ("x = 1\n", ParseResult.COMPLETE),
        ("return 1\n", ParseResult.COMPLETE),  # grammar, not meaning
        ("def f():\n", ParseResult.INCOMPLETE),
        ("x = (1,\n", ParseResult.INCOMPLETE),
        ('x = """a\n', ParseResult.INCOMPLETE),
        ("try:\n    x\n", ParseResult.INCOMPLETE),
        ("@wraps\n", ParseResult.INCOMPLETE),
        ("x = 1 \\\n", ParseResult.INCOMPLETE),
        ("x =\n", ParseResult.ERROR),
        ("if x:\nx\n", ParseResult.ERROR),
        ("if x:\n    x\n  y\n", ParseResult.ERROR),
        ("x = (1]\n", ParseResult.ERROR),
        ('x = "a\n', ParseResult.ERROR),  # the line has ended, and the string with it
        ("(" * 500 + "\n", ParseResult.ERROR),  # deeper than the parser goes
        ("x = 1\0\n", ParseResult.ERROR),
        ('x = "\\d"\n', ParseResult.COMPLETE),  # a warning is no error
    ],
)
def test_verdicts(text, verdict):
    assert parse_python(text) is verdict


@pytest.mark.parametrize(
    "prompt, completion, expected",
    [
        (DEF, "    return x\n", True),
        (DEF, "    return x\n\ny = (1,\n", True),  # a statement still open
        (DEF, "    return x\nfoo bar", True),  # a line without its end
        (DEF, "    return x\nfoo bar\n", False),
        (DEF, "    foo bar\n    return x\n", False),
        (DEF, "    return x", False),  # no line of it survives
        (DEF, "", False),
        ("x = 1\n", "y = (\n", False),  # only the prompt is left
        ("x = 1\n\x0c\n", "y = (\n", False),  # a form feed ends no line
        ("def f(", "x):\n    return x\n", True),  # in the middle of a line
        ("def f(", "x, x y):\n    return x\n", False),
        ("x = 1", "\ny = (\n", False),  # the prompt's own line does not count
        ("x = 1", "\ny = 2\n", True),
        ("x = 1", "\n\n\ny = (\n", False),  # blank lines are nothing of it
        ("x = 1", "\n\n\ny = 2\nz = (\n", True),
        ("x = (\n", "1,\n", False),  # no complete statement at all
        (DEF, '    """Text that goes on\n    and on\n', False),
        (DEF, "    pass\n" + '"""Text that goes on\n    and on\n', True),
        (DEF, "    pass\n\x0c\ny = 1\n", True),
    ],
)
def test_completions(prompt, completion, expected):
    assert parses(prompt, completion) is expected

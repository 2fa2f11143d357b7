"""What counts as Python that a budget cut off, and what does not."""

import inspect
import random
import textwrap
import tokenize

import pytest

from specsamp.evaluation.python_syntax import ParseResult, parse_python, parses

SOURCE = inspect.getsource(textwrap)
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
        ("x = 1\n", "y = (\n", False),  # what is left is the prompt
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


@pytest.fixture(scope="module")
def cuts():
    """Offsets of the ends of the tokens of a part of the source, which begins with a whole function."""
    lines = SOURCE.splitlines(keepends=True)
    starts = [sum(map(len, lines[:n])) for n in range(len(lines))]
    tokens = tokenize.generate_tokens(iter(lines).__next__)
    ends = {starts[row - 1] + column for _, _, _, (row, column), _ in tokens if 0 < row <= len(lines)}
    return sorted(ends)


@pytest.fixture(scope="module")
def prompt():
    """Up to the first line of a function's body; all cuts that are tested come later."""
    start = SOURCE.index("def dedent(text):\n")
    return SOURCE[: SOURCE.index("\n", start) + 1]


def test_source_that_is_cut_anywhere_parses(cuts, prompt):
    """From where the docstring has ended: before, there is no statement to cut at."""
    body = SOURCE.index('"""', SOURCE.index('"""', len(prompt)) + 3) + 4
    after = [cut for cut in cuts if cut >= body]
    assert len(after) > 300
    assert [cut for cut in after if not parses(prompt, SOURCE[len(prompt) : cut])] == []


def test_shuffled_source_does_not_parse(prompt):
    """The control: the same lines, or the same words of every line, in another order."""
    rest = SOURCE[len(prompt) :].splitlines(keepends=True)
    rng = random.Random(0)

    def shuffle(items):
        return rng.sample(items, len(items))

    def words(line):
        return line[: len(line) - len(line.lstrip())] + " ".join(shuffle(line.split())) + "\n"

    good = [parses(prompt, "".join(shuffle(rest))) for _ in range(50)]
    good += [parses(prompt, "".join(map(words, rest))) for _ in range(50)]
    assert not any(good)

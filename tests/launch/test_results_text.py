"""The page of results is a text for people: short paragraphs, short sentences, few tables."""

import re

from launch.lib import page
from launch.lib.study import RESULTS

TEXT = (RESULTS / "README.md").read_text(encoding="utf-8")
MOST_WORDS, MOST_OF_A_PARAGRAPH, MEAN_OF_A_SENTENCE, MOST_TABLES = 4000, 120, 20, 20


def paragraphs(text):
    """Returns the prose: what stands in no mark, no block of code, no heading and no picture; an item is a paragraph."""
    prose = re.sub(r"```.*?```", "", page.MARK.sub("", text), flags=re.DOTALL)
    parts = (part.strip() for part in re.split(r"\n\s*\n|\n(?=- )", prose))
    return [part for part in parts if part and not part.startswith(("#", "!["))]


def sentences(paragraph):
    return [one for one in re.split(r"(?<=[.?!])\s+(?=[A-Z`*\[])", paragraph) if one]


def words(text):
    return len(text.split())


def test_prose_is_short():
    found = paragraphs(TEXT)
    assert sum(map(words, found)) <= MOST_WORDS
    assert not [one[:60] for one in found if words(one) > MOST_OF_A_PARAGRAPH]
    lengths = [words(sentence) for one in found for sentence in sentences(one)]
    assert sum(lengths) / len(lengths) < MEAN_OF_A_SENTENCE
    # The control.
    assert [len(sentences(one)) for one in paragraphs("# A\n\nOne b. Two\nc.\n\n- d\n- e\n")] == [2, 1, 1]


def test_few_tables_are_on_the_page():
    assert TEXT.count("<!-- table: ") <= MOST_TABLES

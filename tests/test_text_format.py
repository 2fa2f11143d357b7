"""Numbers are formatted for readers."""

import pytest

from specsamp.text_format import human_count


@pytest.mark.parametrize("number, text", [(0, "0"), (7, "7"), (1234567, "1.235M"), (70_057_992_192, "70.06B")])
def test_human_count(number, text):
    assert human_count(number) == text

"""Prompts that are cut from source."""

import pytest

from specsamp.pretrained.prompts import cut_prompts
from specsamp.pretrained.tokenizer import ByteTokenizer

SOURCE = "import os\n\nclass A:\n    def one(self):\n        return 1\n\n\ndef two(x):\n    y = x\n    return y\n\ndef end():"


@pytest.fixture
def files(tmp_path):
    (tmp_path / "a.py").write_text(SOURCE, encoding="utf-8")
    return [tmp_path / "a.py"]


def test_prompts_begin_a_definition_and_end_with_a_whole_line(files):
    prompts = cut_prompts(files, ByteTokenizer(), 3, longest=40)
    assert sorted((prompt["line"], prompt["text"]) for prompt in prompts) == [
        (3, "class A:\n    def one(self):"),
        (4, "    def one(self):\n        return 1"),
        (8, "def two(x):\n    y = x\n    return y"),
    ]
    assert cut_prompts(files, ByteTokenizer(), 3, longest=40) == prompts
    (short,) = cut_prompts(files, ByteTokenizer(), 1, longest=24)
    assert short["text"] == "def two(x):\n    y = x"


def test_more_than_there_are(files):
    with pytest.raises(ValueError, match="4 prompts were asked for, 1 files have 3"):
        cut_prompts(files, ByteTokenizer(), 4, longest=40)

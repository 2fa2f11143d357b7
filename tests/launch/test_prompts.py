"""Prompts that are cut from source."""

import pytest

from launch.studies.prompts import cut_prompts
from support.byte_tokenizer import ByteTokenizer

SOURCE = "import os\n\nclass A:\n    def one(self):\n        return 1\n\n\ndef two(x):\n    y = x\n    return y\n\ndef end():"


@pytest.fixture
def root(tmp_path):
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "a.py").write_text(SOURCE, encoding="utf-8")
    (tmp_path / "b.py").write_text("\n".join(f"def f{n}():\n    pass\n" for n in range(9)), encoding="utf-8")
    return tmp_path


def test_prompts_begin_a_definition_end_with_a_whole_line_and_share_none(root):
    prompts = cut_prompts(root, ["package/a.py"], ByteTokenizer(), 2, longest=40)
    assert sorted((prompt["line"], prompt["text"]) for prompt in prompts) == [
        (3, "class A:\n    def one(self):"),  # not its method once more
        (8, "def two(x):\n    y = x\n    return y"),
    ]
    assert {prompt["file"] for prompt in prompts} == {"package/a.py"}
    assert cut_prompts(root, ["package/a.py"], ByteTokenizer(), 2, longest=40) == prompts
    (short,) = cut_prompts(root, ["package/a.py"], ByteTokenizer(), 1, longest=24)
    assert short["text"] == "def two(x):\n    y = x"


def test_files_give_alike_as_far_as_they_have(root):
    prompts = cut_prompts(root, ["package/a.py", "b.py"], ByteTokenizer(), 6, longest=40)
    assert sorted(prompt["file"] for prompt in prompts) == ["b.py"] * 4 + ["package/a.py"] * 2
    assert prompts != cut_prompts(root, ["package/a.py", "b.py"], ByteTokenizer(), 6, longest=40, seed=1)


def test_more_than_there_are(root):
    with pytest.raises(ValueError, match="3 prompts were asked for, 1 files have 2"):
        cut_prompts(root, ["package/a.py"], ByteTokenizer(), 3, longest=40)

"""More prompts of the kind that come with a pair: beginnings of functions and classes from files it has not read."""

from __future__ import annotations

import pathlib
import random
import re
from collections.abc import Sequence

from specsamp.decoding.pair import Tokenizer

BEGINS = re.compile(r"^ *(async )?(def|class) .*$", re.MULTILINE)
FEWEST_LINES = 2


def cut_prompts(
    files: Sequence[pathlib.Path], tokenizer: Tokenizer, count: int, *, longest: int = 64, seed: int = 0
) -> list[dict]:
    """``count`` prompts, drawn without repetition: file, line and text.

    Args:
      files: Python source; each gives as many as it has.
      longest: tokens of a prompt; it ends with the last whole line that fits.
      seed: of the drawing. Any part of the result has the files in the proportions of the whole, nearly.

    Raises:
      ValueError: the files have fewer.
    """
    found = [prompt for path in files for prompt in _beginnings(path, tokenizer, longest)]
    if len(found) < count:
        raise ValueError(f"{count} prompts were asked for, {len(files)} files have {len(found)}")
    return random.Random(seed).sample(found, count)


def _beginnings(path: pathlib.Path, tokenizer: Tokenizer, longest: int) -> list[dict]:
    source, found = path.read_text(encoding="utf-8"), []
    for begin in BEGINS.finditer(source):
        lines = source[begin.start() :].split("\n")
        whole = [n for n in range(FEWEST_LINES, 12) if len(tokenizer.encode("\n".join(lines[:n]))) <= longest]
        # A line break and the indentation after it are one token: a prompt that ends with one leads astray.
        text = "\n".join(lines[: whole[-1]]).rstrip() if whole else ""
        if text.count("\n") + 1 >= FEWEST_LINES:
            found.append({"file": path.name, "line": source.count("\n", 0, begin.start()) + 1, "text": text})
    return found

"""Cuts prompts like those that come with a pair: beginnings of functions and classes in files it has not read."""

from __future__ import annotations

import itertools
import pathlib
import re
from collections.abc import Sequence
from random import Random

from specsamp.decoding.pair import Tokenizer

BEGINS = re.compile(r"^ *(async )?(def|class) .*$", re.MULTILINE)
FEWEST_LINES = 2


def cut_prompts(
    root: pathlib.Path, files: Sequence[str], tokenizer: Tokenizer, count: int, *, longest: int = 64, seed: int = 0
) -> list[dict]:
    """Returns prompts that share no line, as many from each file as it has: the file, line and text of each.

    Args:
      root: the folder of the files.
      files: names of Python files below ``root``.
      tokenizer: counts the tokens of a prompt.
      count: the number of prompts.
      longest: the most tokens of a prompt, which ends with the last whole line that fits.
      seed: decides which prompts are drawn, and their order.

    Raises:
      ValueError: the files have fewer than ``count``.
    """
    random = Random(seed)
    found = [_beginnings(root, name, tokenizer, longest) for name in files]
    if (have := sum(map(len, found))) < count:
        raise ValueError(f"{count} prompts were asked for, {len(files)} files have {have}")
    for of_file in found:
        random.shuffle(of_file)
    in_turn = [prompt for one_of_each in itertools.zip_longest(*found) for prompt in one_of_each if prompt is not None]
    return random.sample(in_turn[:count], count)


def _beginnings(root: pathlib.Path, name: str, tokenizer: Tokenizer, longest: int) -> list[dict]:
    """Returns the prompts of one file, in its order; of those that overlap, the first."""
    source, found, end = (root / name).read_text(encoding="utf-8"), [], 0
    for begin in BEGINS.finditer(source):
        if begin.start() < end:
            continue  # a method at the beginning of a class that is a prompt already
        lines = source[begin.start() :].split("\n")
        whole = [n for n in range(FEWEST_LINES, 12) if len(tokenizer.encode("\n".join(lines[:n]))) <= longest]
        # A line break and the indentation after it are one token: a prompt that ends with one leads astray.
        text = "\n".join(lines[: whole[-1]]).rstrip() if whole else ""
        if text.count("\n") + 1 >= FEWEST_LINES:
            found.append({"file": name, "line": source.count("\n", 0, begin.start()) + 1, "text": text})
            end = begin.start() + len(text)
    return found

"""Cuts more prompts from the files that a pair of the standard library held out, for studies that need many.

    python launch/study.py prompts --count=160 --output=runs/python_prompts.json

The files are those of the running Python, so the result depends on its version, which it names.
"""

from __future__ import annotations

import itertools
import pathlib
import platform
import re
import sysconfig
from collections.abc import Sequence
from random import Random
from typing import Any

from launch.lib.study import Option, Study
from specsamp import storage
from specsamp.checkpoints.pair import load_pair, pair_folder
from specsamp.decoding.pair import Tokenizer

BEGINS = re.compile(r"^ *(async )?(def|class) .*$", re.MULTILINE)
FEWEST_LINES = 2


def measure(options: Any, key, say) -> dict[str, Any]:
    """Returns the prompts, and where they are from."""
    held_out = storage.read_json(pair_folder(options.pair) / "prompts.json")["prompts"]
    library = pathlib.Path(sysconfig.get_path("stdlib"))
    files = sorted({prompt["file"] for prompt in held_out if (library / prompt["file"]).is_file()})
    tokenizer = load_pair(options.pair).tokenizer
    prompts = cut_prompts(library, files, tokenizer, options.count, longest=options.longest, seed=options.seed)
    source = f"held-out files of the Python {platform.python_version()} standard library (PSF licence version 2)"
    return {"source": source, "prompts": prompts}


def cut_prompts(
    root: pathlib.Path, files: Sequence[str], tokenizer: Tokenizer, count: int, *, longest: int = 64, seed: int = 0
) -> list[dict]:
    """Returns the file, line and text of prompts that begin functions and classes, and share no line.

    Each file gives as many as the others, as far as it has them. A prompt ends with the last whole line that fits into
    ``longest`` tokens.
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


STUDY = Study(
    question="Which further prompts do the files give that a pair was not trained on?",
    options={
        "pair": Option("python", "The pair, by its name or folder, whose held-out files and tokenizer are used."),
        "count": Option(160, "The number of prompts.", least=1),
        "longest": Option(64, "The most tokens of a prompt.", least=8),
        "seed": Option(0, "The seed that decides which prompts are drawn.", least=0),
    },
    measure=measure,
)

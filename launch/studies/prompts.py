"""Cuts more prompts from the files that a pair of the standard library held out, for studies that need many.

    python launch/study.py prompts --count=160 --output=runs/python_prompts.json

The files are those of the running Python, so the result depends on its version, which it names.
"""

from __future__ import annotations

import pathlib
import platform
import sysconfig
from typing import Any

from launch.lib.study import Option, Study
from specsamp import storage
from specsamp.checkpoints.pair import load_pair, pair_folder
from specsamp.evaluation.prompts import cut_prompts


def measure(options: Any, key, say) -> dict[str, Any]:
    """Returns the prompts, and where they are from."""
    held_out = storage.read_json(pair_folder(options.pair) / "prompts.json")["prompts"]
    library = pathlib.Path(sysconfig.get_path("stdlib"))
    files = sorted({prompt["file"] for prompt in held_out if (library / prompt["file"]).is_file()})
    tokenizer = load_pair(options.pair).tokenizer
    prompts = cut_prompts(library, files, tokenizer, options.count, longest=options.longest, seed=options.seed)
    source = f"held-out files of the Python {platform.python_version()} standard library (PSF licence version 2)"
    return {"source": source, "prompts": prompts}


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

"""Cuts more prompts from the files that a pair of the standard library held out, for comparisons that need many.

    python launch/studies/cut_prompts.py --count=160 --output=runs/python_prompts.json

The files are those of the running Python, so the result depends on its version, which it names.
"""

import json
import pathlib
import platform
import sysconfig

from absl import flags

import _launch  # noqa: F401, the folder of entry
import entry
from specsamp import storage
from specsamp.checkpoints.pair import load_pair, pair_folder
from specsamp.evaluation.prompts import cut_prompts

_PAIR = flags.DEFINE_string("pair", "python", "Whose held-out files, and whose tokenizer.")
_COUNT = flags.DEFINE_integer("count", 160, "How many.", lower_bound=1)
_LONGEST = flags.DEFINE_integer("longest", 64, "Tokens of a prompt.", lower_bound=8)
_SEED = flags.DEFINE_integer("seed", 0, "Of the drawing.", lower_bound=0)
_OUTPUT = flags.DEFINE_string("output", None, "Where to write them as JSON.", required=True)


def main() -> None:
    console = entry.make_console()
    entry.check_output(_OUTPUT.value)
    held_out = json.loads((pair_folder(_PAIR.value) / "prompts.json").read_text(encoding="utf-8"))["prompts"]
    library = pathlib.Path(sysconfig.get_path("stdlib"))
    files = sorted({prompt["file"] for prompt in held_out if (library / prompt["file"]).is_file()})
    prompts = cut_prompts(
        library, files, load_pair(_PAIR.value).tokenizer, _COUNT.value, longest=_LONGEST.value, seed=_SEED.value
    )
    source = f"held-out files of the Python {platform.python_version()} standard library (PSF licence version 2)"
    document = {"command": entry.command(), "source": source, "prompts": prompts}
    storage.write(_OUTPUT.value, json.dumps(document, indent=1) + "\n")
    console.print(f"{len(prompts)} prompts of {len(files)} files, written to {_OUTPUT.value}", soft_wrap=True)


if __name__ == "__main__":
    entry.run(main)

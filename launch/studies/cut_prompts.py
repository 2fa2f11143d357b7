"""Cuts more prompts from the files that a pair of the standard library held out, for comparisons that need many.

    python launch/studies/cut_prompts.py --count=160 --output=runs/python_prompts.json

The files are those of the running Python, so the result depends on its version, which it names.
"""

import pathlib
import platform
import sysconfig

from absl import flags

from launch.lib import entry
from specsamp import storage
from specsamp.checkpoints.pair import load_pair, pair_folder
from specsamp.evaluation.prompts import cut_prompts

_PAIR = flags.DEFINE_string(
    "pair", "python", "The pair, by its name or folder, whose held-out files and tokenizer are used."
)
_COUNT = flags.DEFINE_integer("count", 160, "The number of prompts.", lower_bound=1)
_LONGEST = flags.DEFINE_integer("longest", 64, "The most tokens of a prompt.", lower_bound=8)
_SEED = flags.DEFINE_integer("seed", 0, "The seed that decides which prompts are drawn.", lower_bound=0)
_OUTPUT = entry.define_output("The JSON file to write, local or gs://.", required=True)


def main() -> None:
    console = entry.make_console()
    entry.check_output(_OUTPUT.value)
    held_out = storage.read_json(pair_folder(_PAIR.value) / "prompts.json")["prompts"]
    library = pathlib.Path(sysconfig.get_path("stdlib"))
    files = sorted({prompt["file"] for prompt in held_out if (library / prompt["file"]).is_file()})
    prompts = cut_prompts(
        library, files, load_pair(_PAIR.value).tokenizer, _COUNT.value, longest=_LONGEST.value, seed=_SEED.value
    )
    source = f"held-out files of the Python {platform.python_version()} standard library (PSF licence version 2)"
    document = {"command": entry.command(), "source": source, "prompts": prompts}
    storage.write_json(_OUTPUT.value, document)
    console.print(f"{len(prompts)} prompts of {len(files)} files, written to {_OUTPUT.value}", soft_wrap=True)


if __name__ == "__main__":
    entry.run(main)

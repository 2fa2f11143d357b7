"""Looks whether the public names of configs/hf.py exist, may be read and would load; no weights are downloaded.

    python launch/check_names.py                                     # all pairs
    python launch/check_names.py --pair=llama-8b --pair=Qwen/Qwen2.5-7B,Qwen/Qwen2.5-0.5B
    python launch/check_names.py --pair=Qwen/Qwen3-8B,RedHatAI/Qwen3-8B-speculator.eagle3 --head

Of each name config, tokenizer and the headers of its tensors are read from the hub, some megabytes. Exit status: 0, all
would load; 1, one would not.
"""

import os

os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")  # before the hub's library: a bar for every small file

import dataclasses
import types

from absl import flags

from launch.lib import entry
from launch.lib.config import load_file
from specsamp.analysis.report import Table
from specsamp.checkpoints.name_check import Finding, NamedPair, check_pair

_PAIR = flags.DEFINE_multi_string(
    "pair", [], "Check this pair of configs/hf.py, or TARGET,DRAFT; may be repeated; by default all of that file."
)
_HEAD = flags.DEFINE_bool("head", False, "The second name of each TARGET,DRAFT is a head of the first.")
_OUTPUT = entry.define_output()

FILE = "configs/hf.py"


def main() -> int:
    console = entry.make_console()
    entry.check_output(_OUTPUT.value)
    pairs = [named(word, load_file(FILE), _HEAD.value) for word in _PAIR.value or known(load_file(FILE))]
    findings = []
    with entry.progress(console, "asking the hub") as say:
        for number, pair in enumerate(pairs):
            say(f"pair {number + 1} of {len(pairs)}, {pair.name}")
            findings += check_pair(pair)
    entry.show([table(findings)], console)
    entry.write_result(_OUTPUT.value, {"names": [dataclasses.asdict(finding) for finding in findings]}, console)
    return int(any(finding.problem is not None for finding in findings))


def known(module: types.ModuleType) -> list[str]:
    """Returns the names of all pairs of configs/hf.py."""
    return [*module.PAIRS, *module.HEADS]


def named(word: str, module: types.ModuleType, is_head: bool) -> NamedPair:
    """Returns the pair of a word, see `configs.hf.find`; ``is_head`` counts for pairs that have no name there."""
    pair = module.find(word)
    return NamedPair(
        name=word,
        target=pair.target,
        draft=pair.draft,
        is_head=pair.drafter == "head" or (is_head and word not in known(module)),
        chat=pair.chat,
    )


def table(findings: list[Finding]) -> Table:
    """Returns a line for each name of each pair."""
    failed = sum(finding.problem is not None for finding in findings)
    rows = [
        (
            finding.pair,
            finding.role,
            finding.model,
            "loads" if finding.problem is None else "does not load",
            said(finding),
        )
        for finding in findings
    ]
    return Table(
        title=f"{len(findings)} names, of which {failed} would not load",
        header=("pair", "as", "name", "", "why, or what differs"),
        rows=[tuple(map(entry.visible, row)) for row in rows],
        left=5,
    )


def said(finding: Finding) -> str:
    """Returns what is wrong with a name, or what differs without harm."""
    return "; ".join(finding.notes) if finding.problem is None else finding.problem


if __name__ == "__main__":
    entry.run(main)

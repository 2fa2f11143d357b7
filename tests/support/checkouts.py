"""Every way to draft, and the comparison of two checkouts by what a script of this folder prints in
each.
"""

import argparse
import collections
import dataclasses
import os
import pathlib
import subprocess
import sys
import tempfile

from specsamp.decoding.drafters import (
    EarlyExitDrafter,
    FeatureDrafter,
    ModelDrafter,
    NgramDrafter,
    NoDrafter,
)
from specsamp.models.eagle import Eagle3Config
from specsamp.models.heads import FeatureHead
from specsamp.models.medusa import MedusaConfig

ROOT = pathlib.Path(__file__).parents[2]


def every_drafter(target, draft, K):
    """Returns by name, for two transformers, a drafter and what makes its parameters of a key."""
    size = target.config
    of_head = dict(num_layers=1, gated=True, activation="silu", positions="rotary")
    shape = dict(
        layer=dataclasses.replace(size, **of_head), own_output=True, target_layers=size.num_layers
    )
    eagle3 = FeatureHead(
        Eagle3Config(hidden_layers=(0, 1, 2), draft_vocab_size=size.vocab_size // 2, **shape)
    )
    medusa = FeatureHead(MedusaConfig(hidden_layers=(size.num_layers,), num_heads=K, **shape))

    def nothing(key):
        return None

    return {
        "none": (NoDrafter(), nothing),
        "model": (ModelDrafter(draft, K), draft.init),
        "ngram": (NgramDrafter(K=K), nothing),
        "early_exit": (EarlyExitDrafter(target, 1, K), nothing),
        "eagle3": (FeatureDrafter(target, eagle3, K), eagle3.init),
        "medusa": (FeatureDrafter(target, medusa, K), medusa.init),
        "adaptive": (ModelDrafter(draft, K), draft.init),
    }


def print_or_compare(script, description, lines, **choices):
    """The command line of a script: prints its lines, ``LABEL: DIGEST ..``, or compares them with
    another commit's.

    Args:
      lines: makes them; ``choices`` are its arguments and what they are chosen from, all by
        default.
    """
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument(
        "--against", help="The commit to compare with, which runs its own copy of this script."
    )
    for name, known in choices.items():
        parser.add_argument(f"--{name}", default=",".join(known))
    chosen, ours = vars(parser.parse_args()), []
    against = chosen.pop("against")
    for line in lines(**{name: text.split(",") for name, text in chosen.items()}):
        ours.append(line)
        if against is None:
            print(line, flush=True)
    if against is not None:
        compare(
            ours,
            run_at(
                against, pathlib.Path(script), [f"--{name}={text}" for name, text in chosen.items()]
            ),
        )


def run_at(revision, script, arguments):
    """Returns the lines that a script prints in a checkout of ``revision``."""
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run(
            ["git", "worktree", "add", "--detach", "-q", folder, revision], cwd=ROOT, check=True
        )
        try:
            command = [sys.executable, f"{folder}/{script.relative_to(ROOT)}", *arguments]
            environment = {**os.environ, "PYTHONPATH": folder}
            theirs = subprocess.run(
                command, capture_output=True, text=True, check=True, env=environment
            )
        finally:
            subprocess.run(["git", "worktree", "remove", "--force", folder], cwd=ROOT, check=True)
    return theirs.stdout.splitlines()


def compare(ours, theirs):
    """Prints what differs, and exits with 1 if anything does; labels that one of the two lacks are
    counted apart.

    A second digest that is equal says that no more than an order differs.
    """
    kinds = collections.Counter()
    here, there = (dict(line.rsplit(": ", 1) for line in lines) for lines in (ours, theirs))
    if apart := here.keys() ^ there.keys():
        print(f"{len(apart)} labels are known to one of the two alone")
    for label in here.keys() & there.keys():
        mine, other = here[label].split(), there[label].split()
        kind = (
            "identical"
            if mine[0] == other[0]
            else "reordered"
            if mine[1:2] == other[1:2] != []
            else "different"
        )
        kinds[kind] += 1
        if kind != "identical":
            print(f"{label}: {kind}")
    print(", ".join(f"{count} {kind}" for kind, count in kinds.items()), f"of {kinds.total()}")
    sys.exit(kinds["identical"] + kinds["reordered"] < kinds.total())

"""Prints a digest of the StableHLO of `Loop.run` for 94 chain-shaped settings; compares two checkouts.

    python tests/support/chain_programs.py                      # prints the digests of this checkout
    python tests/support/chain_programs.py --against=HEAD~1     # compares them with those of another commit

Moves, renames and optional fields must not change what is compiled for a chain. A commit that must change it says
so and says what. Digests do not depend on the order of a program's arguments, which follows the names of fields.
Every checkout is asked by its own copy of this file, since names differ between commits.
"""

import argparse
import collections
import dataclasses
import hashlib
import itertools
import os
import pathlib
import re
import subprocess
import sys
import tempfile

os.environ["JAX_PLATFORMS"] = "cpu"

import jax
import jax.numpy as jnp

ROOT = pathlib.Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

from specsamp.decoding.adaptive import Adaptive, Confidence
from specsamp.decoding.drafters import (
    BeamDrafter,
    ChoosingDrafter,
    EarlyExitDrafter,
    FeatureDrafter,
    ModelDrafter,
    NgramDrafter,
    NoDrafter,
)
from specsamp.decoding.loop import Loop
from specsamp.decoding.state import RequestBatch, Weights
from specsamp.models.config import tiny
from specsamp.models.eagle import Eagle3Config
from specsamp.models.heads import FeatureHead
from specsamp.models.medusa import MedusaConfig
from specsamp.models.transformer import TransformerLM
from specsamp.sampling.coupled import CoupledRule
from specsamp.sampling.rejection import BlockRule, TokenRule
from specsamp.sampling.warp import chain, temperature, top_p

SLOTS, K = 64, 4
METHODS = (
    ("model", TokenRule()),
    ("model", BlockRule()),
    ("model", CoupledRule()),
    ("ngram", TokenRule()),
    ("none", TokenRule()),
)
SETTINGS = tuple(itertools.product(("rotary", "relative"), (False, True), (1, 3), METHODS, (1, 6)))
# Every other way to draft, adaptive lengths, and kept rounds.
OTHERS = ("beam", "early_exit", "eagle3", "medusa", "choosing", "adaptive")
SETTINGS += tuple(("rotary", False, batch, (name, TokenRule()), 1) for name in OTHERS for batch in (1, 3))


def lower(positions: str, cpu_layout: bool, batch: int, method: tuple, window: int) -> str:
    """Returns the StableHLO of one setting."""
    layout = "cpu" if cpu_layout else "default"
    target = TransformerLM(tiny(positions=positions), layout)
    draft = TransformerLM(tiny(positions=positions, num_layers=1), layout)
    name, rule = method
    drafter, init_draft = drafter_of(name, target, draft)
    keeps_rounds = name in OTHERS
    lengths = Adaptive(lengths=(0, 1, K), costs_ms=(1.0, 1.2, 1.5), stop=Confidence(0.3)).for_batch(batch)
    loop = Loop(
        target=target,
        drafter=drafter,
        rule=rule,
        window=window,
        keep_log_probs=True,
        keep_rounds=keeps_rounds,
        adaptive=lengths if name == "adaptive" else None,
    )
    request = RequestBatch.create(sampling=chain(temperature(0.8), top_p(0.9)), limits=[40] * batch)

    def prepare(key):
        draft_weights = drafter.fit_slots(drafter.prepare(init_draft(key)), SLOTS)
        return Weights(target=target.fit_slots(target.prepare(target.init(key)), SLOTS), draft=draft_weights)

    weights = jax.eval_shape(prepare, jax.random.key(0))
    tokens_BP, lengths_B = jnp.zeros((batch, 8), jnp.int32), jnp.full((batch,), 8)

    def prefill(weights):
        return loop.prefill(weights, request, tokens_BP, lengths_B, slots=SLOTS)

    state = dataclasses.replace(jax.eval_shape(prefill, weights), request=None)
    return jax.jit(loop._run).lower(weights, request, state, jnp.int32(9)).as_text()


def drafter_of(name: str, target: TransformerLM, draft: TransformerLM):
    """Returns a drafter, and what makes its parameters of a key."""
    both = NgramDrafter(K=K), ModelDrafter(draft, K)

    def two(key):
        return None, draft.init(key)

    made = {
        "none": (NoDrafter(), lambda key: None),
        "model": (ModelDrafter(draft, K), draft.init),
        "ngram": (NgramDrafter(K=K), lambda key: None),
        "beam": (BeamDrafter(draft, K, beams=2), draft.init),
        "early_exit": (EarlyExitDrafter(target, 1, K), lambda key: None),
        "choosing": (ChoosingDrafter(both), two),
        "adaptive": (ModelDrafter(draft, K), draft.init),
    }
    if name in made:
        return made[name]
    size = target.config
    layer = dataclasses.replace(size, num_layers=1, gated=True, activation="silu")
    shape = dict(layer=layer, target_layers=size.num_layers, own_output=True)
    heads = {
        "eagle3": Eagle3Config(hidden_layers=(0, 1, 2), draft_vocab_size=size.vocab_size // 2, **shape),
        "medusa": MedusaConfig(hidden_layers=(size.num_layers,), num_heads=K, **shape),
    }
    head = FeatureHead(heads[name])
    return FeatureDrafter(target, head, K), head.init


def digest(text: str) -> str:
    """Hashes a program without its locations and without the order of its arguments."""
    text = re.sub(r"loc\(.*?\)|#loc.*", "", text)
    head, body = re.search(r"func\.func public @main\((.*?)\) -> [^\n]*\n", text, re.S), None
    body = text[: head.start()] + text[head.end() :]
    order = {name: f"%in{i}" for i, name in enumerate(dict.fromkeys(re.findall(r"%arg\d+", body)))}
    body = re.sub(r"%arg\d+", lambda found: order[found.group()], body)
    types = sorted(re.findall(r"%arg\d+: (tensor<[^>]*>)", head.group(1)))
    return hashlib.sha256((body + "\n".join(types)).encode()).hexdigest()[:16]


def operations(text: str) -> str:
    """Hashes how often each operation occurs with which types: equal for two orders of a loop's carry."""
    lines = [re.sub(r"%\w+(:\d+|#\d+)?", "%", re.sub(r"loc\(.*?\)", "", line)).strip() for line in text.splitlines()]
    plain = collections.Counter(
        line for line in lines if " = " in line and "while" not in line and "func.func" not in line
    )
    return hashlib.sha256(repr(sorted(plain.items())).encode()).hexdigest()[:16]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--against", help="The commit to compare with.")
    against = parser.parse_args().against
    lines = []
    for setting in SETTINGS:
        text = lower(*setting)
        positions, cpu_layout, batch, (name, rule), window = setting
        label = f"{positions} cpu_layout={cpu_layout} batch={batch} {name} {type(rule).__name__} window={window}"
        lines.append(f"{label}: {digest(text)} {operations(text)} {len(text)}")
        if against is None:
            print(lines[-1], flush=True)
    if against is None:
        return
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run(["git", "worktree", "add", "--detach", "-q", folder, against], cwd=ROOT, check=True)
        try:
            script = f"{folder}/{pathlib.Path(__file__).relative_to(ROOT)}"
            environment = {**os.environ, "PYTHONPATH": folder}
            theirs = subprocess.run(
                [sys.executable, script], capture_output=True, text=True, check=True, env=environment
            )
        finally:
            subprocess.run(["git", "worktree", "remove", "--force", folder], cwd=ROOT, check=True)
    compare(lines, theirs.stdout.splitlines())


def compare(ours: list[str], theirs: list[str]) -> None:
    """Prints what differs; exits with 1 if programs do. Settings that only one of the two knows are counted apart."""
    kinds = collections.Counter()
    here, there = (dict(line.rsplit(": ", 1) for line in lines) for lines in (ours, theirs))
    if apart := here.keys() ^ there.keys():
        print(f"{len(apart)} settings are known to one of the two alone")
    for label in here.keys() & there.keys():
        mine, other = here[label], there[label]
        (exact, ops, _), (exact_there, ops_there, _) = mine.split(), other.split()
        kind = "identical" if exact == exact_there else "reordered" if ops == ops_there else "different"
        kinds[kind] += 1
        if kind != "identical":
            print(f"{label}: {kind}")
    print(", ".join(f"{count} {kind}" for kind, count in kinds.items()), f"of {kinds.total()} programs")
    sys.exit(kinds["identical"] + kinds["reordered"] < kinds.total())


if __name__ == "__main__":
    main()

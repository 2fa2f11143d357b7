"""Prints a digest of the StableHLO of `Loop.run` for 92 chain-shaped settings; compares two
checkouts.

    python tests/support/chain_programs.py                   # prints this checkout's digests
    python tests/support/chain_programs.py --against=HEAD~1  # compares them with a commit's

Moves, renames and optional fields must not change what is compiled for a chain. A commit that must
change it says so and says what. Digests do not depend on the order of a program's arguments, which
follows the names of fields. Every checkout is asked by its own copy of this file, since names
differ between commits.
"""

import collections
import dataclasses
import hashlib
import itertools
import os
import pathlib
import re
import sys

os.environ["JAX_PLATFORMS"] = "cpu"

import jax
import jax.numpy as jnp

ROOT = pathlib.Path(__file__).parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from specsamp.decoding.adaptive import Adaptive, Confidence
from specsamp.decoding.loop import Loop
from specsamp.decoding.state import RequestBatch, Weights
from specsamp.models.config import tiny
from specsamp.models.transformer import TransformerLM
from specsamp.sampling.coupled import CoupledRule
from specsamp.sampling.rejection import BlockRule, TokenRule
from specsamp.sampling.warp import chain, temperature, top_p
from support.checkouts import every_drafter, print_or_compare

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
OTHERS = ("early_exit", "eagle3", "medusa", "adaptive")
SETTINGS += tuple(
    ("rotary", False, batch, (name, TokenRule()), 1) for name in OTHERS for batch in (1, 3)
)


def lower(positions: str, cpu_layout: bool, batch: int, method: tuple, window: int) -> str:
    """Returns the StableHLO of one setting."""
    layout = "cpu" if cpu_layout else "default"
    target = TransformerLM(tiny(positions=positions), layout)
    draft = TransformerLM(tiny(positions=positions, num_layers=1), layout)
    name, rule = method
    drafter, init_draft = every_drafter(target, draft, K)[name]
    keeps_rounds = name in OTHERS
    lengths = Adaptive(lengths=(0, 1, K), costs_ms=(1.0, 1.2, 1.5), stop=Confidence(0.3)).for_batch(
        batch
    )
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
        return Weights(
            target=target.fit_slots(target.prepare(target.init(key)), SLOTS), draft=draft_weights
        )

    weights = jax.eval_shape(prepare, jax.random.key(0))
    tokens_BP, lengths_B = jnp.zeros((batch, 8), jnp.int32), jnp.full((batch,), 8)

    def prefill(weights):
        return loop.prefill(weights, request, tokens_BP, lengths_B, slots=SLOTS)

    state = dataclasses.replace(jax.eval_shape(prefill, weights), request=None)
    return jax.jit(loop._run).lower(weights, request, state, jnp.int32(9)).as_text()


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
    """Hashes how often each operation occurs with which types: equal for two orders of a loop's
    carry.
    """
    lines = [
        re.sub(r"%\w+(:\d+|#\d+)?", "%", re.sub(r"loc\(.*?\)", "", line)).strip()
        for line in text.splitlines()
    ]
    plain = collections.Counter(
        line for line in lines if " = " in line and "while" not in line and "func.func" not in line
    )
    return hashlib.sha256(repr(sorted(plain.items())).encode()).hexdigest()[:16]


def lines():
    for setting in SETTINGS:
        text = lower(*setting)
        positions, cpu_layout, batch, (name, rule), window = setting
        label = (
            f"{positions} cpu_layout={cpu_layout} batch={batch} {name} {type(rule).__name__} "
            f"window={window}"
        )
        yield f"{label}: {digest(text)} {operations(text)} {len(text)}"


if __name__ == "__main__":
    print_or_compare(__file__, __doc__.splitlines()[0], lines)

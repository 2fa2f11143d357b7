"""Prints the tokens that every front door writes, by drafter and rule; compares two checkouts bit by bit.

    python tests/support/front_doors.py                      # prints a digest for each door, drafter and rule
    python tests/support/front_doors.py --against=HEAD~1     # compares them with those of another commit
    python tests/support/front_doors.py --doors=stream,queue --drafters=model

A door is a way to decode: ``generate``, ``stream``, ``generate_many`` (queue), ``Conversation``, the endpoint's service,
and the decoder of benchmarks. Tokens, marks of drafted tokens, endings and counts are compared; rounding is too, since
both checkouts run on one machine. Every checkout runs its own copy of this file where it has one, else this one.
"""

import argparse
import dataclasses
import hashlib
import itertools
import json
import os
import pathlib
import queue
import subprocess
import sys
import tempfile

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["JAX_DISABLE_MOST_OPTIMIZATIONS"] = "true"

import jax
import jax.numpy as jnp

ROOT = pathlib.Path(__file__).parents[2]
CHECKOUT = pathlib.Path(os.environ.get("FRONT_DOORS_OF", ROOT))  # whose package runs
sys.path.insert(0, str(CHECKOUT))

from specsamp import Adaptive, Confidence, Pair, generate, generate_many, penalties, stream
from specsamp.decoding.conversation import Conversation
from specsamp.decoding.drafters import (
    BeamDrafter,
    ChoosingDrafter,
    EarlyExitDrafter,
    FeatureDrafter,
    ModelDrafter,
    NgramDrafter,
    NoDrafter,
)
from specsamp.models.config import tiny
from specsamp.models.eagle import Eagle3Config
from specsamp.models.heads import FeatureHead
from specsamp.models.medusa import MedusaConfig
from specsamp.models.transformer import TransformerLM
from specsamp.sampling.coupled import CoupledRule
from specsamp.sampling.lossy import Lenience
from specsamp.sampling.rejection import BlockRule, TokenRule
from specsamp.sampling.warp import chain, temperature, top_p

VOCAB, K = 48, 3
PROMPTS = [[1, 2, 3, 1, 2, 3, 1, 2], [7], [5, 4, 3, 2, 1, 5, 4, 3, 2, 1, 5, 4, 3, 2, 1, 5, 4, 3], [9, 9, 9]]
BUDGETS = [21, 9, 30, 14]
STOP = [11]
SAMPLING = chain(penalties(repetition=1.1), temperature(0.7), top_p(0.9))


def pair_of(kind: str) -> Pair:
    """Returns a pair with random weights: a draft close to its target, or a head."""
    shape = dict(vocab_size=VOCAB, positions="rotary", num_kv_heads=2)
    target, draft = (TransformerLM(tiny(num_layers=layers, **shape)) for layers in (2, 1))
    params = target.init(jax.random.key(1))
    if kind == "model":
        return Pair(target=target, target_params=params, draft=draft, draft_params=draft.init(jax.random.key(1)))
    layer = tiny(num_layers=1, gated=True, activation="silu", **shape)
    heads = {
        "eagle3": Eagle3Config(
            layer=layer, target_layers=2, hidden_layers=(0, 1, 2), draft_vocab_size=24, own_output=True
        ),
        "medusa": MedusaConfig(layer=layer, target_layers=2, hidden_layers=(2,), num_heads=K, own_output=True),
    }
    head = FeatureHead(heads[kind])
    return Pair(target=target, target_params=params, head=head, draft_params=head.init(jax.random.key(2)))


def drafters() -> dict:
    """Returns, by name, a pair and the arguments that choose what drafts for it."""
    models = pair_of("model")
    several = dataclasses.replace(models, draft=None, draft_params=(None, models.draft_params))
    both = (NgramDrafter(K=K), ModelDrafter(models.draft, K))
    drafters = {
        "none": NoDrafter(),
        "model": ModelDrafter(models.draft, K),
        "ngram": NgramDrafter(K=K),
        "beam": BeamDrafter(models.draft, K, beams=2),
        "early_exit": EarlyExitDrafter(models.target, 1, K),
        "choosing": ChoosingDrafter(both),
    }
    found = {
        name: (several if name == "choosing" else models, {"drafter": drafter}) for name, drafter in drafters.items()
    }
    for kind in ("eagle3", "medusa"):
        pair = pair_of(kind)
        found[kind] = pair, {"drafter": FeatureDrafter(pair.target, pair.head, K)}
    lengths = Adaptive(lengths=(0, 1, K), costs_ms=(1.0, 1.2, 1.5), stop=Confidence(0.05))
    found["adaptive"] = models, {"draft_length": lengths}
    return found


RULES = {"token": TokenRule(), "block": BlockRule(), "coupled": CoupledRule(), "lenience": Lenience(0.5)}


def of_completion(one) -> list:
    return [one.tokens, one.from_draft, one.finish, _counts(one.stats)]


def _counts(stats) -> dict:
    """Returns counts by the names of today: verified positions had another name once."""
    return {name.replace("reached", "verified"): value for name, value in vars(stats).items()}


def by_generate(pair, options):
    found = generate(
        pair, PROMPTS, BUDGETS, sampling=SAMPLING, stop=STOP, num_samples=2, return_log_probs=True, seed=3, **options
    )
    return [[*of_completion(one), one.log_probs] for one in found]


def by_stream(pair, options):
    chunks = stream(pair, PROMPTS, BUDGETS, rounds_per_chunk=3, sampling=SAMPLING, stop=STOP, seed=3, **options)
    return [[one.prompt_index, one.sample_index, one.tokens, one.from_draft, one.finish] for one in chunks]


def by_queue(pair, options):
    work = generate_many(
        pair, PROMPTS * 2, BUDGETS * 2, rows=3, sampling=SAMPLING, stop=STOP, num_samples=2, seed=3, **options
    )
    found = sorted(work, key=lambda one: (one.prompt_index, one.sample_index))
    return [of_completion(one) for one in found]


def by_conversation(pair, options):
    chat, text, found = (
        Conversation(pair, max_tokens=120, sampling=SAMPLING, stop=STOP, seed=3, **options),
        [3, 1, 4],
        [],
    )
    for _ in range(3):
        found += [[one.tokens, one.from_draft, one.finish] for one in chat.stream(text, 12)]
        found.append([chat.tokens_read, _counts(chat.stats)])
        text = [*chat.tokens, 2, 7]
    return found


def by_service(pair, options):
    from specsamp.decoding.method import make_method
    from specsamp.serving.service import Service

    service, pieces = (
        Service(pair, make_method(pair, sampling=SAMPLING, **options), rows=2, context=96),
        queue.SimpleQueue(),
    )
    service.start()
    for seed in (3, 4):  # both wait for the same two rows
        for prompt, budget in zip(PROMPTS, BUDGETS):
            service.ask([prompt], budget, seed=seed, deliver=lambda piece, of=(seed, prompt): pieces.put((of, piece)))
    found = [pieces.get(timeout=600) for _ in range(2 * len(PROMPTS))]
    service.close()
    service.join()
    rows = [
        [of, piece.tokens, piece.from_draft, piece.log_probs, piece.finish, _counts(piece.stats)] for of, piece in found
    ]
    return sorted(rows, key=lambda row: row[0])


def by_benchmark(pair, options):
    from specsamp.analysis.workload import Workload, decoders
    from specsamp.decoding.method import make_method

    method = make_method(pair, sampling=SAMPLING, **options)
    work = Workload(batch=2, prompt_length=20, max_new_tokens=24, repeats=2, prompts=tuple(map(tuple, PROMPTS)))
    made = decoders(pair, {"it": method}, work)
    found = [made["it"].decode(repeat) for repeat in range(2)]
    return [[one.rounds, one.texts, one.from_draft, [_counts(row) for row in one.rows]] for one in found]


DOORS = (by_generate, by_stream, by_queue, by_conversation, by_service, by_benchmark)
DOORS = {door.__name__.removeprefix("by_"): door for door in DOORS}


def cases(doors: list[str], chosen: list[str]) -> list[tuple[str, str, str]]:
    """Returns every door with every drafter under the token rule, and with every rule with the draft model."""
    pairs = [(name, "token") for name in chosen] + [("model", rule) for rule in RULES if rule != "token"]
    return [(door, drafter, rule) for (drafter, rule), door in itertools.product(pairs, doors)]


def digest(found) -> str:
    def as_json(value):
        return (
            value.tolist() if isinstance(value, jnp.ndarray) or hasattr(value, "tolist") else dataclasses.asdict(value)
        )

    return hashlib.sha256(json.dumps(found, default=as_json).encode()).hexdigest()[:16]


def lines(doors: list[str], chosen: list[str]):
    known = drafters()
    for door, drafter, rule in cases(doors, chosen):
        if door == doors[0]:
            jax.clear_caches()  # compiled programs are mapped into memory, and Linux limits the mappings of a process
        pair, options = known[drafter]
        found = DOORS[door](pair, options | {"rule": RULES[rule]})
        yield f"{door}, {drafter}, {rule}: {digest(found)}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--against", help="The commit to compare with.")
    parser.add_argument("--doors", default=",".join(DOORS))
    parser.add_argument("--drafters", default=",".join(drafters()))
    chosen = parser.parse_args()
    ours = []
    for line in lines(chosen.doors.split(","), chosen.drafters.split(",")):
        ours.append(line)
        if chosen.against is None:
            print(line, flush=True)
    if chosen.against is None:
        return
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run(["git", "worktree", "add", "--detach", "-q", folder, chosen.against], cwd=ROOT, check=True)
        try:
            own = pathlib.Path(folder, pathlib.Path(__file__).relative_to(ROOT))
            script = own if own.exists() else pathlib.Path(__file__)
            theirs = subprocess.run(
                [sys.executable, script, f"--doors={chosen.doors}", f"--drafters={chosen.drafters}"],
                capture_output=True,
                text=True,
                check=True,
                env={**os.environ, "PYTHONPATH": folder, "FRONT_DOORS_OF": folder},
            ).stdout.splitlines()
        finally:
            subprocess.run(["git", "worktree", "remove", "--force", folder], cwd=ROOT, check=True)
    different = [mine for mine, other in zip(ours, theirs, strict=True) if mine != other]
    print("\n".join(different), f"{len(ours) - len(different)} identical of {len(ours)}", sep="\n" * bool(different))
    sys.exit(bool(different))


if __name__ == "__main__":
    main()

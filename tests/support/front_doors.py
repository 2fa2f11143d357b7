"""Prints the tokens that every front door writes, by drafter and rule; compares two checkouts bit by bit.

    python tests/support/front_doors.py                      # prints a digest for each door, drafter and rule
    python tests/support/front_doors.py --against=HEAD~1     # compares them with those of another commit
    python tests/support/front_doors.py --doors=stream,queue --drafters=model

A door is a way to decode: ``generate``, ``stream``, ``generate_many`` (queue), ``Conversation``, the endpoint's service,
and the decoder of benchmarks. Tokens, marks of drafted tokens, endings and counts are compared; rounding is too, since
both checkouts run on one machine. Every checkout runs its own copy of this file.
"""

import dataclasses
import hashlib
import itertools
import json
import os
import pathlib
import queue
import sys

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["JAX_DISABLE_MOST_OPTIMIZATIONS"] = "true"

import jax

ROOT = pathlib.Path(__file__).parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from specsamp import Adaptive, Confidence, Pair, generate, generate_many, penalties, stream
from specsamp.decoding.conversation import Conversation
from specsamp.models.config import tiny
from specsamp.models.transformer import TransformerLM
from specsamp.sampling.coupled import CoupledRule
from specsamp.sampling.lossy import Lenience
from specsamp.sampling.rejection import BlockRule, TokenRule
from specsamp.sampling.warp import chain, temperature, top_p
from support.checkouts import every_drafter, print_or_compare

VOCAB, K = 48, 3
PROMPTS = [[1, 2, 3, 1, 2, 3, 1, 2], [7], [5, 4, 3, 2, 1, 5, 4, 3, 2, 1, 5, 4, 3, 2, 1, 5, 4, 3], [9, 9, 9]]
BUDGETS = [21, 9, 30, 14]
STOP = [11]
SAMPLING = chain(penalties(repetition=1.1), temperature(0.7), top_p(0.9))


def every_pair() -> dict:
    """Returns, by name, a pair with random weights and the arguments that choose what drafts for it."""
    shape = dict(vocab_size=VOCAB, positions="rotary", num_kv_heads=2)
    target, draft = (TransformerLM(tiny(num_layers=layers, **shape)) for layers in (2, 1))
    params, found = target.init(jax.random.key(1)), {}
    for name, (drafter, init) in every_drafter(target, draft, K).items():
        head = getattr(drafter, "head", None)
        drafts = {"draft_params": init(jax.random.key(2 if head else 1)), "head": head}
        if drafts["draft_params"] is not None and hasattr(drafter, "model"):
            drafts["draft"] = draft
        found[name] = Pair(target=target, target_params=params, **drafts), {"drafter": drafter}
    lengths = Adaptive(lengths=(0, 1, K), costs_ms=(1.0, 1.2, 1.5), stop=Confidence(0.05))
    return found | {"adaptive": (found["adaptive"][0], {"draft_length": lengths})}


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
    chat = Conversation(pair, max_tokens=120, sampling=SAMPLING, stop=STOP, seed=3, **options)
    text, found = [3, 1, 4], []
    for _ in range(3):
        found += [[one.tokens, one.from_draft, one.finish] for one in chat.stream(text, 12)]
        found.append([chat.tokens_read, _counts(chat.stats)])
        text = [*chat.tokens, 2, 7]
    return found


def by_service(pair, options):
    from specsamp.decoding.method import make_method
    from specsamp.serving.service import Service

    service = Service(pair, make_method(pair, sampling=SAMPLING, **options), rows=2, context=96)
    pieces = queue.SimpleQueue()
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


def digest(found) -> str:
    def as_json(value):
        return value.tolist() if hasattr(value, "tolist") else dataclasses.asdict(value)

    return hashlib.sha256(json.dumps(found, default=as_json).encode()).hexdigest()[:16]


def lines(doors: list[str], drafters: list[str]):
    """Tries every door with every drafter under the token rule, and with every rule with the draft model."""
    known = every_pair()
    pairs = [(name, "token") for name in drafters] + [("model", rule) for rule in RULES if rule != "token"]
    for (drafter, rule), door in itertools.product(pairs, doors):
        if door == doors[0]:
            jax.clear_caches()  # compiled programs are mapped into memory, and Linux limits the mappings of a process
        pair, options = known[drafter]
        found = DOORS[door](pair, options | {"rule": RULES[rule]})
        yield f"{door}, {drafter}, {rule}: {digest(found)}"


if __name__ == "__main__":
    print_or_compare(__file__, __doc__.splitlines()[0], lines, doors=DOORS, drafters=every_pair())

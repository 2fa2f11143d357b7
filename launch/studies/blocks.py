"""Measures under which law a head that drafts blocks is accepted most, by temperatures of target and draft.

    python launch/study.py blocks --head=runs/my_head --output=runs/python_blocks.json

The head is DSpark's. "conditional" draws tokens in order, with its Markov head; "marginals" leaves the Markov head out,
which training weighs too. A draft temperature of 0 is argmax. Only acceptance is measured, not time.
"""

import functools
import math
from collections.abc import Callable
from typing import Any

from launch.lib.study import Document, Option, Published, Study, answers, law
from specsamp import Pair, chain, generate, load_pair, temperature, top_p
from specsamp.analysis.report import Table
from specsamp.checkpoints.params import digest
from specsamp.checkpoints.public_heads import open_head, read_head
from specsamp.checkpoints.trained_pair import load_prompts
from specsamp.decoding.drafters import BlockDrafter

PAIR, TOKENS = "python", 64
SAMPLING = ({"temperature": 0.0, "top_p": 1.0}, {"temperature": 0.8, "top_p": 0.95}, {"temperature": 1.0, "top_p": 1.0})
DRAFTS = (0.0, 0.5, 0.8, 1.0)
LAWS = ("marginals", "conditional")


@functools.cache
def pair_with(folder: str) -> Pair:
    """Returns the pair with a block head: its own, or that of a folder."""
    if not folder:
        return load_pair(PAIR, draft="block")
    pair = load_pair(PAIR)
    checkpoint = open_head(folder, pair.target.config, dtype="float32")
    head, params = checkpoint.config.head(), read_head(checkpoint, checkpoint.config.head())
    return Pair(
        target=pair.target, target_params=pair.target_params, tokenizer=pair.tokenizer, head=head, draft_params=params
    )


def measure(options: Any, key: dict, say: Callable[[str], None]) -> dict[str, Any]:
    """Returns tokens per round, and the accepted share of each position."""
    pair, K = pair_with(options.head), options.K
    prompts = load_prompts(PAIR)[: options.prompts]
    target = chain(temperature(key["temperature"]), top_p(key["top_p"]))
    draft = chain(temperature(key["draft_temperature"]), top_p(key["top_p"]))
    drafter = BlockDrafter(pair.target, pair.head, K, key["law"])
    done = generate(pair, prompts, TOKENS, drafter=drafter, sampling=target, draft_sampling=draft)
    stats = functools.reduce(lambda a, b: a + b, (completion.stats for completion in done))
    places = [share for share in stats.acceptance_by_position if not math.isnan(share)]  # nan where none was reached
    return {"tokens_per_round": stats.emitted / stats.rounds, "by_position": places}


def table(document: Document) -> Table:
    """Returns a row for each target and draft temperature."""
    found = {(law(key), key["draft_temperature"], key["law"]): result for key, result in answers(document)}
    rows = []
    for sampling, draft in dict.fromkeys((sampling, draft) for sampling, draft, _ in found):
        results = [found.get((sampling, draft, each)) for each in LAWS]
        numbers = [f"{one['tokens_per_round']:.2f}" if one else "" for one in results]
        places = [" ".join(f"{share:.2f}" for share in one["by_position"][:4]) if one else "" for one in results]
        rows.append((sampling, "argmax" if draft == 0 else f"{draft}", *numbers, *places))
    header = ("sampling", "draft at", *LAWS, "accepted by position, marginals", "conditional")
    return Table(title="Laws of a block's draft: tokens per round", header=header, rows=rows)


STUDY = Study(
    question="Under which law of the draft is a block accepted most?",
    cells=lambda options: [
        one | {"draft_temperature": draft, "law": each} for one in SAMPLING for draft in DRAFTS for each in LAWS
    ],
    identity=lambda options: {
        **{"pair": PAIR, "head": digest(pair_with(options.head).draft_params), "max_new_tokens": TOKENS},
        **{"K": options.K, "prompts": options.prompts},
    },
    measure=measure,
    tables={"blocks": Published(["python_blocks"], table)},
    options={
        "head": Option("", "The folder of the head; empty: the one that comes with the pair."),
        "K": Option(8, "Tokens of a draft.", least=1),
        "prompts": Option(16, "Prompts that are continued.", least=1),
    },
)

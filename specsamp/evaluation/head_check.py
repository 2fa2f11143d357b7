"""Checks that a head fits its target and is read as it was trained, since wrong features cost speed and nothing else.

    found = check_head(pair, write_texts(pair, ["def fibonacci(n):"]))
    print("\\n".join(found.sentences))

The target and the head read a few texts (teacher forcing). After every pair of tokens the first drafted token is accepted
with probability ``sum_x min(q(x), p(x))`` of the target's distribution q and the head's p. Layers off by one, swapped norms
or offsets taken for ids leave little of it.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from specsamp.decoding.data_shards import BY_ROWS, REPLICATED, DataShards
from specsamp.decoding.generate import generate
from specsamp.decoding.method import head_drafter
from specsamp.decoding.pair import Pair
from specsamp.decoding.request import Prompt, encode
from specsamp.decoding.state import Weights
from specsamp.decoding.whole_texts import read_texts
from specsamp.evaluation.audit.readers import FirstTokenReader, first_logits
from specsamp.models.heads import Head
from specsamp.models.interface import LayeredModel
from specsamp.sampling.warp import Warp, chain, for_rows, log_probs, temperature

Array = jax.Array

LOW = 0.2  # acceptance; heads that fit have more than a half


@dataclasses.dataclass(frozen=True, eq=False)
class HeadCheck:
    """The acceptance of the first drafted token after each pair of tokens, float32 ``[N]``."""

    acceptance_N: np.ndarray

    @property
    def acceptance(self) -> float:
        """Returns the mean acceptance."""
        return float(self.acceptance_N.mean(dtype=np.float64))

    @property
    def fits(self) -> bool:
        """Returns whether the head's acceptance is at least `LOW`."""
        return self.acceptance >= LOW

    @property
    def sentences(self) -> list[str]:
        """Returns the acceptance, and a warning if it is low."""
        found = [
            f"{self.acceptance:.0%} of the head's first tokens are accepted "
            f"({len(self.acceptance_N)} drafts, teacher-forced)"
        ]
        if not self.fits:
            found.append(
                f"WARNING: THE HEAD DOES NOT FIT: {self.acceptance:.0%} of its first tokens are accepted, where "
                "heads that fit have more than half. Was it trained for this very target (a tuned model differs from its "
                "base), and on prompts like these (with the chat template)? Does its config.json name the right layers and "
                "norms?"
            )
        return found


def check_head(pair: Pair, texts: Sequence[Sequence[int]], *, sampling: Warp | None = None) -> HeadCheck:
    """Measures the acceptance of a pair's head.

    Args:
      pair: a pair with a head.
      texts: token ids, such as `write_texts` returns; texts of a single token are left out.
      sampling: the warp of both distributions; default: temperature 1.

    Raises:
      ValueError: the pair has no head, or all texts are too short.
    """
    if pair.head is None:
        raise ValueError("the pair has no head that could be checked")
    texts = [text for text in texts if len(text) > 1]
    if not texts:
        raise ValueError("all texts are shorter than 2 tokens, after which a head drafts first: give longer texts")
    warp = pair.full_warp(chain(temperature(1.0)) if sampling is None else sampling)

    def read(weights: Weights, slots: int, tokens_BT: Array, *_: Any) -> Array:
        of_rows = for_rows(warp, len(tokens_BT))
        return first_acceptance(pair.target, pair.head, pair.shards, weights, tokens_BT, of_rows, slots=slots)

    rows = read_texts(pair, head_drafter(pair.target, pair.head, 1), texts, read)
    return HeadCheck(np.concatenate([row[: len(text) - 1] for row, text in zip(rows, texts, strict=True)]))


def write_texts(
    pair: Pair, prompts: Sequence[Prompt], *, tokens: int = 32, sampling: Warp | None = None, seed: int = 0
) -> list[list[int]]:
    """Returns prompts with the target's own completions, as token ids."""
    sampling = chain(temperature(1.0)) if sampling is None else sampling
    completions = generate(pair, prompts, tokens, draft_length=0, sampling=sampling, seed=seed)
    return [
        [*prompt, *completion.tokens] for prompt, completion in zip(encode(pair, prompts), completions, strict=True)
    ]


@functools.partial(jax.jit, static_argnames=("target", "head", "shards", "slots"))
def first_acceptance(
    target: LayeredModel,
    head: Head,
    shards: DataShards,
    weights: Weights,
    tokens_BT: Array,
    warp: Warp,
    *,
    slots: int,
) -> Array:
    """Returns the acceptance ``[B, T-1]`` of the first token that is drafted after each pair of tokens."""

    def read(weights, tokens_BT, warp):
        cache = FirstTokenReader(target, head).init_cache(len(tokens_BT), slots)
        start_B = jnp.zeros((len(tokens_BT),), jnp.int32)
        output = target(weights.target, tokens_BT, start_B, cache[0], hidden_layers=head.hidden_layers)
        drafted_BNV = first_logits(target, head, weights, tokens_BT, output.hidden, cache)
        distributions = (jnp.exp(log_probs(warp, x_BNV)) for x_BNV in (drafted_BNV, output.logits_BTV[:, 1:]))
        return jnp.minimum(*distributions).sum(-1)

    return shards.map(read, (REPLICATED, BY_ROWS, BY_ROWS))(weights, tokens_BT, warp)

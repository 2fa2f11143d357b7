"""Checks that a head fits its target and is read as it was trained, since wrong features cost speed and nothing else.

    found = check_head(pair, write_texts(pair, ["def fibonacci(n):"]))
    print("\\n".join(found.sentences))

The target and the head read a few texts (teacher forcing). After every pair of tokens the first drafted token is accepted
with probability ``sum_x min(q(x), p(x))`` of the target's distribution q and the head's p. Layers off by one, swapped norms
or offsets taken for ids leave little of it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from specsamp.decoding.generate import generate
from specsamp.decoding.method import head_drafter
from specsamp.decoding.pair import Pair
from specsamp.decoding.request import Prompt, encode
from specsamp.evaluation.audit.readers import FirstTokenReader, Reader
from specsamp.evaluation.audit.teacher import Text, read_tokens
from specsamp.sampling.warp import Warp, chain, for_rows, log_probs, temperature

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
      texts: token ids, such as `write_texts` returns; those of one or two tokens are left out.
      sampling: the warp of both distributions; default: temperature 1.

    Raises:
      ValueError: the pair has no head, or all texts are too short.
    """
    if pair.head is None:
        raise ValueError("the pair has no head that could be checked")
    texts = [text for text in texts if len(text) > 2]
    if not texts:
        raise ValueError("all texts are shorter than 3 tokens, of which a head drafts the last: give longer texts")
    warp = pair.full_warp(chain(temperature(1.0)) if sampling is None else sampling)

    def read(rows: Sequence[Text], tokens_BN: np.ndarray, *logits: jax.Array) -> jax.Array:
        probs = [jnp.exp(log_probs(for_rows(warp, len(rows)), logits_BNV)) for logits_BNV in logits]
        return jnp.minimum(*probs).sum(-1)

    rows = read_tokens(
        pair,
        [Text(prompt=tuple(text[:2]), tokens=tuple(text[2:])) for text in texts],
        read,
        drafter=head_drafter(pair.target, pair.head, 1),
        reader=Reader(model=FirstTokenReader(pair.target, pair.head), weights_of=lambda weights: weights),
    )
    return HeadCheck(np.concatenate(rows))


def write_texts(
    pair: Pair, prompts: Sequence[Prompt], *, tokens: int = 32, sampling: Warp | None = None, seed: int = 0
) -> list[list[int]]:
    """Returns prompts with the target's own completions, as token ids."""
    sampling = chain(temperature(1.0)) if sampling is None else sampling
    completions = generate(pair, prompts, tokens, draft_length=0, sampling=sampling, seed=seed)
    return [
        [*prompt, *completion.tokens] for prompt, completion in zip(encode(pair, prompts), completions, strict=True)
    ]

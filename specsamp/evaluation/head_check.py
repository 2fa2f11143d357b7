"""Checks that a head fits its target and is read as it was trained, since wrong features cost speed
and nothing else.

    print("\\n".join(check_head(pair, ["def fibonacci(n):"]).sentences))

The pair continues a few prompts with one drafted token in each round. Layers off by one, swapped
norms or offsets taken for ids leave little of the acceptance. Other ways to read the head are
compared on the same texts, after every position.
"""

import contextlib
import dataclasses
from collections.abc import Mapping, Sequence

import jax.numpy as jnp
import numpy as np

from specsamp.decoding.generate import generate
from specsamp.decoding.method import Method, head_drafter
from specsamp.decoding.pair import Pair
from specsamp.decoding.request import Prompt, encode
from specsamp.evaluation.audit.readers import reader
from specsamp.evaluation.audit.teacher import Text, read_tokens
from specsamp.models.heads import HeadConfig
from specsamp.sampling.warp import Warp, chain, for_rows, log_probs, temperature

LOW = 0.2  # acceptance; heads that fit have more than a half
# In acceptance: five standard errors of some hundred positions.
CONFIGURED, CLEAR_GAIN = "as configured", 0.1


@dataclasses.dataclass(frozen=True)
class HeadCheck:
    """Counts of the tokens that a head drafted, each the first of its round, and of those that were
    accepted.
    """

    drafted: int
    accepted: int
    # Acceptance by how the head is read.
    readings: Mapping[str, float] = dataclasses.field(default_factory=dict)

    @property
    def acceptance(self) -> float:
        """Returns the accepted share; nan if nothing was drafted."""
        return self.accepted / self.drafted if self.drafted else float("nan")

    @property
    def fits(self) -> bool:
        """Returns whether nothing speaks against the head: an acceptance below `LOW`, or a better
        way to read it.
        """
        return not self.acceptance < LOW and self.better is None

    @property
    def better(self) -> str | None:
        """Returns the reading that is accepted most, if it fits and is accepted clearly more often
        than the configured one.
        """
        best = max(self.readings, key=self.readings.get, default=CONFIGURED)
        if best == CONFIGURED:
            return None
        clear = max(LOW, self.readings[CONFIGURED] + CLEAR_GAIN)
        return best if self.readings[best] > clear else None

    @property
    def sentences(self) -> list[str]:
        """Returns the acceptance, and a warning if it is low."""
        found = [
            f"{self.acceptance:.0%} of the head's first tokens are accepted ({self.drafted} drafts)"
        ]
        if self.better is not None:
            found.append(
                f"WARNING: THE HEAD IS READ WRONGLY: with {self.better} it would be accepted more "
                f"often ({self.readings[self.better]:.0%}, now {self.readings[CONFIGURED]:.0%}): "
                "correct config.json"
            )
        elif not self.fits:
            found.append(
                f"WARNING: THE HEAD DOES NOT FIT: {self.acceptance:.0%} of its first tokens are "
                "accepted, where heads that fit have more than half. Was it trained for this very "
                "target (a tuned model differs from its base), and on prompts like these (with the "
                "chat template)? Does its config.json name the right layers and norms?"
            )
        return found


def check_head(
    pair: Pair,
    prompts: Sequence[Prompt],
    *,
    tokens: int = 32,
    sampling: Warp | None = None,
    seed: int = 0,
    others: bool = False,
) -> HeadCheck:
    """Counts how many of a head's first tokens are accepted while ``tokens`` tokens are decoded
    after each prompt.

    Args:
      sampling: the warp of both distributions; default: temperature 1.
      others: whether to compare `other_readings`, each of which takes a program.

    Raises:
      ValueError: the pair has no head.
    """
    if pair.head is None:
        raise ValueError("the pair has no head that could be checked")
    sampling = chain(temperature(1.0)) if sampling is None else sampling
    method = Method(drafter=head_drafter(pair.target, pair.head, 1), sampling=sampling)
    done = generate(pair, prompts, tokens, method=method, seed=seed)
    texts = [
        Text(prompt=tuple(prompt), tokens=tuple(one.tokens))
        for prompt, one in zip(encode(pair, prompts), done)
        if others and len(prompt) > 1 and one.tokens  # a head reads two tokens
    ]
    return HeadCheck(
        drafted=sum(sum(one.stats.reached) for one in done),
        accepted=sum(one.stats.accepted for one in done),
        readings=_compare_readings(pair, texts, pair.full_warp(sampling)) if texts else {},
    )


def other_readings(config: HeadConfig) -> dict[str, HeadConfig]:
    """Returns other ways in which a head with the same tensors may have been trained, by the field
    that differs.
    """
    ways = [
        ("hidden_layers", tuple(layer + shift for layer in config.hidden_layers))
        for shift in (-1, 1)
    ]
    if config.drafts_blocks:
        size = config.block_size
        ways += [("block_size", other) for other in (size // 2, size - 1, size + 1, 2 * size)]
        ways += [("from_anchor", not config.from_anchor)]
    found = {}
    for field, value in ways:
        # The target has no such layer, or the block would be too short.
        with contextlib.suppress(ValueError):
            found[f"{field} = {value}"] = dataclasses.replace(config, **{field: value})
    return found


def _compare_readings(pair: Pair, texts: Sequence[Text], warp: Warp) -> dict[str, float]:
    def accepted(rows, tokens_BN, *logits):
        warp_B = for_rows(warp, len(rows))
        target_BNV, draft_BNV = (log_probs(warp_B, logits_BNV) for logits_BNV in logits)
        return jnp.exp(jnp.minimum(target_BNV, draft_BNV)).sum(-1)

    found = {}
    for name, config in {CONFIGURED: pair.head.config, **other_readings(pair.head.config)}.items():
        other = dataclasses.replace(pair, head=dataclasses.replace(pair.head, config=config))
        drafter = head_drafter(other.target, other.head, 1)
        model = reader(drafter)
        if model is None:  # of an assistant, which drafts from the target's caches
            return {}
        read = read_tokens(other, texts, accepted, drafter=drafter, reader=model)
        found[name] = float(np.concatenate(read).mean())
    return found

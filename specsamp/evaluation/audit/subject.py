"""What is audited, and what a check says of it."""

from __future__ import annotations

import dataclasses
import enum
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from scipy import stats

from specsamp.decoding import checks
from specsamp.decoding.drafter import Drafter
from specsamp.decoding.drafters import ModelDrafter
from specsamp.decoding.generate import generate
from specsamp.decoding.pair import Pair
from specsamp.decoding.results import Completion
from specsamp.evaluation.audit.teacher import next_logits
from specsamp.mesh.sharded import ShardedModel
from specsamp.models.interface import LanguageModel
from specsamp.models.transformer import TransformerLM
from specsamp.sampling.rejection import TokenRule
from specsamp.sampling.rules import Rule
from specsamp.sampling.warp import Warp, chain, first_tokens, greedy

# Two float32 computations of the same logits, in units of eps times the largest logit: farthest apart, with a
# margin of three over what 500,000 logits of the pair "python" showed, and how often a decision of one falls
# otherwise in the other: a token is one acceptance and one draw, and the distributions were 0.7 apart in total variation.
FARTHEST, FLIPS = 32, 4


class Verdict(enum.StrEnum):
    PASSED = "passed"
    FAILED = "failed"
    NOT_APPLICABLE = "not applicable"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Check:
    """What one check found."""

    name: str
    verdict: Verdict
    sentence: str
    numbers: dict[str, int | float]  # finite, so that JSON holds them


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class Subject:
    """A pair, its prompts, and the settings it is used with.

    Attributes:
      pair: target and draft.
      prompts: token ids; ``prompts[i]`` has prompt id i, whatever the batch it is in.
      drafter, rule: what is audited.
      sampling, draft_sampling: warps whose numbers are the same for all prompts; the draft's own is by default
        the target's.
      max_new_tokens: of the texts that are compared token by token.
      seed: of the noise.

    Raises:
      ValueError: nothing is drafted, there are no prompts, or one is too long.
    """

    pair: Pair
    prompts: Sequence[Sequence[int]]
    drafter: Drafter
    sampling: Warp
    draft_sampling: Warp | None = None
    rule: Rule = TokenRule()
    max_new_tokens: int = 64
    seed: int = 0

    def __post_init__(self):
        if self.drafter.K == 0:
            raise ValueError("nothing is drafted, so there is nothing to audit: give a drafter and a draft_length >= 1")
        lengths = [len(tokens) for tokens in checks.encode(self.pair, self.prompts)]
        checks.limits(self.pair, self.drafter, lengths, self.max_new_tokens)

    def decode(self, prompts: Sequence[Sequence[int]] | None = None, **changes: Any) -> list[Completion]:
        """`generate` with these settings, of all prompts or others; ``changes`` are arguments of `generate`."""
        settings = {
            "max_new_tokens": self.max_new_tokens,
            "sampling": self.sampling,
            "draft_sampling": self.draft_sampling,
            "drafter": self.drafter,
            "rule": self.rule,
            "seed": self.seed,
        }
        return generate(self.pair, self.prompts if prompts is None else prompts, **(settings | changes))

    def decode_greedily(self, **changes: Any) -> list[Completion]:
        return self.decode(**({"sampling": greedy(), "draft_sampling": None} | changes))

    def law(self, warp: Warp) -> Warp:
        """``warp`` over the tokens that the tokenizer has, as `generate` applies it."""
        tokenizer = self.pair.tokenizer
        if tokenizer is None or tokenizer.vocab_size == self.pair.target.vocab_size:
            return chain(warp)
        return chain(first_tokens(tokenizer.vocab_size), warp)

    def cast(self, dtype: str) -> Subject | None:
        """The same with models that compute in ``dtype``; None where the target has no such choice."""
        target = in_dtype(self.pair.target, dtype)
        if target is None:
            return None
        recast = in_dtype(self.pair.draft, dtype)
        draft = recast or self.pair.draft
        if (target, draft) == (self.pair.target, self.pair.draft):
            return self
        drafter = self.drafter
        if isinstance(drafter, ModelDrafter):
            drafter = dataclasses.replace(drafter, model=draft)
        pair = dataclasses.replace(self.pair, target=target, draft=draft)
        if dtype == "float32":
            # Here, and once: `Pair.weights` would make a wider copy for every number of slots.
            def wide(params):
                return jax.tree.map(lambda x: x.astype(dtype), params)

            draft_params = wide(pair.draft_params) if recast else pair.draft_params
            pair = dataclasses.replace(pair, target_params=wide(pair.target_params), draft_params=draft_params)
        return dataclasses.replace(self, pair=pair, drafter=drafter)

    @functools.cached_property
    def prompt_logits(self) -> np.ndarray:
        """What the target says after each prompt, ``[len(prompts), V]``."""
        return next_logits(self.pair, self.prompts)

    @property
    def rounding(self) -> float:
        """eps of float32 times the largest logit: what the constants of this module count in."""
        logits = self.prompt_logits
        largest = np.abs(logits[np.isfinite(logits)]).max(initial=1.0)
        return float(jnp.finfo(jnp.float32).eps * largest)

    def flips_allowed(self, tokens: int, false_alarm: float) -> int:
        """How many of ``tokens`` decisions may fall otherwise by rounding: more has a chance below ``false_alarm``."""
        return int(stats.binom.isf(false_alarm, tokens, min(FLIPS * self.rounding, 1.0)))


def in_dtype(model: LanguageModel | None, dtype: str) -> LanguageModel | None:
    """The model computing in another dtype, on its mesh if it is on one; None for models of other kinds."""
    if isinstance(model, ShardedModel):
        inner = in_dtype(model.model, dtype)
        return inner and ShardedModel(dataclasses.replace(inner, layout="default"), model.layout)
    if not isinstance(model, TransformerLM):
        return None
    if model.config.dtype == dtype:
        return model
    return TransformerLM.for_backend(dataclasses.replace(model.config, dtype=dtype))

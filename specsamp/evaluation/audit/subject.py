"""The audited pair with its settings, and the result of a check."""

from __future__ import annotations

import copy
import dataclasses
import enum
import functools
from collections.abc import Sequence
from typing import Any, Self

import jax
import jax.numpy as jnp
import numpy as np
from scipy import stats

from specsamp.decoding.generate import generate
from specsamp.decoding.method import Method
from specsamp.decoding.pair import Pair
from specsamp.decoding.request import check_budgets, encode
from specsamp.decoding.results import Completion
from specsamp.evaluation.audit.teacher import next_logits
from specsamp.mesh.sharded import ShardedModel, shard_model
from specsamp.models.interface import LanguageModel
from specsamp.models.transformer import TransformerLM
from specsamp.sampling.warp import is_stateless

# Differences of two float32 computations of the same logits, in units of eps times the largest
# logit. FARTHEST bounds the difference of a logit: three times the largest difference among 500,000
# logits of the pair "python". FLIPS bounds the probability that rounding changes a sampled token,
# by an acceptance and a draw: the two distributions were 0.7 units apart in total variation.
FARTHEST, FLIPS = 32, 4
POWER = 0.99  # probability with which an error must be seen


class Status(enum.StrEnum):
    """Outcomes of a check."""

    PASSED = "passed"
    FAILED = "failed"
    NOT_APPLICABLE = "not applicable"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Check:
    """Result of one check.

    Attributes:
      name: one of `specsamp.evaluation.audit.checks.CHECKS`.
      verdict: passed, failed or not applicable.
      sentence: the observations behind the verdict.
      numbers: the observations as numbers; finite, for JSON.
      seen: the errors that would have been detected, and with which probability.
    """

    name: str
    verdict: Status
    sentence: str
    numbers: dict[str, int | float] = dataclasses.field(default_factory=dict)
    seen: str = ""

    @classmethod
    def tested(cls, name: str, failed: bool, sentence: str, **more: Any) -> Self:
        """Returns a check that passed or failed."""
        return cls(
            name=name, verdict=Status.FAILED if failed else Status.PASSED, sentence=sentence, **more
        )

    def __and__(self, other: Check) -> Check:
        """Joins two parts of a check. It fails if either part fails; a part that does not apply
        does not count.
        """
        severity = (Status.NOT_APPLICABLE, Status.PASSED, Status.FAILED)
        return Check(
            name=self.name,
            verdict=max(self.verdict, other.verdict, key=severity.index),
            sentence="; ".join((self.sentence, other.sentence)),
            numbers=self.numbers | other.numbers,
            seen="; ".join(filter(None, (self.seen, other.seen))),
        )


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class Subject:
    """A pair with its prompts and settings.

    Attributes:
      pair: target and draft.
      prompts: token ids; ``prompts[i]`` has prompt id i in every batch.
      method: the audited method; its warps have the same numbers for all prompts. Its adaptive
        draft length is used in all checks but the tests of rounds, which always draft K tokens.
      max_new_tokens: longest length of the texts that are compared or read.
      seed: seed of the random numbers.

    Raises:
      ValueError: nothing is drafted, there are no prompts, a prompt is too long, or a warp depends
        on earlier tokens.
    """

    pair: Pair
    prompts: Sequence[Sequence[int]]
    method: Method
    max_new_tokens: int = 64
    seed: int = 0

    def __post_init__(self):
        if self.method.drafter.K == 0:
            raise ValueError(
                "nothing is drafted, so there is nothing to audit: give a drafter and a "
                "draft_length >= 1"
            )
        one = jnp.ones(1, jnp.int32)
        vocab_size = self.pair.target.vocab_size
        for name in ("sampling", "draft_sampling"):
            warp = getattr(self.method, name)
            if warp is not None and not is_stateless(warp.init(one[None], one, vocab_size)):
                raise ValueError(
                    f"{name} depends on the text before each token, and the audit does not compute "
                    f"such distributions: audit the pair without {type(warp).__name__}"
                )
        lengths = [len(tokens) for tokens in encode(self.pair, self.prompts)]
        check_budgets(self.pair, self.method.drafter, lengths, self.max_new_tokens)

    def decode(
        self, prompts: Sequence[Sequence[int]] | None = None, **changes: Any
    ) -> list[Completion]:
        """Calls `generate` with these settings, on these prompts by default; ``changes`` replaces
        its arguments.
        """
        settings = {"max_new_tokens": self.max_new_tokens, "method": self.method, "seed": self.seed}
        return generate(
            self.pair, self.prompts if prompts is None else prompts, **(settings | changes)
        )

    @functools.cached_property
    def texts(self) -> list[Completion]:
        """Returns the texts of the prompts, decoded together."""
        return self.decode()

    def cast(self, dtype: str) -> Subject | None:
        """Returns the subject with models that compute in ``dtype``; None if the target has no
        dtype to choose.
        """
        target = in_dtype(self.pair.target, dtype)
        if target is None:
            return None
        recast = in_dtype(self.pair.draft, dtype)
        new = {
            "target": target,
            "draft": recast or self.pair.draft,
            "head": self.pair.head and self.pair.head.in_dtype(dtype),
        }
        old = {name: getattr(self.pair, name) for name in new}
        if new == old:
            return self
        pair = dataclasses.replace(self.pair, **new)
        # A copy in which the new models stand for the old ones.
        models = {id(old[name]): model for name, model in new.items()}
        drafter = copy.deepcopy(self.method.drafter, models)
        if dtype == "float32":
            # Widened once: `Pair.weights` would make a wider copy for every number of slots.
            params = {"target_params": pair.target_params}
            if recast or pair.head:
                params["draft_params"] = pair.draft_params
            pair = dataclasses.replace(pair, **jax.tree.map(_widen, params))
        return dataclasses.replace(
            self, pair=pair, method=dataclasses.replace(self.method, drafter=drafter)
        )

    @functools.cached_property
    def prompt_logits(self) -> np.ndarray:
        """Returns the target's logits after each prompt, ``[len(prompts), V]`` float32."""
        return next_logits(self.pair, self.prompts)

    @property
    def rounding(self) -> float:
        """Returns eps of float32 times the largest logit: the unit of `FARTHEST` and `FLIPS`."""
        logits = self.prompt_logits
        largest = np.abs(logits[np.isfinite(logits)]).max(initial=1.0)
        return float(jnp.finfo(jnp.float32).eps * largest)

    def flips_allowed(self, tokens: int, false_alarm: float) -> int:
        """Returns the largest number of ``tokens`` that rounding changes, except with probability
        ``false_alarm``.
        """
        return int(stats.binom.isf(false_alarm, tokens, min(FLIPS * self.rounding, 1.0)))


def _widen(x: jax.Array) -> jax.Array:
    """Returns an array in float32; ids stay integers."""
    return x.astype(jnp.float32) if jnp.issubdtype(x.dtype, jnp.floating) else x


def in_dtype(model: LanguageModel | None, dtype: str) -> LanguageModel | None:
    """Returns the model with another compute dtype, on its mesh; None for models other than
    transformers.
    """
    if isinstance(model, ShardedModel):
        inner = in_dtype(model.model, dtype)
        return inner and shard_model(inner, model.layout)
    if not isinstance(model, TransformerLM):
        return None
    if model.config.dtype == dtype:
        return model
    made = TransformerLM.for_backend(dataclasses.replace(model.config, dtype=dtype))
    if model.kernels is None:
        return made
    return dataclasses.replace(made, weight_order="default", kernels=model.kernels)

"""Finds, for audits, the model that a drafter samples tokens from, and makes drafters with another
model.

The package's drafters are registered. For other drafters the audit leaves out checks, unless their
class is registered: ``reader.register(MyDrafter, lambda drafter: Reader(model=drafter.model))``.
"""

import dataclasses
import functools
import operator
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp

from specsamp.decoding.drafter import Drafter
from specsamp.decoding.drafters import (
    BeamDrafter,
    BlockDrafter,
    EarlyExitDrafter,
    FeatureDrafter,
    ModelDrafter,
    ModuleDrafter,
)
from specsamp.decoding.state import Weights
from specsamp.models.heads import Head
from specsamp.models.interface import LanguageModel, LayeredModel, Output


@dataclasses.dataclass(frozen=True, kw_only=True)
class Reader:
    """The model that drafted tokens are sampled from, given the sequence so far.

    Attributes:
      model: scores whole sequences.
      weights_of: returns its weights among those of a pair.
      depth: number of tokens at the beginning of a draft that are sampled from it; None: all. Later
        tokens also depend on where the round began. With a number, prompts of one token are not
        read: their first round may draft nothing.
      with_target: returns the drafter with the target as its draft model, whose tokens are all
        accepted; None: the drafter has no such model.
    """

    model: LanguageModel
    weights_of: Callable[[Weights], Any] = operator.attrgetter("draft")
    depth: int | None = None
    with_target: Callable[[LanguageModel], Drafter] | None = None

    def reads(self, prompt: Any) -> bool:
        """Returns whether sequences that begin with this prompt can be read."""
        return self.depth is None or len(prompt) > 1


@functools.singledispatch
def reader(drafter: Drafter) -> Reader | None:
    """Returns the model that drafted tokens are sampled from, or None."""
    return None


@reader.register
def _(drafter: ModelDrafter) -> Reader:
    return Reader(
        model=drafter.model, with_target=lambda target: dataclasses.replace(drafter, model=target)
    )


@reader.register
def _(drafter: BeamDrafter) -> None:
    return None  # no token is sampled


@reader.register
def _(drafter: EarlyExitDrafter) -> Reader:
    def with_target(target):
        return WholeTargetDrafter(target, target.num_layers, drafter.K)

    return Reader(
        model=drafter.exit_model, weights_of=operator.attrgetter("target"), with_target=with_target
    )


@reader.register
def _(drafter: FeatureDrafter | ModuleDrafter) -> Reader:
    return Reader(
        model=FirstTokenReader(drafter.target, drafter.head),
        weights_of=lambda weights: weights,
        depth=1,
    )


@reader.register
def _(drafter: BlockDrafter) -> Reader | None:
    if drafter.law == "argmax":
        return None  # no token is sampled
    model = FirstTokenReader(drafter.target, drafter.head, corrected=drafter.law == "conditional")
    return Reader(model=model, weights_of=lambda weights: weights, depth=1)


@dataclasses.dataclass(frozen=True)
class WholeTargetDrafter(EarlyExitDrafter):
    """Drafts with all layers: every token must be accepted, which checks the shared weights and
    cache.
    """

    @property
    def last_exit(self):
        return self.model.num_layers


@dataclasses.dataclass(frozen=True)
class FirstTokenReader(LanguageModel):
    """Scores whole sequences with the weights of a pair: logits of the first drafted token after
    every position.

    After the first token nothing is drafted: all logits are zero.
    """

    target: LayeredModel
    head: Head
    corrected: bool = True  # of heads that draft blocks: with their correction

    @property
    def vocab_size(self):
        return self.head.vocab_size

    def init_cache(self, batch, slots):
        of_blocks = slots * self.head.config.block_size if self.head.config.drafts_blocks else 0
        return self.target.init_cache(batch, slots), self.head.init_cache(batch, slots + of_blocks)

    def __call__(self, weights, tokens_BT, start_B, cache):
        head = self.head
        draft = weights.draft
        batch, length = tokens_BT.shape
        output = self.target(
            weights.target,
            tokens_BT,
            start_B,
            cache[0],
            hidden_layers=head.hidden_layers,
            **self.target.with_lengths(start_B + length),
        )
        features_BTD = head.fuse(draft, output.hidden)
        unembed = functools.partial(self.target.unembed_normed, weights.target)
        if head.config.drafts_blocks:
            # A block at every token but the first, all in one call.
            caches = head.read(draft, features_BTD, start_B, cache[1])
            anchors_BN = jnp.broadcast_to(jnp.arange(1, length)[None], (batch, length - 1))
            rows_BNSD = head.run_in_texts(
                draft, self.target, weights.target, tokens_BT, anchors_BN, caches
            )
            returned_BND = rows_BNSD[:, :, 0]
        else:
            # Every pair of tokens, each with the feature of the first.
            embedded_BTD = head.embed_tokens(
                draft, self.target, weights.target, tokens_BT, start_B, cache[0]
            )
            returned_BND, _ = head(
                draft, embedded_BTD[:, 1:], features_BTD[:, :-1], start_B, cache[1]
            )
        logits_BNU = head.logits(draft, returned_BND, unembed)
        if head.config.drafts_blocks and self.corrected:
            count = batch * (length - 1)
            corrected_XU, _ = head.correct(
                draft,
                logits_BNU.reshape(count, -1),
                returned_BND.reshape(count, -1),
                tokens_BT[:, 1:].reshape(-1),
                head.begin(draft, count),
            )
            logits_BNU = corrected_XU.reshape(logits_BNU.shape)
        logits_BNV = head.expand(draft, logits_BNU)
        logits_BTV = jnp.concatenate([jnp.zeros_like(output.logits_BTV[:, :1]), logits_BNV], axis=1)
        return Output(logits_BTV=logits_BTV, cache=cache)

"""Plausible mistakes, which the tests of the loop's distribution and the audit must catch."""

import dataclasses

import jax
import jax.numpy as jnp

from specsamp import (
    BlockRule,
    Bounded,
    EarlyExitDrafter,
    FeatureDrafter,
    Loop,
    ModelDrafter,
    TokenRule,
)
from specsamp.decoding.sampler import Sampler
from specsamp.models.interface import LayeredModel
from specsamp.sampling import rejection
from specsamp.sampling.rng import Purpose, RoundKeys


def broken(rule, **methods):
    """Returns a rule of this class with replaced methods."""
    return dataclasses.dataclass(frozen=True)(type(f"Broken{rule.__name__}", (rule,), methods))()


class AcceptAlways(TokenRule):
    def acceptance(self, draft, target_log_probs):
        return draft.is_drafted_BK.astype(jnp.float32)


class RejectAlways(TokenRule):
    def acceptance(self, draft, target_log_probs):
        return jnp.zeros_like(super().acceptance(draft, target_log_probs))


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class SharedNoise(RoundKeys):
    def uniforms(self, purpose, offsets_BT):
        return RoundKeys.uniforms(
            self, Purpose.DRAFT if purpose == Purpose.RESIDUAL else purpose, offsets_BT
        )


class ResidualWithTheNoiseOfTheDraft(TokenRule):
    def verify(self, draft, target, keys):
        return super().verify(
            draft, target, SharedNoise(rows_B=keys.rows_B, starts_B=keys.starts_B)
        )


class COfTheNextIndex(BlockRule):
    def residual(self, draft, target_log_probs, num_accepted_B):
        log_c = self.prefix_weights(draft, target_log_probs)
        next_B = jnp.minimum(num_accepted_B + 1, log_c.shape[1] - 1)
        scale_B = jnp.exp(jnp.take_along_axis(log_c, next_B[:, None], axis=1)[:, 0])
        return rejection._residual(draft, target_log_probs, num_accepted_B, scale_B)


class StopsAtTheFirstRefusal(BlockRule):
    def num_accepted(self, passed_BK):
        return TokenRule().num_accepted(passed_BK)


class BeforeWarping(Sampler):
    def __call__(self, logits_BV, node, **options):
        return super().__call__(logits_BV, node, **options)[0], jax.nn.log_softmax(
            logits_BV, axis=-1
        )


class DistributionBeforeWarping(ModelDrafter):
    def propose(self, weights, state, prefix, cache, sample):
        return super().propose(weights, state, prefix, cache, BeforeWarping(**vars(sample)))


class HoleInTheCache(ModelDrafter):
    """Lacks the last drafted token in its cache after full acceptance."""

    first_window = 1


@dataclasses.dataclass(frozen=True)
class OneSlotEarly:
    model: LayeredModel

    def __call__(self, weights, tokens_BT, start_B, cache):
        return self.model(weights, tokens_BT, jnp.maximum(start_B - 1, 0), cache)


class WritesOverWhatWasScored(EarlyExitDrafter):
    """Drafts one slot early, over the target's entry for the token before the pending one."""

    @property
    def exit_model(self):
        return OneSlotEarly(super().exit_model)


def neighbours(state):
    """Returns a state in which the rows of two prompts have exchanged their lengths."""
    return dataclasses.replace(
        state, lengths_B=jnp.roll(state.lengths_B, state.lengths_B.shape[0] // 2)
    )


class ScoresWithANeighboursLength(Loop):
    def score(self, weights, state, draft, cache):
        return super().score(weights, neighbours(state), draft, cache)


class DraftsWithANeighboursLength(Loop):
    def draft(self, weights, request, state):
        return super().draft(weights, request, neighbours(state))


# Heads.


class OfTheDraftVocabulary(TokenRule):
    """Renormalises the target, too, over the vocabulary of the head: ids 0 and 2."""

    def verify(self, draft, target, keys):
        kept_V = jnp.asarray([0, -jnp.inf, 0])[None, None]
        return super().verify(
            draft, dataclasses.replace(target, logits_BTV=target.logits_BTV + kept_V), keys
        )


@dataclasses.dataclass(frozen=True)
class OfAnotherLayer(FeatureDrafter):
    """Reads the layer after the one that its head was made for."""

    @property
    def hidden_layers(self):
        return tuple(layer + 1 for layer in super().hidden_layers)


@dataclasses.dataclass(frozen=True)
class OfTheWrongRow(FeatureDrafter):
    def commit(self, weights, state, scored, cache):
        after, cache = super().commit(weights, state, scored, cache)
        fewer_B = jnp.maximum(scored.verdict.num_accepted_B - 1, 0)
        wrong = dataclasses.replace(
            scored, verdict=dataclasses.replace(scored.verdict, num_accepted_B=fewer_B)
        )
        stale = super().commit(weights, state, wrong, cache)[0]
        return dataclasses.replace(after, feature_BD=stale.feature_BD), cache


@dataclasses.dataclass(frozen=True)
class KeepsItsOwnOutputs(FeatureDrafter):
    """Reads only the last true pair; earlier entries stay as drafted."""

    def commit(self, weights, state, scored, cache):
        prefix = scored.prefix
        verdict = scored.verdict
        output = scored.output
        last_B = verdict.num_accepted_B
        token_B1 = jnp.take_along_axis(verdict.tokens_BT, last_B[:, None], axis=1)
        feature_B1D = self.head.take(self.head.fuse(weights.draft, output.hidden), last_B)[:, None]
        embedded_B1D = self.head.embed(weights.draft, token_B1)
        start_B = prefix.lengths_B - 1 + last_B
        returned_B1D, head_cache = self.head(
            weights.draft, embedded_B1D, feature_B1D, start_B, state.cache
        )
        return dataclasses.replace(state, cache=head_cache, feature_BD=returned_B1D[:, 0]), cache


# Lossy rules.


class IgnoresItsBudget(Bounded):
    def _share(self, log_q, log_p):
        return jnp.ones_like(log_q[..., :1])


# Adaptive draft lengths.


class CancelsTheTokenItself(Sampler):
    """Applies a stop to the token that it has seen, so that tokens are dropped for their value."""

    def _decide(self, before, after, *drawn):
        after = super()._decide(before, after, *drawn)
        num_drafted_B = before.draft.num_drafted_B + after.goes_on_B
        draft = dataclasses.replace(after.draft, num_drafted_B=num_drafted_B)
        return dataclasses.replace(after, draft=draft)


class StopsOneTokenEarly(ModelDrafter):
    def propose(self, weights, state, prefix, cache, sample):
        draft_lengths_B = sample.draft_lengths_B + 1  # the stop decides on the last token too
        mutant = CancelsTheTokenItself(**(vars(sample) | {"draft_lengths_B": draft_lengths_B}))
        return super().propose(weights, state, prefix, cache, mutant)


class SubmitsTheFirstTokenAlone(ModelDrafter):
    """Submits a draft only if its first token is 0."""

    def propose(self, *arguments):
        draft, state, cache = super().propose(*arguments)
        num_drafted_B = jnp.where(draft.tokens_BK[:, 0] == 0, draft.num_drafted_B, 0)
        return dataclasses.replace(draft, num_drafted_B=num_drafted_B), state, cache


class NeverCatchesUp(ModelDrafter):
    """Lacks the tokens of a pause in its cache."""

    falls_behind = False

"""Beam search with the draft model: proposes the most probable sequence of K tokens.

Multi-token joint decoding drafts this way (MTAD, arXiv 2407.09722). `JointThreshold` compares the
joint probabilities of the proposal under the target and under the draft, `Draft.scores_BK`::

    drafter = BeamDrafter(pair.draft, K=4)
    rule = JointThreshold(0.5)
    generate(pair, prompts, drafter=drafter, rule=rule, sampling=chain(temperature(1.0)))

Nothing is sampled, so an exact rule verifies the tokens as one-hot, as for prompt lookup. Joint
probabilities are those of the warped distributions.

Hypotheses change places at every token. Their caches stay in place, since moving them would copy
them at every token; instead, each call reads all tokens of its hypothesis again, at most K.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp

from specsamp import validate
from specsamp.decoding.drafters.model import ModelDrafter
from specsamp.decoding.state import gather_tokens, write_tokens
from specsamp.decoding.trees import pick
from specsamp.pytrees import pytree
from specsamp.sampling.rules import Draft
from specsamp.sampling.warp import log_probs

Array = jax.Array


@pytree
class Hypotheses:
    """The W most probable continuations of each row so far, the best first."""

    tokens_BWS: Array  # int32, the sequence and its continuation
    scores_BWK: Array  # float32, the draft's log-probability of each token; 0 for later tokens
    parents_BW: Array  # int32, the hypothesis that each was extended from
    warp_state: Any  # arrays [B, W, ...], after the last token


@dataclasses.dataclass(frozen=True)
class BeamDrafter(ModelDrafter):
    """Drafts K tokens by beam search with ``model``.

    While it drafts, it holds ``beams`` copies of its cache; the K - 1 calls after the first read
    ``beams`` times as many rows, with K tokens in each.

    Attributes:
      model, K: as in `ModelDrafter`.
      beams: W, hypotheses kept after each token, from 1 (the greedy chain) to the size of the
        vocabulary.
    """

    beams: int = dataclasses.field(default=4, kw_only=True)

    def __post_init__(self):
        super().__post_init__()
        validate.integer("beams", self.beams, 1, self.model.vocab_size + 1)

    def propose(self, weights, state, prefix, cache, sample):
        lengths_B, beams = prefix.lengths_B, self.beams
        batch = len(lengths_B)
        logits_BV, state = self.last_logits(
            weights, state, prefix.tokens_BS, lengths_B, self.first_window
        )
        nothing = Hypotheses(
            tokens_BWS=prefix.tokens_BS[:, None],
            scores_BWK=jnp.zeros((batch, 1, self.K), jnp.float32),
            parents_BW=jnp.zeros((batch, 1), jnp.int32),
            warp_state=jax.tree.map(lambda x: x[:, None], sample.warp_state),
        )
        warped = jax.vmap(functools.partial(log_probs, sample.warp), in_axes=1, out_axes=1)
        write = jax.vmap(write_tokens, in_axes=(1, 1, None), out_axes=1)

        def extend(found, logits_BWV, offset):
            """Extends all hypotheses by one token; returns the W most probable hypotheses."""
            log_probs_BWV = warped(logits_BWV, found.warp_state)
            vocab_size = log_probs_BWV.shape[-1]
            if sample.draft_lengths_B is not None:  # the search of a row ends with its draft
                padding_V = jnp.where(jnp.arange(vocab_size) == 0, 0.0, -jnp.inf)
                goes_on_B11 = (offset < sample.draft_lengths_B)[:, None, None]
                log_probs_BWV = jnp.where(goes_on_B11, log_probs_BWV, padding_V[None, None])
            joint_BWV = found.scores_BWK.sum(-1)[..., None] + log_probs_BWV
            _, best_BW = jax.lax.top_k(joint_BWV.reshape(batch, -1), beams)
            parents_BW, tokens_BW = best_BW // vocab_size, best_BW % vocab_size
            scores_BW = jnp.take_along_axis(log_probs_BWV.reshape(batch, -1), best_BW, axis=1)
            kept = jax.tree.map(functools.partial(pick, index_BW=parents_BW), found)
            return Hypotheses(
                tokens_BWS=write(kept.tokens_BWS, tokens_BW[..., None], lengths_B + offset),
                scores_BWK=kept.scores_BWK.at[:, :, offset].set(scores_BW.astype(jnp.float32)),
                parents_BW=parents_BW,
                warp_state=sample.advance_all(kept.warp_state, tokens_BW),
            )

        found = extend(nothing, logits_BV[:, None], 0)

        def step(offset, carry):
            caches, found = carry
            tokens_RS = found.tokens_BWS.reshape(batch * beams, -1)
            end_R = jnp.repeat(lengths_B + offset, beams)
            logits_RV, caches = self.last_logits(weights, caches, tokens_RS, end_R, self.K)
            logits_BWV = logits_RV.reshape(batch, beams, -1)
            return caches, extend(found, logits_BWV, offset)

        caches = jax.tree.map(lambda x: jnp.repeat(x, beams, axis=0), state)
        caches, found = jax.lax.fori_loop(1, self.K, step, (caches, found))
        # The cache in which the best hypothesis was last extended has read all its tokens but the
        # last, as after a chain.
        best_B = jnp.arange(batch) * beams + found.parents_BW[:, 0]
        state = jax.tree.map(lambda x: jnp.take(x, best_B, axis=0), caches)
        draft = Draft(
            num_drafted_B=jnp.full_like(lengths_B, self.K),
            tokens_BK=gather_tokens(found.tokens_BWS[:, 0], lengths_B, self.K),
            scores_BK=found.scores_BWK[:, 0],
        )
        return draft, state, cache

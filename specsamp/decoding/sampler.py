"""Drawing drafted tokens: the distribution that is sampled is the one that is verified, and a chain of them may stop.

Whether a token is submitted must not depend on what it is. With a target of (.7, .3) and a draft of (.5, .5), a drafter
that submits its token only where it is the first one writes (.85, .15). So the decision about token k + 1 is taken when
token k has been drawn, and sees nothing after it (`Sampler.chain`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from specsamp.decoding.adaptive import Stop
from specsamp.sampling.rng import RoundKeys
from specsamp.sampling.rules import Draft, Rule
from specsamp.sampling.warp import Chain, Greedy, Warp, log_probs

Array = jax.Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Drawn:
    """Holds what a round has drawn so far along a chain; the last three are None where all rows draft all K tokens."""

    log_probs_BRV: Array | None = None  # the distributions; None where they are one-hot, and before the first token
    warp_state: Any = ()  # of the context that ends with the token drawn last
    num_drafted_B: Array | None = None  # int32
    log_prob_B: Array | None = None  # float32, of the tokens so far, together
    goes_on_B: Array | None = None  # bool, whether the row wants another token


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sampler:
    """Turns a draft's logits into tokens, so that the distribution sampled is the distribution verified."""

    warp: Warp
    rule: Rule
    keys: RoundKeys
    warp_state: Any = ()  # of the context that ends with the pending token
    any_shard: Callable[[Array], Array] = jnp.asarray
    wanted_B: Array | None = None  # int32, the most tokens that each row drafts; None: all K
    stop: Stop | None = None  # ends drafts before that
    drafter: int = 0  # index, where several draft in one round: their draws are kept apart

    @property
    def is_one_hot(self) -> bool:
        """Returns whether sampling is statically greedy: the distribution is its token, and need not be written out."""
        warps = self.warp.warps if isinstance(self.warp, Chain) else (self.warp,)
        return any(isinstance(warp, Greedy) for warp in warps)

    def __call__(
        self,
        logits_BV: Array,
        node: Array | int,
        *,
        depth: Array | int | None = None,
        warp_state: Any = None,
    ) -> tuple[Array, Array | None]:
        """Draws a token per row.

        Args:
          logits_BV: the draft's, before warping.
          node: index of the drafted node, 0 for the first.
          depth: drafted tokens before this one on its path; default ``node``, as in a chain.
          warp_state: from `advance`, along the path to this node; default that of the pending token.

        Returns:
          ``tokens_B`` int32, and the ``[B, V]`` log-probabilities they were drawn from; None where sampling
          is statically greedy, which makes the distribution one-hot (the default of `generate`).
        """
        with jax.named_scope("sample"):
            warped_BV = log_probs(self.warp, logits_BV, self.warp_state if warp_state is None else warp_state)
            if self.is_one_hot:
                return jnp.argmax(warped_BV, axis=-1).astype(jnp.int32), None
            depth = node if depth is None else depth
            return self.rule.sample(warped_BV, self.keys, node=node, depth=depth, drafter=self.drafter), warped_BV

    def advance(self, warp_state: Any, tokens_B: Array) -> Any:
        """Returns the warp's state after one more token per row; begin with ``sample.warp_state``."""
        return self.warp.advance(warp_state, tokens_B)

    def chain(
        self,
        K: int,
        first: Callable[[int, Any, Drawn], tuple[Any, Drawn]],
        step: Callable[[Array, Any, Drawn], tuple[Any, Drawn]],
        carry: Any,
    ) -> tuple[Any, Drawn]:
        """Draws up to K tokens per row, one after the other; ends early once no row of any data shard wants another.

        Args:
          first, step: of the first and of every other token: ``(offset, carry, drawn) -> (carry, drawn)``, which call
            the draft model and then `draw` once.
          carry: of the drafter.
        """
        both = first(0, carry, self._nothing_drawn())
        if self.wanted_B is None:
            return jax.lax.fori_loop(1, K, lambda offset, both: step(offset, *both), both)

        def goes_on(state: tuple[Array, tuple[Any, Drawn]]) -> Array:
            offset, (_, drawn) = state
            return (offset < K) & self.any(drawn.goes_on_B)

        def another(state: tuple[Array, tuple[Any, Drawn]]) -> tuple[Array, tuple[Any, Drawn]]:
            offset, both = state
            return offset + 1, step(offset, *both)

        return jax.lax.while_loop(goes_on, another, (jnp.ones((), jnp.int32), both))[1]

    def _nothing_drawn(self) -> Drawn:
        if self.wanted_B is None:
            return Drawn(warp_state=self.warp_state)
        nothing_B = jnp.zeros_like(self.wanted_B)
        return Drawn(
            warp_state=self.warp_state,
            num_drafted_B=nothing_B,
            log_prob_B=nothing_B.astype(jnp.float32),
            goes_on_B=self.wanted_B > 0,
        )

    def draw(self, logits_BV: Array, offset: Array | int, drawn: Drawn, K: int) -> tuple[Array, Drawn]:
        """Draws the token at ``offset`` of a chain of K; returns ``tokens_B`` and what is drawn with it.

        Whether this token is submitted was decided before it was drawn; what it is may only cancel those after it.
        """
        tokens_B, log_probs_BV = self(logits_BV, offset, warp_state=drawn.warp_state)
        log_probs_BRV = drawn.log_probs_BRV
        if log_probs_BV is not None:
            if log_probs_BRV is None:
                log_probs_BRV = jnp.zeros((len(tokens_B), K, log_probs_BV.shape[-1]), log_probs_BV.dtype)
            log_probs_BRV = jax.lax.dynamic_update_index_in_dim(log_probs_BRV, log_probs_BV, offset, axis=1)
        after = dataclasses.replace(
            drawn, log_probs_BRV=log_probs_BRV, warp_state=self.advance(drawn.warp_state, tokens_B)
        )
        return tokens_B, after if self.wanted_B is None else self._decide(
            drawn, after, logits_BV, log_probs_BV, tokens_B
        )

    def _decide(
        self, before: Drawn, after: Drawn, logits_BV: Array, log_probs_BV: Array | None, tokens_B: Array
    ) -> Drawn:
        """Counts the token that was drawn, where the row wanted it, and decides whether the row wants the next one."""
        num_drafted_B = before.num_drafted_B + before.goes_on_B
        goes_on_B = before.goes_on_B & (num_drafted_B < self.wanted_B)
        log_prob_B = before.log_prob_B
        if self.stop is not None:
            seen_BV = jax.nn.log_softmax(logits_BV.astype(jnp.float32), axis=-1)
            if log_probs_BV is not None:  # a greedy row is sure of its token whatever the draft thinks of it
                is_greedy_B1 = log_probs_BV.max(-1, keepdims=True) == 0
                seen_BV = jnp.where(is_greedy_B1, seen_BV, log_probs_BV.astype(jnp.float32))
            log_prob_B += jnp.take_along_axis(seen_BV, tokens_B[:, None], axis=-1)[:, 0]
            goes_on_B &= self.stop.goes_on(seen_BV, log_prob_B)
        return dataclasses.replace(after, num_drafted_B=num_drafted_B, log_prob_B=log_prob_B, goes_on_B=goes_on_B)

    def draft(self, tokens_BK: Array, drawn: Drawn) -> Draft:
        """Returns the draft of a chain."""
        num_drafted_B = drawn.num_drafted_B
        if num_drafted_B is None:
            num_drafted_B = jnp.full_like(self.keys.starts_B, tokens_BK.shape[1])
        return Draft(tokens_BK=tokens_BK, num_drafted_B=num_drafted_B, log_probs_BRV=drawn.log_probs_BRV)

    def any(self, running_B: Array) -> Array:
        """Returns whether any row of any data shard is true: the condition of a drafter's own `lax.while_loop`."""
        return self.any_shard(jnp.any(running_B))

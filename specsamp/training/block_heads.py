"""Trains heads that draft a block in one call, as in DFlash and DSpark.

Each text gets A *anchors*, positions whose token begins a block. All blocks of a text run in one
call, each behind the context before its anchor, without attention to another block. Token k is
compared with the target after the true tokens before it:

    loss = sum_k decay^k mean [D(q_k, p_k) + m D(q_k, b_k) + BCE(confidence_k, 1 - TV(q_k, p_k))]

``p_k`` are distributions with the head's correction, given the true token before; ``b_k`` without
it. The weight m trains one head for both, so that its drafts can be compared with independent ones.
DFlash has decay = exp(-1/4), as DSpark. D-PACE weighs each block by its own acceptance instead: a
token's weight is the probability that the draft reaches it and is longer.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from specsamp import validate
from specsamp.models.dflash import BlockHead
from specsamp.sampling.warp import Warp
from specsamp.training.feature_heads import TrainHead, step_averages
from specsamp.training.objective import DIVERGENCES, overlap

Array = jax.Array


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainBlock(TrainHead):
    """Trains a `BlockHead` with its target as the teacher; a `Task`.

    Attributes:
      test_steps: tokens of a block that are trained, at most ``head.config.max_tokens``.
      decay: weight of a token relative to the token before; not used with ``pace``.
      chunk: blocks of each text whose logits are in memory at a time; None: all.
      anchors: A, blocks of each text.
      marginals: m, the weight of the loss without the correction.
      pace: the weights are those of D-PACE, smoothed by this number; see `pace_weights`.
    """

    head: BlockHead
    anchors: int = 32
    marginals: float = 0.0
    pace: float | None = None

    objectives: ClassVar[tuple[str, ...]] = tuple(DIVERGENCES)

    def __post_init__(self):
        super().__post_init__()
        validate.integer("test_time.anchors", self.anchors, 1)
        validate.number("test_time.marginals", self.marginals, 0)
        if self.pace is not None:
            validate.number("test_time.pace", self.pace, 0, 1)
        if self.chunk is not None and self.anchors % self.chunk:
            raise ValueError(
                f"test_time.chunk {self.chunk} does not divide test_time.anchors {self.anchors}"
            )

    def _loss_weights(self):
        return super()._loss_weights() if self.pace is None else jnp.ones((self.test_steps,))

    def _averages(self, weights, teacher, tokens_BT, warp, key):
        """Returns averages for each token of a draft, ``[S]``; without a key, of anchors at even
        distances.
        """
        anchors_BA = self._choose_anchors(tokens_BT, key)
        rows_BASD, stream_BASD = self._blocks(weights, teacher["target"], tokens_BT, anchors_BA)
        at_BAS = anchors_BA[..., None] + jnp.arange(self.test_steps)[None, None]
        before_BAS = jnp.take_along_axis(
            tokens_BT, at_BAS.reshape(len(tokens_BT), -1), axis=1
        ).reshape(at_BAS.shape)
        chunk = self.chunk or self.anchors

        def cut(x: Array) -> Array:
            parts = jnp.moveaxis(x.reshape(len(x), -1, chunk, *x.shape[2:]), 1, 0)
            return parts.reshape(len(parts), -1, *x.shape[2:])

        parts = cut(rows_BASD), cut(stream_BASD), cut(before_BAS)
        sums_XS = self._add_up(
            functools.partial(self._compare_blocks, warp=warp), weights, teacher, parts, 12
        )
        found, marginal, config = (
            step_averages(sums_XS[:5]),
            step_averages(sums_XS[5:10]),
            self.head.config,
        )
        if config.correction() is not None:
            found["loss"] += self.marginals * marginal.pop("loss")
            found |= {
                f"marginal_{name.removeprefix('greedy_')}": values_S
                for name, values_S in marginal.items()
            }
        if config.confidence is not None:
            loss_S, error_S = sums_XS[10:] / sums_XS[4:5]
            found |= {"loss": found["loss"] + loss_S, "confidence_error": error_S}
        return found | {"loss": found["loss"] / self.test_steps}

    def _choose_anchors(self, tokens_BT: Array, key: Array | None) -> Array:
        """Returns positions ``[B, A]`` with a token before them and a whole block behind them."""
        batch, last = len(tokens_BT), tokens_BT.shape[1] - 1 - self.head.config.block_size
        if last < self.anchors:
            raise ValueError(
                f"windows of {tokens_BT.shape[1] - 1} tokens have room for {max(last, 0)} blocks "
                f"of {self.head.config.block_size}, fewer than test_time.anchors {self.anchors}"
            )
        if key is None:
            even_A = 1 + jnp.arange(self.anchors) * (last - 1) // max(self.anchors - 1, 1)
            return jnp.broadcast_to(even_A[None], (batch, self.anchors))
        keys = jax.random.split(key, batch)
        return 1 + jax.vmap(lambda one: jax.random.permutation(one, last)[: self.anchors])(keys)

    def _blocks(
        self, weights: Any, target_params: Any, tokens_BT: Array, anchors_BA: Array
    ) -> tuple[Array, Array]:
        """Runs the target, and all blocks.

        Returns:
          The rows that draft, ``[B, A, S, D]``; and the target's streams that predict the same
          tokens, likewise.
        """
        head, config, inputs_BT = self.head, self.head.config, tokens_BT[:, :-1]
        (batch, length), size = inputs_BT.shape, config.block_size
        layers = *head.hidden_layers, self.target.num_layers - 1
        *hidden, stream_BTD = self.target.forward_streams(target_params, inputs_BT, layers)
        caches = head.init_cache(batch, length + self.anchors * size)
        features_BTD = head.fuse(weights, tuple(hidden))
        caches = head.read(weights, features_BTD, jnp.zeros((batch,), jnp.int32), caches)
        pending_BA = jnp.take_along_axis(tokens_BT, anchors_BA, axis=1)
        of_blocks = pending_BA.reshape(-1), anchors_BA.reshape(-1)
        embedded = head.embed_blocks(weights, self.target, {"params": target_params}, *of_blocks)
        first_BA = jnp.broadcast_to(
            (length + size * jnp.arange(self.anchors))[None], anchors_BA.shape
        )
        rows_BTD, _ = head(
            weights, embedded.reshape(batch, -1, embedded.shape[-1]), anchors_BA, first_BA, caches
        )
        rows_BASD = rows_BTD.reshape(batch, self.anchors, size, -1)[:, :, config.first_row :][
            :, :, : self.test_steps
        ]
        at_BX = (anchors_BA[..., None] + jnp.arange(self.test_steps)[None, None]).reshape(batch, -1)
        stream_BXD = jnp.take_along_axis(stream_BTD, at_BX[..., None], axis=1)
        return rows_BASD, stream_BXD.reshape(batch, self.anchors, self.test_steps, -1)

    def _compare_blocks(
        self,
        weights: Any,
        teacher: Any,
        rows_NSD: Array,
        stream_NSD: Array,
        before_NS: Array,
        *,
        warp: Warp | None,
    ) -> Array:
        """Compares the tokens of N blocks with the target, token by token.

        Returns:
          ``[S, 12]``: the sums of `TrainHead`, the same without the correction, the sums of the
          binary cross-entropy of the confidence and of its distance from the acceptance. Losses are
          weighed by `pace_weights` if ``pace`` is set.
        """
        head, target_weights = self.head, {"params": teacher["target"]}
        unembed = functools.partial(self.target.unembed_normed, target_weights)
        state, found, accepted = head.begin(weights, len(rows_NSD)), [], []
        exists_N1 = jnp.ones((len(rows_NSD), 1), bool)
        for k in range(self.test_steps):
            x_ND, token_N = rows_NSD[:, k], before_NS[:, k]
            base_N1U = head.logits(weights, x_ND[:, None], unembed)
            logits_NU, state = head.correct(weights, base_N1U[:, 0], x_ND, token_N, state)
            of_target = self._of_target(weights, teacher, stream_NSD[:, k : k + 1], warp)
            compare = functools.partial(
                self._of_each, weights, of_target, exists_BT=exists_N1, warp=warp
            )
            both = [
                compare(logits_BTU=logits_N1U)[:, :, 0]
                for logits_N1U in (logits_NU[:, None], base_N1U)
            ]
            accepted_N = overlap(
                of_target[1][:, 0], jax.lax.stop_gradient(jax.nn.log_softmax(logits_NU))
            )
            accepted.append(accepted_N)  # at temperature 1, whatever is measured
            trust_2N = jnp.zeros((2, len(rows_NSD)))
            if head.config.confidence is not None:
                odds_N = head.confidence(weights, x_ND, token_N)
                loss_N = jax.nn.softplus(odds_N) - accepted_N * odds_N
                trust_2N = jnp.stack([loss_N, jnp.abs(jax.nn.sigmoid(odds_N) - accepted_N)])
            found.append(jnp.concatenate([*both, trust_2N]))
        found_SXN = jnp.stack(found)
        if self.pace is not None:
            of_losses = jnp.zeros(12, bool).at[jnp.array([0, 5])].set(True)[None, :, None]
            weights_SN = jax.lax.stop_gradient(pace_weights(jnp.stack(accepted), self.pace))
            found_SXN = jnp.where(of_losses, found_SXN * weights_SN[:, None], found_SXN)
        return found_SXN.sum(axis=-1)


def pace_weights(accepted_SN: Array, smoothing: float) -> Array:
    """Returns D-PACE's weights ``[S, N]``: of token k ``sum_{j >= k} prod_{i <= j} ((1 - smoothing)
    p_i + smoothing)``.
    """
    reached_SN = jnp.cumprod((1 - smoothing) * accepted_SN + smoothing, axis=0)
    return jnp.cumsum(reached_SN[::-1], axis=0)[::-1]

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

import dataclasses
import functools
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from specsamp import validate
from specsamp.models.dflash import BlockHead
from specsamp.sampling.warp import Warp
from specsamp.training.feature_heads import TrainHead, stacked, step_averages
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
        """Returns weights of the tokens of a block; the loss is a mean over them."""
        weights_S = super()._loss_weights() if self.pace is None else jnp.ones((self.test_steps,))
        return weights_S / self.test_steps

    def _averages(self, weights, teacher, tokens_BT, warp, key):
        """Returns averages for each token of a draft, ``[S]``; without a key, of anchors at even
        distances.
        """
        anchors_BA = self._choose_anchors(tokens_BT, key)
        blocks = self._blocks(weights, teacher["target"], tokens_BT, anchors_BA)
        chunk = self.chunk or self.anchors

        def cut(x: Array) -> Array:
            parts = jnp.moveaxis(x.reshape(len(x), -1, chunk, *x.shape[2:]), 1, 0)
            return parts.reshape(len(parts), -1, *x.shape[2:])

        compare = functools.partial(self._compare_blocks, weights, teacher, warp)
        sums = self._add_up(compare, jax.tree.map(cut, blocks))
        found = step_averages(sums["corrected"])
        if self.head.config.correction() is not None:
            marginal = step_averages(sums["marginal"])
            found["loss"] += self.marginals * marginal.pop("loss")
            found |= {
                f"marginal_{name.removeprefix('greedy_')}": values_S
                for name, values_S in marginal.items()
            }
        if self.head.config.confidence is not None:
            tokens_S = sums["corrected"]["exists"]
            found["loss"] += sums["confidence"]["loss"] / tokens_S
            found["confidence_error"] = sums["confidence"]["error"] / tokens_S
        return found

    def _choose_anchors(self, tokens_BT: Array, key: Array | None) -> Array:
        """Returns positions ``[B, A]`` with a token before them and a whole block behind them."""
        batch, length = tokens_BT[:, 1:].shape
        last = length - self.head.config.block_size
        if last < self.anchors:
            raise ValueError(
                f"windows of {length} tokens have room for {max(last, 0)} blocks "
                f"of {self.head.config.block_size}, fewer than test_time.anchors {self.anchors}"
            )
        if key is None:
            even_A = 1 + jnp.arange(self.anchors) * (last - 1) // max(self.anchors - 1, 1)
            return jnp.broadcast_to(even_A[None], (batch, self.anchors))
        keys = jax.random.split(key, batch)
        return 1 + jax.vmap(lambda one: jax.random.permutation(one, last)[: self.anchors])(keys)

    def _blocks(
        self, weights: Any, target_params: Any, tokens_BT: Array, anchors_BA: Array
    ) -> tuple[Array, Array, Array]:
        """Runs the target, and all blocks.

        Returns:
          The rows that draft, ``[B, A, S, D]``; the target's streams that predict the same tokens,
          likewise; and the token before each of them, ``[B, A, S]``.
        """
        head = self.head
        inputs_BT = tokens_BT[:, :-1]
        batch, length = inputs_BT.shape
        layers = *head.hidden_layers, self.target.num_layers - 1
        *hidden, stream_BTD = self.target.forward_streams(target_params, inputs_BT, layers)
        caches = head.init_cache(batch, length + self.anchors * head.config.block_size)
        features_BTD = head.fuse(weights, tuple(hidden))
        caches = head.read(weights, features_BTD, jnp.zeros((batch,), jnp.int32), caches)
        rows_BASD = head.run_in_texts(
            weights, self.target, {"params": target_params}, inputs_BT, anchors_BA, caches
        )[:, :, : self.test_steps]
        at_BAS = anchors_BA[..., None] + jnp.arange(self.test_steps)[None, None]
        at_BX = at_BAS.reshape(batch, -1)
        stream_BXD = jnp.take_along_axis(stream_BTD, at_BX[..., None], axis=1)
        before_BX = jnp.take_along_axis(tokens_BT, at_BX, axis=1)
        return rows_BASD, stream_BXD.reshape(*at_BAS.shape, -1), before_BX.reshape(at_BAS.shape)

    def _compare_blocks(
        self,
        weights: Any,
        teacher: Any,
        warp: Warp | None,
        rows_NSD: Array,
        stream_NSD: Array,
        before_NS: Array,
    ) -> dict[str, dict[str, Array]]:
        """Compares the tokens of N blocks with the target, token by token.

        Returns:
          Sums ``[S]``: those of `TrainHead`, "corrected" and "marginal", without the correction;
          and of the "confidence" the binary cross-entropy and the distance from the acceptance.
          Divergences are weighed by `pace_weights` if ``pace`` is set.
        """
        head = self.head
        unembed = functools.partial(self.target.unembed_normed, {"params": teacher["target"]})
        state = head.begin(weights, len(rows_NSD))
        found = []
        accepted = []
        exists_N1 = jnp.ones((len(rows_NSD), 1), bool)
        for k in range(self.test_steps):
            x_ND = rows_NSD[:, k]
            token_N = before_NS[:, k]
            base_N1U = head.logits(weights, x_ND[:, None], unembed)
            logits_NU, state = head.correct(weights, base_N1U[:, 0], x_ND, token_N, state)
            of_target = self._of_target(weights, teacher, stream_NSD[:, k : k + 1], warp)
            one = {
                name: self._of_each(weights, of_target, logits_N1U, exists_N1, warp)
                for name, logits_N1U in (("corrected", logits_NU[:, None]), ("marginal", base_N1U))
            }
            accepted_N = overlap(
                of_target[1][:, 0], jax.lax.stop_gradient(jax.nn.log_softmax(logits_NU))
            )
            accepted.append(accepted_N)  # at temperature 1, whatever is measured
            if head.config.confidence is not None:
                odds_N = head.confidence(weights, x_ND, token_N)
                one["confidence"] = {
                    "loss": jax.nn.softplus(odds_N) - accepted_N * odds_N,
                    "error": jnp.abs(jax.nn.sigmoid(odds_N) - accepted_N),
                }
            found.append(one)
        found = stacked(found)
        if self.pace is not None:
            weights_SN = jax.lax.stop_gradient(pace_weights(jnp.stack(accepted), self.pace))
            for name in ("corrected", "marginal"):
                found[name]["loss"] *= weights_SN[..., None]
        return jax.tree.map(lambda x: x.reshape(len(x), -1).sum(1, dtype=jnp.float32), found)


def pace_weights(accepted_SN: Array, smoothing: float) -> Array:
    """Returns D-PACE's weights ``[S, N]``: of token k ``sum_{j >= k} prod_{i <= j} ((1 - smoothing)
    p_i + smoothing)``.
    """
    reached_SN = jnp.cumprod((1 - smoothing) * accepted_SN + smoothing, axis=0)
    return jnp.cumsum(reached_SN[::-1], axis=0)[::-1]

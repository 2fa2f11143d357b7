"""Corrections of a block's logits that make drafted tokens depend on each other: DSpark and DFlash
2.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from specsamp import validate
from specsamp.arrays import pad_axis
from specsamp.models.dflash import BlockConfig, Correction
from specsamp.models.int8 import take_rows
from specsamp.models.modules import parameter, table, weight, zero_bias
from specsamp.models.products import contract

Array = jax.Array

MARKOV = ("vanilla", "gated", "recurrent")
CONFIDENCE = ("hidden", "markov")


class Markov(Correction):
    """Adds ``W2 s`` to the logits, where s is computed from the previous token; the heads of
    DSpark.

    vanilla: s is the previous token's row of W1, so that ``W2 W1`` is a table of pairs of tokens.
    gated: s times a gate, computed from s and the block's row. recurrent: s is a gated state that
    is carried along the block.
    """

    config: DSparkConfig

    def setup(self):
        config, width, rank = self.config, self.config.layer.width, self.config.markov_rank
        self.embedding = table(self, "embedding", config.layer.vocab_size, rank, fan_in=10_000)
        self.output = table(self, "output", config.num_outputs, rank)
        read, made = {"vanilla": (0, 0), "gated": (1, 1), "recurrent": (2, 3)}[config.markov]
        if made:
            read = width + read * rank
            self.gate = weight(self, "gate", (read, made * rank), ("features", "embed"))
            self.gate_bias = zero_bias(self, "gate_bias", ("embed",), jnp.zeros((1, made * rank)))
        if config.confidence is not None:
            read = width + (rank if config.confidence == "markov" else 0)
            self.trust = weight(self, "trust", (read, 1), ("features", "embed"))
            self.trust_bias = zero_bias(self, "trust_bias", ("embed",), jnp.zeros((1, 1)))

    def begin(self, batch: int) -> Any:
        recurrent = self.config.markov == "recurrent"
        return (
            jnp.zeros((batch, self.config.markov_rank), self.config.layer.compute_dtype)
            if recurrent
            else ()
        )

    def __call__(
        self, logits_BU: Array, x_BD: Array, token_B: Array, state: Any
    ) -> tuple[Array, Any]:
        s_BR = take_rows(self.embedding, token_B).astype(x_BD.dtype)
        if self.config.markov == "gated":
            s_BR = jax.nn.sigmoid(self._gates(x_BD, s_BR)) * s_BR
        if self.config.markov == "recurrent":
            gate_BR, new_BR, out_BR = jnp.split(self._gates(state, s_BR, x_BD), 3, axis=-1)
            gate_BR = jax.nn.sigmoid(gate_BR)
            state = gate_BR * state + (1 - gate_BR) * jnp.tanh(new_BR)
            s_BR = jnp.tanh(out_BR)
        return logits_BU + contract("BR,UR->BU", s_BR, self.output, dtype=jnp.float32), state

    def confidence(self, x_BD: Array, token_B: Array) -> Array:
        parts = [x_BD]
        if self.config.confidence == "markov":
            parts.append(take_rows(self.embedding, token_B).astype(x_BD.dtype))
        x_BX = jnp.concatenate(parts, axis=-1)
        return (contract("BX,XD->BD", x_BX, self.trust, dtype=jnp.float32) + self.trust_bias)[:, 0]

    def _gates(self, *parts: Array) -> Array:
        x_BX = jnp.concatenate(parts, axis=-1)
        return contract("BX,XR->BR", x_BX, self.gate) + self.gate_bias.astype(x_BX.dtype)


@dataclasses.dataclass(frozen=True, kw_only=True)
class DSparkConfig(BlockConfig):
    """The shape of a DSpark head.

    Attributes:
      markov: one of `MARKOV`.
      markov_rank: R, the columns of W1 and W2.
      confidence: estimates acceptance from the block's row alone ("hidden") or also from the
        previous token ("markov").
    """

    from_anchor: bool = True
    markov: str = "vanilla"
    markov_rank: int = 256
    confidence: str | None = "markov"

    kind = "DSpark"

    def __post_init__(self):
        super().__post_init__()
        validate.choice("markov", self.markov, MARKOV)
        validate.choice("confidence", self.confidence, (None, *CONFIDENCE))

    def correction(self) -> Correction:
        return Markov(self)


class Selector(Correction):
    """Scores the most probable tokens of a row given the previous token; excludes all
    other tokens.
    """

    config: DFlash2Config

    def setup(self):
        config, rank = self.config, self.config.selector_rank
        vocab, width = config.layer.vocab_size, config.layer.width
        self.embedding = table(self, "embedding", vocab, rank, fan_in=2_500)
        self.output = table(self, "output", vocab, rank, fan_in=2_500)
        self.linear = weight(self, "linear", (width, rank), ("features", "embed"))

    def __call__(
        self, logits_BU: Array, x_BD: Array, token_B: Array, state: Any
    ) -> tuple[Array, Any]:
        scores_BC, ids_BC = jax.lax.top_k(
            logits_BU, min(self.config.selector_top_k, logits_BU.shape[-1])
        )
        s_BR = contract("BD,DR->BR", x_BD, self.linear)
        s_BR = s_BR * take_rows(self.embedding, token_B).astype(s_BR.dtype)
        successors_BCR = take_rows(self.output, ids_BC).astype(s_BR.dtype)
        scores_BC = scores_BC + contract("BR,BCR->BC", s_BR, successors_BCR, dtype=jnp.float32)
        excluded_BU = jnp.full_like(logits_BU, -jnp.inf)
        return jnp.put_along_axis(excluded_BU, ids_BC, scores_BC, axis=-1, inplace=False), state


class GroupedConvolution(nn.Module):
    """A causal convolution over the rows of each block, before and after a part of the layer.

    The coefficients of a tap are a learned vector plus a number per group of entries, computed from
    the row.
    """

    config: DFlash2Config

    @nn.compact
    def __call__(self, x_BTD: Array) -> tuple[Array, Callable[[Array], Array]]:
        """Returns the convolved input, and the function that convolves the output of the part."""
        config, width = self.config, self.config.layer.width
        taps, groups = config.conv_taps, width // config.conv_group

        def first_tap(_, shape):
            return jnp.zeros(shape).at[:, 0].set(1)

        base_2CD = parameter(self, "base", (2, taps, width), (None, None, "embed"), first_tap)
        made = parameter(self, "coefficients", (width, 2 * taps * groups), ("embed", None))
        made_BTX = contract("BTD,DX->BTX", x_BTD, made).reshape(*x_BTD.shape[:2], 2, taps, groups)

        def convolve(x_BTD: Array, side: int) -> Array:
            shape = (-1, config.block_size, groups, config.conv_group)
            x_NbGI, y = x_BTD.reshape(shape), 0.0
            of_rows = made_BTX[:, :, side].reshape(-1, config.block_size, taps, groups)
            for tap in range(taps):
                base_GI = base_2CD[side, tap].reshape(shape[2:]).astype(x_BTD.dtype)
                moved = pad_axis(x_NbGI, 0, 1, before=tap)[:, : config.block_size]
                y = y + moved * (base_GI[None, None] + of_rows[:, :, tap, :, None])
            return y.reshape(x_BTD.shape)

        return convolve(x_BTD, 0), lambda y_BTD: convolve(y_BTD, 1)


@dataclasses.dataclass(frozen=True, kw_only=True)
class DFlash2Config(BlockConfig):
    """The shape of a DFlash 2 head.

    Attributes:
      conv_taps: rows that a convolution reads, the current and previous rows; at most
        ``block_size``.
      conv_group: entries of the stream that share a coefficient computed from the row.
      selector_rank: R, the columns of the selector's tables.
      selector_top_k: the tokens that can be drafted in a row.
    """

    conv_taps: int = 2
    conv_group: int = 16
    selector_rank: int = 256
    selector_top_k: int = 16

    kind = "DFlash 2"

    def __post_init__(self):
        super().__post_init__()
        validate.integer("conv_taps", self.conv_taps, 1, self.block_size + 1)
        if self.layer.width % self.conv_group:
            raise ValueError(
                f"conv_group {self.conv_group} does not divide the width {self.layer.width}"
            )
        if self.draft_vocab_size is not None:
            raise ValueError("a DFlash 2 head has the whole vocabulary: leave draft_vocab_size out")

    def correction(self) -> Correction:
        return Selector(self)

    def around(self) -> nn.Module:
        return GroupedConvolution(self)

"""The heads of Medusa (Cai et al., arXiv 2401.10774): each predicts one of the tokens after the
next, from one feature.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import flax.linen as nn
import jax

from specsamp.models.heads import HeadConfig, HeadModule
from specsamp.models.modules import parameter, table
from specsamp.models.products import contract

Array = jax.Array


class MedusaHead(nn.Module):
    """The parameters of one head. Initially its residual block adds 0."""

    config: MedusaConfig

    def setup(self):
        config, width = self.config, self.config.layer.width

        def zeros(name, *axes):
            return parameter(self, name, (width,) * len(axes), axes)

        self.linear = zeros("linear", "features", "embed")
        self.bias = zeros("bias", "embed") if config.bias else None
        self.output = None
        if config.own_output:
            self.output = table(self, "output", config.num_outputs, width)


class Medusa(HeadModule):
    """Several heads on the stream after the target's final norm, one for each offset of a draft.

    They read no tokens and have no cache, so a call returns its features unchanged. The token that
    precedes a draft comes from the target.
    """

    config: MedusaConfig

    def setup(self):
        self.head = [MedusaHead(self.config) for _ in range(self.config.num_heads)]

    def __call__(self, embedded_BTD, features_BTD, start_B, cache, block=None) -> tuple[Array, Any]:
        return features_BTD, cache

    def normed(self, features_BTD: Array, offset: Array | int) -> Array:
        return _one_of(
            self._add_residual,
            [(head.linear, head.bias) for head in self.head],
            offset,
            features_BTD,
        )

    def project(self, x_BTD: Array, offset: Array | int) -> Array:
        return _one_of(self.multiply, [head.output for head in self.head], offset, x_BTD)

    def _add_residual(self, parameters: tuple[Array, Array | None], x_BTD: Array) -> Array:
        linear, bias = parameters
        y_BTD = contract("BTX,XD->BTD", self.layout.split_features(x_BTD), linear)
        if bias is not None:
            y_BTD = y_BTD + bias.astype(x_BTD.dtype)[None, None]
        return x_BTD + nn.silu(y_BTD)


def _one_of(
    run: Callable[[Any, Array], Array], parts: Sequence[Any], offset: Array | int, x: Array
) -> Array:
    """Returns ``run(parts[offset], x)`` and reads no other part."""
    if isinstance(offset, int):
        return run(parts[offset], x)
    return jax.lax.switch(offset, [functools.partial(run, part) for part in parts], x)


@dataclasses.dataclass(frozen=True, kw_only=True)
class MedusaConfig(HeadConfig):
    """The shape of Medusa heads; only width, vocabulary and dtype of ``layer`` are used.

    Attributes:
      num_heads: the number of heads, which is the length of the longest draft.
      bias: the linear layer of a residual block has a bias.
    """

    num_heads: int
    bias: bool = True

    module = Medusa
    kind = "Medusa"
    has_layer = False
    reads_final_norm = True

    def begin(self, params: Any, output_UD: jax.Array, scale_D: jax.Array | None) -> Any:
        """Returns the parameters with the target's output matrix in every head."""
        if not self.own_output:
            return params
        return {name: head | {"output": output_UD} for name, head in params.items()}

    def is_read_by_a_step(self, name: str) -> bool:
        """Returns whether the parameter belongs to the first head: a step reads one head, and all
        have equal sizes.
        """
        return name == "head_0"

    @property
    def max_tokens(self) -> int:
        return self.num_heads

"""What the decoding loop asks of a language model. Anything of this shape can be a target or a draft."""

from __future__ import annotations

import dataclasses
from typing import Any, Protocol

import jax

Array = jax.Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Output:
    """The result of one call of a language model."""

    logits_BTV: Array  # float32
    cache: Any  # the cache given, with the call's slots written
    hidden: tuple[Array, ...] = ()  # [B, T, D] after each layer asked for


class LanguageModel(Protocol):
    """A static (hashable) description of a model; its arrays travel beside it.

    ``prepare`` turns training parameters into decode-time *weights*: cast, folded, quantised. They do
    not change during a loop, so they are never donated and never in the carry.

    Caches have a little more than ``max_positions`` slots: the last ones are scratch. A stale slot must
    not be able to harm: masked scores, not masked values, so nothing in a cache may become NaN.
    """

    @property
    def vocab_size(self) -> int: ...

    @property
    def max_positions(self) -> int | None:
        """The longest sequence the model supports, None if there is no limit."""

    def prepare(self, params: Any, slots: int) -> Any:
        """Weights for calls with a cache of ``slots`` slots."""

    def init_cache(self, batch: int, slots: int) -> Any:
        """A cache whose every leaf has the batch as its leading axis."""

    def __call__(
        self, weights: Any, tokens_BT: Array, start_B: Array, cache: Any, *, hidden_layers: tuple[int, ...] = ()
    ) -> Output:
        """Scores ``tokens_BT`` in slots ``start_B[b] .. start_B[b] + T - 1`` of each row.

        Row b sees the slots before ``start_B[b]`` and, causally, its own tokens. What slots beyond
        hold is never seen: taking tokens back means starting the next call earlier.

        A model for token trees also takes ``positions_BT`` and ``block_mask_TT``, which override
        position and causality among the T tokens.

        Args:
          weights: from `prepare`.
          tokens_BT: ``[B, T]`` int32.
          start_B: ``[B]`` int32, ``start_B + T <= slots``.
          cache: from `init_cache` or an earlier call.
          hidden_layers: layers (0 is the first) whose outputs a drafter wants to see.
        """


def check_logits(name: str, model: LanguageModel, output: Output) -> None:
    """Refuses logits of another width than the vocabulary's: the missing tokens would get any distribution at all.

    Raises:
      ValueError: while tracing, with both numbers.
    """
    width = output.logits_BTV.shape[-1]
    if width != model.vocab_size:
        raise ValueError(f"the {name} has a vocabulary of {model.vocab_size} but returned logits of width {width}")

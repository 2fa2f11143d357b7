"""The interface between the decoding loop and a language model.

Anything derived from `LanguageModel` can be a target or a draft.
"""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import jax
from jax.sharding import Mesh, PartitionSpec

Array = jax.Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Output:
    """The result of one call of a language model."""

    logits_BTV: Array  # float32
    cache: Any  # the cache given, with the call's slots written
    hidden: tuple[Array, ...] = ()  # [B, T, D], one per entry of ``hidden_layers``


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Block:
    """Positions and visibility among the last slots of a call, where they are not a chain (token trees).

    Every query sees all slots before ``start_B``; query t also sees slot ``start_B + r`` where
    ``visible_BTR[:, t, r]``: its ancestors and itself, which stand in the order of their depth. R exceeds T where a
    tree is drafted in several calls.
    """

    start_B: Array  # int32, the slot of the tree's first row
    positions_BT: Array  # int32, of the queries in their texts: ``start_B`` plus their depth
    visible_BTR: Array  # bool


class MeshLayout(Protocol):
    """Says how arrays lie on a mesh, see `specsamp.mesh.layout.Layout`; hashable."""

    mesh: Mesh

    def spec(self, axes: PartitionSpec, shape: Sequence[int]) -> PartitionSpec:
        """Maps the logical axes of an array of this shape to mesh axes."""

    def shardings(self, axes: Any, shapes: Any) -> Any:
        """Returns the `NamedSharding` of each array of a tree, from the tree of their logical axes."""

    def per_device(self, function: Callable, in_specs: Any, out_specs: Any) -> Callable:
        """Returns ``function`` applied on each device to its part of the arrays."""


class LanguageModel(abc.ABC):
    """A static, hashable description of a model, such as a frozen dataclass; its arrays travel beside it.

    Derive from this class. ``vocab_size``, `init_cache` and `__call__` must be given; the rest has defaults.
    """

    vocab_size: int
    max_positions: int | None = None  # the longest sequence the model supports; None: no limit
    compiler_options: tuple[tuple[str, str], ...] = ()  # for programs that call the model as their target

    def prepare(self, params: Any) -> Any:
        """Turns training parameters into decode-time weights: cast, folded, quantised.

        Weights do not change during a loop, so they are never donated and never in its carry.
        """
        return params

    def fit_slots(self, weights: Any, slots: int) -> Any:
        """Adds to ``weights`` what depends on the number of cache slots, such as tables of relative positions."""
        return weights

    @abc.abstractmethod
    def init_cache(self, batch: int, slots: int) -> Any:
        """Returns an empty cache whose every leaf has the batch as its leading axis.

        Caches have a little more than ``max_positions`` slots: the last ones are scratch. A stale slot must not be
        able to harm: scores are masked, not values, so nothing in a cache may become NaN.
        """

    @abc.abstractmethod
    def __call__(
        self,
        weights: Any,
        tokens_BT: Array,
        start_B: Array,
        cache: Any,
        *,
        hidden_layers: tuple[int, ...] = (),
        block: Block | None = None,
    ) -> Output:
        """Scores ``tokens_BT`` in slots ``start_B[b] .. start_B[b] + T - 1`` of each row.

        Row b sees the slots before ``start_B[b]`` and, causally, its own tokens. What slots beyond hold is never
        seen: taking tokens back means starting the next call earlier.

        Args:
          weights: from `prepare` and `fit_slots`.
          tokens_BT: ``[B, T]`` int32.
          start_B: ``[B]`` int32, ``start_B + T <= slots``.
          cache: from `init_cache` or an earlier call.
          hidden_layers: the layers whose outputs a drafter reads; 0 is the first, ``num_layers`` stands for the
            stream after the final norm. Only asked for by drafters that declare them.
          block: positions and visibility of a token tree; None is a chain. Only given by drafters of trees.
        """

    def compact(self, cache: Any, start_B: Array, rows_BT: Array, num_rows: int) -> Any:
        """Moves the slots ``start_B + rows_BT`` to ``start_B ..``, for drafters of trees.

        Args:
          cache: of this model.
          start_B: ``[B]`` int32, the slot of the tree's first scored row.
          rows_BT: ``[B, T]`` int32, increasing: the scored rows that stay. Entries behind the last of them may hold
            anything.
          num_rows: how many rows the tree has, a static number; ``start_B + num_rows <= slots``.

        Raises:
          NotImplementedError: unless a model says how.
        """
        raise NotImplementedError(f"{type(self).__name__} has no compact(): it cannot be the target of a token tree")

    def for_mesh(self, layout: MeshLayout) -> LanguageModel:
        """Returns the model to lay out over a mesh: itself, unless it is made for a single device."""
        return self

    def matrices_read(self, weights: Any, tokens: int) -> list[tuple[Array, float]] | None:
        """Returns the matrices that a call multiplies by, and the share of each that it is expected to read.

        Costs are estimated from them. The share is below 1 for stacked experts, of which tokens choose a few. None: all
        arrays with two axes or more.

        Args:
          tokens: of all sequences of the call.
        """
        return None

    def param_axes(self) -> Any:
        """Returns the logical axis names of parameters, a tree of `PartitionSpec`; None: every device has all."""
        return None

    def weight_axes(self) -> Any:
        """Returns the same for the result of `prepare` and `fit_slots`."""
        return None

    def cache_axes(self) -> Any:
        """Returns the same for the result of `init_cache`."""
        return None


class LayeredModel(LanguageModel):
    """A model in three calls, for drafters inside it: ``__call__`` is ``unembed(layers(embed(tokens)))``."""

    num_layers: int
    width: int  # D

    @abc.abstractmethod
    def embed(
        self, weights: Any, tokens_BT: Array, start_B: Array, cache: Any, *, block: Block | None = None
    ) -> tuple[Array, Any]:
        """Returns the embedded tokens ``[B, T, D]`` and the cache, in which n-gram models remember tokens."""

    @abc.abstractmethod
    def layers(
        self,
        weights: Any,
        x_BTD: Array,
        start_B: Array,
        cache: Any,
        first: int,
        last: int,
        *,
        hidden_layers: tuple[int, ...] = (),
        block: Block | None = None,
    ) -> tuple[Array, Any, tuple[Array, ...]]:
        """Runs layers ``first .. last - 1``; returns the stream, the cache, and what ``hidden_layers`` asks for."""

    @abc.abstractmethod
    def unembed(self, weights: Any, x_BTD: Array) -> Array:
        """Returns float32 logits ``[B, T, V]`` of the stream after the last layer; includes the final norm."""

    def first(self, num_layers: int) -> LayeredModel:
        """Returns the model that ends after its first layers, with the same final norm and output.

        It runs on weights of its own, and as well on those of the whole model, and on a cache of the whole: layers
        behind the first are passed through untouched.

        Raises:
          NotImplementedError: unless a model says how.
        """
        raise NotImplementedError(f"{type(self).__name__} has no first(): it cannot be left after {num_layers} layers")

    def unembed_normed(self, weights: Any, x_BTD: Array) -> Array:
        """Returns `unembed` without the final norm, for heads that share the target's output.

        Raises:
          NotImplementedError: unless a model says how.
        """
        raise NotImplementedError(f"{type(self).__name__} has no unembed_normed(): heads cannot share its output")


def check_logits(name: str, model: LanguageModel, output: Output) -> None:
    """Refuses logits of another width than the vocabulary's: the missing tokens would get any distribution at all.

    Raises:
      ValueError: while tracing, with both numbers.
    """
    width = output.logits_BTV.shape[-1]
    if width != model.vocab_size:
        raise ValueError(f"the {name} has a vocabulary of {model.vocab_size} but returned logits of width {width}")

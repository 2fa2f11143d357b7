"""The interface between the decoding loop and a language model.

Anything derived from `LanguageModel` can be a target or a draft.
"""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec, SingleDeviceSharding

from specsamp.pytrees import pytree
from specsamp.sampling.warp import RowKernels

Array = jax.Array


@pytree
class Output:
    """The result of one call of a language model."""

    logits_BTV: Array  # float32
    cache: Any  # the cache given, with the call's slots written
    hidden: tuple[Array, ...] = ()  # [B, T, D], one per entry of ``hidden_layers``


@pytree
class Block:
    """The attention mask of a token tree. All tokens of the tree attend to the text before it.

    The tree of a pending token p with the children a and b, and with c below a, lies in four slots
    from ``start_B`` on:

        token   position      attends to
        p       start_B       p
        a       start_B + 1   p a
        b       start_B + 1   p   b
        c       start_B + 2   p a   c

    A call may contain only the last T of the R rows of a tree, if earlier calls have read the first
    R - T.
    """

    start_B: Array  # int32, the slot of the tree's first row
    # int32, of the call's tokens: the position of the tree's first row, ``start_B`` unless tokens
    # were skipped, plus their depth in the tree
    positions_BT: Array
    # Bool, whether token t of the call attends to row r of the tree, in slot ``start_B + r``.
    visible_BTR: Array
    # int32, how many tokens of the text have no slot, behind the ``num_kept`` first ones; None: all
    # have one
    skipped_B: Array | None = None
    num_kept: int = dataclasses.field(default=0, metadata={"static": True})

    def slot_positions(self, num_slots: int) -> Array:
        """Returns the positions of the tokens of the text in all slots, int32 ``[B or 1, S]``."""
        slots_1S = jnp.arange(num_slots)[None]
        if self.skipped_B is None:
            return slots_1S
        return slots_1S + jnp.where(slots_1S >= self.num_kept, self.skipped_B[:, None], 0)


@dataclasses.dataclass(frozen=True)
class DeviceLayout:
    """The layout of arrays on a single device. `specsamp.mesh.layout.Layout` is the layout on a
    mesh.
    """

    @property
    def device(self) -> jax.Device:
        """Returns the device, or one of those of a mesh."""
        return jax.local_devices()[0]

    def spec(self, axes: PartitionSpec, shape: Sequence[int]) -> PartitionSpec:
        return PartitionSpec()

    def specs(self, axes: Any, tree: Any) -> Any:
        return PartitionSpec()

    def part_shape(self, axes: PartitionSpec, shape: tuple[int, ...]) -> tuple[int, ...]:
        return shape

    def per_device(self, function: Callable, in_specs: Any, out_specs: Any) -> Callable:
        return function

    def on_all_devices(self, tree: Any) -> Any:
        return tree

    by_rows = split_features = on_all_devices

    def place_cache(self, axes: Any, cache: Any) -> Any:
        return cache

    def put(self, axes: Any, tree: Any) -> Any:
        return tree

    def shardings(self, axes: Any, shapes: Any) -> Any:
        return jax.tree.map(lambda _: SingleDeviceSharding(self.device), shapes)


class Kernels(RowKernels, Protocol):
    """The kernels that a model calls; `specsamp.models.kernels.dispatch.PallasKernels` has them."""

    def for_heads(self, head_size: int) -> Kernels | None:
        """Returns the kernels, or None if they do not take heads of this size."""

    def take(self, num_slots: int, length: int, group: int = 1) -> bool:
        """Returns whether `attend` and `write` are kernels for a call of ``length`` tokens."""

    def attend(self, q_BNTH: Array, cache: Any, visible: Any, **options: Any) -> Array:
        """Computes `specsamp.models.cache.LayerCache.attend`, with its arguments."""

    def write(
        self, caches: tuple[Array, ...], new: tuple[Array, ...], start_B: Array
    ) -> tuple[Array, ...]:
        """Writes keys and values ``[B, M, T, H]`` in place, in slots ``start_B ..``."""

    def take_small(self, x: Array) -> bool:
        """Returns whether `fuse` computes functions of ``x`` in one kernel."""

    def fuse(self, function: Callable, operands: tuple, axes: tuple[str | None, ...]) -> Any:
        """Computes a function of arrays and trees of arrays; ``axes`` split their axis 1."""

    def expand(self, logits: Array, ranks_1V: Array, first_J: Array) -> Array:
        """Computes `specsamp.models.heads.Head.expand` for a reduced vocabulary."""

    def take_experts(self, tokens: int, part: tuple[int, int, int], dtype: jnp.dtype) -> bool:
        """Returns whether `mix_experts` takes matrices ``part``, ``[E', F, D]`` on a device."""

    def mix_experts(self, config: Any, *arrays: Any) -> Array:
        """Routes tokens; returns the sum of the experts' results, ``[R, D]`` float32."""

    def take_delta(self, shape: Any) -> bool:
        """Returns whether `step_delta` is a kernel for a `RecurrentConfig`."""

    def step_delta(self, config: Any, *arrays: Any) -> Any:
        """Computes `specsamp.models.recurrent.mix` for tokens that may be removed again."""


class LanguageModel(abc.ABC):
    """A static, hashable description of a model, such as a frozen dataclass; its arrays are
    separate arguments.

    Derived classes define ``vocab_size``, `init_cache` and `__call__`; all other methods have
    defaults. The defaults of `compact` and `cut_cache` raise NotImplementedError, and so do those
    of `LayeredModel.first` and `LayeredModel.unembed_normed`.
    """

    vocab_size: int
    max_positions: int | None = None  # the longest sequence the model supports; None: no limit
    takes_trees: bool = False  # whether it has `compact`, and its calls take a ``block``
    # How many tokens before the start of its last call a call may begin, and its calls take
    # ``lengths_B``; None: any number.
    rewind: int | None = None
    kernels: Kernels | None = None  # also for the warps of a loop; None: no kernels
    # For programs that call the model as their target.
    compiler_options: tuple[tuple[str, str], ...] = ()

    def prepare(self, params: Any) -> Any:
        """Turns training parameters into decode-time weights, which stay constant: casts, folds,
        quantises.
        """
        return params

    def fit_slots(self, weights: Any, slots: int) -> Any:
        """Adds arrays that depend on the number of cache slots, such as tables of relative
        positions.
        """
        return weights

    @abc.abstractmethod
    def init_cache(self, batch: int, slots: int) -> Any:
        """Returns an empty cache; the batch is the leading axis of every leaf.

        ``slots`` may exceed ``max_positions`` by a few scratch slots. No value in a cache may
        become NaN: attention masks the scores of stale slots, but multiplies their values by 0, and
        0 times NaN is NaN.
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
        lengths_B: Array | None = None,
    ) -> Output:
        """Scores ``tokens_BT`` in slots ``start_B[b] .. start_B[b] + T - 1`` of each sequence.

        Sequence b attends to the slots before ``start_B[b]`` and, causally, to the tokens of this
        call. Later slots are masked, so a caller removes tokens by starting the next call at an
        earlier slot.

        Args:
          weights: from `prepare` and `fit_slots`.
          tokens_BT: ``[B, T]`` int32.
          start_B: ``[B]`` int32. Tokens beyond the last slot are padding; their slots are dropped.
          cache: from `init_cache` or an earlier call.
          hidden_layers: the layers whose outputs the drafter reads; 0 is the first, ``num_layers``
            stands for the residual stream after the final norm, -1 for the embedded tokens. () for
            drafters without ``hidden_layers``.
          block: positions and visibility of a token tree; None: a chain.
          lengths_B: int32, given to models with a `rewind` in calls that read known texts: their
            lengths. Tokens beyond them are padding; no later call begins before the last one.
            None: all tokens of the call may be removed.
        """

    def with_lengths(self, lengths_B: Array) -> dict[str, Array]:
        """Returns the options of a call that reads known texts of these lengths."""
        return {} if self.rewind is None else {"lengths_B": lengths_B}

    def compact(self, cache: Any, start_B: Array, rows_BT: Array, num_rows: int) -> Any:
        """Moves the accepted path of a token tree to consecutive slots, so that later calls find a
        chain in the cache.

        If c was accepted in the example of `Block`, the rows p, a, c move from slots ``start_B +
        (0, 1, 3)`` to ``start_B + (0, 1, 2)``.

        Args:
          cache: of this model.
          start_B: ``[B]`` int32, the slot of the tree's first row.
          rows_BT: ``[B, T]`` int32, increasing: the rows that stay, such as 0, 1, 3. Later entries
            are arbitrary.
          num_rows: the number of rows of the tree, static.
        """
        raise NotImplementedError(
            f"{type(self).__name__} has no compact(): it cannot be the target of a token tree"
        )

    def cut_cache(self, cache: Any, num_kept: int, first_B: Array, count: int, room: int) -> Any:
        """Returns the first ``num_kept`` slots, ``count`` slots from ``first_B`` and at least
        ``room`` empty ones.

        A call with this cache has a `Block` that says which tokens of the text have no slot.
        """
        raise NotImplementedError(
            f"{type(self).__name__} has no cut_cache(): it cannot draft with a window"
        )

    def for_mesh(self, layout: DeviceLayout) -> LanguageModel:
        """Returns the model for a mesh: itself, unless it is made for a single device."""
        return self

    def matrices_read(self, weights: Any, tokens: int) -> list[tuple[Array, float]] | None:
        """Returns the matrices that a call of ``tokens`` tokens multiplies by, each with the share
        that is read.

        Cost estimates use them. The share is below 1 for stacked experts. None: all arrays with two
        axes or more.
        """
        return None

    def param_axes(self) -> Any:
        """Returns the logical axis names of parameters, a tree of `PartitionSpec`; None: every
        device has all.
        """
        return None

    def weight_axes(self) -> Any:
        """Returns the logical axis names of the result of `prepare` and `fit_slots`."""
        return None

    def cache_axes(self) -> Any:
        """Returns the logical axis names of the result of `init_cache`."""
        return None


class LayeredModel(LanguageModel):
    """A model in three calls, so that drafters can run a part of it."""

    num_layers: int
    width: int  # D

    def __call__(
        self,
        weights: Any,
        tokens_BT: Array,
        start_B: Array,
        cache: Any,
        *,
        hidden_layers: tuple[int, ...] = (),
        **options: Any,
    ) -> Output:
        block = options.get("block")
        x_BTD, cache = self.embed(weights, tokens_BT, start_B, cache, block=block)
        x_BTD, cache, hidden = self.layers(
            weights,
            x_BTD,
            start_B,
            cache,
            0,
            self.num_layers,
            hidden_layers=hidden_layers,
            **options,
        )
        return Output(logits_BTV=self.unembed(weights, x_BTD), cache=cache, hidden=hidden)

    @abc.abstractmethod
    def embed(
        self,
        weights: Any,
        tokens_BT: Array,
        start_B: Array,
        cache: Any,
        *,
        block: Block | None = None,
    ) -> tuple[Array, Any]:
        """Returns the embedded tokens ``[B, T, D]`` and the cache, to which n-gram embeddings add
        tokens.
        """

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
        """Runs layers ``first .. last - 1``; returns the residual stream, the cache, and
        ``hidden_layers``' outputs.
        """

    @abc.abstractmethod
    def unembed(self, weights: Any, x_BTD: Array) -> Array:
        """Applies the final norm and the output matrix; returns float32 logits ``[B, T, V]``."""

    def first(self, num_layers: int) -> LayeredModel:
        """Returns the model of the first ``num_layers`` layers, with the same final norm and output
        matrix.

        It also runs on the weights and the cache of the whole model, whose later layers stay
        untouched.
        """
        raise NotImplementedError(
            f"{type(self).__name__} has no first(): it cannot be left after {num_layers} layers"
        )

    def unembed_normed(self, weights: Any, x_BTD: Array) -> Array:
        """Returns `unembed` without the final norm, for heads that share the target's output
        matrix.
        """
        raise NotImplementedError(
            f"{type(self).__name__} has no unembed_normed(): heads cannot share its output"
        )


def check_logits(name: str, model: LanguageModel, output: Output) -> None:
    """Raises ValueError, while tracing, if the width of the logits is not the size of the
    vocabulary.
    """
    width = output.logits_BTV.shape[-1]
    if width != model.vocab_size:
        raise ValueError(
            f"the {name} has a vocabulary of {model.vocab_size} but returned logits of width "
            f"{width}"
        )

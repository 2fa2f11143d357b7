"""`TransformerLM` presents the decoder as a `LanguageModel` that can be called in parts."""

from __future__ import annotations

import dataclasses
import functools
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from specsamp import validate
from specsamp.models.cache import (
    LayerCache,
    TokenCache,
    TransformerCache,
    TransposedKVCache,
    kind_of_cache,
)
from specsamp.models.compiling import FEW_ROWS, options_on
from specsamp.models.config import TransformerConfig
from specsamp.models.cpu_weights import UNEMBEDDING, CPUDecoder, to_cpu_order
from specsamp.models.decoder import POSITION_EMBEDDING, Decoder
from specsamp.models.experts import STACKED_AXES
from specsamp.models.int8 import Int8Weight, decode_weights, is_int8, pad_rows
from specsamp.models.interface import Block, DeviceLayout, Kernels, LayeredModel, Output
from specsamp.models.positions import relative_keys
from specsamp.models.products import full_precision
from specsamp.models.recurrent import REWIND, RecurrentCache, join_axes, join_parts

Array = jax.Array

WEIGHT_ORDERS = ("default", "cpu")


@dataclasses.dataclass(frozen=True)
class TransformerLM(LayeredModel):
    """A `LayeredModel`, hashable and static; parameters and weights are arguments of its methods.

    Attributes:
      weight_order: the order of axes in decode-time weights and caches: "default", head-major like
        the parameters, for TPUs and meshes; or "cpu", see `specsamp.models.cpu_weights`. Results
        are the same.
      kernels: of attention over the caches, experts, norms and rotations, for TPUs; None: XLA's
        operations.
      layout: of the weights, for layers with experts.
    """

    config: TransformerConfig
    weight_order: str = "default"
    kernels: Kernels | None = None
    layout: DeviceLayout = DeviceLayout()

    def __post_init__(self):
        validate.choice("weight_order", self.weight_order, WEIGHT_ORDERS)
        for size in ("vocab_size", "max_positions", "num_layers", "width"):
            object.__setattr__(self, size, getattr(self.config, size))
        is_hybrid = self.config.recurrent is not None
        object.__setattr__(self, "takes_trees", not is_hybrid)
        object.__setattr__(self, "rewind", REWIND if is_hybrid else None)
        if self.weight_order == "cpu" and self.kernels is not None:
            raise ValueError(
                "weight_order 'cpu' has no kernels: leave kernels=None, or weight_order='default'"
            )

    @classmethod
    def for_backend(cls, config: TransformerConfig) -> TransformerLM:
        """Builds the model with the weight order of the default backend, without kernels."""
        on_cpu = jax.default_backend() == "cpu" and config.dtype == "float32"
        return cls(config, "cpu" if on_cpu else "default")

    def first(self, num_layers: int) -> TransformerLM:
        without_window = tuple(layer for layer in self.config.global_layers if layer < num_layers)
        config = dataclasses.replace(
            self.config, num_layers=num_layers, global_layers=without_window
        )
        return dataclasses.replace(self, config=config)

    # Parameters.

    @functools.partial(jax.jit, static_argnums=0)  # layer by layer it takes ten times as long
    def init(self, key: Array) -> Any:
        """Returns random float32 parameters. ``jax.eval_shape(model.init, key)`` gives the shapes
        alone.
        """
        return nn.meta.unbox(self._boxed(key))

    def param_axes(self) -> Any:
        """Returns the logical axis names of every parameter, as a tree of `PartitionSpec`."""
        return nn.get_partition_spec(jax.eval_shape(self._boxed, jax.random.key(0)))

    @functools.cached_property
    def num_parameters(self) -> int:
        """Returns the number of parameters; of equal layers the first is traced."""
        config, layers = self.config, range(self.num_layers)
        kinds = [
            (config.of_layer(i), config.has_experts(i), config.is_recurrent(i)) for i in layers
        ]
        counts = {kinds.index(kind): count for kind, count in Counter(kinds).items()}
        shapes = jax.eval_shape(lambda: self._boxed(jax.random.key(0), counts))
        times = {f"layer_{i}": count for i, count in counts.items()}
        return sum(
            times.get(name, 1) * leaf.size
            for name, part in shapes.items()
            for leaf in jax.tree.leaves(part)
        )

    @property
    def weight_bytes(self) -> int:
        """Returns the bytes of decode-time weights; in int8 one per parameter, without the
        scales.
        """
        is_int8 = self.config.weight_dtype == "int8"
        return self.num_parameters * (1 if is_int8 else self.config.compute_dtype.itemsize)

    def _boxed(self, key: Array, layers: Iterable[int] | None = None) -> Any:
        """Returns random parameters with the names of their axes; of some layers, or of all."""
        layers = range(self.num_layers) if layers is None else layers
        tokens_BT, start_B = jnp.zeros((1, 1), jnp.int32), jnp.zeros((1,), jnp.int32)
        arguments = tokens_BT, start_B, layers
        return Decoder(self.config).init(key, *arguments, method="declare")["params"]

    def forward(
        self, params: Any, tokens_BT: Array, *, hidden_layers: tuple[int, ...] = ()
    ) -> Output:
        """Scores whole sequences without a cache, for training and evaluation; logits ``[B, T, V]``
        float32.
        """
        *hidden, x_BTD = self.forward_streams(
            params, tokens_BT, (*hidden_layers, self.num_layers - 1)
        )
        return Output(logits_BTV=self.read_out(params, x_BTD), cache=None, hidden=tuple(hidden))

    def forward_streams(
        self,
        params: Any,
        tokens_BT: Array,
        layers: tuple[int, ...],
        *,
        kept_BL: Array | None = None,
    ) -> tuple[Array, ...]:
        """Returns the outputs ``[B, T, D]`` of ``layers``; see `Output.hidden`.

        Args:
          kept_BL: bool, the layers that run for each sequence; None: all.
        """
        start_B = jnp.zeros(tokens_BT.shape[:1], jnp.int32)

        def run(decoder: Decoder) -> tuple[Array, ...]:
            x_BTD, _ = decoder.embed(tokens_BT, start_B, None)
            last = self.num_layers
            return decoder.run_layers(x_BTD, start_B, None, None, 0, last, layers, kept_BL=kept_BL)[
                2
            ]

        with full_precision(self.config.dtype):
            return Decoder(self.config, self.layout).apply({"params": params}, method=run)

    def read_out(self, params: Any, x_BTD: Array) -> Array:
        """Applies final norm and output matrix, for training; returns float32 logits
        ``[B, T, V]``.
        """
        with full_precision(self.config.dtype):
            return Decoder(self.config, self.layout).apply(
                {"params": params}, x_BTD, method="unembed"
            )

    # Decode-time weights.

    def prepare(self, params: Any) -> Any:
        """Casts or quantises parameters and arranges them in the weight order; `fit_slots` adds the
        tables.
        """
        weights = decode_weights(params, self.config.compute_dtype, self.config.weight_dtype)
        weights = self._of_recurrent(weights, join_parts)
        if self.kernels is not None and not self.config.tied:
            weights["embedding"] = pad_rows(weights["embedding"])
        return {
            "params": to_cpu_order(weights) if self.weight_order == "cpu" else weights,
            "relative_keys": None,
        }

    def fit_slots(self, weights: Any, slots: int) -> Any:
        """Folds the projections of relative positions into tables for caches of ``slots`` slots.

        Without the tables every call computes them. Weights of models with other positions are
        returned unchanged.
        """
        if self.config.positions != "relative":
            return weights
        params, tables = dict(weights["params"]), []
        for i in range(self.config.num_layers):
            attention = dict(params[f"layer_{i}"]["attention"])
            with full_precision(self.config.dtype):
                # Compiled, so that each device computes its part of the table from its part of the
                # weight.
                table = jax.jit(relative_keys, static_argnums=1)(attention.pop("relative"), slots)
            table = table.astype(self.config.compute_dtype)
            tables.append(table.swapaxes(1, 2) if self.weight_order == "cpu" else table)
            params[f"layer_{i}"] = dict(params[f"layer_{i}"]) | {"attention": attention}
        return {"params": params, "relative_keys": tuple(tables)}

    def for_mesh(self, layout: DeviceLayout) -> TransformerLM:
        """Returns the model in the default weight order: a CPU's joined heads cannot be split."""
        kernels = self.kernels and dataclasses.replace(self.kernels, layout=layout)
        layout = self.layout if self.config.experts is None else layout
        return dataclasses.replace(self, weight_order="default", kernels=kernels, layout=layout)

    def weight_axes(self) -> Any:
        """Returns the logical axis names of `fit_slots`'s result, as a tree of `PartitionSpec`.

        Raises:
          ValueError: the weight order is "cpu", in which one axis joins several logical axes.
        """
        if self.weight_order == "cpu":
            raise ValueError(
                "weights in the order 'cpu' cannot be split over a mesh: use TransformerLM(config)"
            )
        join = functools.partial(join_axes, in_int8=self.config.weight_dtype == "int8")
        params = self._of_recurrent(self.param_axes(), join)
        if self.config.positions != "relative":
            return {"params": params, "relative_keys": None}
        for i in range(self.config.num_layers):
            del params[f"layer_{i}"]["attention"]["relative"]
        table = PartitionSpec("kv_heads", "slots", "head")
        return {"params": params, "relative_keys": (table,) * self.config.num_layers}

    def _of_recurrent(self, params: Any, join: Callable) -> Any:
        """Returns parameters, or their axes, with those of recurrent layers joined."""
        joined = {
            f"layer_{i}": dict(params[f"layer_{i}"])
            for i in range(self.num_layers)
            if self.config.is_recurrent(i)
        }
        for layer in joined.values():
            layer["recurrence"] = join(layer["recurrence"])
        return {**params, **joined}

    def matrices_read(self, weights: Any, tokens: int) -> list[tuple[Array | Int8Weight, float]]:
        """See `LanguageModel.matrices_read`. Embeddings that only look up rows do not count."""
        experts, tables = self.config.experts, {POSITION_EMBEDDING}
        share = 1.0 if experts is None else experts.expected_touched(tokens) / experts.num_experts
        if UNEMBEDDING in weights["params"] or not self.config.tied:
            tables.add("embedding")
        matrices = []
        for path, matrix in jax.tree_util.tree_leaves_with_path(weights["params"], is_leaf=is_int8):
            module, name = ("", *(key.key for key in path))[-2:]
            if matrix.ndim >= 2 and name not in tables and not name.startswith("ngrams"):
                is_stacked = module == "experts" and name in STACKED_AXES
                matrices.append((matrix, share if is_stacked else 1.0))
        return matrices

    # Caches.

    def init_cache(self, batch: int, slots: int) -> TransformerCache:
        config, tokens = self.config, None
        if config.ngram_rows:
            tokens = TokenCache(tokens_BS=jnp.zeros((batch, slots), jnp.int32))
        kinds = map(self._kind_of_cache, range(self.num_layers))
        layers = [
            kind.zeros(config.of_layer(i), batch, slots, kernels)
            for i, (kind, kernels) in enumerate(kinds)
        ]
        return TransformerCache(layers=tuple(layers), tokens=tokens)

    def cache_axes(self) -> TransformerCache:
        """Returns the logical axis names of `init_cache`'s result, as a tree of `PartitionSpec`."""
        tokens = TokenCache.logical_axes() if self.config.ngram_rows else None
        kinds = map(self._kind_of_cache, range(self.num_layers))
        layers = [kind.logical_axes(kernels) for kind, kernels in kinds]
        return TransformerCache(layers=tuple(layers), tokens=tokens)

    def _kind_of_cache(self, layer: int) -> tuple[type[LayerCache], Kernels | None]:
        """Returns the class of a layer's cache, and its kernels."""
        if self.config.is_recurrent(layer):
            return RecurrentCache, None
        if self.weight_order == "cpu" and self.config.cache_dtype is None:
            return TransposedKVCache, None
        return kind_of_cache(self.config.of_layer(layer), self.kernels)

    def compact(
        self, cache: TransformerCache, start_B: Array, rows_BT: Array, num_rows: int
    ) -> TransformerCache:
        """Moves slots ``start_B + rows_BT`` to ``start_B ..``; see
        `specsamp.models.slots.move_slots`.
        """
        return cache.compact(start_B, rows_BT, num_rows)

    def cut_cache(
        self, cache: TransformerCache, num_kept: int, first_B: Array, count: int, room: int
    ) -> TransformerCache:
        return cache.cut(num_kept, first_B, count, room)

    # Calls.

    def embed(
        self,
        weights: Any,
        tokens_BT: Array,
        start_B: Array,
        cache: TransformerCache,
        *,
        block: Block | None = None,
    ) -> tuple[Array, TransformerCache]:
        return self._apply("embed", weights, tokens_BT, start_B, cache, block)

    def layers(
        self,
        weights: Any,
        x_BTD: Array,
        start_B: Array,
        cache: TransformerCache,
        first: int,
        last: int,
        *,
        hidden_layers: tuple[int, ...] = (),
        **options: Any,
    ) -> tuple[Array, TransformerCache, tuple[Array, ...]]:
        tables = weights["relative_keys"]
        return self._apply(
            "run_layers",
            weights,
            x_BTD,
            start_B,
            cache,
            tables,
            first,
            last,
            hidden_layers,
            **options,
        )

    def unembed(self, weights: Any, x_BTD: Array) -> Array:
        return self._apply("unembed", weights, x_BTD)

    def unembed_normed(self, weights: Any, x_BTD: Array) -> Array:
        return self._apply("unembed_normed", weights, x_BTD)

    @property
    def compiler_options(self) -> tuple[tuple[str, str], ...]:
        """Returns the compiler options of programs that call this model, see
        `specsamp.models.compiling`.
        """
        return (
            options_on("cpu", FEW_ROWS)
            if self.weight_order == "cpu" and self.config.dtype == "float32"
            else ()
        )

    def _apply(self, method: str, weights: Any, *arguments: Any, **options: Any) -> Any:
        decoder = (CPUDecoder if self.weight_order == "cpu" else Decoder)(
            self.config, self.layout, self.kernels
        )
        with full_precision(self.config.dtype):
            return decoder.apply(
                {"params": weights["params"]}, *arguments, method=method, **options
            )

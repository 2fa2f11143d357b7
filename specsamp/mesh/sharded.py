"""Shards a pair over a mesh: models and heads. `generate` is then called as on one device and gives the same tokens.

    mesh = make_mesh(data=2, model=4)
    completions = generate(shard(pair, mesh), prompts)

Over the mesh axis ``model`` the compiler splits each call of a model, from the shardings of its weights, caches and
logits. Over the axis ``data`` the rows of the batch are split with `jax.shard_map`: each data shard decodes its rows
with a program of its own devices, and the shards only agree on when to end.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import Mesh

from specsamp import validate
from specsamp.decoding.data_shards import DataShards
from specsamp.decoding.pair import Pair
from specsamp.mesh.layout import MODEL, REPLICA, Layout, put
from specsamp.models.cache import KVCache
from specsamp.models.compiling import fewest_collectives_on_tpu
from specsamp.models.heads import FeatureHead, HeadModule
from specsamp.models.interface import Block, LanguageModel, LayeredModel, Output
from specsamp.models.kernels.cache import choose_kernels
from specsamp.models.transformer import TransformerLM


def shard(pair: Pair, mesh: Mesh, *, draft_model_parallelism: int | None = None) -> Pair:
    """Returns the pair with its parameters sharded over the mesh, for `generate` and for benchmarks.

    Args:
      pair: models and parameters; the parameters may be on any devices, also on this mesh.
      mesh: a mesh from `make_mesh`.
      draft_model_parallelism: number of devices that hold one copy of the draft together. 1 gives every device a
        copy, None splits the draft like the target, and any other number must be the one that the mesh was made with.

    Raises:
      ValueError: a size of a model does not divide over the devices, with both numbers; or an argument has the wrong type.
    """
    validate.instance("pair", pair, Pair, "load_pair('python')")
    validate.instance("mesh", mesh, Mesh, "make_mesh(data=2, model=4)")
    layout = draft_layout(mesh, draft_model_parallelism)
    target = shard_model(pair.target, Layout.tensor_parallel(mesh))
    draft = pair.draft and shard_model(pair.draft, layout)
    head = pair.head and shard_head(pair.head, layout)
    if drafting := draft or head:
        shardings = drafting.param_shardings(pair.draft_params)
    else:  # parameters of a drafter that is no model, or None
        shardings = Layout.replicated(mesh).shardings(None, pair.draft_params)
    return dataclasses.replace(
        pair,
        target=target,
        target_params=put(pair.target_params, target.param_shardings(pair.target_params)),
        draft=draft,
        head=head,
        draft_params=put(pair.draft_params, shardings),
        shards=DataShards(mesh),
    )


def draft_layout(mesh: Mesh, draft_model_parallelism: int | None = None) -> Layout:
    """Returns the layout of a draft that ``draft_model_parallelism`` devices hold together, see `shard`.

    Raises:
      ValueError: the mesh was made for another number of devices.
    """
    if draft_model_parallelism == 1:
        return Layout.replicated(mesh)
    if draft_model_parallelism in (None, mesh.shape[MODEL] * mesh.shape.get(REPLICA, 1)):
        return Layout.tensor_parallel(mesh)
    if draft_model_parallelism != mesh.shape[MODEL]:
        raise ValueError(
            f"draft_model_parallelism {draft_model_parallelism} needs a mesh made with it; this one is "
            f"{dict(mesh.shape)}"
        )
    return Layout(mesh, (MODEL,))


def shard_head(head: FeatureHead, layout: Layout) -> ShardedHead:
    """Wraps a head so that its weights, cache and logits are laid out over a mesh."""
    return ShardedHead(head.config, layout)


def shard_model(model: LanguageModel, layout: Layout) -> ShardedModel:
    """Wraps a model so that its weights, caches and logits are laid out over a mesh."""
    model = model.model if isinstance(model, ShardedModel) else model
    return ShardedModel(model.for_mesh(layout), layout)


def with_attention(pair: Pair, attention: str) -> Pair:
    """Returns the pair with another attention over its caches, on its mesh if it has one.

    Args:
      attention: "kernel", for TPUs; or "plain", the same in XLA's operations. Heads, and models that are no
        `TransformerLM`, have theirs alone.

    Raises:
      ValueError: another word, or "kernel" where there is no TPU.
    """
    kernels = choose_kernels(attention)

    def change(model: LanguageModel | None) -> LanguageModel | None:
        if isinstance(model, ShardedModel):
            return shard_model(change(model.model), model.layout)
        return dataclasses.replace(model, kernels=kernels) if isinstance(model, TransformerLM) else model

    return dataclasses.replace(pair, target=change(pair.target), draft=change(pair.draft))


@dataclasses.dataclass(frozen=True)
class ShardedModel(LayeredModel):
    """A `LanguageModel` whose weights and caches are sharded, and whose logits are gathered once per call.

    Models may name the logical axes of their arrays with ``param_axes()``, ``weight_axes()`` and ``cache_axes()``,
    each a tree of `PartitionSpec`. Every device has all of the arrays whose axes are not named.
    The model can be called in parts if the one inside can.

    Attributes:
      whole: the model whose caches calls are given, where ``model`` is the first layers of it; None: it is ``model``.
    """

    model: LanguageModel
    layout: Layout
    whole: LanguageModel | None = None

    @property
    def vocab_size(self) -> int:
        return self.model.vocab_size

    @property
    def max_positions(self) -> int | None:
        return self.model.max_positions

    @property
    def num_layers(self) -> int:
        return self.model.num_layers

    @property
    def width(self) -> int:
        return self.model.width

    @property
    def config(self) -> Any:
        return self.model.config

    @property
    def compiler_options(self) -> tuple[tuple[str, str], ...]:
        return fewest_collectives_on_tpu() or self.model.compiler_options

    def param_shardings(self, params: Any) -> Any:
        """Returns the shardings of parameters, or of their shapes."""
        return self.layout.shardings(self.model.param_axes(), params)

    def weight_shardings(self, weights: Any) -> Any:
        """Returns the shardings of prepared weights, or of their shapes."""
        return self.layout.shardings(self.model.weight_axes(), weights)

    def init(self, key: jax.Array) -> Any:
        """Returns random float32 parameters, the same on any mesh; under `jax.jit` each device makes its own part."""
        shardings = self.param_shardings(jax.eval_shape(self.model.init, key))
        return jax.lax.with_sharding_constraint(self.model.init(key), shardings)

    def prepare(self, params: Any) -> Any:
        return self.model.prepare(params)

    def fit_slots(self, weights: Any, slots: int) -> Any:
        weights = self.model.fit_slots(weights, slots)
        return put(weights, self.weight_shardings(weights))

    def matrices_read(self, weights: Any, tokens: int) -> list[tuple[jax.Array, float]] | None:
        return self.model.matrices_read(weights, tokens)

    def init_cache(self, batch: int, slots: int) -> Any:
        return self._place_cache((self.whole or self.model).init_cache(batch, slots))

    def __call__(
        self,
        weights: Any,
        tokens_BT: jax.Array,
        start_B: jax.Array,
        cache: Any,
        *,
        hidden_layers: tuple[int, ...] = (),
        block: Block | None = None,
    ) -> Output:
        tokens_BT, start_B = self.layout.on_all_devices((tokens_BT, start_B))
        trees = {} if block is None else {"block": block}
        output = self.model(weights, tokens_BT, start_B, cache, hidden_layers=hidden_layers, **trees)
        return Output(
            logits_BTV=self.layout.by_rows(output.logits_BTV),
            cache=self._place_cache(output.cache),
            hidden=self.layout.on_all_devices(output.hidden),
        )

    def first(self, num_layers: int) -> ShardedModel:
        return dataclasses.replace(self, model=self.model.first(num_layers), whole=self.whole or self.model)

    def compact(self, cache: Any, start_B: jax.Array, rows_BT: jax.Array, num_rows: int) -> Any:
        rows_BT, start_B = self.layout.on_all_devices((rows_BT, start_B))
        return self._place_cache(self.model.compact(cache, start_B, rows_BT, num_rows))

    def embed(
        self, weights: Any, tokens_BT: jax.Array, start_B: jax.Array, cache: Any, *, block: Block | None = None
    ) -> tuple[jax.Array, Any]:
        tokens_BT, start_B = self.layout.on_all_devices((tokens_BT, start_B))
        x_BTD, written = self.model.embed(weights, tokens_BT, start_B, cache, block=block)
        # What embedding does not write is left alone: else a loop that only embeds would move whole caches.
        placed = self._place_cache(written)
        cache = jax.tree.map(lambda old, new, at: old if new is old else at, cache, written, placed)
        return self.layout.on_all_devices(x_BTD), cache

    def layers(
        self,
        weights: Any,
        x_BTD: jax.Array,
        start_B: jax.Array,
        cache: Any,
        first: int,
        last: int,
        *,
        hidden_layers: tuple[int, ...] = (),
        block: Block | None = None,
    ) -> tuple[jax.Array, Any, tuple[jax.Array, ...]]:
        x_BTD, cache, hidden = self.model.layers(
            weights, x_BTD, start_B, cache, first, last, hidden_layers=hidden_layers, block=block
        )
        x_BTD, hidden = self.layout.on_all_devices((x_BTD, hidden))
        return x_BTD, self._place_cache(cache), hidden

    def unembed(self, weights: Any, x_BTD: jax.Array) -> jax.Array:
        return self.layout.by_rows(self.model.unembed(weights, x_BTD))

    def unembed_normed(self, weights: Any, x_BTD: jax.Array) -> jax.Array:
        return self.layout.by_rows(self.model.unembed_normed(weights, x_BTD))

    def _place_cache(self, cache: Any) -> Any:
        return self.layout.place_cache((self.whole or self.model).cache_axes(), cache)


@dataclasses.dataclass(frozen=True)
class ShardedHead(FeatureHead):
    """A `FeatureHead` whose weights and cache are sharded. Features are on all devices of a data shard."""

    layout: Layout

    def param_shardings(self, params: Any) -> Any:
        """Returns the shardings of parameters, or of their shapes."""
        return self.layout.shardings(self.param_axes(), params)

    def fit_slots(self, weights: Any, slots: int) -> Any:
        return put(weights, self.layout.shardings(self.weight_axes(), weights))

    def init_cache(self, batch: int, slots: int) -> KVCache:
        return self.layout.place_cache(self.cache_axes(), super().init_cache(batch, slots))

    def fuse(self, weights: Any, hidden: tuple[jax.Array, ...]) -> jax.Array:
        return self.layout.on_all_devices(super().fuse(weights, hidden))

    def embed(self, weights: Any, tokens_BT: jax.Array) -> jax.Array:
        return self.layout.on_all_devices(super().embed(weights, self.layout.on_all_devices(tokens_BT)))

    def __call__(
        self,
        weights: Any,
        embedded_BTD: jax.Array,
        features_BTD: jax.Array,
        start_B: jax.Array,
        cache: KVCache | None,
    ) -> tuple[jax.Array, KVCache]:
        # The features that come in, too: else the compiler keeps them split in the carry, for their product.
        start_B, features_BTD = self.layout.on_all_devices((start_B, features_BTD))
        features_BTD, cache = super().__call__(weights, embedded_BTD, features_BTD, start_B, cache)
        return self.layout.on_all_devices(features_BTD), self.layout.place_cache(self.cache_axes(), cache)

    def logits(
        self,
        weights: Any,
        features_BTD: jax.Array,
        of_target: Callable[[jax.Array], jax.Array],
        offset: jax.Array | int = 0,
    ) -> jax.Array:
        logits = super().logits(weights, features_BTD, of_target, offset)
        return self.layout.by_rows(logits) if self.config.own_output else logits  # the target has placed its own

    def take(self, features_BTD: jax.Array, row_B: jax.Array) -> jax.Array:
        return self.layout.on_all_devices(super().take(features_BTD, self.layout.on_all_devices(row_B)))

    def _module(self) -> HeadModule:
        return self.config.module(self.config, split=self.layout.split_features)

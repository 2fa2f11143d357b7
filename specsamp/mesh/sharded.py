"""Shards a pair over a mesh. `generate` is then called as on one device and gives the same tokens.

    mesh = make_mesh(data=2, model=4)
    completions = generate(shard(pair, mesh), prompts)

Over the mesh axis ``model`` the compiler splits each call of a model, from the shardings of its
weights, caches and logits. Over the axis ``data`` `jax.shard_map` splits the sequences of the
batch: each data shard decodes its sequences on its devices, and the shards only agree on when to
end.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
from jax.sharding import Mesh

from specsamp import validate
from specsamp.decoding.data_shards import DataShards
from specsamp.decoding.pair import Pair
from specsamp.mesh.distributed import from_first
from specsamp.mesh.layout import MODEL, REPLICA, Layout, put
from specsamp.models.compiling import ON_TPU, options_on
from specsamp.models.config import TransformerConfig
from specsamp.models.dflash import BlockHead
from specsamp.models.heads import FeatureHead, Head
from specsamp.models.interface import LanguageModel, LayeredModel, Output
from specsamp.models.kernels.dispatch import PallasKernels, choose_kernels, say_once
from specsamp.models.kernels.first_call import reason_for_plain
from specsamp.models.transformer import TransformerLM

Array = jax.Array


def shard(pair: Pair, mesh: Mesh, *, draft_model_parallelism: int | None = None) -> Pair:
    """Returns the pair with its parameters sharded over the mesh, for `generate` and for
    benchmarks.

    Args:
      pair: models and parameters; the parameters may be on any devices.
      mesh: a mesh from `make_mesh`.
      draft_model_parallelism: number of devices that hold one copy of the draft together. 1 gives
        every device a copy, None splits the draft like the target, any other number must equal the
        argument of `make_mesh`.

    Raises:
      ValueError: a size of a model does not divide over the devices, with both numbers; or an
        argument has the wrong type.
    """
    validate.instance("pair", pair, Pair, "load_pair('python')")
    validate.instance("mesh", mesh, Mesh, "make_mesh(data=2, model=4)")
    layout = draft_layout(mesh, draft_model_parallelism)
    target = shard_model(pair.target, Layout.tensor_parallel(mesh))
    draft = pair.draft and shard_model(pair.draft, layout)
    head = pair.head and shard_head(pair.head, layout)
    if drafting := draft or head:
        shardings = drafting.param_shardings(pair.draft_params)
    else:  # None, or parameters of a drafter that is no model
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
    """Returns the layout of a draft; raises ValueError if the mesh was made for another
    parallelism, see `shard`.
    """
    if draft_model_parallelism == 1:
        return Layout.replicated(mesh)
    ways = mesh.shape.get(MODEL, 1)
    if draft_model_parallelism in (None, ways * mesh.shape.get(REPLICA, 1)):
        return Layout.tensor_parallel(mesh)
    if draft_model_parallelism != ways:
        raise ValueError(
            f"draft_model_parallelism {draft_model_parallelism} needs a mesh made with it; this "
            f"one is {dict(mesh.shape)}"
        )
    return Layout(mesh, (MODEL,))


def shard_head(head: Head, layout: Layout) -> Head:
    """Returns the head with its weights, cache and logits sharded over a mesh."""
    kernels = head.kernels and dataclasses.replace(head.kernels, layout=layout)
    return dataclasses.replace(head, layout=layout, kernels=kernels)


def shard_model(model: LanguageModel, layout: Layout) -> ShardedModel:
    """Wraps a model so that its weights, caches and logits are sharded over a mesh."""
    model = model.model if isinstance(model, ShardedModel) else model
    return ShardedModel(model.for_mesh(layout), layout)


def with_attention(pair: Pair, attention: str) -> Pair:
    """Returns the pair with or without kernels (`specsamp.models.kernels`), on the same mesh.

    Args:
      attention: "kernel", for TPUs; "plain", the same in XLA's operations; or "auto", the kernels
        on a TPU, if a call with them equals a call without; otherwise plain, with a warning. It is
        set for each `TransformerLM` and each head with layers and caches of its own.

    Raises:
      ValueError: another word, or "kernel" without a TPU.
    """
    chosen = choose_kernels(attention)

    def kernels_of(config: TransformerConfig) -> PallasKernels | None:
        is_checked = chosen is not None and attention == "auto"
        reason = from_first(lambda: reason_for_plain(config, chosen)) if is_checked else ""
        if reason:
            say_once(f"there are no kernels: {reason}")
        return None if reason else chosen

    def change(model: LanguageModel | None) -> LanguageModel | None:
        if isinstance(model, ShardedModel):
            return shard_model(change(model.model), model.layout)
        if not isinstance(model, TransformerLM):
            return model
        return dataclasses.replace(model, kernels=kernels_of(model.config))

    head = pair.head
    if isinstance(head, FeatureHead | BlockHead) and head.config.has_layer:
        head = dataclasses.replace(head, kernels=kernels_of(head.config.layer))
        head = shard_head(head, head.layout) if isinstance(head.layout, Layout) else head
    return dataclasses.replace(
        pair, target=change(pair.target), draft=change(pair.draft), head=head
    )


@dataclasses.dataclass(frozen=True)
class ShardedModel(LayeredModel):
    """A `LanguageModel` whose weights and caches are sharded, and whose logits are gathered once
    per call.

    Arrays whose logical axes the model does not name are on every device. The model can be called
    in parts if the model inside can; ``options`` of a call go to the model inside.

    Attributes:
      whole: the model that makes the caches, if ``model`` is its first layers; None: ``model``
        makes them.
    """

    model: LanguageModel
    layout: Layout
    whole: LanguageModel | None = None

    def __post_init__(self):
        # Of the model inside.
        names = "vocab_size max_positions num_layers width config kernels takes_trees rewind"
        for name in names.split():
            object.__setattr__(self, name, getattr(self.model, name, None))

    @property
    def compiler_options(self) -> tuple[tuple[str, str], ...]:
        return options_on("tpu", ON_TPU) or self.model.compiler_options

    def param_shardings(self, params: Any) -> Any:
        """Returns the shardings of parameters, or of their shapes."""
        return self.layout.shardings(self.model.param_axes(), params)

    def weight_shardings(self, weights: Any) -> Any:
        """Returns the shardings of prepared weights, or of their shapes."""
        return self.layout.shardings(self.model.weight_axes(), weights)

    def init(self, key: Array) -> Any:
        """Returns random float32 parameters, the same on any mesh; under `jax.jit` each device
        makes its part.
        """
        shardings = self.param_shardings(jax.eval_shape(self.model.init, key))
        return jax.lax.with_sharding_constraint(self.model.init(key), shardings)

    def prepare(self, params: Any) -> Any:
        return self.model.prepare(params)

    def fit_slots(self, weights: Any, slots: int) -> Any:
        return self.layout.put(self.model.weight_axes(), self.model.fit_slots(weights, slots))

    def matrices_read(self, weights: Any, tokens: int) -> list[tuple[Array, float]] | None:
        return self.model.matrices_read(weights, tokens)

    def init_cache(self, batch: int, slots: int) -> Any:
        return self._place_cache((self.whole or self.model).init_cache(batch, slots))

    def __call__(
        self, weights: Any, tokens_BT: Array, start_B: Array, cache: Any, **options: Any
    ) -> Output:
        tokens_BT, start_B = self.layout.on_all_devices((tokens_BT, start_B))
        output = self.model(weights, tokens_BT, start_B, cache, **options)
        return Output(
            logits_BTV=self.layout.by_rows(output.logits_BTV),
            cache=self._place_cache(output.cache),
            hidden=self.layout.on_all_devices(output.hidden),
        )

    def first(self, num_layers: int) -> ShardedModel:
        return dataclasses.replace(
            self, model=self.model.first(num_layers), whole=self.whole or self.model
        )

    def compact(self, cache: Any, start_B: Array, rows_BT: Array, num_rows: int) -> Any:
        rows_BT, start_B = self.layout.on_all_devices((rows_BT, start_B))
        return self._place_cache(self.model.compact(cache, start_B, rows_BT, num_rows))

    def cut_cache(self, cache: Any, num_kept: int, first_B: Array, count: int, room: int) -> Any:
        return self._place_cache(
            self.model.cut_cache(cache, num_kept, self.layout.on_all_devices(first_B), count, room)
        )

    def embed(
        self, weights: Any, tokens_BT: Array, start_B: Array, cache: Any, **options: Any
    ) -> tuple[Array, Any]:
        tokens_BT, start_B = self.layout.on_all_devices((tokens_BT, start_B))
        x_BTD, written = self.model.embed(weights, tokens_BT, start_B, cache, **options)
        # Arrays that embedding does not write are not resharded: a loop that only embeds must not
        # move whole caches.
        placed = self._place_cache(written)
        cache = jax.tree.map(lambda old, new, at: old if new is old else at, cache, written, placed)
        return self.layout.on_all_devices(x_BTD), cache

    def layers(
        self,
        weights: Any,
        x_BTD: Array,
        start_B: Array,
        cache: Any,
        first: int,
        last: int,
        **options: Any,
    ) -> tuple[Array, Any, tuple[Array, ...]]:
        x_BTD, cache, hidden = self.model.layers(
            weights, x_BTD, start_B, cache, first, last, **options
        )
        x_BTD, hidden = self.layout.on_all_devices((x_BTD, hidden))
        return x_BTD, self._place_cache(cache), hidden

    def unembed(self, weights: Any, x_BTD: Array) -> Array:
        return self.layout.by_rows(self.model.unembed(weights, x_BTD))

    def unembed_normed(self, weights: Any, x_BTD: Array) -> Array:
        return self.layout.by_rows(self.model.unembed_normed(weights, x_BTD))

    def _place_cache(self, cache: Any) -> Any:
        return self.layout.place_cache((self.whole or self.model).cache_axes(), cache)

"""A pair on a mesh: the same `generate`, with weights and caches spread over many devices.

    mesh = make_mesh(data=2, model=4)
    completions = generate(shard(pair, mesh), prompts)

Within a call of a model the compiler splits the work over ``model``, from the shardings of weights, caches
and logits. Rows of a batch are split over ``data`` by hand (`jax.shard_map`): what a share does with its
rows is the program of one group of devices alone. Groups only agree on when to end.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

from specsamp.decoding.data_shards import DataShards, constrain
from specsamp.decoding.pair import Pair
from specsamp.mesh.layout import MODEL, REPLICA, ROWS, Layout, put
from specsamp.models.compiling import fewest_collectives_on_tpu
from specsamp.models.interface import Block, LanguageModel, Output
from specsamp.models.transformer import TransformerLM


def shard(pair: Pair, mesh: Mesh, *, draft_model_parallelism: int | None = None) -> Pair:
    """The pair with its parameters in place, for `generate` and all that measures.

    Args:
      pair: its parameters may lie anywhere, or be on this mesh already.
      mesh: from `make_mesh`.
      draft_model_parallelism: devices that hold one copy of the draft together: 1 replicates it, None splits it like the
        target, anything else is what the mesh was made with.

    Raises:
      ValueError: a size that does not divide over the mesh, with the numbers.
    """
    target = shard_model(pair.target, Layout.tensor_parallel(mesh))
    sides = {"target": target, "target_params": put(pair.target_params, target.param_shardings(pair.target_params))}
    if pair.draft is not None:
        draft = shard_model(pair.draft, draft_layout(mesh, draft_model_parallelism))
        sides |= {"draft": draft, "draft_params": put(pair.draft_params, draft.param_shardings(pair.draft_params))}
    elif pair.draft_params is not None:  # of a drafter of one's own
        sides["draft_params"] = put(pair.draft_params, Layout.replicated(mesh).shardings(None, pair.draft_params))
    return dataclasses.replace(pair, **sides, shards=DataShards(mesh))


def draft_layout(mesh: Mesh, draft_model_parallelism: int | None = None) -> Layout:
    """Of a draft that ``draft_model_parallelism`` devices hold together, see `shard`."""
    if draft_model_parallelism == 1:
        return Layout.replicated(mesh)
    if draft_model_parallelism in (None, mesh.shape[MODEL] * mesh.shape.get(REPLICA, 1)):
        return Layout.tensor_parallel(mesh)
    if draft_model_parallelism != mesh.shape[MODEL]:
        raise ValueError(
            f"draft_model_parallelism {draft_model_parallelism} needs a mesh made with it; this one is {dict(mesh.shape)}"
        )
    return Layout.tensor_parallel(mesh, over=(MODEL,))


def shard_model(model: LanguageModel, layout: Layout) -> ShardedModel:
    model = model.model if isinstance(model, ShardedModel) else model.for_mesh()
    return ShardedModel(model, layout)


def placed_params(model: TransformerLM | ShardedModel) -> Any:
    """The parameters as `jax.ShapeDtypeStruct`: in the compute dtype, in their places, or on the first device."""
    if isinstance(model, ShardedModel):
        shapes = jax.eval_shape(model.model.init, jax.random.key(0))
        shardings = model.param_shardings(shapes)
    else:
        shapes = jax.eval_shape(model.init, jax.random.key(0))
        one = SingleDeviceSharding(jax.local_devices()[0])
        shardings = jax.tree.map(lambda _: one, shapes)

    def place(x, at):
        return jax.ShapeDtypeStruct(x.shape, model.config.compute_dtype, sharding=at)

    return jax.tree.map(place, shapes, shardings)


@dataclasses.dataclass(frozen=True)
class ShardedModel(LanguageModel):
    """A `LanguageModel` laid out: weights and caches in their places, logits gathered once per call, by rows.

    Models may name the axes of ``param_axes()``, ``weight_axes()`` and ``cache_axes()``, each a tree of
    `PartitionSpec` of logical names; what a model does not name, every device has whole.
    """

    model: LanguageModel
    layout: Layout

    @property
    def vocab_size(self) -> int:
        return self.model.vocab_size

    @property
    def max_positions(self) -> int | None:
        return self.model.max_positions

    @property
    def config(self) -> Any:
        return self.model.config

    @property
    def compiler_options(self) -> tuple[tuple[str, str], ...]:
        return fewest_collectives_on_tpu() or self.model.compiler_options

    def param_shardings(self, params: Any) -> Any:
        """For parameters, or their shapes."""
        return self.layout.shardings(self.model.param_axes(), params)

    def weight_shardings(self, weights: Any) -> Any:
        return self.layout.shardings(self.model.weight_axes(), weights)

    def init(self, key: jax.Array) -> Any:
        """Random float32 parameters; under `jax.jit` made where they belong, and the same on any mesh."""
        shardings = self.param_shardings(jax.eval_shape(self.model.init, key))
        return jax.lax.with_sharding_constraint(self.model.init(key), shardings)

    def prepare(self, params: Any) -> Any:
        return self.model.prepare(params)

    def fit_slots(self, weights: Any, slots: int) -> Any:
        weights = self.model.fit_slots(weights, slots)
        return put(weights, self.weight_shardings(weights))

    def streamed(self, weights: Any) -> list[jax.Array] | None:
        return self.model.streamed(weights)

    def init_cache(self, batch: int, slots: int) -> Any:
        return self._constrain_cache(self.model.init_cache(batch, slots))

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
        # Tokens that were sampled row by row: a model wants all of them.
        whole = (PartitionSpec(None, None), PartitionSpec(None))
        tokens_BT, start_B = self.layout.constrain(whole, (tokens_BT, start_B))
        trees = {} if block is None else {"block": block}
        output = self.model(weights, tokens_BT, start_B, cache, hidden_layers=hidden_layers, **trees)
        return dataclasses.replace(
            output, logits_BTV=self._by_rows(output.logits_BTV), cache=self._constrain_cache(output.cache)
        )

    def _by_rows(self, logits_BTV: jax.Array) -> jax.Array:
        """Each row whole on a device, so that warping it holds no collective; and where rows are many, on few devices.

        Whole rows on all devices cost a batch of eight ten times the cycles of a warp (`specsamp.tpu.variants`);
        split, tokens and what was accepted are a few small collectives more in a round. One row stays on all devices.

        In steps: straight from the product to rows, a compiler gathers the embedding; from a vocabulary split
        over more devices than rows are, it gathers all rows.
        """
        rows = self.layout.spec(PartitionSpec(ROWS), logits_BTV.shape[:1])
        over = rows[0] if rows else None
        logits_BTV = self.layout.constrain(PartitionSpec(None, None, "vocab"), logits_BTV)
        for spec in (PartitionSpec(None, None, over), PartitionSpec(over, None, None)):
            logits_BTV = constrain(logits_BTV, NamedSharding(self.layout.mesh, spec))
        return logits_BTV

    def _constrain_cache(self, cache: Any) -> Any:
        axes = self.model.cache_axes()
        if axes is None:
            return cache

        # Rows are split already, see `DataShards`: here a batch is a share of it.
        def no_batch(spec):
            return PartitionSpec(*(None if name == "batch" else name for name in spec))

        axes = jax.tree.map(no_batch, axes, is_leaf=lambda x: isinstance(x, PartitionSpec))
        return self.layout.constrain(axes, cache)

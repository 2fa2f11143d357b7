"""Lowers the programs of decoding for a described slice: arguments are shapes with shardings.

    programs = Programs(target, draft, mesh=mesh, sampling=chain(top_p(0.8)), batch=1, slots=2048)
    compiled = programs.call(target, tokens=5)().compile(compiler_options=dict(FEWEST_COLLECTIVES))

No memory is allocated: a 70B pair takes a few seconds to lower.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding

from specsamp.decoding.data_shards import BY_ROWS, REPLICATED, DataShards
from specsamp.decoding.drafter import Drafter
from specsamp.decoding.drafters import EarlyExitDrafter, FeatureDrafter, ModelDrafter
from specsamp.decoding.loop import Loop
from specsamp.decoding.state import Request, Weights
from specsamp.mesh.sharded import ShardedModel
from specsamp.mesh.sharded_head import shard_head
from specsamp.models.heads import FeatureHead
from specsamp.sampling.rules import Rule
from specsamp.sampling.warp import Warp

WINDOW = 2  # tokens of a one-token call on a TPU: a product of one row does not use the matrix unit


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Programs:
    """The programs of one pair, batch and mesh.

    With an ``exit_layer`` the target drafts with its first layers. Calls of a draft are then those of ``draft``, a model
    of these layers alone; a round has no weights and no cache but the target's. With a ``head``, ``draft`` is a step of
    it, see `specsamp.tpu.head_step`; a round has the head's weights and its state.
    """

    target: ShardedModel
    draft: ShardedModel
    mesh: Mesh
    sampling: Warp | None
    batch: int
    slots: int
    exit_layer: int | None = None  # None: the draft is a model beside the target, or a head
    head: FeatureHead | None = None

    def check(self) -> None:
        """Checks the slots.

        Raises:
          ValueError: they are more than a model can read.
        """
        for side, model in (("target", self.target), ("draft", self.draft)):
            most = model.max_positions
            if most is not None and self.slots > most:
                raise ValueError(f"{self.slots} slots exceed the {most} positions of the {side}: give --slots={most}")

    @functools.cache  # eighty layers take seconds to trace
    def weights(self, model: ShardedModel) -> Any:
        """Returns the shapes of a model's prepared weights, sharded."""

        def prepare(key):
            return model.model.fit_slots(model.model.prepare(model.model.init(key)), self.slots)

        shapes = jax.eval_shape(prepare, jax.random.key(0))
        return _placed(shapes, model.weight_shardings(shapes))

    def floor(self, model: ShardedModel, live: float = 1.0, *, tokens: int = 1) -> float:
        """Returns the bytes per device that a call reads at least; of experts those that its tokens are expected to choose.

        Experts are the mean of the devices; where each has whole ones, the others wait for one that reads more.

        Args:
          live: share of the slots of the cache that hold something, in [0, 1].
          tokens: of each row, which only counts for experts.
        """
        weights = self.weights(model)
        streamed = {id(leaf) for leaf in jax.tree.leaves((model.streamed(weights), weights.get("relative_keys")))}
        read = sum(_bytes_per_device(leaf) for leaf in jax.tree.leaves(weights) if id(leaf) in streamed)
        rows = self.batch // DataShards(self.mesh).count
        for matrix, share in model.chosen(weights, rows * tokens):
            read += share * sum(map(_bytes_per_device, jax.tree.leaves(matrix)))
        return read + live * sum(map(_bytes_per_device, jax.tree.leaves(self.cache(model))))

    def floor_of_round(self, draft_length: int, live: float = 1.0) -> float:
        """Returns the bytes per device that a round reads at least: its calls, and what makes features for a head."""
        fused = [] if self.head is None else self.draft.model.fused(self.weights(self.draft))
        drafts = draft_length * self.floor(self.draft, live) + sum(map(_bytes_per_device, jax.tree.leaves(fused)))
        return self.floor(self.target, live, tokens=draft_length + 1) + drafts

    def bytes_of_state(self) -> tuple[int, int]:
        """Returns the bytes per device of weights, and of caches: of the target, and of what drafts beside it."""
        parts = (self.weights(self.target), self.draft_weights()), (self.cache(self.target), self.draft_cache())
        weights, caches = (sum(map(_bytes_per_device, jax.tree.leaves(part))) for part in parts)
        return weights, caches

    def draft_weights(self) -> Any:
        """Returns the shapes of what a round drafts with beside the target's weights, sharded."""
        if self.exit_layer is not None:
            return None
        return self.weights(self.draft) if self.head is None else self.weights(self.draft)["head"]

    def draft_cache(self) -> Any:
        """Returns the shapes of the cache of what drafts beside the target, sharded."""
        if self.exit_layer is not None:
            return ()
        return self.cache(self.draft) if self.head is None else self.cache(self.draft)["cache"]

    def bytes_of(self, model: ShardedModel) -> tuple[int, int]:
        """Returns the bytes per device of one model's weights, and of its cache."""

        def size(tree):
            return sum(map(_bytes_per_device, jax.tree.leaves(tree)))

        return size(self.weights(model)), size(self.cache(model))

    def call(self, model: ShardedModel, tokens: int) -> jax.stages.Lowered:
        """Lowers a call of a model with ``tokens`` tokens per row; its logits are replicated."""

        def call(weights, tokens_BT, start_B, cache):
            output = model(weights, tokens_BT, start_B, cache)
            return output.logits_BTV, output.cache

        split = DataShards(self.mesh).map(call, (REPLICATED, BY_ROWS, BY_ROWS, BY_ROWS))
        sizes = (self.batch, tokens), (self.batch,)
        tokens_BT, start_B = self._by_rows([jax.ShapeDtypeStruct(size, jnp.int32) for size in sizes])
        return jax.jit(split, donate_argnums=3).lower(self.weights(model), tokens_BT, start_B, self.cache(model))

    def round(self, draft_length: int, rule: Rule) -> jax.stages.Lowered:
        """Lowers the loop of generation, all rounds of it, with the draft proposing K tokens a round."""
        drafter = self.drafter(draft_length)
        loop = Loop(target=self.target, drafter=drafter, rule=rule, window=WINDOW, shards=DataShards(self.mesh))
        weights = Weights(target=self.weights(self.target), draft=self.draft_weights())
        request = self._by_rows(
            jax.eval_shape(lambda: Request.create(sampling=self.sampling, limits=[self.slots] * self.batch))
        )
        # Sharded models ask for the devices of their mesh even where only shapes are wanted.
        bare = dataclasses.replace(
            loop,
            target=self.target.model,
            drafter=drafter.with_models(self.target.model, self.head or self.draft.model),
            shards=DataShards(),
        )
        prompt = (jnp.zeros((self.batch, 16), jnp.int32), jnp.full((self.batch,), 16, jnp.int32))
        state = jax.eval_shape(lambda w, r: bare.prefill(w, r, *prompt, slots=self.slots), weights, request)
        drafter_state = self.draft_cache()
        if self.head is not None:
            rest = self._by_rows(dataclasses.replace(state.drafter_state, cache=None))
            drafter_state = dataclasses.replace(rest, cache=drafter_state)
        state = self._by_rows(dataclasses.replace(state, cache=None, drafter_state=None, request=None))
        state = dataclasses.replace(state, cache=self.cache(self.target), drafter_state=drafter_state)
        rounds = jax.ShapeDtypeStruct((), jnp.int32, sharding=NamedSharding(self.mesh, REPLICATED))

        def run(weights, request, state, rounds):
            return loop.run_request(weights, request, state, rounds)

        return jax.jit(run, donate_argnums=2).lower(weights, request, state, rounds)

    def drafter(self, draft_length: int) -> Drafter:
        """Returns what drafts in a round."""
        if self.head is not None:
            return FeatureDrafter(self.target, shard_head(self.head, self.draft.layout), draft_length, WINDOW)
        if self.exit_layer is None:
            return ModelDrafter(self.draft, draft_length, WINDOW)
        return EarlyExitDrafter(self.target, self.exit_layer, draft_length, WINDOW)

    def cache(self, model: ShardedModel) -> Any:
        """Returns the shapes of a model's cache, sharded."""
        shapes = jax.eval_shape(lambda: model.model.init_cache(self.batch, self.slots))
        return _placed(shapes, model.layout.shardings(model.model.cache_axes(), shapes))

    def _by_rows(self, shapes: Any) -> Any:
        """Shards the first axis of every leaf over the data shards."""
        by_rows = NamedSharding(self.mesh, BY_ROWS)
        return jax.tree.map(lambda x: _shape(x, by_rows), shapes)


def _placed(shapes: Any, shardings: Any) -> Any:
    return jax.tree.map(_shape, shapes, shardings)


def _shape(x: Any, sharding: NamedSharding) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)


def _bytes_per_device(x: jax.ShapeDtypeStruct) -> int:
    return math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize

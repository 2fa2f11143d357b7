"""Lowers the programs of decoding for a described slice: arguments are shapes with shardings.

    sampling = chain(top_p(0.8))
    programs = Programs(
        target=target, draft=draft, mesh=mesh, sampling=sampling, batch=1, slots=2048
    )
    lowered = programs.call(target, tokens=5)
    compiled = lowered.compile(compiler_options=dict(ON_TPU))

No memory is allocated: a 70B pair takes a few seconds to lower.
"""

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from specsamp.decoding.data_shards import BY_ROWS, REPLICATED, DataShards
from specsamp.decoding.drafter import Drafter
from specsamp.decoding.drafters import (
    BlockDrafter,
    BlockTree,
    EarlyExitDrafter,
    EarlyExitTree,
    FeatureDrafter,
    FeatureTree,
    ModelDrafter,
    ModelTree,
    WindowDrafter,
)
from specsamp.decoding.drafters.tree import sized
from specsamp.decoding.loop import Loop
from specsamp.decoding.state import RequestBatch, Weights
from specsamp.decoding.trees import TreeShape
from specsamp.mesh.layout import Layout
from specsamp.mesh.sharded import ShardedModel, shard_head, shard_model
from specsamp.models.assistant import AssistantHead
from specsamp.models.config import TransformerConfig
from specsamp.models.decoder import OUTPUT_EMBEDDING
from specsamp.models.heads import Head
from specsamp.models.interface import LanguageModel, LayeredModel, Output
from specsamp.models.mtp import ModuleChain
from specsamp.models.transformer import TransformerLM
from specsamp.sampling.rules import Rule
from specsamp.sampling.warp import Warp


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Programs:
    """The programs of one pair, batch and mesh."""

    target: ShardedModel
    # A model; a head as a model, see `sharded_head_model`; the target's first layers; or a
    # `WindowStep`.
    draft: ShardedModel
    mesh: Mesh
    sampling: Warp | None
    batch: int
    slots: int
    # The draft is of the target's first layers or a window, with the target's weights and cache.
    inside: bool = False

    @property
    def shards(self) -> DataShards:
        """Returns the split of the rows over the mesh."""
        return DataShards(self.mesh)

    @property
    def head(self) -> Head | None:
        """Returns the head that drafts; None: a model does."""
        return self.draft.model.head if isinstance(self.draft.model, HeadModel) else None

    def draft_calls(self, size: int | TreeShape) -> int:
        """Returns how many calls of the draft a round has: one for each token or level of a tree,
        or one for a block.
        """
        if self.head is not None and self.head.config.drafts_blocks:
            return 1
        return size.depth if isinstance(size, TreeShape) else size

    @functools.cache  # eighty layers take seconds to trace
    def weights(self, model: ShardedModel) -> Any:
        """Returns the shapes of a model's prepared weights, sharded."""

        def prepare(key):
            return model.model.fit_slots(model.model.prepare(model.model.init(key)), self.slots)

        shapes = jax.eval_shape(prepare, jax.random.key(0))
        return _placed(shapes, model.weight_shardings(shapes))

    def floor(self, model: ShardedModel, live: float = 1.0, *, tokens: int = 1) -> float:
        """Returns the bytes per device that a call of so many tokens a row reads at least, on the
        mean of the devices.

        ``live`` is the share of the slots of the cache, and of the table of relative keys, that
        hold something. Of experts the expected choice counts.
        """
        weights = self.weights(model)
        rows = self.batch // self.shards.count
        read = [
            *model.matrices_read(weights, rows * tokens),
            (weights.get("relative_keys"), live),
            (self.cache(model), live),
        ]
        return sum(share * _size(tree) for tree, share in read)

    def floor_of_round(self, size: int | TreeShape, live: float = 1.0) -> float:
        """Returns the sum of the floors of a round's calls, and of the matrices that fuse features,
        in bytes per device.
        """
        floor = self.floor(self.target, live, tokens=scored_rows(size))
        floor += self.draft_calls(size) * self.floor(self.draft, live)
        if self.head is not None:
            params = self.draft_weights()["params"]
            floor += _size([params[name] for name in self.head.config.fused])
        return floor

    def bytes_of_state(self) -> tuple[int, int]:
        """Returns the bytes per device of weights, and of caches, of the target and of
        the draft.
        """
        weights = self.weights(self.target), self.draft_weights()
        caches = self.cache(self.target), self.draft_cache()
        return _size(weights), _size(caches)

    def draft_weights(self) -> Any:
        """Returns the shapes of the draft's own weights in a round, sharded."""
        if self.inside:
            return None
        weights = self.weights(self.draft)
        return weights if self.head is None else weights["head"]

    def draft_cache(self) -> Any:
        """Returns the shapes of the draft's cache, sharded; a draft inside the target has none."""
        if self.inside:
            return ()
        cache = self.cache(self.draft)
        return cache if self.head is None else cache["cache"]

    def call(
        self,
        model: ShardedModel,
        tokens: int,
        tree: TreeShape | None = None,
        *,
        is_prompt: bool = False,
    ) -> jax.stages.Lowered:
        """Lowers a call of a model with ``tokens`` tokens per row, of a tree or of prompts if so
        given; its logits are replicated.
        """

        def call(weights, tokens_BT, start_B, cache):
            options = {} if tree is None else {"block": tree.block(start_B)}
            if is_prompt:
                options = model.with_lengths(start_B + tokens)
            output = model(weights, tokens_BT, start_B, cache, **options)
            return output.logits_BTV, output.cache

        split = self.shards.map(call, (REPLICATED, BY_ROWS, BY_ROWS, BY_ROWS))
        sizes = (self.batch, tokens), (self.batch,)
        given = self._by_rows([jax.ShapeDtypeStruct(size, jnp.int32) for size in sizes])
        return jax.jit(split, donate_argnums=3).lower(
            self.weights(model), *given, self.cache(model)
        )

    def round(self, size: int | TreeShape, rule: Rule) -> jax.stages.Lowered:
        """Lowers the loop of generation, all rounds of it, with the draft proposing K tokens or a
        tree a round.
        """
        loop = Loop(
            target=self.target,
            drafter=self.drafter(size),
            rule=rule,
            shards=self.shards,
        )
        weights = Weights(target=self.weights(self.target), draft=self.draft_weights())
        limits = [self.slots] * self.batch
        request = self._by_rows(
            jax.eval_shape(lambda: RequestBatch.create(sampling=self.sampling, limits=limits))
        )
        # Sharded models use the devices of their mesh even to compute shapes.
        bare = dataclasses.replace(
            loop,
            target=self.target.model,
            drafter=self.drafter(size, is_sharded=False),
            shards=DataShards(),
        )
        prompt = jnp.zeros((self.batch, 16), jnp.int32), jnp.full((self.batch,), 16, jnp.int32)
        state = jax.eval_shape(
            lambda w, r: bare.prefill(w, r, *prompt, slots=self.slots), weights, request
        )
        drafter_state = self.draft_cache()
        if self.head is not None and not self.head.config.drafts_blocks:
            features = self._by_rows(dataclasses.replace(state.drafter_state, cache=None))
            drafter_state = dataclasses.replace(features, cache=drafter_state)
        rest = self._by_rows(
            dataclasses.replace(state, cache=None, drafter_state=None, request=None)
        )
        state = dataclasses.replace(
            rest, cache=self.cache(self.target), drafter_state=drafter_state
        )
        rounds = jax.ShapeDtypeStruct((), jnp.int32, sharding=NamedSharding(self.mesh, REPLICATED))

        def run(weights, request, state, rounds):
            state = loop.run(weights, dataclasses.replace(state, request=request), rounds)
            return dataclasses.replace(state, request=None)

        return jax.jit(run, donate_argnums=2).lower(weights, request, state, rounds)

    def drafter(self, size: int | TreeShape, *, is_sharded: bool = True) -> Drafter:
        """Returns the drafter of a round, of the sharded models or of the models inside."""
        target = self.target if is_sharded else self.target.model
        if self.head is not None:
            head = shard_head(self.head, self.draft.layout) if is_sharded else self.head
            if head.config.drafts_blocks:
                return sized(BlockDrafter, BlockTree, size, target, head)
            if isinstance(head, ModuleChain):
                raise ValueError(
                    "compile reports are of one MTP module; this head has "
                    f"{head.config.num_modules}"
                )
            return sized(FeatureDrafter, FeatureTree, size, target, head)
        if isinstance(self.draft.model, WindowStep):
            step = self.draft.model
            return WindowDrafter(target, size, step.window, step.sinks)
        if self.inside:
            return sized(EarlyExitDrafter, EarlyExitTree, size, target, self.draft.num_layers)
        draft = self.draft if is_sharded else self.draft.model
        return sized(ModelDrafter, ModelTree, size, draft)

    def cache(self, model: ShardedModel) -> Any:
        """Returns the shapes of a model's cache, sharded."""
        shapes = jax.eval_shape(lambda: model.model.init_cache(self.batch, self.slots))
        return _placed(shapes, model.layout.shardings(model.model.cache_axes(), shapes))

    def _by_rows(self, shapes: Any) -> Any:
        """Shards the first axis of every leaf over the data shards."""
        by_rows = NamedSharding(self.mesh, BY_ROWS)
        return jax.tree.map(lambda x: _shape(x, by_rows), shapes)


def scored_rows(size: int | TreeShape) -> int:
    """Returns the rows that the target scores: K + 1."""
    return (size.K if isinstance(size, TreeShape) else size) + 1


def rows_of_step(model: ShardedModel) -> int:
    """Returns the rows of a step of a sequence: of one token, or of a block."""
    if isinstance(model.model, HeadModel) and model.model.head.config.drafts_blocks:
        return model.model.head.config.block_size
    return 1


def _placed(shapes: Any, shardings: Any) -> Any:
    return jax.tree.map(_shape, shapes, shardings)


def _shape(x: Any, sharding: NamedSharding) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)


def _size(tree: Any) -> int:
    """Returns the bytes per device of the arrays of a tree."""
    return sum(
        math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize for x in jax.tree.leaves(tree)
    )


@dataclasses.dataclass(frozen=True)
class WindowStep(TransformerLM):
    """A draft step of a `WindowDrafter` as a model: the target, with a cache of the slots that it
    attends to.
    """

    window: int = 0
    sinks: int = 0

    def init_cache(self, batch: int, slots: int) -> Any:
        cache = super().init_cache(batch, slots)
        first_B, window = jnp.full(batch, self.sinks), min(self.window, slots - self.sinks)
        return self.cut_cache(cache, self.sinks, first_B, window, 1)


@dataclasses.dataclass(frozen=True)
class HeadModel(LanguageModel):
    """A step of a head as a model, which is measured like a step of a draft model.

    It scores the next token from a token and the feature of the step before, which is kept in the
    cache; or a block of tokens from its first.

    Attributes:
      target: a target of one layer, which is not run. It has the embedding and the output for heads
        without them.
      head: the head that a step calls.
    """

    target: LayeredModel
    head: Head

    @property
    def vocab_size(self) -> int:
        return self.head.vocab_size

    @property
    def config(self) -> TransformerConfig:
        """Returns the shape of the head's layers."""
        return self.head.config.layer

    def init(self, key: jax.Array) -> Any:
        """Returns random parameters of head and target."""
        return {"head": self.head.init(key), "target": self.target.init(key)}

    def prepare(self, params: Any) -> Any:
        return {
            "head": self.head.prepare(params["head"]),
            "target": self.target.prepare(params["target"]),
        }

    def fit_slots(self, weights: Any, slots: int) -> Any:
        return weights | {"target": self.target.fit_slots(weights["target"], slots)}

    def matrices_read(self, weights: Any, tokens: int) -> list[tuple[jax.Array, float]]:
        """See `LanguageModel.matrices_read`. A step does not read the matrices of `Head.fuse`; a
        round does.
        """
        config = self.head.config
        of_head = weights["head"]["params"]
        of_target = weights["target"]["params"]
        matrices = jax.tree.leaves(
            [part for name, part in of_head.items() if config.is_read_by_a_step(name)]
        )
        if not config.own_output:
            matrices.append(of_target.get(OUTPUT_EMBEDDING, of_target["embedding"]))
        return [(matrix, 1.0) for matrix in matrices if matrix.ndim >= 2]

    def weight_axes(self) -> Any:
        return {"head": self.head.weight_axes(), "target": self.target.weight_axes()}

    def init_cache(self, batch: int, slots: int) -> Any:
        if self.head.config.drafts_blocks:
            slots += self.head.config.block_size
        features_BD = jnp.zeros((batch, self.config.width), self.config.compute_dtype)
        return {"cache": self.head.init_cache(batch, slots), "features_BD": features_BD}

    def cache_axes(self) -> Any:
        return {"cache": self.head.cache_axes(), "features_BD": PartitionSpec("batch", None)}

    def __call__(
        self,
        weights: Any,
        tokens_BT: jax.Array,
        start_B: jax.Array,
        cache: Any,
        *,
        hidden_layers: Any = (),
        block: Any = None,
    ) -> Output:
        head = self.head
        given = weights["head"]
        of_target = functools.partial(self.target.unembed_normed, weights["target"])
        if head.config.drafts_blocks:
            start_B1 = start_B[:, None]
            embedded_BTD = head.embed_blocks(
                given, self.target, weights["target"], tokens_BT[:, 0], start_B
            )
            rows_BTD, of_head = head(given, embedded_BTD, start_B1, start_B1, cache["cache"])
            logits_BTU = head.logits(given, rows_BTD[:, head.config.first_row :], of_target)
            logits_BTV = head.expand(given, logits_BTU, self.target.kernels)
            return Output(logits_BTV=logits_BTV, cache=cache | {"cache": of_head})
        embedded_BTD = head.embed_tokens(given, self.target, weights["target"], tokens_BT, start_B)
        features_BTD = jnp.repeat(cache["features_BD"][:, None], tokens_BT.shape[1], axis=1)
        features_BTD, of_head = head(given, embedded_BTD, features_BTD, start_B - 1, cache["cache"])
        logits_BTU = head.logits(given, features_BTD, of_target)
        # The rows behind the first are stale.
        logits_BV = head.expand(given, logits_BTU[:, 0], self.target.kernels)
        return Output(
            logits_BTV=logits_BV[:, None],
            cache={"cache": of_head, "features_BD": features_BTD[:, 0]},
        )


class _ShardedHeadModel(ShardedModel):
    """A `HeadModel` over a mesh; head and target place what they return themselves."""

    def __call__(
        self, weights: Any, tokens_BT: jax.Array, start_B: jax.Array, cache: Any, **options: Any
    ) -> Output:
        inside = HeadModel(
            shard_model(self.model.target, self.layout), shard_head(self.model.head, self.layout)
        )
        return inside(weights, *self.layout.on_all_devices((tokens_BT, start_B)), cache)


def sharded_head_model(target: LayeredModel, head: Head, layout: Layout) -> ShardedModel:
    """Returns a step of a head, with the target's kernels, as a model that is laid out over a mesh,
    for `Programs.draft`.
    """
    if isinstance(head, AssistantHead):
        raise ValueError(
            "compile reports are of heads with caches of their own, and an assistant reads the "
            "target's: take another head, or measure this one with launch/benchmark.py"
        )
    kernels = target.kernels and dataclasses.replace(target.kernels, layout=layout)
    head = dataclasses.replace(head, kernels=kernels)
    return _ShardedHeadModel(HeadModel(target.first(1), head), layout)

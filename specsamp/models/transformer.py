"""The decoder, and `TransformerLM`, which presents it as a `LanguageModel`.

Layers are unrolled, each with its own cache arrays; stacked weights under `lax.scan` are copied layer
by layer.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from specsamp.models import ngrams
from specsamp.models.cache import KVCache
from specsamp.models.compiling import few_rows_on_cpu
from specsamp.models.config import TransformerConfig
from specsamp.models.interface import LanguageModel, Output
from specsamp.models.layers import FLAT_LOGITS, OUTPUT_EMBEDDING, Layer, Norm, flatten, relative_keys, soft_cap, weight
from specsamp.models.products import contract

Array = jax.Array

POSITION_EMBEDDING = "position_embedding"


@dataclasses.dataclass(frozen=True)
class TransformerLM(LanguageModel):
    """A `LanguageModel`. Hashable and static; parameters and weights travel beside it."""

    config: TransformerConfig
    # Lay decode-time weights out as `flatten` says. For a CPU; a TPU wants the head-major weights as they are.
    flat: bool = False

    @classmethod
    def here(cls, config: TransformerConfig) -> TransformerLM:
        """With decode-time weights laid out for the platform at hand."""
        return cls(config, flat=jax.default_backend() == "cpu" and config.dtype == "float32")

    @property
    def vocab_size(self) -> int:
        return self.config.vocab_size

    @property
    def max_positions(self) -> int | None:
        return self.config.max_positions

    @functools.partial(jax.jit, static_argnums=0)  # layer by layer it takes ten times as long
    def init(self, key: Array) -> Any:
        """Random float32 parameters. ``jax.eval_shape(model.init, key)`` gives the shapes alone."""
        return nn.meta.unbox(self._boxed(key))

    def param_axes(self) -> Any:
        """The logical axis names of every parameter, as a tree of `PartitionSpec`."""
        return nn.get_partition_spec(jax.eval_shape(self._boxed, jax.random.key(0)))

    def for_mesh(self) -> TransformerLM:
        """Returns the model with the weights of a TPU: heads side by side in one matrix cannot be split."""
        return dataclasses.replace(self, flat=False)

    def weight_axes(self) -> Any:
        """The same of `prepare`'s result; not for the CPU's layout, whose axes hold several things."""
        if self.flat:
            raise ValueError("weights that lie flat cannot be split over a mesh: use TransformerLM(config)")
        params = self.param_axes()
        if self.config.positions != "relative":
            return {"params": params, "relative_keys": None}
        for i in range(self.config.num_layers):
            del params[f"layer_{i}"]["attention"]["relative"]
        table = PartitionSpec("kv_heads", "slots", "head")
        return {"params": params, "relative_keys": (table,) * self.config.num_layers}

    def cache_axes(self) -> KVCache:
        """The same of `init_cache`'s result."""
        return KVCache.logical_axes(self.config, transposed_keys=self.flat)

    def _boxed(self, key: Array) -> Any:
        tokens_BT = jnp.zeros((1, 1), jnp.int32)
        return Transformer(self.config).init(key, tokens_BT, jnp.zeros((1,), jnp.int32))["params"]

    def forward(self, params: Any, tokens_BT: Array, *, hidden_layers: tuple[int, ...] = ()) -> Output:
        """Scores whole sequences without a cache, for training and evaluation; logits [B, T, V] f32."""
        start_B = jnp.zeros(tokens_BT.shape[:1], jnp.int32)
        with self._full_precision():
            return Transformer(self.config).apply({"params": params}, tokens_BT, start_B, hidden_layers=hidden_layers)

    def prepare(self, params: Any) -> Any:
        """Casts parameters to the compute dtype and lays them out for the platform."""
        weights = jax.tree.map(lambda x: x.astype(self.config.compute_dtype), params)
        if self.config.positions == "relative":  # folded before they are rounded, see `fit_slots`
            for i in range(self.config.num_layers):
                projection = params[f"layer_{i}"]["attention"]["relative"]
                attention = weights[f"layer_{i}"]["attention"] | {"relative": projection}
                weights = weights | {f"layer_{i}": weights[f"layer_{i}"] | {"attention": attention}}
        return {"params": flatten(weights) if self.flat else weights, "relative_keys": None}

    def fit_slots(self, weights: Any, slots: int) -> Any:
        """Folds relative-position projections into tables of keys; other positions do not depend on ``slots``."""
        if self.config.positions != "relative":
            return weights
        kept, tables = dict(weights["params"]), []
        for i in range(self.config.num_layers):
            layer = dict(kept[f"layer_{i}"])
            attention = dict(layer["attention"])
            with self._full_precision():
                # Compiled, so that nothing is made whole on a device that holds a part of the weight.
                table = jax.jit(relative_keys, static_argnums=1)(attention.pop("relative"), slots)
            tables.append(table.astype(self.config.compute_dtype))
            layer["attention"] = attention
            kept[f"layer_{i}"] = layer
        if self.flat:
            tables = [table.swapaxes(1, 2) for table in tables]
        return {"params": kept, "relative_keys": tuple(tables)}

    @property
    def compiler_options(self) -> tuple[tuple[str, str], ...]:
        """What `specsamp.models.compiling` hands to the compiler of a program that calls this model."""
        return few_rows_on_cpu() if self.flat and self.config.dtype == "float32" else ()

    def streamed(self, weights: Any) -> list[Array]:
        """The matrices that a call multiplies by, whatever its length: not the tables it only looks rows up in."""
        named = jax.tree_util.tree_leaves_with_path(weights["params"])
        looked_up = {POSITION_EMBEDDING}
        if FLAT_LOGITS in weights["params"] or not self.config.tied:
            looked_up.add("embedding")

        def is_table(name):
            return name in looked_up or name.startswith("ngrams")

        return [leaf for path, leaf in named if leaf.ndim >= 2 and not is_table(path[-1].key)]

    def init_cache(self, batch: int, slots: int) -> KVCache:
        return KVCache.zeros(self.config, batch, slots, transposed_keys=self.flat)

    def __call__(
        self, weights: Any, tokens_BT: Array, start_B: Array, cache: KVCache, *, hidden_layers: tuple[int, ...] = ()
    ) -> Output:
        """See `LanguageModel.__call__`."""
        with self._full_precision():
            return Transformer(self.config).apply(
                {"params": weights["params"]},
                tokens_BT,
                start_B,
                cache,
                weights["relative_keys"],
                hidden_layers=hidden_layers,
            )

    def _full_precision(self) -> contextlib.AbstractContextManager:
        """float32 means float32, also where a device would multiply in less; a user's own setting stands."""
        if self.config.dtype == "float32" and jax.config.jax_default_matmul_precision is None:
            return jax.default_matmul_precision("highest")
        return contextlib.nullcontext()


class Transformer(nn.Module):
    """Embedding, pre-normalised layers, output."""

    config: TransformerConfig

    @nn.compact
    def __call__(
        self,
        tokens_BT: Array,
        start_B: Array,
        cache: KVCache | None = None,
        tables: tuple[Array, ...] | None = None,
        hidden_layers: tuple[int, ...] = (),
    ) -> Output:
        config = self.config
        embedding_VD = weight(
            self, "embedding", (config.vocab_size, config.width), ("vocab", "embed"), fan_in=config.width
        )
        x_BTD = embedding_VD[tokens_BT]
        tokens_BS = None if cache is None else cache.tokens_BS
        if config.num_ngram_tables:
            before = config.ngram_order - 1
            context_BX, tokens_BS = ngrams.context(tokens_BT, start_B, tokens_BS, before)
            for order in range(2, config.ngram_order + 1):
                shape = (config.ngram_rows, config.width)
                # From zero: an n-gram that was never seen adds nothing.
                zeros = nn.with_logical_partitioning(nn.initializers.zeros, ("vocab", "embed"))
                table_RD = self.param(f"ngrams_{order}", zeros, shape)
                rows_BX = ngrams.rows_of(context_BX, order, config.ngram_rows)
                x_BTD = x_BTD + table_RD[rows_BX[:, -tokens_BT.shape[1] :]]
        positions_BT = start_B[:, None] + jnp.arange(tokens_BT.shape[1])[None, :]
        if config.positions == "learned":
            shape = (config.max_positions, config.width)
            table_PD = weight(self, POSITION_EMBEDDING, shape, ("slots", "embed"), fan_in=config.width)
            x_BTD = x_BTD + table_PD[positions_BT]  # scratch slots beyond the table read its last row
        x_BTD = x_BTD.astype(config.compute_dtype)
        if config.embedding_scale is not None:
            x_BTD = x_BTD * jnp.asarray(config.embedding_scale, x_BTD.dtype)
        windows = [config.window_of(i) for i in range(config.num_layers)]
        rotaries = {rotary: rotary and rotary.turns(positions_BT) for rotary in map(config.rotary_of, windows)}
        keys, values, hidden = [], [], {}
        for i, window in enumerate(windows):
            memory = None if cache is None else (cache.keys[i], cache.values[i])
            table = None if tables is None else tables[i]
            layer = Layer(config, window, name=f"layer_{i}")
            x_BTD, (k_BMSH, v_BMSH) = layer(x_BTD, start_B, rotaries[config.rotary_of(window)], memory, table)
            keys.append(k_BMSH)
            values.append(v_BMSH)
            hidden[i] = x_BTD
        x_BTD = Norm(config, name="final_norm")(x_BTD)
        with jax.named_scope("logits"):
            logits_BTV = self._logits(x_BTD, embedding_VD)
        return Output(
            logits_BTV=logits_BTV,
            cache=None if cache is None else KVCache(keys=tuple(keys), values=tuple(values), tokens_BS=tokens_BS),
            hidden=tuple(hidden[i] for i in hidden_layers),
        )

    def _logits(self, x_BTD: Array, embedding_VD: Array) -> Array:
        config = self.config
        if self.has_variable("params", FLAT_LOGITS):
            unembedding_DV = self.get_variable("params", FLAT_LOGITS)
            logits_BTV = contract("BTD,DV->BTV", x_BTD, unembedding_DV, dtype=jnp.float32)
        else:
            if not config.tied:
                embedding_VD = weight(
                    self, OUTPUT_EMBEDDING, embedding_VD.shape, ("vocab", "embed"), fan_in=config.width
                )
            logits_BTV = contract("BTD,VD->BTV", x_BTD, embedding_VD, dtype=jnp.float32)
        if config.logit_cap is not None:
            logits_BTV = soft_cap(logits_BTV, config.logit_cap)
        if config.num_real_tokens not in (None, config.vocab_size):
            is_token_V = jnp.arange(config.vocab_size) < config.num_real_tokens
            logits_BTV = jnp.where(is_token_V[None, None], logits_BTV, -jnp.inf)
        return logits_BTV

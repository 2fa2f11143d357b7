"""The decoder as a Linen module: embedding, layers with norms, output.

Layers are unrolled, each with its own cache arrays; stacked weights under `lax.scan` are copied
layer by layer. Names of parameters are those of checkpoints: they follow from the names below.
"""

import dataclasses
from collections.abc import Iterable

import flax.linen as nn
import jax
import jax.numpy as jnp

from specsamp.models import ngrams
from specsamp.models.attention import Attention
from specsamp.models.cache import LayerCache, TokenCache, TransformerCache
from specsamp.models.config import TransformerConfig
from specsamp.models.experts import Experts, run_experts
from specsamp.models.int8 import take_rows
from specsamp.models.interface import Block, DeviceLayout, Kernels
from specsamp.models.modules import FeedForward, Norm, embedding, parameter, table, weight
from specsamp.models.products import contract, soft_cap
from specsamp.models.recurrent import GatedDelta
from specsamp.models.visibility import positions_of

Array = jax.Array

POSITION_EMBEDDING = "position_embedding"
OUTPUT_EMBEDDING = "output_embedding"  # of a model whose output is not tied


class Layer(nn.Module):
    """Attention and feed-forward, each with norms and added to the residual stream."""

    config: TransformerConfig
    window: int | None  # see `Attention`
    attention: type[Attention]
    experts: type[Experts] | None = None  # None: a layer without
    recurrence: type[GatedDelta] | None = None  # instead of attention
    layout: DeviceLayout = DeviceLayout()
    kernels: Kernels | None = None

    @nn.compact
    def __call__(
        self,
        x_BTD: Array,
        start_B: Array,
        rope: tuple[Array, Array] | None,
        cache: LayerCache | None,
        table: Array | None,
        block: Block | None,
        lengths_B: Array | None = None,
    ) -> tuple[Array, LayerCache]:
        config, of_sequences = self.config, (len(start_B), -1, x_BTD.shape[2])

        def finish(name, y_BTD):
            if config.post_norms:
                y_BTD = Norm(config, kernels=self.kernels, name=f"{name}_post_norm")(y_BTD)
            if config.residual_scale is not None:
                y32_BTD = y_BTD.astype(jnp.float32) * config.residual_scale
                y_BTD = y32_BTD.astype(y_BTD.dtype)
            return y_BTD

        with jax.named_scope("attention"):
            y_BTD = x_BTD
            if config.pre_norms:
                y_BTD = Norm(config, kernels=self.kernels, name="attention_norm")(x_BTD)
            y_BTD = y_BTD.reshape(of_sequences)
            if self.recurrence is not None:
                recurrence = self.recurrence(config, self.kernels, name="recurrence")
                y_BTD, cache = recurrence(y_BTD, start_B, cache, lengths_B)
            else:
                attention = self.attention(
                    config, self.window, kernels=self.kernels, name="attention"
                )
                y_BTD, cache = attention(y_BTD, start_B, rope, cache, table, block)
            y_BTD = finish("attention", y_BTD.reshape(x_BTD.shape))
        with jax.named_scope("mlp"):
            norm = Norm(config, kernels=self.kernels, name="mlp_norm")
            if config.parallel:
                attended_BTD, y_BTD = x_BTD + y_BTD, norm(x_BTD)
            elif config.pre_norms:
                attended_BTD, y_BTD = norm.after(x_BTD, y_BTD)
            else:
                attended_BTD = y_BTD = x_BTD + y_BTD
            if self.experts is not None:
                experts = self.experts(config, self.layout, self.kernels, name="experts")
                made_BTD = run_experts(experts, y_BTD)
            else:
                made_BTD = FeedForward(config, name="mlp")(y_BTD)
            x_BTD = attended_BTD + finish("mlp", made_BTD)
        if config.layer_scale:
            scale_1 = parameter(self, "scale", (1,), (None,), nn.initializers.ones)
            x_BTD = x_BTD * scale_1.astype(x_BTD.dtype)[None, None]
        return x_BTD, cache


class Decoder(nn.Module):
    """The whole model, called in three parts: `embed`, `run_layers` and `unembed`."""

    config: TransformerConfig
    layout: DeviceLayout = DeviceLayout()
    kernels: Kernels | None = None

    attention = Attention
    experts = Experts
    recurrence = GatedDelta

    def setup(self):
        config, experts, layout, kernels = self.config, self.experts, self.layout, self.kernels
        self.embedding = embedding(self, config.vocab_size, config.width)
        # Zero at first: an n-gram that does not occur in training adds nothing.
        shape = config.ngram_rows, config.width
        self.ngram_tables = [
            parameter(self, f"ngrams_{order}", shape, ("vocab", "embed"))
            for order in range(2, config.num_ngram_tables + 2)
        ]
        if config.positions == "learned":
            shape = (config.max_positions, config.width)
            self.position_embedding = weight(
                self, POSITION_EMBEDDING, shape, ("slots", "embed"), fan_in=config.width
            )
        self.layer = [
            Layer(
                config.of_layer(i),
                config.window_of(i),
                self.attention,
                experts=experts if config.has_experts(i) else None,
                recurrence=self.recurrence if config.is_recurrent(i) else None,
                layout=layout,
                kernels=kernels,
            )
            for i in range(config.num_layers)
        ]
        self.final_norm = Norm(config, kernels=kernels)
        self.output_embedding = self.declare_output()

    def declare(self, tokens_BT: Array, start_B: Array, layers: Iterable[int]) -> Array:
        """Runs the parts around the layers, and some layers, to declare their parameters."""
        x_BTD, _ = self.embed(tokens_BT, start_B, None)
        for i in layers:
            x_BTD, *_ = self.run_layers(x_BTD, start_B, None, None, i, i + 1)
        return self.unembed(x_BTD)

    def embed(
        self,
        tokens_BT: Array,
        start_B: Array,
        cache: TransformerCache | None,
        block: Block | None = None,
    ) -> tuple[Array, TransformerCache | None]:
        """Returns the stream ``[B, T, D]`` that enters layer 0, and the cache with the tokens that
        n-grams need.
        """
        config = self.config
        with jax.named_scope("embed"):
            x_BTD = take_rows(self.embedding, tokens_BT)[..., : config.width]
            if config.num_ngram_tables:
                memory_BS = None if cache is None else cache.tokens.tokens_BS
                rows, memory_BS = ngrams.rows_of_call(tokens_BT, start_B, memory_BS, config, block)
                for table_RD, rows_BT in zip(self.ngram_tables, rows, strict=True):
                    x_BTD = x_BTD + take_rows(table_RD, rows_BT)
                if cache is not None:
                    cache = dataclasses.replace(cache, tokens=TokenCache(tokens_BS=memory_BS))
            if config.positions == "learned":
                # The positions of scratch slots are beyond the table, and get its last row.
                positions_BT = positions_of(start_B, tokens_BT.shape[1], block)
                x_BTD = x_BTD + self.position_embedding[positions_BT]
            x_BTD = x_BTD.astype(config.compute_dtype)
            if config.embedding_scale is not None:
                x_BTD = x_BTD * jnp.asarray(config.embedding_scale, x_BTD.dtype)
        return x_BTD, cache

    def run_layers(
        self,
        x_BTD: Array,
        start_B: Array,
        cache: TransformerCache | None,
        tables: tuple[Array, ...] | None,
        first: int,
        last: int,
        hidden_layers: tuple[int, ...] = (),
        block: Block | None = None,
        kept_BL: Array | None = None,
        lengths_B: Array | None = None,
    ) -> tuple[Array, TransformerCache | None, tuple[Array, ...]]:
        """Runs layers ``first .. last - 1``; see `LayeredModel.layers`.

        Args:
          cache: None: the tokens of the call attend to each other only.
          tables: of relative keys, one for each layer; None: computed in the call.
          kept_BL: bool, in training: the layers that run for each sequence; all other layers are
            skipped.

        Raises:
          ValueError: the call does not run one of ``hidden_layers``.
        """
        config = self.config
        if config.recurrent is not None and block is not None:
            raise ValueError("a model with recurrent layers takes no block: score chains")
        numbers = range(first, last)
        rotaries = [config.of_layer(i).rotary_of(config.window_of(i)) for i in numbers]
        positions_BT = positions_of(start_B, x_BTD.shape[1], block)
        ropes = {rotary: rotary and rotary.angles(positions_BT) for rotary in rotaries}
        caches, hidden = [], {-1: x_BTD} if first == 0 else {}
        shape = x_BTD.shape
        if self.kernels is not None:  # on one axis, tokens need no padding for each sequence
            x_BTD = x_BTD.reshape(1, -1, shape[2])
        for i, rotary in zip(numbers, rotaries, strict=True):
            layer_cache = None if cache is None else cache.layers[i]
            table = None if tables is None else tables[i]
            y_BTD, layer_cache = self.layer[i](
                x_BTD, start_B, ropes[rotary], layer_cache, table, block, lengths_B
            )
            x_BTD = y_BTD if kept_BL is None else jnp.where(kept_BL[:, i, None, None], y_BTD, x_BTD)
            caches.append(layer_cache)
            hidden[i] = x_BTD.reshape(shape)
        x_BTD = x_BTD.reshape(shape)
        if last == config.num_layers and last in hidden_layers:
            hidden[last] = self.final_norm(x_BTD)
        for layer in hidden_layers:
            if layer not in hidden:
                raise ValueError(
                    f"hidden_layers names layer {layer}, but a call of layers below {last} has "
                    f"{tuple(hidden)}; a call with the last layer also has {config.num_layers}, "
                    "the stream after the final norm"
                )
        if cache is not None:
            layers = (*cache.layers[:first], *caches, *cache.layers[last:])
            cache = dataclasses.replace(cache, layers=layers)
        return x_BTD, cache, tuple(hidden[i] for i in hidden_layers)

    def unembed(self, x_BTD: Array) -> Array:
        """Returns logits ``[B, T, V]`` float32 from the output of the last layer."""
        with jax.named_scope("logits"):
            return self.unembed_normed(self.final_norm(x_BTD))

    def unembed_normed(self, x_BTD: Array) -> Array:
        """Returns the logits of a normalised stream."""
        config = self.config
        with jax.named_scope("logits"):
            logits_BTV = self.project_to_vocabulary(x_BTD)
            if config.logit_divisor is not None:
                logits_BTV = logits_BTV / config.logit_divisor
            if config.logit_cap is not None:
                logits_BTV = soft_cap(logits_BTV, config.logit_cap)
            if config.num_real_tokens not in (None, config.vocab_size):
                is_token_V = jnp.arange(config.vocab_size) < config.num_real_tokens
                logits_BTV = jnp.where(is_token_V[None, None], logits_BTV, -jnp.inf)
        return logits_BTV

    def declare_output(self) -> Array:
        """Returns the output matrix."""
        config = self.config
        if config.tied:
            return self.embedding
        return table(self, OUTPUT_EMBEDDING, config.vocab_size, config.width)

    def project_to_vocabulary(self, x_BTD: Array) -> Array:
        """Returns the product of a normalised stream and the output matrix, float32."""
        return contract("BTD,VD->BTV", x_BTD, self.output_embedding, dtype=jnp.float32)

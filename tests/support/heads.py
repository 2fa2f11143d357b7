"""Targets and heads small enough to enumerate."""

import dataclasses
import functools

import jax
import jax.numpy as jnp

from specsamp import TransformerConfig
from specsamp.models.assistant import AssistantConfig
from specsamp.models.block_corrections import DFlash2Config, DSparkConfig
from specsamp.models.cache import KVCache
from specsamp.models.dflash import BlockConfig, BlockHead
from specsamp.models.eagle import Eagle1Config, Eagle3Config
from specsamp.models.heads import DRAFT_IDS, FeatureHead
from specsamp.models.interface import LayeredModel
from specsamp.models.medusa import MedusaConfig
from specsamp.models.mtp import MTPConfig
from specsamp.models.visibility import ancestor_slots
from support.fakes import TableLM
from support.weights import drawn_params

WIDTH, LAYERS = 8, 6


@dataclasses.dataclass(frozen=True)
class LayeredTable(TableLM, LayeredModel):
    """A table model with hidden states, waves of token and layer, and a fixed output matrix."""

    num_layers = LAYERS
    width = WIDTH

    def __call__(self, weights, tokens_BT, start_B, cache, *, hidden_layers=(), block=None):
        output = super().__call__(weights, tokens_BT, start_B, cache, block=block)
        hidden = tuple(self.state(tokens_BT, layer) for layer in hidden_layers)
        return dataclasses.replace(output, hidden=hidden)

    def state(self, tokens_BT, layer):
        return waves(tokens_BT, 0.9 + layer)

    def embed(self, weights, tokens_BT, start_B, cache, *, block=None):
        return waves(tokens_BT, 0.5), cache

    def layers(self, *arguments, **options):
        raise NotImplementedError

    def unembed(self, weights, x_BTD):
        raise NotImplementedError

    def unembed_normed(self, weights, x_BTD):
        return x_BTD @ waves(jnp.arange(self.vocab_size)[None], 0.3)[0].T


def waves(tokens_BT, frequency):
    return jnp.sin(
        frequency * (tokens_BT[..., None] + 1.0) * jnp.arange(1.0, WIDTH + 1)[None, None]
    )


def layer_config(vocab_size, **changes):
    sizes = dict(
        width=WIDTH,
        num_layers=1,
        num_heads=2,
        num_kv_heads=1,
        feedforward_width=12,
        norm_epsilon=1e-5,
    )
    kind = dict(positions="rotary", gated=True, activation="silu", tied=False)
    return TransformerConfig(vocab_size=vocab_size, **(sizes | kind | changes))


def head_of(kind, vocab_size, **changes):
    shape = dict(layer=layer_config(vocab_size), target_layers=LAYERS, hidden_layers=(LAYERS,))
    return kind(**(shape | changes)).head()


eagle1 = functools.partial(head_of, Eagle1Config)
eagle3 = functools.partial(head_of, Eagle3Config, hidden_layers=(0, 2, 5), own_output=True)
mtp = functools.partial(head_of, MTPConfig)


def assistant(vocab_size, **changes):
    """Returns an assistant that scores every second token, in clusters of two."""
    layer = layer_config(
        vocab_size,
        num_layers=2,
        num_kv_heads=2,
        window=3,
        global_layers=(1,),
        query_key_norm=True,
        attention_scale=1.0,
    )
    scored = dict(num_centroids=vocab_size // 2, top_centroids=vocab_size // 4)
    shape = dict(layer=layer, read_layers=(0, 1), own_output=True) | scored
    return head_of(AssistantConfig, vocab_size, **(shape | changes))


def medusa(vocab_size, num_heads, **changes):
    changes = dict(num_heads=num_heads, own_output=True) | changes
    return head_of(MedusaConfig, vocab_size, **changes)


def block(vocab_size, kind=BlockConfig, **changes):
    layer = layer_config(
        vocab_size, num_layers=2, query_key_norm=True, window=2, global_layers=(1,)
    )
    shape = dict(layer=layer, hidden_layers=(0, 2), block_size=4, mask_id=vocab_size - 1)
    return head_of(kind, vocab_size, **(shape | changes))


def dspark(vocab_size, **changes):
    return block(vocab_size, DSparkConfig, **(dict(markov_rank=6) | changes))


def dflash2(vocab_size, **changes):
    shape = dict(conv_group=4, selector_rank=6, selector_top_k=2, windows_both_ways=True)
    return block(vocab_size, DFlash2Config, **(shape | changes))


@dataclasses.dataclass(frozen=True)
class ShowsTokens(LayeredTable):
    """A table model whose hidden states are its tokens, ten times as large in each layer."""

    width = 1

    def state(self, tokens_BT, layer):
        return tokens_BT[..., None] * 10.0**layer


def weights_of(head, seed=0):
    """Returns weights with distinct distributions; a reduced vocabulary has ids 0 and 2."""
    params = jax.tree.map(
        lambda x: 3 * x if x.dtype == jnp.float32 else x, drawn_params(head, seed)
    )
    if DRAFT_IDS in params:
        params[DRAFT_IDS] = jnp.asarray([0, 2], jnp.int32)
    return head.prepare(params)


def look_up(table, context):
    """Returns the logits of a table after each context, and zeros after an unknown one."""
    context = context.astype(jnp.int32)
    known = jnp.all((context >= 0) & (context < len(table)), axis=-1, keepdims=True)
    return jnp.where(known, table[tuple(jnp.moveaxis(context, -1, 0))], 0.0)


UNKNOWN = -1.0


class OfTables:
    """Methods of heads whose parameters are tables, and whose embeddings are tokens."""

    def prepare(self, params):
        return params

    def embed(self, weights, tokens_BT):
        return tokens_BT[..., None] * 1.0

    def expand(self, weights, logits, kernels=None):
        return logits


def unknown_entries(batch, slots):
    unknown = jnp.full((batch, 1, slots, 1), UNKNOWN)
    return KVCache(keys_BMSH=unknown, values_BMSH=unknown + 0)


@dataclasses.dataclass(frozen=True)
class TableHead(OfTables, FeatureHead):
    """Looks up the target's logits by a token and the two features before it, the first one cached.

    Right features thus give the target's own distribution, and acceptance 1. A returned feature
    lacks its token: a second drafted token is not always accepted, and a cache entry with this
    feature harms the next round.
    """

    def init_cache(self, batch, slots):
        return unknown_entries(batch, slots)

    def fuse(self, weights, hidden):
        return jnp.pad(hidden[0], ((0, 0), (0, 0), (0, 3)))

    def __call__(self, weights, embedded_BTD, features_BTD, start_B, cache, block=None):
        new_BMTH = features_BTD[:, None, :, :1]
        cache = cache.append(new_BMTH, new_BMTH, start_B)
        at_BT = start_B[:, None] + jnp.arange(features_BTD.shape[1])[None] - 1
        if block is not None:
            at_BT = ancestor_slots(block, 2)[..., 0]
        before_BT = jnp.take_along_axis(cache.keys_BMSH[:, 0, :, 0], jnp.maximum(at_BT, 0), axis=1)
        before_BT = jnp.where(at_BT >= 0, before_BT, self.vocab_size)
        parts = before_BT, features_BTD[..., 0], embedded_BTD[..., 0]
        return jnp.stack([jnp.full_like(before_BT, UNKNOWN), *parts], axis=-1), cache

    def logits(self, weights, features_BTD, of_target, offset=0):
        return look_up(weights, features_BTD[..., 1:])


def table_head(vocab_size, layer=0):
    """Returns a `TableHead` on ``layer`` of a `ShowsTokens`; only layer 0 has the right tokens."""
    shape = layer_config(vocab_size, width=4, num_heads=1, head_size=2)
    shape = Eagle3Config(
        layer=shape,
        target_layers=LAYERS,
        target_width=1,
        hidden_layers=(layer,),
        own_embedding=True,
        own_output=True,
    )
    return TableHead(shape)


@dataclasses.dataclass(frozen=True)
class TableBlock(OfTables, BlockHead):
    """Looks up the target's logits by the pending token and the two tokens of the context before
    it, from its cache.

    A right context thus gives the target's own distribution of the first token and, with the
    correction, of all tokens. Without the correction, later rows are uniform. Its confidence is
    high only after token 0.
    """

    def init_cache(self, batch, slots):
        return (unknown_entries(batch, slots),)

    def fuse(self, weights, hidden):
        return hidden[0]

    def read(self, weights, features_BTD, start_B, caches):
        return (caches[0].append(features_BTD[:, None], features_BTD[:, None], start_B),)

    def __call__(self, weights, embedded_BTD, anchors_BA, first_BA, caches):
        caches = self.read(weights, 10 * embedded_BTD, first_BA[:, 0], caches)
        at_B2 = anchors_BA + jnp.asarray([[-2, -1]])
        known_B2 = jnp.take_along_axis(
            caches[0].keys_BMSH[:, 0, :, 0], jnp.maximum(at_B2, 0), axis=1
        )
        known_B2 = jnp.where(at_B2 >= 0, known_B2, self.vocab_size)
        context_B3 = jnp.concatenate([known_B2, embedded_BTD[:, 0]], axis=1)
        return jnp.repeat(context_B3[:, None], self.config.block_size, axis=1), caches

    def logits(self, weights, features_BTD, of_target, offset=0):
        logits_BTV = look_up(weights, features_BTD)
        return jnp.where(jnp.arange(logits_BTV.shape[1])[None, :, None] == 0, logits_BTV, 0.0)

    def begin(self, weights, batch):
        return jnp.full((batch, 3), UNKNOWN)

    def correct(self, weights, logits_BU, x_BD, token_B, state):
        later_B3 = jnp.concatenate([state[:, 1:], token_B[:, None] * 1.0], axis=1)
        state = jnp.where(state[:, -1:] == UNKNOWN, x_BD, later_B3)
        return look_up(weights, state), state

    def confidence(self, weights, x_BD, token_B):
        return jnp.where(token_B == 0, 5.0, -5.0)


def table_block(vocab_size):
    layer = layer_config(vocab_size, width=4, num_heads=1, head_size=2)
    shape = dict(
        layer=layer, target_layers=LAYERS, target_width=1, hidden_layers=(0,), own_embedding=True
    )
    return TableBlock(DSparkConfig(**shape, own_output=True, block_size=8, mask_id=vocab_size - 1))

"""Shapes of transformers and of their experts, and the presets of the paper."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp
import numpy as np

from specsamp import validate
from specsamp.models.positions import Rotary, RotaryScaling

POSITIONS = ("relative", "rotary", "learned")
# "gelu" is the approximation by tanh.
ACTIVATIONS: dict[str, Callable[[jax.Array], jax.Array]] = {
    "gelu": jax.nn.gelu,
    "gelu_exact": functools.partial(jax.nn.gelu, approximate=False),
    "gelu_sigmoid": lambda x: x * jax.nn.sigmoid(1.702 * x),
    "relu": jax.nn.relu,
    "relu_squared": lambda x: jnp.square(jax.nn.relu(x)),
    "silu": jax.nn.silu,
}
NORMS = ("rms", "layer")
DTYPES = ("float32", "bfloat16")
# Fields that change decoding but not the parameters.
DECODING = ("dtype", "weight_dtype", "cache_dtype")


@dataclasses.dataclass(frozen=True, kw_only=True)
class ExpertsConfig:
    """The shape of mixture-of-experts layers (Shazeer et al., arXiv 1701.06538)."""

    num_experts: int  # E, of a layer
    experts_per_token: int  # k
    width: int  # of each expert
    normalised: bool = True  # the weights of the chosen experts sum to one
    shared_width: int = 0  # of an expert for all tokens, with a gate; 0: none
    dense_layers: tuple[int, ...] = ()  # layers with a dense feed-forward part instead
    bias: bool = False  # of the router and of all matrices
    # Gates are at most ``limit`` and ups within it, and one is added to ups; None: neither.
    limit: float | None = None

    def __post_init__(self):
        object.__setattr__(self, "dense_layers", tuple(self.dense_layers))
        validate.fields(self, " of experts", least={"shared_width": 0})
        if self.experts_per_token > self.num_experts:
            raise ValueError(
                f"a token cannot have {self.experts_per_token} experts of {self.num_experts}"
            )
        validate.integers("dense_layers", self.dense_layers)

    def clamp_gate(self, gate: jax.Array) -> jax.Array:
        """Returns the gates that are activated."""
        return gate if self.limit is None else jnp.minimum(gate, self.limit)

    def clamp_up(self, up: jax.Array) -> jax.Array:
        """Returns the factors of activated gates."""
        return up if self.limit is None else jnp.clip(up, -self.limit, self.limit) + 1

    def expected_touched(self, tokens: int) -> float:
        """Returns the expected number of experts that a call of T = ``tokens`` tokens reads in a
        layer.

        ``E (1 - (1 - k / E)^T)``, if tokens choose independently and all experts are equally
        popular (Huang et al., MoESD, arXiv 2505.19645). It is smaller if some experts are more
        popular, or if neighbouring tokens are alike.
        """
        return self.num_experts * (1 - (1 - self.experts_per_token / self.num_experts) ** tokens)

    def expected_blocks(self, tokens: int, block: int, devices: int = 1) -> float:
        """Returns the expected number of blocks, each of at most ``block`` tokens of one expert,
        that a call needs.

        If the experts are split over devices, it is the number of the device with most blocks. See
        `expected_touched`.
        """
        if devices == 1 and block >= tokens:
            return self.expected_touched(tokens)
        return _simulated_blocks(self.num_experts, self.experts_per_token, tokens, block, devices)


@functools.cache  # every layer has the same
def _simulated_blocks(total: int, chosen: int, tokens: int, block: int, devices: int) -> float:
    """Returns the mean of 4000 simulated calls, of fewer if they are long."""
    calls = min(max(20_000_000 // (tokens * total), 50), 4000)
    random, counts_CE = np.random.default_rng(0), np.zeros((calls, total), np.int64)
    for _ in range(tokens):
        experts_Ck = np.argsort(random.random((calls, total)), axis=1)[:, :chosen]
        counts_CE[np.arange(calls)[:, None], experts_Ck] += 1
    blocks_CE = -(-counts_CE // block)
    return float(blocks_CE.reshape(calls, devices, -1).sum(axis=2).max(axis=1).mean())


@dataclasses.dataclass(frozen=True, kw_only=True)
class RecurrentConfig:
    """The shape of layers of the gated delta rule, see `specsamp.models.recurrent`."""

    num_key_heads: int  # M, of queries and keys
    num_value_heads: int  # N, each key head serves N / M of them
    key_size: int  # K, of a head
    value_size: int  # V, of a head
    attention_layers: tuple[int, ...]  # layers with attention instead
    taps: int = 4  # tokens that the short convolution reads

    def __post_init__(self):
        object.__setattr__(self, "attention_layers", tuple(self.attention_layers))
        validate.fields(self, " of recurrent layers")
        validate.integers("attention_layers", self.attention_layers)
        if self.num_value_heads % self.num_key_heads:
            raise ValueError(
                f"num_value_heads {self.num_value_heads} is not a multiple of num_key_heads "
                f"{self.num_key_heads}"
            )

    @property
    def projections(self) -> dict[str, tuple[int, int]]:
        """Returns the number of key heads and the size of each in every projection: of queries,
        keys, values, gates, and of the shares and decays of the value heads.
        """
        heads = self.num_key_heads
        group = self.num_value_heads // heads
        keys = heads, self.key_size
        values = heads, group * self.value_size
        parts = {"query": keys, "key": keys, "value": values, "gate": values}
        return parts | dict.fromkeys(("share", "decay"), (heads, group))

    @property
    def input_size(self) -> int:
        """Returns the numbers per token and key head that a cache holds: query, key, values and two
        gates of each value head.
        """
        group = self.num_value_heads // self.num_key_heads
        return 2 * self.key_size + group * (self.value_size + 2)


@dataclasses.dataclass(frozen=True, kw_only=True)
class TransformerConfig:
    """The shape of a decoder: by default that of Chinchilla, with switches for the families of
    public checkpoints.

    Chinchilla's parameter counts imply, per layer, 4 D^2 for Q, K, V, O, D^2 for the projection of
    relative positions, 8 D^2 for an ungated feed-forward of width 4 D; and tied embeddings. The
    activation was not published.

    Every switch after ``dtype`` except ``tied`` and ``pre_norms`` is off by default, and then
    changes neither parameters nor programs.
    """

    vocab_size: int
    width: int  # D
    num_layers: int
    num_heads: int  # N, query heads
    num_kv_heads: int | None = None  # M; None: one per query head. 1 is multi-query attention
    head_size: int | None = None  # H; None: D / N
    feedforward_width: int | None = None  # F; None: 4 D
    # Or "rotary", or "learned": a vector for each position, added to the embedding.
    positions: str = "relative"
    max_positions: int = 2048
    rotary_base: float = 10_000.0
    ngram_rows: int = 0  # of each hashed table of n-gram embeddings, see ngrams.py; 0: none
    ngram_order: int = 3  # the longest n; each n from 2 has a table
    activation: str = "gelu"
    norm_epsilon: float = 1e-6
    dtype: str = "float32"  # of decode-time weights, activations and cache
    # Of decode-time matrices; None: ``dtype``. "int8" has a scale per output channel.
    weight_dtype: str | None = None
    # Of the cache; None: ``dtype``. "int8" has a scale per token and head.
    cache_dtype: str | None = None

    # The ends.
    tied: bool = True  # one matrix embeds and unembeds; False: the output has its own
    embedding_scale: float | None = None  # embeddings are multiplied by it
    logit_divisor: float | None = None  # logits are divided by it
    logit_cap: float | None = None  # c: logits become c tanh(logits / c)
    # Ids from here on are padding: their logits are -inf. None: no padding.
    num_real_tokens: int | None = None
    # The stream.
    norm: str = "rms"  # or "layer": mean subtracted, with a bias
    norm_offset: bool = False  # norms multiply by 1 + scale
    pre_norms: bool = True  # a norm before attention and before feed-forward
    post_norms: bool = False  # a norm behind attention and feed-forward, before they are added
    # Attention and feed-forward are multiplied by it, before they are added.
    residual_scale: float | None = None
    parallel: bool = False  # attention and feed-forward both read the layer's input
    layer_scale: bool = False  # the stream after each layer is multiplied by a learned number
    # Feed-forward.
    gated: bool = False  # activation(gate x) * (up x)
    feedforward_bias: bool = False
    # Of layers that choose experts for each token; None: there are none.
    experts: ExpertsConfig | None = None
    # Attention.
    attention_bias: bool = False  # of Q, K and V
    attention_gate: bool = False  # the mean of values is multiplied by a sigmoid of the input
    output_bias: bool = False
    query_key_norm: bool = False  # of each head, before it is turned
    joint_norm: bool = False  # one of all query heads and one of all key heads, likewise
    attention_scale: float | None = None  # of scores; None: 1 / sqrt(H)
    attention_cap: float | None = None  # as logit_cap, of scores
    attention_sinks: bool = False  # a learned score of each head, of a slot without a value
    value_norm: bool = False  # of each head, without a scale
    window: int | None = None  # a token sees itself and the window - 1 before it; None: all
    global_layers: tuple[int, ...] = ()  # layers without a window
    # Of layers without a window; None: ``head_size`` and ``num_kv_heads``.
    global_head_size: int | None = None
    global_kv_heads: int | None = None
    keys_as_values: bool = False  # in layers without a window, projected keys are also values
    # Of layers with a recurrence instead of attention; None: there are none.
    recurrent: RecurrentConfig | None = None
    # Rotary positions.
    rotary_size: int | None = None  # entries of each head that turn; None: all
    rotary_scaling: RotaryScaling | None = None
    # Of layers with a window, unscaled; None: ``rotary_base``.
    window_rotary_base: float | None = None

    def __post_init__(self):
        def set_default(name, value):
            return object.__setattr__(self, name, value)

        parts = {"rotary_scaling": RotaryScaling, "experts": ExpertsConfig}
        for name, kind in (parts | {"recurrent": RecurrentConfig}).items():
            if isinstance(getattr(self, name), Mapping):  # from JSON
                set_default(name, kind(**getattr(self, name)))
        set_default("global_layers", tuple(self.global_layers))
        choices = dict(positions=POSITIONS, activation=ACTIVATIONS, norm=NORMS, dtype=DTYPES)
        choices |= dict.fromkeys(("weight_dtype", "cache_dtype"), (None, "int8"))
        validate.fields(self, choices=choices, least={"ngram_rows": 0})
        if self.num_kv_heads is None:
            set_default("num_kv_heads", self.num_heads)
        if self.head_size is None:
            if self.width % self.num_heads:
                raise ValueError(
                    f"width {self.width} is not a multiple of num_heads {self.num_heads}: set "
                    "head_size"
                )
            set_default("head_size", self.width // self.num_heads)
        if self.feedforward_width is None:
            set_default("feedforward_width", 4 * self.width)
        self._check_combinations()

    def _check_combinations(self) -> None:
        validate.integer("ngram_order", self.ngram_order, 2, 6)
        for name in ("num_kv_heads", "global_kv_heads"):
            if self.num_heads % (getattr(self, name) or 1):
                raise ValueError(
                    f"num_heads {self.num_heads} is not a multiple of {name} {getattr(self, name)}"
                )
        if self.positions == "rotary" and self.head_size % 2:
            raise ValueError(
                f"rotary positions turn pairs: head_size must be even; got {self.head_size}"
            )
        if self.num_real_tokens is not None:
            validate.integer("num_real_tokens", self.num_real_tokens, 1, self.vocab_size + 1)
        if self.positions != "rotary":
            for name in ("rotary_size", "rotary_scaling", "window_rotary_base"):
                if getattr(self, name) is not None:
                    raise ValueError(f"{name} is of rotary positions; these are {self.positions!r}")
        size = self.rotary_size
        if size is not None and (size % 2 or size > self.head_size):
            raise ValueError(
                f"rotary_size must be even and at most head_size {self.head_size}; got {size}"
            )
        validate.integers("global_layers", self.global_layers, 0, self.num_layers)
        if self.experts is not None and (self.feedforward_bias or not self.gated):
            raise ValueError(
                "experts have a gate, and biases of their own: set gated=True and "
                "feedforward_bias=False"
            )
        if self.parallel and not self.pre_norms:
            raise ValueError("parallel layers begin with norms: set pre_norms=True")
        if self.joint_norm and self.query_key_norm:
            raise ValueError("joint_norm takes the place of query_key_norm: choose one")
        if self.attention_gate and self.attention_bias:
            raise ValueError("gated attention has no biases: set attention_bias=False")
        if self.keys_as_values and (self.attention_gate or self.attention_bias):
            raise ValueError(
                "keys that are also values have neither gates nor biases: set attention_gate=False "
                "and attention_bias=False"
            )
        if self.recurrent is not None and (self.window is not None or self.positions != "rotary"):
            raise ValueError(
                "recurrent layers are beside attention without a window and with rotary positions: "
                f"leave window out; got {self.window} and {self.positions!r}"
            )
        if self.window is None and (self.global_layers or self.window_rotary_base is not None):
            raise ValueError(
                "global_layers and window_rotary_base need windowed layers: set window"
            )

    @property
    def kv_heads_of_all(self) -> int:
        """Returns the number of devices over which the kv heads of every layer can be split; if
        that is one, the kv heads of the layers with a window.
        """
        common = math.gcd(self.num_kv_heads, self.global_kv_heads or 0)
        return common if common > 1 else self.num_kv_heads

    def window_of(self, layer: int) -> int | None:
        """Returns the attention window of a layer; None: it attends to all tokens."""
        return None if layer in self.global_layers else self.window

    def of_layer(self, layer: int) -> TransformerConfig:
        """Returns the shape with the heads of one layer."""
        if self.window_of(layer) is not None:
            return dataclasses.replace(self, keys_as_values=False)
        return dataclasses.replace(
            self,
            head_size=self.global_head_size or self.head_size,
            num_kv_heads=self.global_kv_heads or self.num_kv_heads,
        )

    def is_recurrent(self, layer: int) -> bool:
        """Returns whether a layer has a recurrence instead of attention."""
        return self.recurrent is not None and layer not in self.recurrent.attention_layers

    def has_experts(self, layer: int) -> bool:
        """Returns whether the feed-forward part of a layer consists of experts."""
        return self.experts is not None and layer not in self.experts.dense_layers

    def rotary_of(self, window: int | None) -> Rotary | None:
        """Returns the rotary embedding of layers with this window; None without rotary
        positions.
        """
        if self.positions != "rotary":
            return None
        size = self.head_size if self.rotary_size is None else self.rotary_size
        if window is not None and self.window_rotary_base is not None:
            return Rotary(size=size, base=self.window_rotary_base)
        return Rotary(size=size, base=self.rotary_base, scaling=self.rotary_scaling)

    @property
    def compute_dtype(self) -> jnp.dtype:
        return jnp.dtype(self.dtype)

    @property
    def num_ngram_tables(self) -> int:
        return self.ngram_order - 1 if self.ngram_rows else 0

    @property
    def num_sparse_layers(self) -> int:
        """Returns the number of layers with experts."""
        return sum(map(self.has_experts, range(self.num_layers)))


# Models by name: functions whose arguments override fields.

# The target of Chen et al., 70.06B parameters in 80 layers; and their draft, 4.12B in 8, wide and
# shallow.
chinchilla_70b = functools.partial(
    TransformerConfig, vocab_size=32_000, width=8192, num_layers=80, num_heads=64, dtype="bfloat16"
)
draft_4b = functools.partial(
    TransformerConfig, vocab_size=32_000, width=6144, num_layers=8, num_heads=48, dtype="bfloat16"
)
# A target for one laptop: 40M parameters, in float32 160 MB, too much for any cache; and its draft,
# of one layer.
target_38m = functools.partial(
    TransformerConfig, vocab_size=4096, width=512, num_layers=12, num_heads=8, positions="rotary"
)
draft_1m = functools.partial(
    TransformerConfig, vocab_size=4096, width=128, num_layers=1, num_heads=2, positions="rotary"
)
# For tests and for running without jit.
tiny = functools.partial(
    TransformerConfig, vocab_size=64, width=32, num_layers=2, num_heads=4, max_positions=512
)

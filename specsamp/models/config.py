"""Shapes of the transformers, and the presets of the paper."""

from __future__ import annotations

import dataclasses
import math

import jax.numpy as jnp

POSITIONS = ("relative", "rotary")
ACTIVATIONS = ("gelu", "relu", "silu")
DTYPES = ("float32", "bfloat16")


@dataclasses.dataclass(frozen=True, kw_only=True)
class TransformerConfig:
    """A decoder in the style of Chinchilla.

    Chinchilla's parameter counts pin it down as far as it is public: per layer 4 D^2 for Q, K, V, O,
    D^2 for the relative-position projection, 8 D^2 for an ungated feed-forward of width 4 D; tied
    embeddings. The activation was not published.
    """

    vocab_size: int
    width: int  # D
    num_layers: int
    num_heads: int  # N, query heads
    num_kv_heads: int | None = None  # M; None: one per query head. 1 is multi-query attention
    head_size: int | None = None  # H; None: D / N
    feedforward_width: int | None = None  # F; None: 4 D
    positions: str = "relative"  # or "rotary"
    max_positions: int = 2048
    rotary_base: float = 10_000.0
    ngram_rows: int = 0  # of each hashed table of n-gram embeddings, see ngrams.py; 0: none
    ngram_order: int = 3  # the longest n; one table for each n from 2
    activation: str = "gelu"
    norm_epsilon: float = 1e-6
    dtype: str = "float32"  # of decode-time weights, activations and cache

    def __post_init__(self):
        set_default = lambda name, value: object.__setattr__(self, name, value)
        optional = ("num_kv_heads", "head_size", "feedforward_width")
        for name in ("vocab_size", "width", "num_layers", "num_heads", "max_positions") + optional:
            value = getattr(self, name)
            if not (isinstance(value, int) and value >= 1 or name in optional and value is None):
                raise ValueError(f"{name} must be a positive integer; got {value!r}")
        if self.ngram_rows < 0 or not 2 <= self.ngram_order <= 5:
            raise ValueError(
                f"ngram_rows must be >= 0 and ngram_order from 2 to 5; got {self.ngram_rows} and {self.ngram_order}"
            )
        if self.num_kv_heads is None:
            set_default("num_kv_heads", self.num_heads)
        if self.head_size is None:
            if self.width % self.num_heads:
                raise ValueError(f"width {self.width} is no multiple of num_heads {self.num_heads}: set head_size")
            set_default("head_size", self.width // self.num_heads)
        if self.feedforward_width is None:
            set_default("feedforward_width", 4 * self.width)
        if self.num_heads % self.num_kv_heads:
            raise ValueError(f"num_heads {self.num_heads} is no multiple of num_kv_heads {self.num_kv_heads}")
        for name, known in (("positions", POSITIONS), ("activation", ACTIVATIONS), ("dtype", DTYPES)):
            if getattr(self, name) not in known:
                raise ValueError(f"{name} must be one of {', '.join(known)}; got {getattr(self, name)!r}")
        if self.positions == "rotary" and self.head_size % 2:
            raise ValueError(f"rotary positions turn pairs: head_size must be even; got {self.head_size}")

    @property
    def compute_dtype(self) -> jnp.dtype:
        return jnp.dtype(self.dtype)

    @property
    def queries_per_kv_head(self) -> int:
        return self.num_heads // self.num_kv_heads

    @property
    def num_ngram_tables(self) -> int:
        return self.ngram_order - 1 if self.ngram_rows else 0

    @property
    def num_parameters(self) -> int:
        """Counted from the formula; tests compare with the shapes of the module itself."""
        heads, kv, size, width = self.num_heads, self.num_kv_heads, self.head_size, self.width
        attention = (2 * heads + 2 * kv) * size * width
        if self.positions == "relative":
            attention += kv * size * width + 2 * heads * size  # projection, and the two biases
        layer = attention + 2 * width * self.feedforward_width + 2 * width
        ngrams = self.num_ngram_tables * self.ngram_rows * width
        return self.num_layers * layer + self.vocab_size * width + width + ngrams

    @property
    def kv_bytes_per_token(self) -> int:
        return 2 * self.num_layers * self.num_kv_heads * self.head_size * self.compute_dtype.itemsize


def chinchilla_70b(**changes) -> TransformerConfig:
    """The target of Chen et al.: 70.06B parameters, 80 layers."""
    shape = dict(vocab_size=32_000, width=8192, num_layers=80, num_heads=64, dtype="bfloat16")
    return TransformerConfig(**{**shape, **changes})


def draft_4b(**changes) -> TransformerConfig:
    """The draft of Chen et al.: 4.12B parameters, wide and shallow, 8 layers."""
    shape = dict(vocab_size=32_000, width=6144, num_layers=8, num_heads=48, dtype="bfloat16")
    return TransformerConfig(**{**shape, **changes})


def target_38m(**changes) -> TransformerConfig:
    """A target for one laptop, 40M parameters: 160 MB in float32, too much for any cache."""
    shape = dict(vocab_size=4096, width=512, num_layers=12, num_heads=8, positions="rotary")
    return TransformerConfig(**{**shape, **changes})


def draft_1m(**changes) -> TransformerConfig:
    """A draft for `target_38m`: one layer."""
    shape = dict(vocab_size=4096, width=128, num_layers=1, num_heads=2, positions="rotary")
    return TransformerConfig(**{**shape, **changes})


def tiny(**changes) -> TransformerConfig:
    """Two layers for tests and for running without jit."""
    shape = dict(vocab_size=64, width=32, num_layers=2, num_heads=4, max_positions=512)
    return TransformerConfig(**{**shape, **changes})


def human_count(parameters: int) -> str:
    """1234567 -> '1.235M'."""
    exponent = min(int(math.log10(max(parameters, 1))) // 3, 3)
    return f"{parameters / 1000**exponent:.4g}{['', 'k', 'M', 'B'][exponent]}"

"""Compares a call with kernels and one without, before a model uses kernels on a chip."""

from __future__ import annotations

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np

from specsamp.compilation_cache import use_compilation_cache
from specsamp.models.config import TransformerConfig
from specsamp.models.heads import kernel_tables
from specsamp.models.kernels.common import LANES
from specsamp.models.kernels.dispatch import PallasKernels
from specsamp.models.transformer import TransformerLM
from specsamp.sampling.warp import chain, log_probs, min_p, temperature, top_k, top_p, with_kernels

SLOTS, PROMPT, TOKENS = 1024, 600, 5
WARPS = chain(temperature([0.0, 0.8]), top_k(200), top_p(0.9), min_p(0.01))  # of two rows
# In several parts.
FEW_EXPERTS = {"num_experts": 4, "experts_per_token": 2, "width": 5120, "dense_layers": ()}
# Difference of logits over their standard deviation. Rounding to bfloat16 makes 0.03, a query that
# misses one slot 0.15.
NEAR = {"float32": 1e-3, "bfloat16": 0.07}


@functools.cache
def reason_for_plain(config: TransformerConfig, kernels: PallasKernels) -> str:
    """Returns why a model of this shape does without kernels here; an empty text if it can have
    them.

    Two models of two layers with the same heads and caches, random parameters and a few experts
    read two texts and score tokens, on one device: one with kernels, one without. Warps and the
    expansion of a reduced vocabulary are compared on logits of the whole vocabulary.
    """
    use_compilation_cache()  # as `generate` does, which comes later
    of_global = config.global_kv_heads
    shared = math.gcd(config.num_kv_heads, of_global or config.num_kv_heads)
    few = config.experts and dataclasses.replace(config.experts, **FEW_EXPERTS)
    try:
        small = dataclasses.replace(
            config,
            width=2 * LANES + config.width % LANES,
            num_layers=2,
            num_heads=2 * config.num_heads // shared,
            num_kv_heads=2 * config.num_kv_heads // shared,
            global_kv_heads=of_global and 2 * of_global // shared,
            global_layers=(1,) if config.global_layers else (),
            feedforward_width=LANES,
            experts=few,
            vocab_size=2 * LANES,
            num_real_tokens=None,
            ngram_rows=0,
            max_positions=SLOTS,
        )
        plain = TransformerLM(small)
        expected_BTV, found_BTV = (
            _logits(dataclasses.replace(plain, kernels=each)) for each in (None, kernels)
        )
        logits_BV = 3 * jax.random.normal(jax.random.key(2), (2, config.vocab_size))
        laws = (
            np.exp(jax.jit(log_probs)(with_kernels(WARPS, each), logits_BV))
            for each in (None, kernels)
        )
        moved = np.abs(np.subtract(*laws)).max()
        is_expanded = all(_expands(kernels, rows, config.vocab_size) for rows in (1, 9))
    except Exception as error:  # whatever a compiler raises, decoding goes on without kernels
        return f"a call with kernels failed: {' '.join(str(error).split())[:200]}"
    difference = np.abs(found_BTV - expected_BTV).max() / expected_BTV.std()
    if difference > NEAR[config.dtype]:
        return f"a call with kernels differs from one without by {difference:.1%}"
    if not moved < NEAR["float32"]:
        return f"warps with kernels move a probability by {moved:.1%}"
    return "" if is_expanded else "a kernel expands a reduced vocabulary wrongly"


def _expands(kernels: PallasKernels, rows: int, vocab_size: int) -> bool:
    """Returns whether a reduced vocabulary is expanded rightly, of ids side by side and apart."""
    ids_V = np.arange(vocab_size)
    is_kept_V = (ids_V < vocab_size // 8) | (ids_V % 7 == 0)
    size = int(is_kept_V.sum())
    ranks_V = jnp.where(is_kept_V, is_kept_V.cumsum(dtype=np.int32) - 1, size)
    logits_RU = jax.random.normal(jax.random.key(3), (rows, size))
    expected_RV = jnp.take(logits_RU, ranks_V, axis=1, mode="fill", fill_value=-jnp.inf)
    found_RV = jax.jit(kernels.expand)(logits_RU, *kernel_tables(ranks_V, size))
    return np.array_equal(found_RV, expected_RV)


@functools.partial(jax.jit, static_argnums=0)
def _logits(model: TransformerLM) -> jax.Array:
    weights = model.fit_slots(model.prepare(model.init(jax.random.key(0))), SLOTS)
    tokens_BT = jax.random.randint(jax.random.key(1), (2, PROMPT + TOKENS), 0, model.vocab_size)
    read = functools.partial(model, **model.with_lengths(jnp.full(2, PROMPT)))
    cache = read(
        weights, tokens_BT[:, :PROMPT], jnp.zeros(2, jnp.int32), model.init_cache(2, SLOTS)
    ).cache
    other = PROMPT // 2 if model.rewind is None else PROMPT
    start_B = jnp.array([PROMPT, other], jnp.int32)  # in two blocks of slots
    return model(weights, tokens_BT[:, PROMPT:], start_B, cache).logits_BTV

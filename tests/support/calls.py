"""Compiled calls of small models, and their inputs."""

import jax
import jax.numpy as jnp
import numpy as np

from specsamp import TransformerLM
from support.enumeration import COMPILE_FAST

OPTIONS = dict(static_argnames="hidden_layers", compiler_options=COMPILE_FAST)
call = jax.jit(TransformerLM.__call__, static_argnums=0, **OPTIONS)
forward = jax.jit(TransformerLM.forward, static_argnums=0, **OPTIONS)
compact = jax.jit(TransformerLM.compact, static_argnums=(0, 4), compiler_options=COMPILE_FAST)


def some_tokens(batch, length, seed=0):
    return np.random.default_rng(seed).integers(0, 60, size=(batch, length), dtype=np.int32)


def stale_cache(model, slots, batch=3, size=10.0):
    """Returns a cache full of entries of rejected tokens."""
    rng = np.random.default_rng(9)

    def garbage(leaf):
        return jnp.asarray(size * rng.normal(size=leaf.shape), leaf.dtype)

    return jax.tree.map(garbage, model.init_cache(batch, slots))

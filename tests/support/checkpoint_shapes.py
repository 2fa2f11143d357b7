"""The model of the checkpoints that the tests write, and how they read and spoil them."""

import json

import jax
import jax.numpy as jnp
import numpy as np

from specsamp.checkpoints.hugging_face import open_checkpoint
from specsamp.models.config import tiny
from specsamp.models.transformer import TransformerLM

CONFIG = tiny(
    vocab_size=304, width=32, num_heads=4, num_kv_heads=2, positions="rotary", gated=True, activation="silu", tied=False
)


def random_params(config, seed=0):
    rng = np.random.default_rng(seed)
    shapes = jax.eval_shape(TransformerLM(config).init, jax.random.key(0))
    return jax.tree.map(lambda x: jnp.asarray(rng.normal(size=x.shape) / np.sqrt(32), jnp.float32), shapes)


def open_all(folder):
    checkpoint = open_checkpoint(folder, dtype="float32")
    return checkpoint, checkpoint.tensors


def edit(path, change):
    content = json.loads(path.read_text(encoding="utf-8"))
    change(content)
    path.write_text(json.dumps(content), encoding="utf-8")

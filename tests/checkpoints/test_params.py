"""What tells the values of parameters from others: the same on every mesh and with rows of padding."""

import jax
import jax.numpy as jnp
import numpy as np

from specsamp.checkpoints.params import digest
from specsamp.mesh.layout import Layout, make_mesh
from specsamp.mesh.sharded import shard_model
from specsamp.models.config import tiny
from specsamp.models.transformer import TransformerLM

MODEL = TransformerLM(tiny(num_layers=1))
PARAMS = jax.jit(MODEL.init)(jax.random.key(0))


def test_other_values_have_another_digest():
    one = jax.tree.map(jnp.copy, PARAMS)
    one["embedding"] = one["embedding"].at[3, 5].set(np.nextafter(np.float32(one["embedding"][3, 5]), np.float32(9)))
    halves = jax.tree.map(lambda x: x.astype(jnp.bfloat16), PARAMS)
    assert len({digest(PARAMS), digest(one), digest(halves), digest({"d2t": jnp.ones(3, bool)})}) == 4


def test_a_mesh_and_padding_do_not_change_it():
    split = shard_model(MODEL, Layout.tensor_parallel(make_mesh(2, 4)))
    placed = jax.device_put(PARAMS, split.param_shardings(PARAMS))
    padded = PARAMS | {"embedding": jnp.pad(PARAMS["embedding"], ((0, 8), (0, 0)))}
    assert digest(placed) == digest(padded) == digest(PARAMS)

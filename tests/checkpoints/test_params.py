"""Digests that tell the values of parameters from others: the same on every mesh and with rows of padding."""

import types

import jax
import jax.numpy as jnp
import numpy as np

from specsamp.checkpoints.params import digest, digest_of_pair
from specsamp.mesh.layout import Layout, make_mesh
from specsamp.mesh.sharded import shard_model
from specsamp.models.config import tiny
from specsamp.models.eagle import Eagle3Config
from specsamp.models.heads import FeatureHead
from specsamp.models.transformer import TransformerLM
from support.heads import layer_config
from support.weights import drawn_params

MODEL = TransformerLM(tiny(num_layers=1))
PARAMS = drawn_params(MODEL)


def test_values_dtypes_places_names_and_signs_count():
    """What changes when a conversion is mended: the order of heads or of halves, a transposed matrix, a swapped side."""
    x, y = jnp.asarray(np.random.default_rng(0).normal(size=(2, 64, 64)).astype(np.float32))
    others = [{"a": x}, {"b": x}, {"a": -x}, {"a": x.T}, {"a": x[::-1]}, {"a": x[:, ::-1]}, {"a": jnp.roll(x, 32, 0)}]
    others += [{"a": x.at[:2].set(x[1::-1])}, {"a": x, "b": y}, {"a": y, "b": x}, ({"a": x}, {"b": y})]
    others += [({"a": x, "b": y}, None), {"a": jnp.ones(3, bool)}, {"a": jnp.ones(3, jnp.int32)}]
    others += [{"a": x.at[3, 5].set(np.nextafter(np.float32(x[3, 5]), np.float32(9)))}, {"a": x.astype(jnp.bfloat16)}]
    assert len({digest(params) for params in others}) == len(others)


def test_heads_that_read_other_layers_have_another_digest():
    """With equal weights; a vocabulary that a mesh padded is the same head."""

    def of(**fields):
        layer = layer_config(fields.pop("vocab_size", 32))
        config = Eagle3Config(layer=layer, target_layers=6, **({"hidden_layers": (1, 2, 3)} | fields))
        return digest_of_pair(types.SimpleNamespace(target_params=PARAMS, draft_params={}, head=FeatureHead(config)))

    assert of(vocab_size=40) == of()
    assert len({of(), of(hidden_layers=(1, 2, 4)), of(norm_output=True), digest((PARAMS, {}))}) == 4


def test_a_mesh_and_padding_do_not_change_it():
    split = shard_model(MODEL, Layout.tensor_parallel(make_mesh(2, 4)))
    placed = jax.device_put(PARAMS, split.param_shardings(PARAMS))
    padded = PARAMS | {"embedding": jnp.pad(PARAMS["embedding"], ((0, 8), (0, 0)))}
    assert digest(placed) == digest(padded) == digest(PARAMS)

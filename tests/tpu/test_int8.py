"""Weights and caches in int8, compiled for a TPU slice: what is read from HBM is int8, and nothing is written there wider."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest

from specsamp.mesh.layout import Layout
from specsamp.mesh.sharded import shard_model
from specsamp.models import products
from specsamp.models.compiling import FEWEST_COLLECTIVES
from specsamp.models.config import TransformerConfig
from specsamp.models.int8 import dequantise, is_int8
from specsamp.models.transformer import TransformerLM
from specsamp.tpu.programs import Programs
from specsamp.tpu.topology import described_mesh
from specsamp.tpu.traffic import traffic_of
from support import extras

OPTIMISED = True
pytestmark = extras.needs("libtpu")

SHAPE = dict(vocab_size=8192, width=4096, num_heads=32, num_kv_heads=8, num_layers=1, feedforward_width=16384)
PLAIN = TransformerConfig(**SHAPE, positions="rotary", gated=True, tied=False, max_positions=2048, dtype="bfloat16")


def call(config, batch=1, slots=256):
    """The traffic of scoring five tokens a row on four chips, its floor, and what is in memory."""
    mesh = described_mesh("v5e:2x2")
    model = shard_model(TransformerLM(config), Layout.tensor_parallel(mesh))
    made = Programs(target=model, draft=model, mesh=mesh, sampling=None, batch=batch, slots=slots)
    with jax.default_matmul_precision("default"):
        compiled = made.call(model, 5).compile(compiler_options=dict(FEWEST_COLLECTIVES))
    return traffic_of(compiled.as_text()), made.floor(model), compiled.memory_analysis()


def widened(spec, x, y, *, dtype=None):
    """Multiplies by a matrix that is converted before: a row of it is written once more, where x says."""
    wide = dequantise(y).astype(x.dtype)
    row = (x.ravel()[0] > 0).astype(jnp.int32)
    return products.contract(spec, x, jax.lax.dynamic_update_slice_in_dim(wide, wide[:1], row, 0), dtype=dtype)


@pytest.mark.slow
def test_int8_is_what_is_read_and_nothing_is_widened(monkeypatch):
    """The control writes converted matrices, some of which are too large to stay on the chip."""
    in_int8 = dataclasses.replace(PLAIN, weight_dtype="int8")
    plain, floor_of_plain, _ = call(PLAIN)
    traffic, floor, memory = call(in_int8)
    assert 0.5 < floor / floor_of_plain < 0.51
    assert traffic.read < 1.05 * floor and traffic.copies == []
    assert traffic.written < 0.01 * floor and memory.temp_size_in_bytes < 0.01 * floor
    assert traffic.collectives == plain.collectives and traffic.cycles < plain.cycles

    def contract(spec, x, y, *, dtype=None):
        return (widened if is_int8(y) else products.contract)(spec, x, y, dtype=dtype)

    for module in ("attention", "modules", "decoder"):
        monkeypatch.setattr(f"specsamp.models.{module}.contract", contract)
    mistaken, _, _ = call(in_int8)  # compilers differ in whether they write the wide rows, or read the others again
    assert mistaken.read + mistaken.written > 1.1 * floor


@pytest.mark.slow
def test_a_cache_in_int8_is_read_as_it_is():
    """Reads, of eight rows, half the bytes of the bfloat16 one and the scales, which are stored without padding."""
    shape = dict(width=1024, head_size=128, feedforward_width=1024, max_positions=16384, cache_dtype="int8")
    config = dataclasses.replace(PLAIN, **shape)
    batch, slots = 8, 8192
    traffic, floor, memory = call(config, batch, slots)
    assert traffic.read < 1.02 * floor and traffic.written < 0.05 * floor and traffic.copies == []
    assert memory.temp_size_in_bytes < 0.05 * floor
    of_token = 2 * config.num_layers * config.num_kv_heads * (config.head_size + 4)  # and the scale
    of_cache = batch * slots * of_token / 4
    assert 0.7 < of_cache / floor < 0.8 and memory.alias_size_in_bytes < 1.01 * of_cache

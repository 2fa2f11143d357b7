"""Calls compiled for a TPU slice: the experts that are read, and the bytes that int8 moves."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest

from specsamp import TransformerLM
from specsamp.mesh.layout import Layout
from specsamp.mesh.sharded import shard_model
from specsamp.models import products
from specsamp.models.compiling import ON_TPU
from specsamp.models.config import ExpertsConfig, TransformerConfig
from specsamp.models.int8 import dequantise, is_int8
from specsamp.models.kernels import delta_step
from specsamp.models.kernels.dispatch import PallasKernels
from specsamp.tpu import schedules
from specsamp.tpu.lowering import Programs
from specsamp.tpu.topology import described_mesh
from specsamp.tpu.traffic import traffic_of
from support import extras
from support.hybrids import RECURRENT, hybrid
from support.refusals import refusal, refused_calls

OPTIMISED = True
pytestmark = extras.needs("libtpu")

EXPERTS = ExpertsConfig(num_experts=32, experts_per_token=4, width=768)
SHAPE = dict(
    vocab_size=1024, width=2048, num_heads=16, num_kv_heads=4, num_layers=1, max_positions=2048
)
CONFIG = TransformerConfig(
    **SHAPE,
    positions="rotary",
    gated=True,
    activation="silu",
    tied=False,
    dtype="bfloat16",
    experts=EXPERTS,
)


def programs(config, batch=1, slots=256, kernels=None):
    mesh = described_mesh("v5e:2x2")
    model = shard_model(TransformerLM(config, kernels=kernels), Layout.tensor_parallel(mesh))
    return Programs(target=model, draft=model, mesh=mesh, sampling=None, batch=batch, slots=slots)


def call(made):
    """Returns traffic, floor and memory of a call that scores five tokens a row on four chips."""
    with jax.default_matmul_precision("default"):
        compiled = made.call(made.target, 5).compile(compiler_options=dict(ON_TPU))
    schedules.take()  # no schedule is left for other tests
    return traffic_of(compiled.as_text()), made.floor(made.target), compiled.memory_analysis()


def with_experts(kernels=None, **changes):
    return programs(dataclasses.replace(CONFIG, **changes), kernels=kernels)


# 49 tiles of memory: a width that does not divide over devices.
BY_EXPERT = dataclasses.replace(EXPERTS, width=784)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"weight_dtype": "int8"},
        {"experts": BY_EXPERT},
        {"experts": BY_EXPERT, "kernels": PallasKernels()},
    ],
    ids=["by width", "int8", "by expert", "by expert, in a kernel"],
)
def test_call_reads_the_expected_experts(changes):
    made = with_experts(**changes)
    traffic, _, memory = call(made)
    floor = made.floor(made.target, tokens=5)
    experts = made.target.config.experts
    devices = 4 if experts == BY_EXPERT else 1  # with whole experts, the slowest device counts
    uneven = devices * experts.expected_blocks(5, 5, devices) / experts.expected_touched(5)
    chosen = made.floor(made.target, tokens=5) - made.floor(made.target, tokens=0)
    assert (uneven > 1.2) == (devices > 1)
    assert traffic.bytes == pytest.approx(floor + (uneven - 1) * chosen, rel=0.05)
    assert traffic.open_loops == 0 and traffic.copies == []
    assert memory.temp_size_in_bytes < 0.05 * floor
    assert traffic.bytes < 0.75 * made.floor(made.target, tokens=1000)  # the floor of all experts


def test_floors_count_experts_of_all_tokens():
    made, one = with_experts(), 3 * 2048 * 768 * 2 / 4  # bytes of an expert, per device
    without = dataclasses.replace(
        made, target=with_experts(experts=dataclasses.replace(EXPERTS, num_experts=4)).target
    )
    router = (32 - 4) * 2048 * 2
    for tokens in (1, 2, 5):
        more = made.floor(made.target, tokens=tokens) - without.floor(without.target, tokens=tokens)
        assert more == pytest.approx(
            one * (EXPERTS.expected_touched(tokens) - 4) + router, rel=1e-6
        )
    rows = dataclasses.replace(made, batch=5)
    caches = rows.floor(rows.target, 1.0) - rows.floor(rows.target, 0.0)
    assert rows.floor(rows.target, 0.0) == made.floor(made.target, 0.0, tokens=5) and caches > 0
    of_round = made.floor_of_round(4)
    assert of_round == made.floor(made.target, tokens=5) + 4 * made.floor(made.target)


# Rows of 2,880 entries are no whole tiles: a TPU would store the embedding by columns.
UNEVEN = dict(experts=None, width=2880, head_size=128, vocab_size=2**17)


@pytest.mark.slow
def test_rows_of_an_embedding_are_looked_up_alone():
    """The control, whose rows are not padded, reads the whole embedding."""
    read = []
    for kernels in (PallasKernels(), None):
        made = with_experts(**UNEVEN, kernels=kernels)
        text = made.call(made.target, 5).compile().as_text()
        read.append(traffic_of(text).read - made.floor(made.target))
        schedules.take()
    embedding = UNEVEN["vocab_size"] * UNEVEN["width"] * 2 / 4
    assert read[0] < embedding / 4 < embedding < read[1]


@pytest.mark.slow
def test_one_token_uses_the_matrix_unit(monkeypatch):
    """It takes no more cycles than five tokens; the control multiplies a single row."""
    made = with_experts(**UNEVEN, kernels=PallasKernels())

    def cycles(tokens):
        text = made.call(made.target, tokens).compile().as_text()
        schedules.take()
        return traffic_of(text).cycles

    one, five = cycles(1), cycles(5)
    monkeypatch.setattr(products, "_only_row", lambda *_: None)
    jax.clear_caches()
    assert one < 1.1 * five < 1.5 * five < cycles(1)


# Weights and caches in int8: HBM is read in int8, and no wider values are written to it.


WIDE = dict(
    vocab_size=8192, width=4096, num_heads=32, num_kv_heads=8, num_layers=1, feedforward_width=16384
)
PLAIN = TransformerConfig(
    **WIDE, positions="rotary", gated=True, tied=False, max_positions=2048, dtype="bfloat16"
)


def widened(spec, x, y, **options):
    """Multiplies by a matrix that is converted first; a row is written again at an index from x."""
    wide = dequantise(y).astype(x.dtype)
    row = (x.ravel()[0] > 0).astype(jnp.int32)
    return products.contract(
        spec, x, jax.lax.dynamic_update_slice_in_dim(wide, wide[:1], row, 0), **options
    )


@pytest.mark.slow
def test_int8_weights_are_read_and_not_widened(monkeypatch):
    """The control writes converted matrices, some of which are too large to stay on the chip."""
    in_int8 = dataclasses.replace(PLAIN, weight_dtype="int8")
    plain = programs(PLAIN)
    traffic, floor, memory = call(programs(in_int8))
    assert 0.5 < floor / plain.floor(plain.target) < 0.51
    assert traffic.read < 1.05 * floor and traffic.copies == []
    assert traffic.written < 0.01 * floor and memory.temp_size_in_bytes < 0.01 * floor

    def contract(spec, x, y, **options):
        return (widened if is_int8(y) else products.contract)(spec, x, y, **options)

    for module in ("attention", "modules", "decoder"):
        monkeypatch.setattr(f"specsamp.models.{module}.contract", contract)
    mistaken, _, _ = call(programs(in_int8))  # some compilers write wide rows, some reread rows
    assert mistaken.read + mistaken.written > 1.1 * floor


@pytest.mark.slow
def test_int8_cache_is_read_without_conversion():
    """For eight rows, half the bytes of a bfloat16 cache are read, and scales without padding."""
    shape = dict(
        width=1024, head_size=128, feedforward_width=1024, max_positions=16384, cache_dtype="int8"
    )
    config = dataclasses.replace(PLAIN, **shape)
    batch, slots = 8, 8192
    traffic, floor, memory = call(programs(config, batch, slots))
    assert traffic.read < 1.02 * floor and traffic.written < 0.05 * floor and traffic.copies == []
    assert memory.temp_size_in_bytes < 0.06 * floor
    of_token = 2 * config.num_layers * config.num_kv_heads * (config.head_size + 4)  # and the scale
    of_cache = batch * slots * of_token / 4
    assert 0.7 < of_cache / floor < 0.8 and memory.alias_size_in_bytes < 1.01 * of_cache


def test_hybrid_prompt_is_lowered_with_its_length():
    """A call whose tokens may be removed reads few tokens, in a kernel."""
    sizes = dict(num_key_heads=4, num_value_heads=8, key_size=128, value_size=128)
    recurrent = dataclasses.replace(RECURRENT, **sizes)
    config = hybrid(num_layers=2, num_heads=4, num_kv_heads=4, vocab_size=64, recurrent=recurrent)
    for in_int8 in (None, "int8"):
        config = dataclasses.replace(config, weight_dtype=in_int8)
        made = programs(config, kernels=PallasKernels())
        assert delta_step.NAME in made.call(made.target, 3).as_text()
        assert delta_step.NAME not in made.call(made.target, 128, is_prompt=True).as_text()
    with refusal("give lengths_B"):
        made.call(made.target, 128)


test_refused_topologies = refused_calls(
    {
        "no TPU topology 'v4'": lambda: described_mesh("v4"),
        "no TPU topology 'v4:2x'": lambda: described_mesh("v4:2x"),
        "no TPU topology 'v4:axb'": lambda: described_mesh("v4:axb"),
        "no TPU topology 'v4:2x2x4x2'": lambda: described_mesh("v4:2x2x4x2"),
        "the compiler refuses the topology 'v5e:3x5'": lambda: described_mesh("v5e:3x5"),
    }
)

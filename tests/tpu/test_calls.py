"""Experts compiled for a TPU slice: a call reads those that its tokens are expected to choose, in place."""

import dataclasses

import jax
import pytest

from specsamp.mesh.layout import Layout
from specsamp.mesh.sharded import shard_model
from specsamp.models.compiling import FEWEST_COLLECTIVES
from specsamp.models.config import ExpertsConfig, TransformerConfig
from specsamp.models.transformer import TransformerLM
from specsamp.tpu.programs import STEP_WINDOWS, Programs, step_windows
from specsamp.tpu.topology import described_mesh
from specsamp.tpu.traffic import traffic_of
from specsamp.tpu.work import Shape
from support import extras

OPTIMISED = True
pytestmark = extras.needs("libtpu")

EXPERTS = ExpertsConfig(num_experts=32, experts_per_token=4, width=768)
SHAPE = dict(vocab_size=1024, width=2048, num_heads=16, num_kv_heads=4, num_layers=1, max_positions=2048)
CONFIG = TransformerConfig(
    **SHAPE, positions="rotary", gated=True, activation="silu", tied=False, dtype="bfloat16", experts=EXPERTS
)


def programs(**changes):
    mesh = described_mesh("v5e:2x2")
    model = shard_model(TransformerLM(dataclasses.replace(CONFIG, **changes)), Layout.tensor_parallel(mesh))
    return Programs(target=model, draft=model, mesh=mesh, sampling=None, batch=1, slots=256)


@pytest.mark.parametrize(
    "changes",
    [{}, {"weight_dtype": "int8"}, {"experts": dataclasses.replace(EXPERTS, num_experts=30)}],
    ids=["by expert", "int8", "by width"],
)
def test_a_call_reads_the_experts_that_it_is_expected_to(changes):
    made = programs(**changes)
    with jax.default_matmul_precision("default"):
        compiled = made.call(made.target, 5).compile(compiler_options=dict(FEWEST_COLLECTIVES))
    traffic, floor = traffic_of(compiled.as_text()), made.floor(made.target, tokens=5)
    experts = made.target.config.experts
    devices = 4 if experts.num_experts == 32 else 1  # that have whole experts, and wait for each other
    uneven = devices * experts.expected_blocks(5, 5, devices) / experts.expected_touched(5)
    chosen = made.floor(made.target, tokens=5) - made.floor(made.target, tokens=0)
    assert (uneven > 1.2) == (devices > 1)
    assert traffic.bytes == pytest.approx(floor + (uneven - 1) * chosen, rel=0.05)
    assert traffic.open_loops == 0 and traffic.copies == []
    assert compiled.memory_analysis().temp_size_in_bytes < 0.05 * floor
    assert traffic.bytes < 0.75 * made.floor(made.target, tokens=1000)  # all of them


def test_floors_count_the_experts_of_the_tokens_of_a_call():
    made, one = programs(), 3 * 2048 * 768 * 2 / 4  # bytes of an expert, per device
    without = dataclasses.replace(made, target=programs(experts=dataclasses.replace(EXPERTS, num_experts=4)).target)
    router = (32 - 4) * 2048 * 2
    for tokens in (1, 2, 5):
        more = made.floor(made.target, tokens=tokens) - without.floor(without.target, tokens=tokens)
        assert more == pytest.approx(one * (EXPERTS.expected_touched(tokens) - 4) + router, rel=1e-6)
    rows = dataclasses.replace(made, batch=5)
    caches = rows.floor(rows.target, 1.0) - rows.floor(rows.target, 0.0)
    assert rows.floor(rows.target, 0.0) == made.floor(made.target, 0.0, tokens=5) and caches > 0
    of_round = made.floor_of_round(4)
    assert of_round == made.floor(made.target, tokens=5) + 4 * made.floor(made.target)


def test_a_step_may_feed_one_token_where_one_more_reads_more_experts():
    assert step_windows(programs(), programs().target) == (1, *STEP_WINDOWS)
    assert step_windows(programs(experts=None), programs(experts=None).target) == STEP_WINDOWS


def test_shapes_count_the_same_experts():
    shape = Shape.of(CONFIG)
    dense = Shape.of(dataclasses.replace(CONFIG, experts=None, feedforward_width=4 * 768))
    router = 2048 * 32
    assert shape.weight_bytes("bfloat16", 1) == dense.weight_bytes("bfloat16", 1) + 2 * router
    touched = EXPERTS.expected_touched(5) - EXPERTS.expected_touched(1)
    more = shape.weight_bytes("bfloat16", 5) - shape.weight_bytes("bfloat16", 1)
    assert more == pytest.approx(touched * 3 * 2048 * 768 * 2)

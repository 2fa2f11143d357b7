"""Kernels compiled for TPU slices with libtpu: the bytes that they move, without copies."""

import functools

import jax
import jax.numpy as jnp
import pytest

from specsamp import TransformerLM
from specsamp.decoding.data_shards import BY_ROWS, REPLICATED, DataShards
from specsamp.mesh.layout import Layout
from specsamp.mesh.sharded import shard_model
from specsamp.models.compiling import ON_TPU
from specsamp.models.config import TransformerConfig, chinchilla_70b
from specsamp.models.interface import Block
from specsamp.models.kernels.dispatch import PallasKernels
from specsamp.tpu import schedules
from specsamp.tpu.hlo import Array, Instruction
from specsamp.tpu.kernels import (
    COUNTS,
    count_attention,
    count_delta,
    count_experts,
    count_rows,
    count_small,
    kernel_of,
)
from specsamp.tpu.lowering import Programs
from specsamp.tpu.program import measure_program
from specsamp.tpu.schedules import Schedule
from specsamp.tpu.topology import described_mesh
from specsamp.tpu.traffic import traffic_of
from support import extras

TWO_OF_SIXTEEN = "experts_2_tokens_2_of_16_here_16_blocks_of_2"
libtpu = extras.needs("libtpu")


def array(*sizes, itemsize=2, in_hbm=True):
    bytes_ = itemsize
    for size in sizes:
        bytes_ *= size
    return Array(bytes=bytes_, in_hbm=in_hbm, sizes=sizes)


def call(*made, scope=""):
    return Instruction("x", "custom-call", made, (), f'metadata={{op_name="{scope}"}}', False)


def test_kernel_traffic_follows_from_shapes():
    """Two rows of eight kv heads and 2048 slots, in blocks of 256; windows of distances have two
    tiles more.
    """
    query = array(2, 8, 5, 128)
    cache = array(2, 8, 2048, 128)
    distances = array(2, 8, 5, 2048, itemsize=4)
    given = [array(1, itemsize=4), query, cache, cache, array(2, 5, 2, itemsize=4), distances]
    small = sum(x.bytes for x in (given[0], query, given[4]))
    for live, share in ((1.0, 1.0), (0.25, 0.25), (0.26, 0.375), (0.0, 0.125)):
        moved = small + share * (2 * cache.bytes + 2 * distances.bytes), query.bytes
        # Steps of four heads.
        assert count_attention(call(query), given, live) == (*moved, 2 * 2 * 8 * share)
    new = array(2, 8, 5, 128)
    read, written, steps = count_rows(call(cache, cache), [given[0], new, new, cache, cache], 1.0)
    assert steps == 2
    assert written == 2 * 2 * 8 * 32 * 128 * 2, "two tiles of 16 slots of each row"
    assert read == written + given[0].bytes + 2 * new.bytes
    in_int8 = [array(2, 8, 2048, 128, itemsize=1), array(2, 8, 1, 2048, itemsize=4)]
    rows = [array(2, 8, 5, 128, itemsize=1), array(2, 8, 1, 256, itemsize=4)]
    _, written, _ = count_rows(call(*in_int8), [given[0], *rows, *in_int8], 1.0)
    assert written == 2 * 8 * (64 * 128 + 256 * 4), "two tiles of 32 slots, and of 128 scales"
    stream = array(1, 160, 8192)
    assert count_small(call(stream), [stream], 1.0) == (stream.bytes, stream.bytes, 5)
    delta = [array(3, 4, 1024), array(3, 8, 128, 128), array(3, 4, 67, 516), array(3)]
    moved = sum(x.bytes for x in delta)
    assert count_delta(call(*delta), delta, 1.0) == (moved, moved, 3 * 4), "of three sequences"
    matrices, x = [array(16, 512, 2048)] * 3, array(2, 2048)
    read, written, steps = count_experts(
        call(x, scope=TWO_OF_SIXTEEN), [x, array(2, 16, in_hbm=False), *matrices], 1.0
    )
    chosen = 16 * (1 - (14 / 16) ** 2)
    assert steps == pytest.approx(2 * chosen) and written == x.bytes, "halves of 3 MB"
    assert read == pytest.approx(x.bytes + chosen / 16 * 3 * matrices[0].bytes)


def test_only_our_kernels_are_counted_as_kernels():
    def op(target, scope):
        attributes = (
            f', custom_call_target="{target}", metadata={{op_name="jit(call)/{scope}/pallas_call"}}'
        )
        return Instruction("x", "custom-call", (), (), attributes, False)

    assert kernel_of(op("tpu_custom_call", "append_rows")) is count_rows
    assert kernel_of(op("tpu_custom_call", "shard_map/decode_attention")) is count_attention
    assert kernel_of(op("tpu_custom_call", "flash_attention")) is None
    assert kernel_of(op("Sharding", "append_rows")) is None


BUNDLES = """= control target key start
LB: loop body
     0   :  { %s1 = sld [smem:[#allocation0]] /* core id */
hlo: x
 */ }
   0x1   :  { %2 = vwait.ge.trace [#allocation12], 1 }
   0x2 LB: > { %3 = sst [smem:[#allocation1]] %s1 }
   0x3   : > { }
   0x4 PF: >> { %s4 = sadd.s32 1, %s1 }
   0x5 PF:  {} /* exit bundle */
"""


def test_loop_traffic_counts_steps_and_pipeline():
    schedule = Schedule.parse(BUNDLES)
    assert schedule == Schedule(once=3, in_loop=3, cores=1)
    assert schedule.cycles(steps=10) == 3 + 3 * 12
    assert Schedule.parse(BUNDLES, passes=16) == Schedule(once=3, in_loop=2 + 16, cores=1)
    flat = Schedule.parse(BUNDLES.replace(">>", ">"), passes=16)
    assert flat.cycles(steps=1) == 3 + 16 * 3, "of one step the passes alone are a loop"
    assert flat.cycles(steps=10) == 3 + 3 * 12, "of several they have none"
    assert (
        Schedule.parse(BUNDLES.replace("> { }", "> { } /* core id */")).cycles(steps=10)
        == 3 + 3 * 7
    )


@pytest.mark.slow
@libtpu
def test_layer_with_kernels_moves_its_floor():
    """The paper's target at batch 8; without kernels a layer moves a quarter more."""
    mesh = described_mesh("v4:2x2x4", rows=8)

    def call(layers):
        model = TransformerLM(chinchilla_70b(num_layers=layers), kernels=PallasKernels())
        model = shard_model(model, Layout.tensor_parallel(mesh))
        made = Programs(target=model, draft=model, mesh=mesh, sampling=None, batch=8, slots=2048)
        floor = functools.partial(made.floor, model, tokens=5)
        lowered = functools.partial(made.call, model, 5)
        return measure_program("call", 5, floor, lowered, "v4:2x2x4", layers=layers)

    with jax.default_matmul_precision("default"):
        few, many = call(1), call(2)
    floor = many.floor_bytes - few.floor_bytes
    assert 0.95 * floor < many.hbm_bytes - few.hbm_bytes < 1.05 * floor
    floor = many.live_floor_bytes - few.live_floor_bytes
    assert 0.95 * floor < many.live_hbm_bytes - few.live_hbm_bytes < 1.1 * floor
    assert many.live_hbm_bytes < 0.9 * many.hbm_bytes
    assert many.num_copies == 0 and many.host_transfers == 0
    # The final norm is a kernel, too.
    assert many.kernel_cycles == pytest.approx(2 * few.kernel_cycles, rel=0.1)
    assert many.memory.outputs < 20e6, (
        "logits alone: the caches that come back are those that were given"
    )
    assert many.collectives["all-reduce"] == few.collectives["all-reduce"] + 2


SHAPES = {
    "float32": dict(dtype="float32", num_kv_heads=2),
    "windowed, capped, in int8": dict(
        dtype="bfloat16", num_kv_heads=1, window=100, attention_cap=50.0, cache_dtype="int8"
    ),
    "pairs, windowed, in int8": dict(
        dtype="bfloat16", num_kv_heads=2, head_size=64, window=100, cache_dtype="int8"
    ),
}


@pytest.mark.slow
@libtpu
@pytest.mark.parametrize("shape", SHAPES)
def test_a_tree_compiles_within_data_shards(shape):
    """The tree has more rows than a tile; its slots are no power of two; rows are in two shards."""
    nodes, slots, batch = 34, 384, 2
    config = TransformerConfig(
        vocab_size=256,
        width=256,
        num_layers=1,
        num_heads=4,
        positions="rotary",
        **dict(head_size=128) | SHAPES[shape],
    )
    mesh = described_mesh("v5e:2x2", 2, num_kv_heads=config.num_kv_heads)
    model = shard_model(
        TransformerLM(config, kernels=PallasKernels()), Layout.tensor_parallel(mesh)
    )
    programs = Programs(
        target=model, draft=model, mesh=mesh, sampling=None, batch=batch, slots=slots
    )

    def call(weights, tokens_BT, start_B, cache, visible_BTR):
        block = Block(
            start_B=start_B, positions_BT=start_B[:, None] + 0 * tokens_BT, visible_BTR=visible_BTR
        )
        output = model(weights, tokens_BT, start_B, cache, block=block)
        rows_BT = jnp.cumsum(tokens_BT[:, :5], axis=1)
        return output.logits_BTV, model.compact(output.cache, start_B, rows_BT, nodes)

    split = DataShards(mesh).map(call, (REPLICATED, *[BY_ROWS] * 4))
    sizes = ((batch, nodes), jnp.int32), ((batch,), jnp.int32), ((batch, nodes, nodes), jnp.bool)
    tokens_BT, start_B, visible_BTR = programs._by_rows(
        [jax.ShapeDtypeStruct(*size) for size in sizes]
    )
    arguments = programs.weights(model), tokens_BT, start_B, programs.cache(model), visible_BTR
    compiled = (
        jax.jit(split, donate_argnums=3).lower(*arguments).compile(compiler_options=dict(ON_TPU))
    )
    text = compiled.as_text()
    # Appended rows, attention, moved rows, norms; also rotations of whole lanes.
    called = 6 + (config.head_size == 128)
    assert text.count('custom_call_target="tpu_custom_call"') == called
    cache = (
        2
        * batch
        * config.num_kv_heads
        * slots
        * config.head_size
        * (1 if config.cache_dtype else 4)
    )
    devices = 4 if config.num_kv_heads == 2 else 2
    assert compiled.memory_analysis().alias_size_in_bytes >= cache / devices
    alone = traffic_of(text)
    traffic = traffic_of(text, schedules=schedules.take(*COUNTS))
    assert traffic.copies == [] and alone.kernel_cycles == 0
    assert traffic.cycles - alone.cycles == pytest.approx(traffic.kernel_cycles)
    assert traffic.kernel_cycles > 2000

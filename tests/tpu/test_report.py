"""Programs compiled for real TPU slices with libtpu, on this CPU: Chinchilla at full width, one and
two layers.

Fixed costs cancel in the difference of the two depths. test_traffic.py shows that copies are
counted.
"""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from specsamp import RecursiveRule, TokenRule, TransformerLM, TreeShape, chain, top_p
from specsamp.analysis.report import as_json
from specsamp.mesh.layout import Layout
from specsamp.mesh.sharded import draft_layout, shard_model
from specsamp.models import slots as cache_slots
from specsamp.models.compiling import ON_TPU, is_out_of_memory
from specsamp.models.config import TransformerConfig, chinchilla_70b, draft_4b
from specsamp.models.dflash import BlockConfig
from specsamp.models.eagle import Eagle3Config
from specsamp.models.heads import FeatureHead
from specsamp.models.kernels.dispatch import choose_kernels
from specsamp.models.medusa import MedusaConfig
from specsamp.sampling.rules import take_row
from specsamp.tpu.lowering import Programs, WindowStep, sharded_head_model
from specsamp.tpu.pair_report import compile_report, compiled_costs
from specsamp.tpu.program import largest_buffers
from specsamp.tpu.topology import described_mesh, parse
from support import extras
from support.refusals import refusal
from support.weights import shapes_of

OPTIMISED = True
pytestmark = extras.needs("libtpu")

TOPOLOGY, K = "v4:2x2x4", 3  # of two draft steps in a loop; the paper has K = 4


@pytest.fixture(autouse=True)
def products_as_they_are_launched():
    """Sets the default precision: products in float32, as in other tests, change TPU programs."""
    with jax.default_matmul_precision("default"):
        yield


def programs(mesh, target_layers, draft_layers=1, batch=1, slots=2048, **changes):
    target = shard_model(
        TransformerLM(chinchilla_70b(num_layers=target_layers, **changes)),
        Layout.tensor_parallel(mesh),
    )
    draft = shard_model(
        TransformerLM(draft_4b(num_layers=draft_layers, **changes)), draft_layout(mesh)
    )
    return Programs(
        target=target, draft=draft, mesh=mesh, sampling=chain(top_p(0.8)), batch=batch, slots=slots
    )


CALLS = "target step", "score"


@functools.cache
def compiled(target_layers, name):
    """Returns one program of the pair; the tests that need it share it."""
    made = programs(described_mesh(TOPOLOGY), target_layers)
    report = compile_report(made, topology=TOPOLOGY, size=K, rule=TokenRule(), names=(name,))
    return report[name]


@pytest.mark.slow
@pytest.mark.parametrize("name", [*CALLS, "round"])
def test_nothing_is_copied_and_nothing_leaves_the_device(name):
    program = compiled(2, name)
    assert program.num_copies == 0 and program.host_transfers == 0
    # All further loops are counted as often as they run.
    assert program.open_loops == (name == "round")
    assert program.memory.temporaries < 100e6
    assert program.memory.total < program.memory.capacity


@pytest.mark.slow
@pytest.mark.parametrize("name", CALLS)
def test_layer_moves_its_floor_and_all_reduces(name):
    """A layer reads its weights and caches once, and its computation hides behind these reads."""
    few, many = compiled(1, name), compiled(2, name)
    moved = many.hbm_bytes - few.hbm_bytes
    floor = many.floor_bytes - few.floor_bytes
    assert 0.95 < moved / floor < 1.05
    chip, _ = parse(TOPOLOGY)
    streaming_ms = many.streaming_ms(chip) - few.streaming_ms(chip)
    assert (many.cycles - few.cycles) / chip.clock_hz * 1e3 < streaming_ms
    assert many.collectives == few.collectives | {"all-reduce": 2 * 2 + 1}
    # One for the embedding, one for the logits.
    assert few.collectives == {"all-reduce": 2 + 1, "all-gather": 1}


def test_round_has_only_the_collectives_of_calls():
    """Only the K calls of a one-layer draft and the call of the target have collectives."""
    assert compiled(2, "round").collectives == {
        "all-reduce": K * 3 + 2 * 2 + 1,
        "all-gather": K + 1,
    }


@pytest.mark.slow
def test_early_exit_round_has_only_target_weights():
    """The first of two layers drafts one step (more: test_compiled.py); nothing is copied or stored
    twice.

    The two shards of rows agree on the end by one further collective, and exchange nothing more.
    """
    made = programs(described_mesh(TOPOLOGY, 2), 2, draft_layers=1, batch=2)
    cut = shard_model(made.target.model.first(1), made.target.layout)
    inside = dataclasses.replace(made, draft=cut, inside=True)
    found = compile_report(inside, topology=TOPOLOGY, size=1, rule=TokenRule(), names=("round",))
    assert found["round"].num_copies == 0 and found["round"].host_transfers == 0
    assert found["round"].collectives == {"all-reduce": 3 + 2 * 2 + 1 + 1, "all-gather": 1 + 1}
    alone = dataclasses.replace(made, draft=made.target, inside=True)
    assert inside.bytes_of_state() == alone.bytes_of_state()
    assert found["round"].memory.arguments < 1.01 * sum(inside.bytes_of_state())
    assert found["round"].hbm_bytes < 1.05 * found["round"].floor_bytes


KERNELS = choose_kernels("auto", backend="tpu")
SHAPE = dict(
    vocab_size=8192,
    width=2048,
    num_heads=16,
    num_kv_heads=8,
    feedforward_width=4096,
    dtype="bfloat16",
)
ROTARY = TransformerConfig(
    num_layers=2, positions="rotary", gated=True, tied=False, max_positions=2048, **SHAPE
)


@pytest.mark.slow
def test_windows_draft_reads_no_more_of_longer_caches():
    """The control drafts with the first layer, which attends to all slots. Tokens of the text grow,
    too.
    """
    mesh = described_mesh("v5e:2x2")
    target = TransformerLM(dataclasses.replace(ROTARY, max_positions=131072), kernels=KERNELS)

    def drafted(draft, slots):
        made = Programs(
            target=shard_model(target, Layout.tensor_parallel(mesh)),
            draft=shard_model(draft, draft_layout(mesh)),
            mesh=mesh,
            sampling=chain(top_p(0.8)),
            batch=2,
            slots=slots,
            inside=True,
        )
        found = compile_report(
            made, topology="v5e:2x2", size=K, rule=TokenRule(), names=("score", "round")
        )
        assert found["round"].memory.arguments < 1.02 * sum(made.bytes_of_state())
        return found["round"].hbm_bytes - found["score"].hbm_bytes

    window = WindowStep(target.config, kernels=KERNELS, window=500, sinks=4)
    more, control = (
        drafted(draft, 131072) - drafted(draft, 8192) for draft in (window, target.first(1))
    )
    assert 0 <= 100 * more < control


OF_HEAD = dict(layer=dataclasses.replace(ROTARY, num_layers=1), target_layers=2, own_output=True)


def programs_with(head):
    mesh = described_mesh("v5e:2x2")
    return Programs(
        target=shard_model(TransformerLM(ROTARY), Layout.tensor_parallel(mesh)),
        draft=sharded_head_model(TransformerLM(ROTARY), head, draft_layout(mesh)),
        mesh=mesh,
        sampling=chain(top_p(0.8)),
        batch=1,
        slots=1024,
    )


def test_medusa_step_reads_one_head():
    """Memory holds all heads, but the reads of a step do not grow with their number."""
    two, three = (
        programs_with(FeatureHead(MedusaConfig(**OF_HEAD, hidden_layers=(2,), num_heads=n)))
        for n in (2, 3)
    )
    one_head = 2 * (8192 + 2048) * 2048 / 4
    assert two.floor(two.draft) == three.floor(three.draft) == pytest.approx(one_head, rel=0.01)
    assert three.bytes_of_state()[0] - two.bytes_of_state()[0] == pytest.approx(one_head, rel=0.01)


ONE_LAYER = dataclasses.replace(ROTARY, num_layers=1)
BLOCK = BlockConfig(layer=ONE_LAYER, target_layers=2, hidden_layers=(0,), block_size=3, mask_id=0)
EAGLE = Eagle3Config(**OF_HEAD, hidden_layers=(0, 1), draft_vocab_size=4096)


@pytest.mark.slow
@pytest.mark.parametrize(
    "config, size, tokens, rule, calls",
    [(BLOCK, 2, 3, TokenRule(), 1), (EAGLE, TreeShape((0, 0, 1)), 4, RecursiveRule(), 2)],
    ids=["block", "tree"],
)
def test_round_has_the_calls_of_its_drafter(config, size, tokens, rule, calls):
    """A block is one call, a tree one for each level; chips exchange nothing more, and memory holds
    the weights of head and target.
    """
    made = programs_with(config.head())
    found = compile_report(made, topology="v5e:2x2", size=size, rule=rule, names=("round",))
    of_round = found["round"]
    assert (of_round.calls, of_round.layers, of_round.tokens) == (calls + 1, calls + 2, tokens)
    assert set(of_round.collectives) == {"all-reduce", "all-gather"}
    floor = made.floor(made.target, tokens=tokens) + calls * made.floor(made.draft)
    assert of_round.floor_bytes == pytest.approx(floor, rel=0.1)
    assert of_round.hbm_bytes < 1.15 * floor and of_round.num_copies == 0
    assert of_round.memory.arguments == pytest.approx(sum(made.bytes_of_state()), rel=0.02)
    of_head = shapes_of(config.head())
    alone = dataclasses.replace(made, draft=made.target, inside=True)
    assert sum(made.bytes_of_state()) - sum(alone.bytes_of_state()) == pytest.approx(
        2 * sum(leaf.size for leaf in jax.tree.leaves(of_head)) / 4, rel=0.1
    )
    if rule.trees:
        step = dataclasses.replace(of_round, name="target step")
        with refusal("is of a token tree"):
            compiled_costs(as_json(dataclasses.replace(found, programs=[step, of_round])))


@pytest.mark.slow
def test_rows_are_sampled_apart():
    """Each of eight rows is on two of 16 chips; all rows on every chip took twice the cycles."""
    made = programs(described_mesh(TOPOLOGY, rows=8), 1, batch=8, slots=512, vocab_size=4096)
    made = compile_report(made, topology=TOPOLOGY, size=1, rule=TokenRule(), names=("round",))[
        "round"
    ]
    assert made.num_copies == 0 and made.host_transfers == 0
    assert made.collectives["all-to-all"] == 1 + 1  # the distributions of each call, to their rows
    # The collectives of the calls, and a few small ones of tokens and acceptance: warping a
    # distribution would take 36 each time.
    assert sum(made.collectives.values()) <= (1 + 1) * (3 + 1 + 1) + 25


@pytest.mark.slow
@pytest.mark.parametrize("options, has_others", [(ON_TPU, False), (ON_TPU[:1], True)])
def test_matrices_keep_their_tiles_on_v7x(options, has_others):
    """For tiles of sixteen rows the compiler copied every weight before the loop."""
    made = programs(described_mesh("tpu7x:2x2x1"), 1, slots=512, vocab_size=4096)
    text = made.round(1, TokenRule()).compile(compiler_options=dict(options)).as_text()
    assert ("T(16,128)" in text) == has_others


def test_rows_of_a_tree_are_read_without_collectives():
    """Reading each sequence's row by itself moved all rows' distributions to one device."""
    mesh = described_mesh("v5e:2x2", rows=4)
    by_rows = NamedSharding(mesh, PartitionSpec(mesh.axis_names))
    on_all = NamedSharding(mesh, PartitionSpec())
    x_BTV = jax.ShapeDtypeStruct((8, 6, 4096), jnp.float32, sharding=by_rows)
    row_B = jax.ShapeDtypeStruct((8,), jnp.int32, sharding=on_all)
    made = jax.jit(take_row, out_shardings=by_rows).lower(x_BTV, row_B).compile()
    assert not re.search(r" (all-|collective-)[a-z]+(-start)?\(", made.as_text())
    assert made.cost_analysis()["bytes accessed"] < 8 * 6 * 4096 * 4


@pytest.mark.slow
@pytest.mark.parametrize("unrolled, loops", [(cache_slots.MAX_UNROLLED_ROWS, 0), (1, 5)])
def test_rows_are_not_looped_over(monkeypatch, unrolled, loops):
    """Keys, values and relative scores have an offset for each row: a scatter or gather would be a
    loop on a TPU.
    """
    monkeypatch.setattr(cache_slots, "MAX_UNROLLED_ROWS", unrolled)
    made = programs(described_mesh(TOPOLOGY), 1, batch=2, slots=512, vocab_size=4096)
    text = made.call(made.target, 2).compile(compiler_options=dict(ON_TPU)).as_text()
    assert text.count(" while(") == loops


def test_out_of_memory_is_a_result():
    """The caches of 64 long texts do not fit on four chips, and the compiler's message is kept."""
    large = programs(described_mesh("v5e:2x2"), 1, batch=64, slots=65536, max_positions=65536)
    made = compile_report(
        large, topology="v5e:2x2", size=4, rule=TokenRule(), names=("target step",)
    )["target step"]
    assert made.memory is None and "hbm" in made.out_of_memory.lower()


def test_bytes_of_the_pair_fit_the_slice():
    mesh = described_mesh(TOPOLOGY)

    def bytes_of(target_layers, draft_layers):
        return np.array(programs(mesh, target_layers, draft_layers).bytes_of_state())

    # For 80 and 8 layers, of which at most two are traced: layers are equal, and slow to trace.
    one = bytes_of(1, 1)
    weights, caches = one + 79 * (bytes_of(2, 1) - one) + 7 * (bytes_of(1, 2) - one)
    assert weights == pytest.approx((129.4e9 + 2.7e9 + 8.24e9 * 12 / 13) / 16, rel=0.02)
    assert caches == (2_621_440 + 196_608) * 2048 / 16
    few, many = (
        programs(mesh, 2, batch=b, slots=s).bytes_of_state()[1] for b, s in ((1, 2048), (8, 4096))
    )
    assert many == 16 * few


@pytest.mark.parametrize(
    "changes, draft_length, message",
    [
        (dict(slots=4096), 4, "slots must be .* below 2049; got 4096"),
        (dict(slots=8), 4, "slots must be an integer >= 16 .*got 8"),
        (dict(), 0, "draft_length must be an integer >= 1 .*got 0"),
    ],
)
def test_impossible_sizes_are_refused(changes, draft_length, message):
    made = dataclasses.replace(programs(described_mesh(TOPOLOGY), 1), **changes)
    with refusal(message):
        compile_report(made, topology=TOPOLOGY, size=draft_length, rule=TokenRule())


def test_missing_libtpu_is_named(monkeypatch):
    def missing(*_, **__):
        raise RuntimeError("JAX TPU support not installed; cannot generate TPU topology.")

    monkeypatch.setattr("jax.experimental.topologies.get_topology_desc", missing)
    with refusal("no libtpu here: pip install libtpu.*x86-64"):
        described_mesh(TOPOLOGY)


def test_compiler_message_is_reduced_to_its_buffers():
    message = (
        "RESOURCE_EXHAUSTED: Ran out of memory in memory space hbm. Used 20G of 15G.\nnoise\n  "
        "Size: 2.00G\n"
    )
    assert largest_buffers(message).splitlines()[1] == "Size: 2.00G"
    assert "noise" not in largest_buffers(message)
    assert is_out_of_memory(RuntimeError(message))

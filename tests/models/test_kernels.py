"""Kernels, interpreted on the CPU, equal their plain forms, and fetch only visible blocks."""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from absl import logging
from numpy.testing import assert_allclose, assert_array_equal

from models.test_blocks import PARENTS, PATHS, block_of
from specsamp import (
    Pair,
    TransformerLM,
    chain,
    generate,
    greedy,
    min_p,
    penalties,
    temperature,
    top_k,
    top_p,
)
from specsamp.models.cache import Int8KVCache, KVCache, LayerCache, PairedInt8KVCache, PairedKVCache
from specsamp.models.config import ExpertsConfig, tiny
from specsamp.models.dflash import BlockConfig
from specsamp.models.eagle import Eagle3Config
from specsamp.models.interface import Block
from specsamp.models.kernels import dispatch as kernel_cache
from specsamp.models.kernels.append_rows import append_rows
from specsamp.models.kernels.common import stream_steps
from specsamp.models.kernels.decode_attention import block_shape
from specsamp.models.kernels.dispatch import PallasKernels, choose_kernels
from specsamp.models.kernels.first_call import reason_for_plain
from specsamp.models.modules import Norm
from specsamp.models.mtp import MTPConfig
from specsamp.models.slots import write_slots
from specsamp.models.visibility import Visibility
from specsamp.sampling.rules import Draft, TargetDistributions
from specsamp.sampling.warp import first_tokens, with_kernels
from support.calls import call, compact
from support.enumeration import COMPILE_FAST
from support.extras import slow_but
from support.weights import drawn_params

SIZE = 128
INTERPRETED = PallasKernels(interpret=True)
TWO_OF_FOUR = ExpertsConfig(num_experts=4, experts_per_token=2, width=24)


def drawn(*shape, dtype="float32", seed=0):
    return jnp.asarray(np.random.default_rng([seed, *shape]).normal(size=shape), dtype)


def starts_of(batch, slots, length):
    """Returns ragged starts: the last possible one, one across the edge of a tile, and the
    first.
    """
    return jnp.asarray([slots - length, 31, 0, 250][:batch], jnp.int32).clip(0, slots - length)


@dataclasses.dataclass(frozen=True, kw_only=True)
class TwoCores(PallasKernels):
    interpret: bool = True
    cores = 2


@functools.partial(
    jax.jit, static_argnames=("window", "cap", "int8", "kernels"), compiler_options=COMPILE_FAST
)
def both(
    q,
    keys,
    values,
    start,
    distances=None,
    block=None,
    sinks=None,
    *,
    window=None,
    cap=None,
    int8=False,
    kernels=INTERPRETED,
):
    """Returns attention by the kernel, for heads of 64 on pairs of keys and values, and by its
    plain form.
    """
    visible = Visibility(start_B=start, num_queries=q.shape[2], window=window, block=block)
    plain = of_kernel = Int8KVCache.of(keys, values) if int8 else KVCache.of(keys, values)
    if keys.shape[3] == SIZE // 2:
        of_kernel = PairedInt8KVCache.of(keys, values) if int8 else PairedKVCache.of(keys, values)
    of_kernel = dataclasses.replace(of_kernel, kernels=kernels)
    assert kernels.take(of_kernel.num_slots, q.shape[2], q.shape[1] // keys.shape[1])
    fields = dict(scale=0.1, distances_BNTS=distances, cap=cap, sinks_N=sinks)
    return of_kernel.attend(q, visible, **fields), plain.attend(q, visible, **fields)


# Tokens of a call, slots, kv heads, queries per kv head, window, whether scores have distances, and
# their cap.
CALLS = {
    "multi-head": (1, 384, 4, 1, None, True, None),
    "grouped": (5, 640, 2, 4, None, False, 30.0),
    "grouped, with distances": (5, 1280, 4, 3, None, True, 30.0),
    "multi-query": (17, 2048, 1, 6, None, False, None),
    "windowed": (33, 1024, 2, 2, 40, True, None),
    "one block": (34, 128, 1, 1, 3, True, None),
    "many rows": (128, 1152, 3, 2, 300, True, None),
}


@pytest.mark.parametrize(
    "call, dtype, size",
    [
        *((call, "float32", SIZE) for call in CALLS),
        ("grouped", "int8", SIZE),
        ("windowed", "int8", SIZE // 2),
        ("grouped, with distances", "int8", SIZE),
        ("grouped, with distances", "float32", SIZE // 2),
        ("grouped", "bfloat16", SIZE // 2),
        *slow_but([(call, "bfloat16", SIZE) for call in ("windowed", "many rows")]),
    ],
)
def test_attention_equals_the_plain_form(call, dtype, size):
    length, slots, kv_heads, group, window, distant, cap = CALLS[call]
    int8 = dtype == "int8"
    dtype = "float32" if dtype == "int8" else dtype
    q = drawn(3, kv_heads * group, length, size, dtype=dtype, seed=1)
    keys, values = (drawn(3, kv_heads, slots, size, dtype=dtype, seed=seed) for seed in (2, 3))
    distances = 10 * drawn(3, kv_heads * group, length, slots) if distant else None
    start = starts_of(3, slots, length)
    sinks = drawn(kv_heads * group, seed=5) if group > 1 else None
    given = q, keys, values, start, distances, None
    ours, plain = both(*given, sinks, window=window, cap=cap, int8=int8)
    assert ours.dtype == dtype
    assert_allclose(
        *(np.asarray(x, np.float32) for x in (ours, plain)),
        atol=2e-2 if dtype == "bfloat16" else 2e-6,
    )
    earlier = q, keys, values, jnp.maximum(start - 1, 0), distances, None, sinks
    one_less = both(*earlier, window=window, cap=cap)[0]
    assert jnp.abs(ours - one_less)[1].max() > 0.05, "the control: a row that begins a slot earlier"
    if sinks is not None:
        without = both(*given, window=window, cap=cap, int8=int8)[0]
        assert jnp.abs(ours - without).max() > 0.01, "the control: no sinks"
    if int8:
        as_it_is = both(*given, sinks, window=window, cap=cap)[0]
        assert jnp.abs(ours - as_it_is).max() > 1e-4, "the control: a cache in float"


@pytest.mark.parametrize(
    "kv_heads, batch, int8", [(1, 4, True), (1, 1, False), (2, 3, False), (3, 4, True)]
)
def test_cores_share_sequences_or_heads(kv_heads, batch, int8):
    """Cores divide ragged sequences if they do not divide heads; a single sequence has one core."""
    length, slots = 5, 640
    q, distances = (drawn(batch, 2 * kv_heads, length, last, seed=1) for last in (SIZE, slots))
    keys, values = (drawn(batch, kv_heads, slots, SIZE, seed=seed) for seed in (2, 3))
    sinks = drawn(2 * kv_heads, seed=5)
    given = q, keys, values, starts_of(batch, slots, length), distances, None, sinks
    assert_allclose(*both(*given, window=300, int8=int8, kernels=TwoCores()), atol=2e-6)


@pytest.mark.parametrize(
    "window, size, int8",
    [(None, SIZE, False), (3, SIZE, False), (3, SIZE // 2, False), (3, SIZE, True)],
)
def test_trees_equal_the_plain_form(window, size, int8):
    """Covers a tree that is scored in several calls, and that crosses the edge of a block."""
    parents = np.array([*PARENTS, range(-1, 5)])
    start = np.array([7, 254, 500])
    block = block_of(parents, start)
    keys, values = (drawn(3, 2, 512, size, seed=seed) for seed in (2, 3))
    q = drawn(3, 4, 6, size, seed=1)
    distances = 10 * drawn(3, 4, 6, 512)
    given = (q, keys, values, jnp.asarray(start), distances)
    sinks = drawn(4, seed=5)
    ours, plain = both(*given, block, sinks, window=window, int8=int8)
    assert_allclose(ours, plain, atol=2e-6)
    causal = both(*given, None, sinks, window=window, int8=int8)[0]
    assert jnp.abs(ours - causal)[:2].max() > 0.05, "the control: a chain"
    later = Block(
        start_B=block.start_B,
        positions_BT=block.positions_BT[:, 3:],
        visible_BTR=block.visible_BTR[:, 3:],
    )
    ours, plain = both(
        q[:, :, 3:], keys, values, jnp.asarray(start + 3), None, later, window=window, int8=int8
    )
    assert_allclose(ours, plain, atol=2e-6)


@pytest.mark.parametrize("window", [None, 100])
def test_only_blocks_that_are_seen_are_fetched(window):
    """Blocks that are not fetched may hold NaN, which even a weight of zero would spread."""
    slots, start = 2048, jnp.asarray([300, 1100], jnp.int32)
    _, block = block_shape(8, slots, SIZE, 4)
    assert block == 256
    q = drawn(2, 8, 2, SIZE)
    keys = drawn(2, 8, slots, SIZE, seed=1)
    values = drawn(2, 8, slots, SIZE, seed=2)
    expected = both(q, keys, values, start, window=window)[0]
    first = np.zeros(2, int) if window is None else (np.asarray(start) - window + 1) // block
    last = (np.asarray(start) + 1) // block
    blocks = np.arange(slots) // block
    dead = (blocks[None] < first[:, None]) | (blocks[None] > last[:, None])
    poisoned = [jnp.where(dead[:, None, :, None], jnp.nan, x) for x in (keys, values)]
    assert_array_equal(both(q, *poisoned, start, window=window)[0], expected)
    values = poisoned[1].at[:, :, (start + 2)[0]].set(jnp.nan)
    assert jnp.isnan(both(q, poisoned[0], values, start, window=window)[0]).any(), (
        "the control: a block that is seen"
    )


@pytest.mark.parametrize(
    ("dtype", "length"),
    [
        *(("bfloat16", length) for length in (1, 17, 34, 128)),
        ("float32", 5),
        *(("int8", length) for length in (1, 5, 34, 128)),
    ],
)
def test_rows_are_appended_as_they_are(dtype, length):
    """Each row is written at its own start, across edges of tiles; the excess at both ends is
    dropped, and nothing else changes.
    """
    slots = 384
    start = jnp.concatenate([starts_of(4, 384, length), jnp.array([-5, 383])])
    caches = [(20 * drawn(6, 2, slots, SIZE, seed=seed)).astype(dtype) for seed in (1, 2)]
    new = [(20 * drawn(6, 2, length, SIZE, seed=seed)).astype(dtype) for seed in (3, 4)]
    if dtype == "int8":  # and the scales
        caches.append(drawn(6, 2, 1, slots))
        new.append(drawn(6, 2, 1, length))
    append = jax.jit(functools.partial(append_rows, interpret=True), compiler_options=COMPILE_FAST)
    for made, cache, rows in zip(
        append(tuple(caches), tuple(new), start), caches, new, strict=True
    ):
        axis = 3 if cache.shape[2] == 1 else 2
        assert_array_equal(made, write_slots(cache, rows, start, axis))


def test_large_streams_are_normalised_in_steps():
    x, y = (drawn(1, 130, 4224, dtype="bfloat16", seed=seed) for seed in (1, 2))
    assert INTERPRETED.take_small(x) and stream_steps(x.shape) == 5
    params = {"params": {"scale": 1 + drawn(4224, seed=3)}}
    ours, plain = (
        Norm(tiny(), kernels=kernels).apply(params, x, y, method="after")
        for kernels in (INTERPRETED, None)
    )
    assert_array_equal(ours[0], plain[0])
    assert_allclose(*(np.asarray(each[1], np.float32) for each in (ours, plain)), rtol=1e-2)


# Models.

SCHEMES = {
    "relative": dict(positions="relative", num_kv_heads=2),
    "windowed, in int8": dict(
        positions="rotary", num_kv_heads=1, window=20, global_layers=(1,), cache_dtype="int8"
    ),
    "with norms of heads": dict(
        positions="rotary", num_kv_heads=2, norm="layer", query_key_norm=True, post_norms=True
    ),
    "as Granite": dict(
        positions="rotary",
        num_kv_heads=2,
        residual_scale=0.4,
        attention_scale=0.02,
        logit_divisor=4.0,
    ),
    "as OLMo": dict(
        positions="rotary",
        num_kv_heads=2,
        pre_norms=False,
        post_norms=True,
        joint_norm=True,
        window=20,
        global_layers=(1,),
        tied=False,
        width=144,  # the kernels' rows of embeddings are padded
    ),
    "in pairs": dict(positions="relative", num_kv_heads=2, head_size=SIZE // 2),
    "in pairs, in int8": dict(
        positions="rotary", num_kv_heads=2, head_size=SIZE // 2, cache_dtype="int8"
    ),
}


@pytest.mark.parametrize("scheme", slow_but(SCHEMES, "relative", "in pairs"))
def test_a_model_with_kernels_equals_one_without(scheme):
    """Covers a prompt, a tree, its compacted path, and a call after it."""
    plain = TransformerLM(tiny(**dict(head_size=SIZE, width=SIZE) | SCHEMES[scheme]))
    kernels = dataclasses.replace(plain, kernels=INTERPRETED)
    params = drawn_params(plain, 0, noise=0.1)
    rng = np.random.default_rng(0)
    start = jnp.asarray([26, 130], jnp.int32)
    prompt, nodes, after = (rng.integers(0, 64, (2, n), dtype=np.int32) for n in (140, 6, 6))
    block = block_of(PARENTS, np.asarray(start))
    rows = jnp.asarray(PATHS, jnp.int32)
    results = []
    for model in (plain, kernels):
        weights = model.fit_slots(model.prepare(params), 256)
        cache = call(
            model, weights, prompt, jnp.zeros(2, jnp.int32), model.init_cache(2, 256)
        ).cache
        scored = call(model, weights, nodes, start, cache, block=block)
        kept = compact(model, scored.cache, start, rows, 6)
        results.append((scored.logits_BTV, call(model, weights, after, start + 4, kept).logits_BTV))
    assert kept.layers[0].kernels == INTERPRETED
    padded = weights["params"]["embedding"].shape[1]
    assert padded == (2 * SIZE if scheme == "as OLMo" else plain.config.width)
    assert jax.tree.structure(kept) == jax.tree.structure(kernels.cache_axes())
    # In int8, a key between two numbers may round to either, if programs add in a different order.
    atol = 5e-3 if plain.config.cache_dtype == "int8" else 2e-5
    for ours, theirs in zip(*results, strict=True):
        assert_allclose(ours, theirs, atol=atol)


@pytest.mark.parametrize("in_int8", [None, "int8"])
def test_padded_embedding_of_a_head_has_the_same_rows(in_int8):
    layer = tiny(num_layers=1, width=144, head_size=36, positions="rotary", weight_dtype=in_int8)
    plain = Eagle3Config(
        layer=layer, target_layers=4, hidden_layers=(0, 1, 2), own_embedding=True, own_output=True
    ).head()
    params, tokens, found = drawn_params(plain), jnp.asarray([[3, 1, 4]]), []
    for head in (plain, dataclasses.replace(plain, kernels=INTERPRETED)):
        weights = head.prepare(params)
        found.append((head.embed(weights, tokens), jax.tree.leaves(weights["params"]["embedding"])))
    assert_array_equal(found[0][0], found[1][0])
    assert [leaves[0].shape[1] for _, leaves in found] == [144, 256]


OF_HEAD = dict(width=SIZE, head_size=SIZE, num_heads=4, num_kv_heads=2, positions="rotary")
BLOCK = dict(target_layers=4, hidden_layers=(0, 2), block_size=5, mask_id=3)
HEADS = {
    "eagle3": Eagle3Config(
        layer=tiny(num_layers=1, **OF_HEAD), target_layers=4, hidden_layers=(0, 1, 2)
    ),
    "mtp, in pairs": MTPConfig(
        layer=tiny(num_layers=1, **OF_HEAD | {"head_size": SIZE // 2}),
        target_layers=4,
        hidden_layers=(3,),
    ),
    "block": BlockConfig(
        layer=tiny(num_layers=2, query_key_norm=True, window=20, global_layers=(1,), **OF_HEAD),
        windows_both_ways=True,
        **BLOCK,
    ),
    "causal block": BlockConfig(
        layer=tiny(num_layers=2, window=3, global_layers=(1,), **OF_HEAD), causal=True, **BLOCK
    ),
}


@pytest.mark.parametrize("name", slow_but(HEADS, "block"))
def test_a_head_with_kernels_equals_one_without(name):
    """The first block stands in front of all slots, the second apart from its context."""
    config = HEADS[name]

    def is_layer(x):
        return isinstance(x, LayerCache)

    plain = config.head()
    weights = plain.prepare(drawn_params(plain, 0, noise=0.1))
    size = config.layer.head_size
    start_B = jnp.asarray([0, 124], jnp.int32)
    x_BTD = drawn(2, BLOCK["block_size"], SIZE)
    given = x_BTD, drawn(*x_BTD.shape, seed=1), start_B
    if config.drafts_blocks:
        given = x_BTD, start_B[:, None], start_B[:, None] + jnp.asarray([[0], [6]])

    def filled(layer, entries):
        return dataclasses.replace(layer.of(*entries), kernels=layer.kernels)

    made = []
    for head in (plain, dataclasses.replace(plain, kernels=INTERPRETED)):
        # Of blocks, whole tiles of slots.
        empty = head.init_cache(2, 250 if head.kernels and config.drafts_blocks else 256)
        entries = [drawn(2, 2, 256, size, seed=seed) for seed in range(2)]
        cache = jax.tree.map(lambda layer: filled(layer, entries), empty, is_leaf=is_layer)
        assert jax.tree.map(jnp.shape, cache) == jax.tree.map(jnp.shape, empty)
        made.append(jax.jit(head.__call__, compiler_options=COMPILE_FAST)(weights, *given, cache))
    (expected, expected_cache), (found, cache) = made
    assert jax.tree.structure(cache) == jax.tree.structure(head.cache_axes())
    assert_allclose(found, expected, atol=2e-5)
    layers = (jax.tree.leaves(each, is_leaf=is_layer) for each in (cache, expected_cache))
    for ours, theirs in zip(*layers, strict=True):
        assert ours.kernels == INTERPRETED
        jax.tree.map(
            functools.partial(assert_allclose, atol=2e-5), ours, filled(ours, theirs.entries_BMSH)
        )


@pytest.mark.slow
def test_kernels_with_paired_heads_keep_texts(monkeypatch):
    target = TransformerLM(tiny(head_size=SIZE // 2, positions="rotary", num_kv_heads=2))
    params = {
        "target_params": drawn_params(target, noise=0.3),
        "draft_params": drawn_params(target.first(1), noise=0.3),
    }

    def tokens(kernels):
        model = dataclasses.replace(target, kernels=kernels)
        pair = Pair(target=model, draft=model.first(1), **params)
        made = generate(pair, [[1, 2, 3], [4, 5]], 12, draft_length=2, sampling=temperature(1.0))
        return [list(each.tokens) for each in made]

    warped, row_by_row = [], PallasKernels.row_by_row
    monkeypatch.setattr(
        PallasKernels, "row_by_row", lambda *given: warped.append(given[0]) or row_by_row(*given)
    )
    assert tokens(INTERPRETED) == tokens(None)
    assert warped and {*warped} == {INTERPRETED}


def test_unsupported_kernel_falls_back_and_warns_once(monkeypatch):
    said = []
    monkeypatch.setattr(logging, "warning", said.append)
    kernel_cache.say_once.cache_clear()
    small = TransformerLM(tiny(), kernels=INTERPRETED)
    assert {
        layer.kernels for layer in small.init_cache(2, 256).layers + small.cache_axes().layers
    } == {None}
    uneven = TransformerLM(tiny(head_size=SIZE), kernels=INTERPRETED).init_cache(2, 100).layers[0]
    for _ in range(2):
        written = uneven.append(*[drawn(2, 4, 3, SIZE)] * 2, jnp.zeros(2, jnp.int32))
    visible = Visibility(start_B=jnp.zeros(2, jnp.int32), num_queries=3)
    assert written.attend(drawn(2, 4, 3, SIZE), visible, scale=0.1).shape == (2, 4, 3, SIZE)
    assert said == [
        "attention is not a kernel: heads of 8 entries are neither 64 nor a multiple of 128",
        "attention is not a kernel: 100 slots are no multiple of 128",
    ]


FIRST = chain(first_tokens(4000), temperature([0.0, 0.7, 1.0]))
WARPS = {
    "greedy": chain(greedy()),
    "filters": chain(top_p([0.3, 1.0, 0.9]), top_k([5, 9000, 1]), min_p(0.1)),
    "behind a state": chain(
        FIRST, penalties(repetition=[1.5, 1.0, 2.0]), temperature(0.8), top_p(0.9)
    ),
}


@pytest.mark.parametrize("name", WARPS)
def test_warps_equal_the_plain_form(name):
    """Covers single rows and several, a folded vocabulary with padding, and states per row."""
    warp, logits_BTV = WARPS[name], jnp.round(24 * drawn(3, 2, 5003)) / 8  # with ties
    draft = Draft(tokens_BK=jnp.int32([[7], [8], [9]]), num_drafted_B=jnp.ones(3, jnp.int32))

    def both(warp):
        state = warp.init(jnp.int32([[1, 2], [3, 4], [7, 9]]), jnp.int32([2, 2, 1]), 5003)
        target = TargetDistributions(
            logits_BTV=logits_BTV, warp=warp, draft=draft, warp_state=state
        )
        return jax.jit(lambda: (target.all(), target.at(jnp.zeros(3, jnp.int32), state)))()

    found = both(with_kernels(warp, INTERPRETED))
    expected = both(warp)
    jax.tree.map(functools.partial(assert_allclose, atol=1e-6), found, expected)
    assert not np.array_equal(found[0], both(chain(first_tokens(4999)))[0])


@pytest.mark.slow
def test_first_call_finds_a_bad_kernel(monkeypatch):
    """A kernel sees a slot too many, raises an unforeseen error, does not warp, or expands
    wrongly.
    """
    config = tiny(
        width=256,
        num_layers=1,
        num_heads=2,
        positions="rotary",
        dtype="bfloat16",
        gated=True,
        experts=TWO_OF_FOUR,
    )
    assert reason_for_plain(config, INTERPRETED) == ""
    right = kernel_cache.decode_attention

    def odd(q_BNTH, entries, seen, *rest, **options):
        return right(
            q_BNTH,
            entries,
            dataclasses.replace(seen, bounds_BT2=seen.bounds_BT2 + 1),
            *rest,
            **options,
        )

    for owner, name, wrong, told in (
        (
            kernel_cache,
            "decode_attention",
            odd,
            r"a call with kernels differs from one without by \d+\.\d%",
        ),
        (kernel_cache, "decode_attention", None, "a call with kernels failed: .*callable"),
        (
            PallasKernels,
            "row_by_row",
            lambda self, function, x, numbers: x,
            "warps with kernels move a probability by .*%",
        ),
        (
            PallasKernels,
            "expand",
            lambda self, logits, ranks_1V, _: jnp.take(
                logits, ranks_1V[0], axis=1, mode="fill", fill_value=0.0
            ),
            "a kernel expands a reduced vocabulary wrongly",
        ),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(owner, name, wrong)
            reason_for_plain.cache_clear()
            jax.clear_caches()
            assert re.fullmatch(told, reason_for_plain(config, INTERPRETED))
    reason_for_plain.cache_clear()


def test_attention_words_choose_kernels():
    assert {choose_kernels(*words) for words in (("plain",), ("plain", "tpu"), ("auto",))} == {None}
    assert choose_kernels("kernel", "tpu") == choose_kernels("auto", "tpu") == PallasKernels()
    with pytest.raises(ValueError, match="weight_order 'cpu' has no kernels"):
        TransformerLM(tiny(), "cpu", INTERPRETED)

"""Warps follow the rules in their docstring, written in NumPy float64 with a sort."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numpy.testing import assert_allclose, assert_array_equal

from specsamp.sampling.warp import (
    chain,
    first_tokens,
    for_rows,
    greedy,
    log_probs,
    min_p,
    temperature,
    top_k,
    top_p,
)
from support.refusals import refused_calls

WARPS = {"temperature": temperature, "top_k": top_k, "top_p": top_p, "min_p": min_p}
TEMPERATURES = (0.0, 1e-38, 0.3, 1.0, 2.5)
TOP_PS = (1e-30, 1e-3, 0.1, 0.3, 0.5, 0.7, 0.9, 0.95, 0.99, 1.0)
MIN_PS = (0.0, 1e-30, 1e-3, 0.02, 0.1, 0.4, 0.9, 1.0)
VOCAB_SIZES = (5, 131, 4096)
NEAR = 1e-6  # float32 may put a token this near to the threshold of top_p or min_p on either side

warped = jax.jit(log_probs)  # a warp's numbers are data: one compilation per shape


def top_ks(vocab_size):
    return 1, 2, 3, vocab_size // 2, vocab_size - 1, vocab_size, vocab_size + 1, 10**12


def some_logits(vocab_size):
    """Returns ``[6, V]`` float32 multiples of 1/64: equal, or apart by far more than rounding."""
    rng = np.random.default_rng(vocab_size)
    spread = 2.5 * rng.normal(size=vocab_size)
    peaked = 0.5 * rng.normal(size=vocab_size)
    peaked[vocab_size // 2] += 9
    # Groups of 2, 3, 3, .. equal values.
    tied = -(np.minimum(rng.permutation(vocab_size) + 2, vocab_size) // 3) / 4
    some_excluded = np.where(rng.random(vocab_size) < 0.5, -np.inf, spread)
    some_excluded[1] = 1.0
    one_left = np.where(np.arange(vocab_size) == vocab_size - 1, 3.0, -np.inf)
    rows = np.stack([np.zeros(vocab_size), spread, peaked, tied, some_excluded, one_left])
    return (np.round(rows * 64) / 64).astype(np.float32)


def oracle(logits, *steps, dtype=np.float32):
    """Returns the log-probabilities of the chained ``steps``, float64, and the rows near a
    threshold.
    """
    x = logits.astype(np.float64)

    undecided = np.zeros(x.shape[:-1], bool)
    for name, value in steps:
        value = float(np.asarray(value, dtype)) if name != "top_k" else value
        probs = np.exp(x - x.max(-1, keepdims=True))
        probs /= probs.sum(-1, keepdims=True)
        order = np.argsort(-probs, axis=-1, kind="stable")
        descending = np.take_along_axis(probs, order, axis=-1)
        before = np.argsort(order, axis=-1)  # the number of tokens that come first
        if name == "temperature":
            if value < 1e-5:
                best = np.argmax(x, axis=-1)[..., None]
                x = np.where(np.arange(x.shape[-1]) == best, 0.0, -np.inf)
            else:
                x = x / value
            continue
        margin = np.full(x.shape, np.inf)
        if name == "top_k":
            keep = before < value
        elif name == "top_p":
            mass_to = np.concatenate(
                [np.zeros(x.shape[:-1] + (1,)), np.cumsum(descending, axis=-1)], axis=-1
            )
            margin = value - np.take_along_axis(mass_to, before, axis=-1)
            keep = (margin > 0) | (value == 1)  # p = 1 keeps all, even if the mass rounds to 1
            margin = np.where((value == 1) | (before == 0), np.inf, margin)
        else:
            margin = probs / probs.max(-1, keepdims=True) - value
            keep = margin >= 0
            margin = np.where(probs == probs.max(-1, keepdims=True), np.inf, margin)
        # Excluded tokens are never undecided, nor are exact ties at the top.
        tolerance = NEAR if name == "top_p" else NEAR * value
        undecided |= ((np.abs(margin) < tolerance) & (x > -np.inf)).any(-1)
        x = np.where(keep, x, -np.inf)
    x = x - x.max(-1, keepdims=True)
    return x - np.log(np.exp(x).sum(-1, keepdims=True)), undecided


def assert_same_distribution(actual, expected, undecided=None, atol=2e-5):
    actual, expected = np.asarray(actual), np.asarray(expected)
    if undecided is not None:
        actual, expected = actual[~undecided], expected[~undecided]
    assert_array_equal(actual > -np.inf, expected > -np.inf)
    assert_allclose(actual, expected, atol=atol, rtol=1e-6 if atol > 1e-9 else 0)


def values_of(name, vocab_size):
    return {
        "temperature": TEMPERATURES,
        "top_k": top_ks(vocab_size),
        "top_p": TOP_PS,
        "min_p": MIN_PS,
    }[name]


@pytest.mark.parametrize("vocab_size", VOCAB_SIZES)
@pytest.mark.parametrize("name", WARPS)
def test_each_warp_follows_its_rule(name, vocab_size):
    logits = some_logits(vocab_size)
    num_undecided = 0
    for value in values_of(name, vocab_size):
        expected, undecided = oracle(logits, (name, value))
        assert_same_distribution(warped(chain(WARPS[name](value)), logits), expected, undecided)
        num_undecided += undecided.sum()
    assert num_undecided <= 1, f"{num_undecided} rows too near a threshold to be compared"


@pytest.mark.parametrize(
    "order, vocab_size", [("tkpm", 5), ("ptmk", 131), ("tkpm", 4096), ("mkpt", 4096)]
)
def test_chains_follow_the_rules_in_order(order, vocab_size):
    logits = some_logits(vocab_size)
    num_undecided = 0
    for t, k, p, m in [
        (0.0, 3, 0.9, 0.1),
        (0.3, 1, 0.5, 0.0),
        (0.3, vocab_size, 0.99, 0.02),
        (1.0, 2, 1.0, 0.4),
        (1.0, vocab_size // 2, 0.7, 1e-3),
        (2.5, 10**6, 0.3, 0.9),
        (2.5, vocab_size - 1, 0.95, 0.1),
    ]:
        named = {"t": ("temperature", t), "k": ("top_k", k), "p": ("top_p", p), "m": ("min_p", m)}
        steps = [named[letter] for letter in order]
        expected, undecided = oracle(logits, *steps)
        assert_same_distribution(
            warped(chain(*(WARPS[name](value) for name, value in steps)), logits),
            expected,
            undecided,
        )
        num_undecided += undecided.sum()
    assert num_undecided <= 1, f"{num_undecided} rows too near a threshold to be compared"


@pytest.mark.parametrize(
    "warp, kept", [(top_k(3), [0, 1, 3]), (top_p(0.4), [0, 1]), (min_p(1.0), [0, 1, 3, 4])]
)
def test_minus_zero_ties_with_zero(warp, kept):
    logits = np.float32([[-0.0, 0.0, -1.0, 0.0, -0.0]])
    assert_array_equal(np.flatnonzero(warped(chain(warp), logits)[0] > -np.inf), kept)


@pytest.mark.parametrize("warp", [top_k(1), top_p(1e-9), top_k([1, 1, 1, 1])])
def test_greedy_bfloat16_tie_takes_one_token(warp):
    logits = (
        jnp.asarray(np.random.default_rng(0).normal(size=(4, 5003)), jnp.bfloat16)
        .at[:, 7]
        .set(9)
        .at[:, 4001]
        .set(9)
    )
    assert_array_equal(warped(chain(warp), logits), warped(greedy(), logits))


# With a power of two, no id lies beyond the vocabulary.
@pytest.mark.parametrize("vocab_size", [16, 1 << 12, 50_257])
def test_top_k_ties_equal_the_reference(vocab_size):
    logits = np.float32(np.random.default_rng(0).integers(0, 9, (3, vocab_size)))
    for k in ([1, 2, 3], [7, vocab_size - 1, vocab_size]):
        kept = np.asarray(warped(chain(top_k(k)), logits)) > -np.inf
        for row, count, expected in zip(kept, k, logits, strict=True):
            assert_array_equal(np.flatnonzero(row), np.sort(jax.lax.top_k(expected, count)[1]))


@pytest.mark.parametrize("shape", [(4,), (4, 3)])
def test_every_row_has_its_own_numbers(shape):
    """Greedy, filtered and plain rows of a batch equal each row alone, in [B, V] and [B, T, V]."""
    columns = dict(
        temperature=[0.0, 0.3, 1.0, 2.5],
        top_k=[7, 2, 200, 50],
        top_p=[0.9, 0.8, 1.0, 0.4],
        min_p=[0.5, 0.0, 0.0, 0.02],
    )
    logits = np.random.default_rng(0).normal(size=shape + (130,)).astype(np.float32) * 2
    together = warped(chain(*(WARPS[name](column) for name, column in columns.items())), logits)
    assert together.shape == logits.shape and together.dtype == jnp.float32
    for b in range(4):
        alone = warped(
            chain(*(WARPS[name](column[b]) for name, column in columns.items())), logits[b : b + 1]
        )
        assert_same_distribution(together[b], alone[0], atol=1e-6)
    sizes = np.asarray(together > -np.inf).reshape(4, -1, 130).sum(-1)
    # The control: the rows differ.
    assert (sizes[0] == 1).all() and (sizes[1] <= 2).all() and (sizes[2] == 130).all()


@pytest.mark.parametrize(
    "warp", [greedy(), temperature(0), temperature(0.0), temperature(1e-6), temperature([0, 0])]
)
def test_greedy_breaks_ties_to_the_lowest_index(warp):
    distribution = warped(chain(warp), np.float32([[1, 3, 3, 3], [2, 2, 0, 2]]))
    assert_array_equal(distribution, np.where(np.arange(4) == [[1], [0]], 0, -np.inf))


@pytest.mark.parametrize("value", [0.0, 1e-38, 9e-6])
def test_greedy_never_divides(value):
    """Huge logits at a temperature near 0 give no NaN or infinity, even in intermediate results."""
    logits = np.float32(
        [[1e30, -1e30, 3e38, -np.inf], [-3e38, -1e30, -np.inf, -np.inf], [0, 1e-30, 0, 0]]
    )
    with jax.debug_nans(True):
        distribution = np.asarray(log_probs(chain(temperature(value)), logits))
    assert_array_equal(distribution, np.where(np.arange(4) == [[2], [1], [1]], 0, -np.inf))


def test_huge_logits_are_sampled_without_nan():
    warp = chain(temperature(0.3), top_k(3), top_p(0.9), min_p(0.1))
    distribution = np.exp(warped(warp, np.float32([[1e30, 1e30, -1e30, 0]])))
    assert_allclose(distribution, [[0.5, 0.5, 0, 0]], atol=1e-6)


def test_bfloat16_logits_give_float32_log_probs():
    warp = chain(temperature(0.3), top_k(40), top_p(0.9), min_p(0.01))
    logits = jnp.asarray(some_logits(130), jnp.bfloat16)
    distribution = warped(warp, logits)
    assert distribution.dtype == jnp.float32
    assert_array_equal(distribution, warped(warp, logits.astype(jnp.float32)))


def test_float64_stays_float64():
    steps = ("temperature", 0.3), ("top_k", 40), ("top_p", 0.9), ("min_p", 0.01)
    logits = np.random.default_rng(0).normal(size=(6, 130))
    expected, undecided = oracle(logits, *steps)
    assert not undecided.any()
    with jax.enable_x64(True):
        distribution = warped(chain(*(WARPS[name](value) for name, value in steps)), logits)
        assert distribution.dtype == jnp.float64
        assert_same_distribution(distribution, expected, atol=1e-13)


def test_trees_of_different_warps_differ():
    """jit selects a program by the tree: with equal trees, one warp might run as another."""
    warps = [temperature(0.5), top_k(1), top_p(0.5), min_p(0.5), first_tokens(1), greedy()]
    warps += [chain(warp) for warp in warps] + [
        chain(a, b) for a in warps for b in warps if a is not b
    ]
    structures = [jax.tree.structure(warp) for warp in warps]
    for i, one in enumerate(structures):
        assert all(one != other for other in structures[i + 1 :])
        assert one == jax.tree.structure(jax.tree.map(lambda x: x, warps[i]))


@pytest.mark.parametrize("vocab_size", [50_257, 128_256])
def test_the_nucleus_of_a_public_vocabulary(vocab_size):
    """Tokens are right unless their mass is within 1e-6 of p, for K + 1 rows or one, and with
    padding of a folded vocabulary or without.
    """
    logits = np.float32(
        np.random.default_rng(0).normal(size=(5, vocab_size)) * [[0.01], [1], [2.5], [4], [8]]
    )
    probs = np.exp(logits.astype(np.float64) - logits.max(-1, keepdims=True))
    probs /= probs.sum(-1, keepdims=True)
    order = np.argsort(-probs, axis=-1)
    above = np.empty_like(probs)
    np.put_along_axis(above, order, np.cumsum(np.take_along_axis(probs, order, -1), -1), -1)
    above -= probs  # no two tokens are equal
    for p in (0.1, 0.8, 0.95, 0.999):
        kept = np.asarray(warped(chain(top_p(p)), logits)) > -np.inf
        sure = np.abs(above - p) > NEAR
        assert_array_equal(kept[sure], (above < p)[sure])
        assert (kept.sum(-1) > 0).all()
        alone = np.asarray(warped(chain(top_p(p)), logits[2:3])) > -np.inf
        assert_array_equal(alone[0], kept[2])


test_refused_warps = refused_calls(
    {
        "one number or one per row.*got 'hot'": lambda: temperature("hot"),
        "one number or one per row": lambda: temperature([[1.0]]),
        r"\(2,\) for 3 prompts: give one number, or": lambda: for_rows(temperature([0.1, 0.2]), 3),
        r"chain takes warps such as temperature\(0\.8\); got 0\.8": lambda: chain(0.8),
        "chain takes warps .* got <function temperature": lambda: chain(temperature, top_p),
        r"temperature must be .* one number or one per row; got \[\]": lambda: temperature([]),
    }
)

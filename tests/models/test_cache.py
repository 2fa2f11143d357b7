"""The cache is written where it should be, and nowhere else; it can be donated whole."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specsamp.models.compiling import MAX_UNROLLED_ROWS
from specsamp.models.config import tiny
from specsamp.models.slots import move_slots, write_slots
from specsamp.models.transformer import TransformerLM

HEADS, SLOTS, SIZE = 2, 12, 3


def along(axis, x):
    """Exchanges the axes of slots and entries where slots are the last axis."""
    return x if axis == 2 else x.swapaxes(2, 3)


@pytest.mark.parametrize("axis", [2, 3])
@pytest.mark.parametrize("length", [1, 4, SLOTS])
@pytest.mark.parametrize("batch", [1, 3, MAX_UNROLLED_ROWS, MAX_UNROLLED_ROWS + 1])
def test_write_slots_writes_just_its_slots(batch, length, axis):
    """Writes at a different offset in each row, including the first and the last;
    unrolled and not.
    """
    rng = np.random.default_rng(batch)
    cache = rng.normal(size=(batch, HEADS, SLOTS, SIZE)).astype(np.float32)
    new = rng.normal(size=(batch, HEADS, length, SIZE)).astype(np.float32)
    starts = rng.integers(0, SLOTS - length + 1, size=batch).astype(np.int32)
    starts[0], starts[-1] = 0, SLOTS - length
    expected = cache.copy()
    for b, start in enumerate(starts):
        expected[b, :, start : start + length] = new[b]
    written = jax.jit(write_slots, static_argnums=3)(
        along(axis, cache), along(axis, new), starts, axis
    )
    np.testing.assert_array_equal(along(axis, written), expected)


@pytest.mark.parametrize("axis", [2, 3])
@pytest.mark.parametrize("batch", [1, 3, MAX_UNROLLED_ROWS + 1])
def test_slots_are_read_before_any_is_written(batch, axis):
    """An entry behind the slots that stay does no harm wherever it points."""
    rng = np.random.default_rng(batch)
    cache = rng.normal(size=(batch, HEADS, SLOTS, SIZE)).astype(np.float32)
    rows = np.sort(rng.integers(0, 6, (batch, 4)), axis=1).astype(np.int32)
    rows[:, -1] = 1000
    starts = rng.integers(0, 7, batch).astype(np.int32)
    moved = jax.jit(move_slots, static_argnums=(3, 4))(along(axis, cache), starts, rows, 6, axis)
    expected, moved = cache.copy(), np.array(along(axis, moved))
    for b, start in enumerate(starts):
        expected[b, :, start : start + 3] = cache[b][:, start + rows[b, :3]]
        moved[b, :, start + 3] = expected[b, :, start + 3]
    np.testing.assert_array_equal(moved, expected)


@pytest.mark.parametrize(
    "dtype, cache_dtype", [("float32", None), ("bfloat16", None), ("float32", "int8")]
)
def test_zeros_has_a_buffer_of_its_own_for_every_array(dtype, cache_dtype):
    """In int8 a byte for each entry, and four for the scale of a token and head."""
    config = tiny(num_kv_heads=2, dtype=dtype, cache_dtype=cache_dtype, num_layers=3)
    layers = TransformerLM(config).init_cache(batch=5, slots=9).layers
    leaves = jax.tree.leaves(layers)
    assert (
        len({leaf.unsafe_buffer_pointer() for leaf in leaves})
        == len(leaves)
        == (4 if cache_dtype else 2) * 3
    )
    of_head = (
        config.head_size + 4 if cache_dtype else config.head_size * config.compute_dtype.itemsize
    )
    assert (
        sum(leaf.nbytes for leaf in leaves)
        == 5 * 9 * 2 * config.num_layers * config.num_kv_heads * of_head
    )
    for name in ("keys_BMSH", "values_BMSH"):
        array = getattr(layers[0], name)
        assert (
            array.shape == (5, 2, 9, config.head_size)
            and array.dtype == (cache_dtype or dtype)
            and not array.any()
        )


@pytest.mark.parametrize("batch", [3, MAX_UNROLLED_ROWS + 1])
def test_the_whole_cache_is_donated(batch):
    """Every buffer is given up and used again by the result (an unusable donation warns, which is
    an error here).
    """
    config = tiny()
    cache = TransformerLM(config).init_cache(batch, SLOTS)
    new = jnp.ones((batch, config.num_kv_heads, 2, config.head_size))
    start = jnp.arange(batch, dtype=jnp.int32) % SLOTS // 2

    def write(cache):
        return jax.tree.map(lambda array: write_slots(array, new, start), cache)

    before = [leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves(cache)]
    written = jax.jit(write, donate_argnums=0)(cache)
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(cache))
    assert [leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves(written)] == before
    for leaf in jax.tree.leaves(written):
        np.testing.assert_array_equal(
            leaf.sum((1, 2, 3)), 2 * config.num_kv_heads * config.head_size
        )

"""Writes at the borders of a cache equal NumPy's: slots that do not fit are dropped, none moves."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numpy.testing import assert_array_equal

from specsamp.models.slots import MAX_UNROLLED_ROWS, move_slots, write_slots

STARTS = (-40, -5, -2, -1, 0, 1, 3, 27, 28, 29, 30, 31, 32, 33, 40, 2**30)
SLOTS = 32


def written(cache, new, starts, axis):
    """Returns the cache after the slots of ``new`` that exist are written one by one."""
    cache = np.moveaxis(cache.copy(), axis, 1)
    new = np.moveaxis(new, axis, 1)
    for row, start in enumerate(starts):
        for t in range(new.shape[1]):
            if 0 <= start + t < cache.shape[1]:
                cache[row, start + t] = new[row, t]
    return np.moveaxis(cache, 1, axis)


def numbers(shape, first=0):
    return np.arange(first, first + np.prod(shape), dtype=np.float32).reshape(shape)


@pytest.mark.parametrize("axis", (2, 3))
@pytest.mark.parametrize("length", (1, 2, 5, 32))
@pytest.mark.parametrize("batch", (1, 3, MAX_UNROLLED_ROWS + 1))
@pytest.mark.parametrize("platform", ("cpu", "tpu"))
def test_write_beyond_either_end_is_dropped(monkeypatch, platform, batch, length, axis):
    """The branch of a TPU reads no old slots if all fit."""
    if platform == "tpu":
        monkeypatch.setattr(
            jax.lax, "platform_dependent", lambda cache, *, tpu, default: tpu(cache)
        )
    shape = (batch, 2, SLOTS, 3) if axis == 2 else (batch, 2, 3, SLOTS)
    new_shape = tuple(length if at == axis else size for at, size in enumerate(shape))
    cache = numbers(shape)
    new = numbers(new_shape, 10_000)
    rounds = -(-len(STARTS) // batch)
    write = jax.jit(lambda *given: write_slots(*given, axis))
    for turn in range(rounds):
        starts = np.resize(STARTS[turn * batch :] or STARTS, batch).astype(np.int32)
        result = write(cache, new, starts)
        assert_array_equal(result, written(cache, new, starts, axis), str(starts))


@pytest.mark.parametrize("bits", (32, 64))
def test_move_at_the_end_takes_existing_slots(bits):
    """Of a tree of four rows, the last two lie beyond the cache: only rows 0 and 1 are moved."""
    cache = numbers((2, 1, SLOTS, 1))
    starts = np.array([30, 4], np.int32)
    rows_BT = np.array([[1, 2], [0, 3]], np.int32)
    with jax.enable_x64(bits == 64):
        moved = jax.jit(move_slots, static_argnums=3)(cache, starts, rows_BT, 4)
    moved = np.asarray(moved)[:, 0, :, 0]
    expected = cache[:, 0, :, 0].copy()
    expected[0, 30] = cache[0, 0, 31, 0]
    expected[1, 5] = cache[1, 0, 7, 0]
    assert_array_equal(moved[0, :31], expected[0, :31])
    assert_array_equal(moved[1], expected[1])


@pytest.mark.parametrize("axis", [2, 3])
@pytest.mark.parametrize("batch", [1, 3, MAX_UNROLLED_ROWS + 1])
def test_slots_are_read_before_any_is_written(batch, axis):
    """An entry after the kept slots may have any value."""
    rng = np.random.default_rng(batch)
    cache = rng.normal(size=(batch, 2, SLOTS, 3)).astype(np.float32)
    rows = np.sort(rng.integers(0, 6, (batch, 4)), axis=1).astype(np.int32)
    rows[:, -1] = 1000
    starts = rng.integers(0, 7, batch).astype(np.int32)
    moved = jax.jit(move_slots, static_argnums=(3, 4))(
        np.moveaxis(cache, 2, axis), starts, rows, 6, axis
    )
    expected = cache.copy()
    moved = np.array(np.moveaxis(moved, axis, 2))
    for b, start in enumerate(starts):
        expected[b, :, start : start + 3] = cache[b][:, start + rows[b, :3]]
        moved[b, :, start + 3] = expected[b, :, start + 3]
    assert_array_equal(moved, expected)


def test_more_tokens_than_slots_are_refused():
    cache = jnp.zeros((1, 1, 4, 2))
    message = re.escape("5 tokens were given to a cache of 4 slots")
    with pytest.raises(ValueError, match=message):
        write_slots(cache, jnp.zeros((1, 1, 5, 2)), jnp.zeros(1, jnp.int32))

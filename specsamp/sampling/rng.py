"""Addressed randomness: every random number has an address and is a function of nothing else.

A draw does not come from a stream that is consumed in order. It comes from

    key(seed, prompt, sample, round_start, offset, purpose)

so a sample does not depend on its batch neighbours, on padding, on how a run was cut into slices or
on the mesh. ``round_start`` is the row's length when the round began, ``offset`` the position
within the round, and ``purpose`` keeps the noise of drafting, accepting and the residual apart.

Why ``round_start`` and not simply the absolute position: a position that is drafted a second time
would get the noise of its discarded draft again. The decisions of the token rule did not depend on
that draft, but those of the block rule did, which becomes biased (tests/decoding/test_mutants.py
measures it). The coupled rule needs exactly this reuse, has no other noise, and addresses by (seed,
prompt, sample, position).
"""

import enum

import jax
import jax.numpy as jnp
import numpy as np

from specsamp.pytrees import pytree

Array = jax.Array


class Purpose(enum.IntEnum):
    """Purposes of random numbers, which are part of their addresses."""

    DRAFT = 0
    ACCEPT = 1
    RESIDUAL = 2


def row_keys(seed: int | np.ndarray, prompt_ids_B: Array, sample_ids_B: Array) -> Array:
    """Returns a key for each row, from the caller's global ids rather than from the row's place in
    the batch.

    Args:
      seed: in [0, 2**64), of the call, or of each row.
      prompt_ids_B: ``[B]`` int, the index of the prompt in the caller's data set.
      sample_ids_B: ``[B]`` int, the index of the sample of this prompt.

    Returns:
      ``[B]`` typed threefry keys (under rbg a vmapped row differs from the unbatched one).
    """
    seed = np.asarray(seed, np.uint64)
    words = [(seed >> np.uint64(shift)).astype(np.uint32) for shift in (32, 0)]
    return _address_rows(words, prompt_ids_B, sample_ids_B)


@jax.jit
def _address_rows(words: list[Array], prompt_ids_B: Array, sample_ids_B: Array) -> Array:
    words = (jnp.broadcast_to(word, prompt_ids_B.shape) for word in words)
    base_B = jax.random.wrap_key_data(jnp.stack([*words], axis=-1), impl="threefry2x32")
    return _fold(_fold(base_B, prompt_ids_B), sample_ids_B)


@pytree
class RoundKeys:
    """The addresses available to one round."""

    rows_B: Array  # [B] keys, from row_keys
    starts_B: Array  # [B] int, each row's length when the round began

    def uniforms(self, purpose: Purpose, offsets_BT: Array) -> Array:
        """Returns two float32 uniforms in [0, 1) at each offset.

        Args:
          purpose: of the numbers.
          offsets_BT: ``[B, T]`` int, position within the round.

        Returns:
          ``[B, T, 2]``: an accept decision takes the first, a draw takes both.
        """
        rounds_B1 = _fold(self.rows_B, self.starts_B)[:, None]
        keys_BT = _fold(jnp.broadcast_to(rounds_B1, offsets_BT.shape), offsets_BT)
        keys_BT = _fold(keys_BT, jnp.full(offsets_BT.shape, purpose))
        return jax.vmap(jax.vmap(lambda key: jax.random.uniform(key, (2,), jnp.float32)))(keys_BT)

    def accept_uniforms(self, batch: int, count: int) -> Array:
        """Returns the uniforms that decide whether drafted tokens are accepted, ``[B, K]``."""
        offsets_BK = jnp.broadcast_to(jnp.arange(count), (batch, count))
        return self.uniforms(Purpose.ACCEPT, offsets_BK)[..., 0]

    def position_gumbels(self, offset: int | Array, vocab_size: int) -> Array:
        """Returns the Gumbel noise of the *absolute position* ``starts_B + offset``, ``[B, V]``
        float32.
        """
        keys_B = _fold(self.rows_B, self.starts_B + offset)
        # "high" spends a second word on the upper tail: with one, no token below 1e-7 is ever
        # drawn.
        return jax.vmap(
            lambda key: jax.random.gumbel(key, (vocab_size,), jnp.float32, mode="high")
        )(keys_B)


def _fold(keys: Array, data: Array) -> Array:
    """Folds ``data`` into ``keys``, element by element."""
    fold = jax.random.fold_in
    for _ in range(keys.ndim):
        fold = jax.vmap(fold)
    return fold(keys, data)

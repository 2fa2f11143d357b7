"""Reads and writes token buffers at a different offset in each row."""

from __future__ import annotations

import jax
import jax.numpy as jnp

Array = jax.Array


def write_tokens(
    buffer_BS: Array, block_BT: Array, start_B: Array, count_B: Array | None = None
) -> Array:
    """Writes the first ``count_B`` (default all) entries of ``block_BT`` from slot ``start_B`` of
    each row.

    Selects rather than scatters: token buffers are small. Entries beyond the end are dropped.
    """
    block_BT = block_BT.astype(buffer_BS.dtype)
    offsets_BS = jnp.arange(buffer_BS.shape[1])[None, :] - start_B[:, None]
    for t in range(block_BT.shape[1]):
        here_BS = offsets_BS == t
        if count_B is not None:
            here_BS &= (count_B > t)[:, None]
        buffer_BS = jnp.where(here_BS, block_BT[:, t : t + 1], buffer_BS)
    return buffer_BS


def gather_tokens(tokens_BS: Array, start_B: Array, width: int) -> Array:
    """Returns ``tokens_BS[b, start_B[b] : start_B[b] + width]``, [B, width]; beyond the end the
    last token again.
    """
    return jnp.take_along_axis(
        tokens_BS, start_B[:, None] + jnp.arange(width)[None, :], axis=1, mode="clip"
    )

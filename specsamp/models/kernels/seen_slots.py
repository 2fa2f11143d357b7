"""Describes which slots of a cache the queries of a call see, in numbers that a kernel can hold."""

from __future__ import annotations

import dataclasses
from typing import Self

import jax
import jax.numpy as jnp

from specsamp.models.kernels.common import LANES
from specsamp.models.visibility import Visibility, seen_after

Array = jax.Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class SeenSlots:
    """Holds what `specsamp.models.visibility.Visibility.mask` spells out.

    Query t of row b sees the slots ``bounds_BT2[b, t, 0] .. bounds_BT2[b, t, 1]`` and, in a tree, the slots
    ``tree_start_B[b] + r`` where ``tree_BTR[b, t, r]`` is 1.
    """

    bounds_BT2: Array  # int32; the first bound may be negative
    last_B: Array  # int32, the last slot that any query sees
    tree_start_B: Array | None = None  # int32
    tree_BTR: Array | None = None  # float32, 0 or 1, with R a multiple of 128

    @classmethod
    def of(cls, visible: Visibility) -> Self:
        """Translates a `Visibility`."""
        queries_BT = visible.start_B[:, None] + jnp.arange(visible.num_queries, dtype=jnp.int32)[None, :]
        block, window = visible.block, visible.window
        last_B = visible.start_B + visible.num_queries - 1
        if block is None:
            first_BT = jnp.zeros_like(queries_BT) if window is None else queries_BT - (window - 1)
            return cls(bounds_BT2=jnp.stack([first_BT, queries_BT], axis=-1), last_B=last_B)
        seen_BTR, positions_BT = block.visible_BTR, block.positions_BT
        first_BT = jnp.zeros_like(positions_BT)
        if window is not None:
            first_BT = positions_BT - (window - 1)
            seen_BTR &= seen_after(block) < window
        before_BT = jnp.broadcast_to(block.start_B[:, None] - 1, first_BT.shape)
        return cls(
            bounds_BT2=jnp.stack([first_BT, before_BT], axis=-1),
            last_B=last_B,
            tree_start_B=block.start_B,
            tree_BTR=jnp.pad(seen_BTR.astype(jnp.float32), ((0, 0), (0, 0), (0, -seen_BTR.shape[-1] % LANES))),
        )

    def blocks(self, size: int, num_slots: int) -> tuple[Array, Array]:
        """Returns the first and the last block of ``size`` slots that any query of each row sees, int32 ``[B]``."""
        first_B = jnp.clip(self.bounds_BT2[:, :, 0].min(axis=1), 0, num_slots - 1)
        return first_B // size, jnp.clip(self.last_B, 0, num_slots - 1) // size

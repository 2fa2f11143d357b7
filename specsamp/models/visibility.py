"""Computes attention masks over the slots of a cache, and the distances of slots."""

import dataclasses

import jax
import jax.numpy as jnp

from specsamp.models.interface import Block
from specsamp.models.slots import write_slots

Array = jax.Array


@dataclasses.dataclass(frozen=True, kw_only=True)
class Visibility:
    """The attention mask of a call in one layer, see `mask`; kernels read the fields instead.

    Without a block, query t of sequence b attends to the last ``window`` slots up to ``start_B[b] +
    t``.

    Attributes:
      start_B: ``[B]`` int32, the slot of each sequence's first query.
      num_queries: T.
      window: number of tokens that a query attends to, including itself; None: all.
      block: the mask among the tokens of a tree; None: causal.
    """

    start_B: Array
    num_queries: int
    window: int | None = None
    block: Block | None = None

    @property
    def needs_mask(self) -> bool:
        """Returns whether distances in a window differ from those of slots, which kernels
        measure.
        """
        return (
            self.window is not None and self.block is not None and self.block.skipped_B is not None
        )

    def mask(self, num_slots: int) -> Array:
        """Returns the attention mask, bool ``[B, T, S]``."""
        if self.block is None:
            seen_BTS = self.distances(num_slots) >= 0
        else:
            is_text_BS = jnp.arange(num_slots)[None] < self.block.start_B[:, None]
            shape = len(is_text_BS), self.num_queries, num_slots
            is_text_BTS = jnp.broadcast_to(is_text_BS[:, None], shape)
            seen_BTS = write_slots(is_text_BTS, self.block.visible_BTR, self.block.start_B)
        if self.window is None:
            return seen_BTS
        return seen_BTS & (self.distances(num_slots) < self.window)

    def distances(self, num_slots: int) -> Array:
        """Returns the distance of each slot in tokens, ``[B, T, S]`` int32; arbitrary for masked
        slots.

        Within a block it is the distance in the tree.
        """
        slots_1S = jnp.arange(num_slots)[None]
        if self.block is not None:
            slots_1S = self.block.slot_positions(num_slots)
        positions_BT = positions_of(self.start_B, self.num_queries, self.block)
        distances_BTS = positions_BT[:, :, None] - slots_1S[:, None]
        if self.block is None:
            return distances_BTS
        in_block_BTR = seen_after(self.block).astype(distances_BTS.dtype)
        return write_slots(distances_BTS, in_block_BTR, self.block.start_B)


def positions_of(start_B: Array, length: int, block: Block | None = None) -> Array:
    """Returns the positions of the tokens of a call, int32 ``[B, T]``."""
    if block is not None:
        return block.positions_BT
    return start_B[:, None] + jnp.arange(length, dtype=jnp.int32)[None]


@dataclasses.dataclass(frozen=True, kw_only=True)
class BlockVisibility:
    """The slots that the rows of some blocks see in one layer, in place of a `Visibility`; kernels
    take one block of each sequence.

    `Visibility` with a `Block` counts how many ancestors are between two rows, which means nothing
    among rows that see each other both ways. Windows are counted from the beginning of the block,
    for all its rows alike.

    Attributes:
      anchors_BA: int32, the position of each block's first row: the block sees the slots before it.
      first_BA: int32, the slot of each block's first row; in decoding, that of its position.
      block_size: b, the rows of a block.
      window: how many tokens of the context are seen; None: all.
      both_ways: whether a row sees the rows of its block behind it.
    """

    anchors_BA: Array
    first_BA: Array
    block_size: int
    window: int | None = None
    both_ways: bool = True

    @property
    def needs_mask(self) -> bool:
        """Returns whether sequences have several blocks."""
        return self.anchors_BA.shape[1] > 1

    def mask(self, num_slots: int) -> Array:
        """Returns ``[B, A b, S]`` bool: whether the row sees the slot."""
        slots, rows = (
            jnp.arange(num_slots)[None, None, None],
            jnp.arange(self.block_size)[None, None, :, None],
        )
        anchors, first = self.anchors_BA[..., None, None], self.first_BA[..., None, None]
        context = slots < anchors
        if self.window is not None:
            context &= slots >= anchors - self.window
        last = first + (self.block_size - 1 if self.both_ways else rows)
        seen_BAbS = context | ((slots >= first) & (slots <= last))
        batch, blocks = self.anchors_BA.shape
        shape = batch, blocks, self.block_size, num_slots
        return jnp.broadcast_to(seen_BAbS, shape).reshape(
            batch, blocks * self.block_size, num_slots
        )


def seen_after(block: Block) -> Array:
    """Counts, for each query and slot of the block, the visible slots after this slot, ``[B, T,
    R]`` int32.

    For an ancestor of the query the count is their distance in the tree.
    """
    visible_BTR = block.visible_BTR.astype(jnp.int32)
    return jnp.sum(visible_BTR, axis=-1, keepdims=True) - jnp.cumsum(visible_BTR, axis=-1)


def ancestor_slots(block: Block, count: int) -> Array:
    """Returns the slots of each query's last ``count`` tokens, ending with the query, ``[B, T,
    count]`` int32.

    A slot is negative if the sequence is shorter, or if the token has no slot.
    """
    after_BTR, num_slots = seen_after(block), block.visible_BTR.shape[-1]
    slots = []
    for distance in range(count - 1, -1, -1):
        here_BTR = block.visible_BTR & (after_BTR == distance)
        offset_BT = jnp.sum(jnp.where(here_BTR, jnp.arange(num_slots), 0), axis=-1)
        inside_BT = block.start_B[:, None] + offset_BT
        before_BT = block.positions_BT - distance
        if block.skipped_B is not None:
            slot_BT = before_BT - block.skipped_B[:, None]
            has_slot_BT = (block.skipped_B[:, None] == 0) | (slot_BT >= block.num_kept)
            before_BT = jnp.where(has_slot_BT, slot_BT, -1)
        slots.append(jnp.where(here_BTR.any(-1), inside_BT, before_BT))
    return jnp.stack(slots, axis=-1)

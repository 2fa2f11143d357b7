"""The state of the loop and its request: pytrees of arrays with a row for each sequence of the
batch.

Here are two rounds of a row with K = 2, after the prompt [5, 8]. A dot is an empty slot. The last
token of a sequence is *pending*: it is decided, but the models have not read it, so it is not in
the caches. A round begins with it.

    round 1     tokens_BS [5 8 . . . . .]   lengths_B 2   cache: slot 0; token 8 is pending
      draft       [3 7]
      score       the target reads [8 3 7] into cache slots 1 to 3: three rows of logits
      verify      token 3 is accepted, token 7 is rejected and replaced by 4
      commit    tokens_BS [5 8 3 4 . . .]   lengths_B 4   slot 3 still holds the rejected 7: masked
    round 2
      draft       [9 1]
      score       the target reads [4 9 1] into cache slots 3 to 5: 4 overwrites 7
      verify      tokens 9 and 1 are accepted, and 6 is drawn from the last row as a bonus
      commit    tokens_BS [5 8 3 4 9 1 6]   lengths_B 7   cache: slots 0 to 5; token 6 is pending

``stats`` then counts 2 rounds, 5 emitted and 4 drafted tokens; ``from_draft_BS`` is true for 3, 9
and 1.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from specsamp.decoding.adaptive import AdaptiveState
from specsamp.pytrees import pytree
from specsamp.sampling.rng import row_keys
from specsamp.sampling.rules import Meter
from specsamp.sampling.warp import Warp, for_rows

Array = jax.Array

# Stop ids are padded to a multiple of 8, so that their number seldom causes a compilation.
STOPS_MULTIPLE = 8


class Finish(enum.IntEnum):
    """Reasons why a row ended."""

    RUNNING = 0
    STOP = 1  # a stop token was emitted
    LENGTH = 2  # the row's budget is spent
    INVALID = 3  # the target's logits held NaN, inf or only -inf, or a warp excluded all tokens


@pytree
class Weights:
    """Decode-time weights of target and drafter."""

    target: Any
    draft: Any = None


@pytree
class RequestBatch:
    """Sampling, random keys, budget and stop tokens of each row: data, so that new values recompile
    nothing.
    """

    sampling: Warp  # numbers of shape [B]
    draft_sampling: Warp  # numbers of shape [B]
    row_keys_B: Array  # from sampling.rng.row_keys
    limits_B: Array  # int32, the length at which each row's budget ends
    stop_ids_BN: Array  # int32; -1 is never emitted
    # int32, drafted tokens per round that may be verified; None: all.
    draft_lengths_B: Array | None = None

    @classmethod
    def create(
        cls,
        *,
        sampling: Warp,
        limits: Sequence[int],
        draft_sampling: Warp | None = None,
        seed: int | Sequence[int] = 0,
        prompt_ids: Sequence[int] | None = None,
        sample_ids: Sequence[int] | None = None,
        stop_ids: Sequence[int] | np.ndarray = (-1,) * STOPS_MULTIPLE,
        draft_lengths: Sequence[int] | None = None,
    ) -> RequestBatch:
        """Makes the arrays of a batch.

        Args:
          sampling: the target's warp; its numbers are scalars or have one value per row.
          limits: the length at which the budget of each row ends.
          draft_sampling: the draft's warp; default the target's.
          seed: in [0, 2**64), one for all rows or one per row.
          prompt_ids: the index of each row's prompt in the caller's data set; default 0, 1, 2, ...
          sample_ids: the index of each row among the samples of its prompt; default 0.
          stop_ids: tokens that end any row, or ``[B, N]``, padded with -1.
          draft_lengths: the largest number of drafted tokens per round that may be verified in each
            row; default all.
        """
        count = len(limits)
        ids = np.arange(count) if prompt_ids is None else prompt_ids
        samples = np.zeros(count) if sample_ids is None else sample_ids
        sampling = for_rows(sampling, count)
        return cls(
            sampling=sampling,
            draft_sampling=sampling if draft_sampling is None else for_rows(draft_sampling, count),
            row_keys_B=row_keys(
                np.asarray(seed, np.uint64),
                np.asarray(ids, np.int32),
                np.asarray(samples, np.int32),
            ),
            limits_B=np.asarray(limits, np.int32),
            stop_ids_BN=np.broadcast_to(
                np.asarray(stop_ids, np.int32), (count, np.shape(stop_ids)[-1])
            ),
            draft_lengths_B=None if draft_lengths is None else np.asarray(draft_lengths, np.int32),
        )


@pytree
class Stats:
    """Counts of rounds and tokens; positions cut off by a stop token or a budget do not count."""

    rounds_B: Array  # int32, rounds that emitted something
    emitted_B: Array  # int32 tokens
    # int32, drafted tokens, including those after a rejection. In a round that a stop token, a
    # budget or invalid logits cut, only the tokens verified before the cut count; in a tree, only
    # the positions that were verified.
    drafted_B: Array
    # int32, rounds in which position i was verified: all tokens before it were accepted.
    reached_BK: Array
    # int32 [B, depth+1], rounds by the number of accepted tokens that were emitted.
    accepted_BT: Array
    # int32 [B, depth+1], rounds by the number of drafted tokens; None: it is fixed.
    lengths_BT: Array | None = None

    @classmethod
    def zeros(cls, batch: int, depth: int, adapts: bool = False) -> Stats:
        """Returns empty counts for drafts of up to ``depth`` accepted tokens, whose length
        ``adapts`` or not.
        """

        def count(*shape):
            return jnp.zeros(shape, jnp.int32)

        return cls(
            rounds_B=count(batch),
            emitted_B=count(batch),
            drafted_B=count(batch),
            reached_BK=count(batch, depth),
            accepted_BT=count(batch, depth + 1),
            lengths_BT=count(batch, depth + 1) if adapts else None,
        )


@pytree
class Prefix:
    """The committed tokens ``tokens_BS[b, :lengths_B[b]]``; the last of them is pending, the slots
    behind it are scratch.
    """

    tokens_BS: Array  # int32
    lengths_B: Array  # int32

    @property
    def pending_B1(self) -> Array:
        """Returns the pending tokens."""
        return gather_tokens(self.tokens_BS, self.lengths_B - 1, 1)


@pytree
class Kept:
    """The part of a drafter's state that a place in the batch keeps when another text is written
    there.
    """

    value: Any


@pytree
class DecodeState:
    """The rows of a batch: the carry of the loop, with the request.

    ``tokens_BS[b, :lengths_B[b]]`` is committed. The last committed token is *pending*: the caches
    hold the positions before it. The leading axis of every leaf is the batch, so rows can be
    inserted and extracted.
    """

    tokens_BS: Array  # int32, prompts and emitted tokens; beyond the length: scratch
    lengths_B: Array  # int32, committed tokens, prompt included
    finish_B: Array  # int32, a Finish
    from_draft_BS: Array  # bool, whether the emitted token had been drafted
    log_probs_BS: Array | None  # float32, of emitted tokens, see `Loop.keep_log_probs`
    cache: Any  # the target's
    drafter_state: Any
    stats: Stats
    request: RequestBatch | None = None  # None only inside the loop, which closes over it
    # int32: 1 + the number of drafted tokens of a round, at the first token that the round emitted;
    # 0 at other tokens
    rounds_BS: Array | None = None
    # Of request.sampling, after the committed tokens; () for warps without a state.
    warp_state: Any = ()
    draft_warp_state: Any = ()  # of request.draft_sampling
    adaptive_state: AdaptiveState | None = None  # of a loop whose draft lengths adapt
    meter: Meter | None = None  # [B, S], of the emitted tokens under a lossy rule

    @property
    def running_B(self) -> Array:
        """Returns True for the rows that have not ended."""
        return self.finish_B == Finish.RUNNING

    @property
    def prefix(self) -> Prefix:
        """Returns the committed tokens."""
        return Prefix(tokens_BS=self.tokens_BS, lengths_B=self.lengths_B)

    def with_adaptive(self, **changes: Array) -> DecodeState:
        """Returns this state with some fields of ``adaptive_state`` replaced."""
        return dataclasses.replace(
            self, adaptive_state=dataclasses.replace(self.adaptive_state, **changes)
        )


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

"""The engine of all ways to decode: reads requests into rows of a state, runs the loop, and reads
out the texts.

    engine = Engine.create(pair, method, requests)
    state = engine.prefill(requests)
    state = engine.run(state)
    texts = engine.take(state, requests)

Between two runs, new requests may replace rows (`Engine.insert`). Sizes are rounded up to buckets,
so that calls of about the same size share a program. Padding changes no result.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import os
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from specsamp import validate
from specsamp.decoding import batch_rows
from specsamp.decoding.drafter import Drafter, hooks_of, positions_of
from specsamp.decoding.loop import Loop
from specsamp.decoding.method import Method
from specsamp.decoding.pair import Pair
from specsamp.decoding.request import Request
from specsamp.decoding.results import RowText
from specsamp.decoding.state import STOPS_MULTIPLE, DecodeState, RequestBatch, Weights
from specsamp.jax_names import multihost_utils
from specsamp.sampling.warp import Warp

Array = jax.Array

SMALLEST_BUCKET = 16
SLOTS_MULTIPLE = 128
DEFAULT_CONTEXT = 4096
MANY_ROUNDS = np.iinfo(np.int32).max
TOKENS_PER_LOOK = 8  # tokens that a row may emit between two searches for stop strings
TOKEN_BYTES = 9  # per slot of a row: the token, whether it was drafted, its log-probability


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class Engine:
    """A loop with its weights, and the sizes of the states that it runs on.

    Attributes:
      slots: slots of each row.
      stop_ids: the largest number of stop tokens of a request.
      idle: a request whose sampling parameters also fill the rows without a request.
      own_lengths: whether each request may have its own draft length.
    """

    pair: Pair
    method: Method
    loop: Loop
    weights: Weights
    slots: int
    stop_ids: int
    idle: Request
    own_lengths: bool = False

    @classmethod
    def create(
        cls,
        pair: Pair,
        method: Method,
        requests: Sequence[Request],
        *,
        batch: int | None = None,
        spare: int = 0,
        slots: int | None = None,
        stop_ids: int = 0,
        keep_log_probs: bool | str = False,
        keep_rounds: bool | None = None,
    ) -> Engine:
        """Chooses sizes for requests, and prepares the weights for these sizes.

        Args:
          requests: all requests, or an example of them if the sizes are given.
          batch: number of rows that are decoded together; default the number of requests.
          spare: number of rows that are prefilled while the batch is decoded, for the check of
            memory.
          slots: slots of the caches; default as many as the requests need.
          stop_ids: the largest number of stop tokens of later requests.
          keep_rounds: see `Loop`; default whether strings end the texts of these requests.

        Raises:
          ValueError: the caches do not fit in memory.
        """
        validate.choice("return_log_probs", keep_log_probs, (False, True, "sampled"))
        if keep_rounds is None:
            keep_rounds = any(request.stops.texts for request in requests)
        batch = len(requests) if batch is None else batch
        loop = method.loop(
            pair, batch=batch, keep_log_probs=keep_log_probs, keep_rounds=keep_rounds
        )
        if slots is None:  # all prompts and budgets in the same buckets
            padded_length = _padded_length(pair, max(len(request.prompt) for request in requests))
            longest = padded_length + bucket(max(request.max_new_tokens for request in requests))
            # Little more than the model's positions.
            longest = max(min(longest, positions_of(pair.target)), padded_length)
            slots = round_slots(longest + loop.headroom)
        check_memory(loop, rows=batch + spare, slots=slots)
        return cls(
            pair=pair,
            method=method,
            loop=loop,
            weights=pair.weights(method.drafter, slots),
            slots=slots,
            stop_ids=max(stop_ids, *(len(request.stops.loop_ids) for request in requests)),
            idle=requests[0],
        )

    def prefill(
        self, requests: Sequence[Request | None], num_samples: int = 1, width: int | None = None
    ) -> DecodeState:
        """Reads prompts, padded to the bucket of the longest, into a state with a row for each
        request.

        Args:
          requests: ``num_samples`` requests of each prompt, one prompt after the other; None is an
            idle row. Idle rows are added until all data shards have equally many rows.
          width: the padded length of prompts; default the bucket of the longest.
        """
        requests = [*requests, *[None] * (-len(requests) % (self.pair.shards.count * num_samples))]
        prompts = [
            (0,) if request is None else request.prompt for request in requests[::num_samples]
        ]
        lengths_B = np.array([len(tokens) for tokens in prompts], np.int32)
        width = _padded_length(self.pair, max(lengths_B.tolist())) if width is None else width
        tokens_BP = np.zeros((len(prompts), min(width, self.slots)), np.int32)
        for row, tokens in zip(tokens_BP, prompts):
            row[: len(tokens)] = tokens
        arrays = self.arrays(requests), tokens_BP, lengths_B
        return self.loop.prefill(self.weights, *arrays, slots=self.slots, num_samples=num_samples)

    def extend(
        self,
        requests: Sequence[Request | None],
        state: DecodeState | None,
        starts: Sequence[int],
        ends: Sequence[int],
        chunk: int,
    ) -> DecodeState:
        """Reads tokens of prompts into the rows of a state, which is donated; see `Loop.extend`.

        Args:
          requests: of all rows; None is a row without a prompt.
          state: without its request batch; None: nothing was read yet.
          starts, ends: the range of tokens of each prompt to read; earlier tokens were read
            already.
          chunk: number of tokens that are read per call.

        Raises:
          ValueError: the last call would end beyond the slots of a row.
        """
        calls = max(-(-(end - start) // chunk) for start, end in zip(starts, ends))
        needed = max(starts) + calls * chunk
        if needed > self.slots:
            raise ValueError(
                f"{calls} calls of {chunk} tokens from slot {max(starts)} need {needed} slots, but "
                f"rows have {self.slots}: read fewer tokens"
            )
        tokens_BS = np.zeros((len(requests), self.slots), np.int32)
        for row, request, end in zip(tokens_BS, requests, ends):
            row[:end] = 0 if request is None else request.prompt[:end]
        start_B, lengths_B = jnp.asarray(starts, jnp.int32), jnp.asarray(ends, jnp.int32)
        arrays = self.arrays(requests)
        return self.loop.extend(
            self.weights, arrays, state, jnp.asarray(tokens_BS), start_B, lengths_B, chunk=chunk
        )

    def blank(self, rows: int) -> DecodeState:
        """Returns ended rows without a prompt, which `insert` can overwrite."""
        return self.loop.blank(self.arrays([None] * rows), slots=self.slots)

    def with_slots(self, slots: int) -> Engine:
        """Returns this engine for states with another number of slots."""
        return dataclasses.replace(
            self, slots=slots, weights=self.pair.weights(self.method.drafter, slots)
        )

    def with_draft(self, params: Any) -> Engine:
        """Returns this engine with other draft parameters, which change proposals but not the
        output distribution.
        """
        drafter = self.method.drafter
        draft = drafter.fit_slots(drafter.prepare(params), self.slots)
        return dataclasses.replace(self, weights=dataclasses.replace(self.weights, draft=draft))

    def insert(self, state: DecodeState, rows: DecodeState, at: Sequence[int]) -> DecodeState:
        """Writes ``rows`` over the rows ``at`` of ``state``, which is donated; see
        `batch_rows.insert`.
        """
        return batch_rows.insert(state, rows, at, self.pair.shards)

    def resize(self, state: DecodeState, at: Sequence[int], slots: int) -> DecodeState:
        """Returns rows of ``state`` as a state with another number of slots; see
        `batch_rows.resize`.
        """
        request = self.arrays([None] * self.pair.shards.count)
        like = jax.eval_shape(lambda: self.loop.blank(request, slots=slots))
        shapes = tuple(leaf.shape[1:] for leaf in jax.tree.leaves(like))
        return batch_rows.resize(state, jnp.asarray(at, jnp.int32), shapes, self.pair.shards)

    def extract(self, state: DecodeState, at: Sequence[int]) -> DecodeState:
        """Returns the rows ``at`` of ``state``, without their request batch; see
        `batch_rows.extract`.
        """
        state = dataclasses.replace(state, request=None)
        return batch_rows.extract(state, jnp.asarray(at, jnp.int32), self.pair.shards)

    def run(
        self, state: DecodeState, max_rounds: int = MANY_ROUNDS, min_running: int = 1
    ) -> DecodeState:
        """Decodes ``max_rounds`` rounds, or until fewer than ``min_running`` rows are running;
        donates ``state``.
        """
        return self.loop.run(self.weights, state, max_rounds, min_running)

    def take(self, state: DecodeState, requests: Sequence[Request | None]) -> list[RowText | None]:
        """Returns the texts so far of ``requests``, which are the first rows of ``state``, in
        order.
        """
        state = to_host(without_caches(state))
        return [
            None if request is None else self.text(state, place, request)
            for place, request in enumerate(requests)
        ]

    def text(self, state: DecodeState, place: int, request: Request) -> RowText:
        """Returns the text of the request in row ``place``, cut at a stop string; ``state`` is on
        the host.
        """
        begin = len(request.prompt)
        tokens = state.tokens_BS[place, begin : state.lengths_B[place]].tolist()
        count = request.stops.count(request.continuation, tokens)
        return RowText.of(state, place, begin, count)

    def end(self, state: DecodeState, is_ended: Sequence[bool]) -> DecodeState:
        """Ends the rows of ``state`` where ``is_ended`` is true, as a stop token would."""
        is_ended_B = np.zeros(len(state.lengths_B), bool)
        is_ended_B[: len(is_ended)] = is_ended
        return dataclasses.replace(state, finish_B=batch_rows.end(state.finish_B, is_ended_B))

    def num_held(self, state: DecodeState) -> np.ndarray:
        """Returns how many tokens of each row the caches of target and drafter hold, int ``[B]``.

        The count includes the pending token and the token before it, see `count_known`.
        """
        seen_B = None if state.adaptive_state is None else state.adaptive_state.seen_B
        lengths_B, seen_B = to_host((state.lengths_B, seen_B))
        if seen_B is None:
            return lengths_B
        # A paused drafter has read less.
        return np.minimum(lengths_B, seen_B + 2 + hooks_of(self.loop.drafter).looks_ahead)

    def rounds_per_look(self, requests: Sequence[Request]) -> int:
        """Returns the number of rounds between two searches for stop strings; tokens after a stop
        string are wasted.
        """
        has_strings = any(request.stops.texts for request in requests)
        return -(-TOKENS_PER_LOOK // (self.loop.depth + 1)) if has_strings else MANY_ROUNDS

    def arrays(self, requests: Sequence[Request | None]) -> RequestBatch:
        """Returns the arrays of requests; None is a row without a budget."""
        asked = [self.idle if request is None else request for request in requests]
        columns = -(-max(self.stop_ids, 1) // STOPS_MULTIPLE) * STOPS_MULTIPLE
        stop_ids_BN = np.full((len(asked), columns), -1, np.int32)
        for row, request in zip(stop_ids_BN, asked):
            row[: len(request.stops.loop_ids)] = request.stops.loop_ids
        most = self.loop.drafter.K
        lengths = [
            most if request.draft_length is None else request.draft_length for request in asked
        ]
        own = [request.draft_sampling for request in asked]
        return RequestBatch.create(
            sampling=self._stack([request.sampling for request in asked]),
            draft_sampling=None if own[0] is None else self._stack(own),
            limits=[0 if request is None else request.limit for request in requests],
            seed=[request.seed for request in asked],
            prompt_ids=[request.prompt_id for request in asked],
            sample_ids=[request.sample_index for request in asked],
            stop_ids=stop_ids_BN,
            draft_lengths=lengths if self.own_lengths else None,
        )

    def _stack(self, warps: Sequence[Warp]) -> Warp:
        return self.pair.full_warp(jax.tree.map(lambda *numbers: np.stack(numbers), *warps))


def without_caches(state: DecodeState) -> DecodeState:
    """Returns a state without caches and request batch: only tokens and counts."""
    return dataclasses.replace(
        state,
        cache=None,
        drafter_state=None,
        request=None,
        warp_state=(),
        draft_warp_state=(),
        adaptive_state=None,
    )


def to_host(tree: Any) -> Any:
    """Returns all arrays as NumPy arrays; for arrays on several processes, all processes must call
    it.
    """

    def elsewhere(x):
        return isinstance(x, jax.Array) and not x.is_fully_addressable

    def gather(x):
        return multihost_utils.process_allgather(x, tiled=True) if elsewhere(x) else x

    return jax.device_get(jax.tree.map(gather, tree))


def bucket(size: int) -> int:
    """Rounds ``size`` up to 16, 24, 32, 48, 64, 96, ...: above 16, by at most one half."""
    power = max(SMALLEST_BUCKET, 1 << (size - 1).bit_length())
    return power * 3 // 4 if size <= power * 3 // 4 and power > SMALLEST_BUCKET else power


def count_known(before: Sequence[int], tokens: Sequence[int], loop: Loop, end: int = 0) -> int:
    """Returns the number of first tokens of a sequence that need not be read again.

    The last token of ``before`` was not read by the target, and the token before it perhaps not by
    the draft. Slots of a drafter that looks ahead may depend on later tokens that differ, or that a
    stop has cut from a draft. A model with recurrent layers reads all tokens again, if more than a
    few of ``before`` are gone.

    Args:
      before: the tokens of a row that its caches hold, see `Engine.num_held`.
      tokens: the whole new sequence.
      end: the length that the row had reached, if more than ``before``: recurrent states hold all.
    """
    hooks = hooks_of(loop.drafter)
    most = min(len(before), len(tokens))
    common = next((at for at in range(most) if before[at] != tokens[at]), most)
    known = max(min(common, len(tokens) - 1, len(before) - 1) - 1 - hooks.looks_ahead, 0)
    models = loop.target, hooks.draft_model
    rewinds = [model.rewind for model in models if model is not None and model.rewind is not None]
    removed = max(len(before), end) - 1 + loop.drafter.K - known
    return known if removed <= min(rewinds, default=math.inf) else 0


def round_slots(slots: int) -> int:
    """Rounds the slots of a cache up, so that few sizes are compiled."""
    return -(-slots // SLOTS_MULTIPLE) * SLOTS_MULTIPLE


def context_of(pair: Pair, drafter: Drafter, name: str, context: int | None) -> int:
    """Returns the largest number of tokens of a sequence; default 4096, or the models' number of
    positions if smaller.

    Args:
      name: of the argument ``context``, for messages.

    Raises:
      ValueError: the models have fewer positions.
    """
    positions = positions_of(pair.target, drafter)
    if context is None:
        return min(positions, DEFAULT_CONTEXT)
    context = validate.integer(name, context, 2)
    if context > positions:
        raise ValueError(f"{name} = {context}, but the models have {positions} positions: lower it")
    return context


def check_memory(loop: Loop, *, rows: int, slots: int) -> None:
    """Raises ValueError, with both sizes, if the caches of ``rows`` sequences do not fit in device
    memory.
    """
    needed = _cache_bytes(loop, rows, slots) + rows * slots * TOKEN_BYTES
    available = _memory_of_devices()
    if available is not None and needed > available:
        raise ValueError(
            f"{rows} rows of {slots} slots need {needed / 1e9:.1f} GB for caches and tokens, more "
            f"than the {available / 1e9:.1f} GB available: decode fewer prompts or samples at a "
            "time, or fewer tokens"
        )


@functools.lru_cache(64)  # large models take tens of milliseconds to trace
def _cache_bytes(loop: Loop, rows: int, slots: int) -> int:
    shapes = jax.eval_shape(lambda: loop.empty_caches(rows, slots))
    return sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in jax.tree.leaves(shapes))


def _memory_of_devices() -> int | None:
    """Returns the memory in bytes of all devices together, or of the host for CPU devices; None:
    unknown.
    """
    devices = jax.devices()
    if devices[0].platform == "cpu":
        try:
            return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") * jax.process_count()
        except (ValueError, OSError, AttributeError):
            return None
    limit = (jax.local_devices()[0].memory_stats() or {}).get("bytes_limit")
    return None if limit is None else limit * len(devices)


def _padded_length(pair: Pair, longest: int) -> int:
    """Returns the bucket of the longest prompt, at most the model's number of positions."""
    return min(bucket(longest), positions_of(pair.target))

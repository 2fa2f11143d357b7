"""A call of `generate`, checked and rounded up to buckets.

Sizes are rounded so that calls of about the same size share a program; what is beyond the sizes asked for is padding
that nothing sees.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils

from specsamp.decoding import checks
from specsamp.decoding.loop import Loop, decode_window
from specsamp.decoding.pair import Pair
from specsamp.decoding.results import Completion, RowStats
from specsamp.decoding.types import DecodeState, Finish, Request, Weights
from specsamp.sampling.rng import row_keys
from specsamp.sampling.warp import Warp, chain, first_tokens, for_rows, greedy

SMALLEST_BUCKET = 16
SLOTS_MULTIPLE = 128
STOPS_MULTIPLE = 8


@dataclasses.dataclass(frozen=True, kw_only=True)
class Job:
    """A checked call: static loop, arrays, and the way back to completions."""

    pair: Pair
    loop: Loop
    weights: Weights
    request: Request
    tokens_BP: jax.Array
    lengths_B: np.ndarray
    rows: int  # that were asked for; any beyond are idle
    slots: int
    num_samples: int
    stop_ids: frozenset[int]

    @classmethod
    def make(
        cls,
        *,
        pair,
        prompts,
        max_new_tokens,
        sampling,
        draft_sampling,
        draft_length,
        rule,
        drafter,
        seed,
        stop,
        num_samples,
        return_log_probs,
        prompt_ids,
    ) -> Job:
        """Takes the arguments of `generate`, and raises what it raises."""
        window = decode_window()
        drafter = checks.choose_drafter(pair, draft_length, drafter, window)
        loop = Loop(
            target=pair.target,
            drafter=drafter,
            rule=checks.choose_rule(rule),
            window=window,
            keep_log_probs=return_log_probs,
            shares=pair.shares,
        )
        token_lists = checks.encode(pair, prompts)
        lengths = [len(tokens) for tokens in token_lists]
        limits = checks.limits(pair, drafter, lengths, max_new_tokens)
        num_samples = checks.integer("num_samples", num_samples, 1)
        seed = checks.integer("seed", seed, 0, 2**32)
        ids = range(len(lengths)) if prompt_ids is None else checks.integers("prompt_ids", prompt_ids, 0)
        if len(ids) != len(lengths):
            raise ValueError(f"{len(ids)} prompt_ids for {len(lengths)} prompts")
        stop_ids = checks.stop_ids(pair, stop)

        def rows(values: Sequence[int]) -> jax.Array:
            return jnp.asarray(np.repeat(np.asarray(values, np.int32), num_samples))

        def warp(given: Warp) -> Warp:
            per_row = for_rows(given, len(lengths), num_samples)
            if pair.tokenizer is None or pair.tokenizer.vocab_size == pair.target.vocab_size:
                return per_row
            return chain(for_rows(first_tokens(pair.tokenizer.vocab_size), len(lengths), num_samples), per_row)

        sampling = warp(greedy() if sampling is None else sampling)
        request = Request(
            sampling=sampling,
            draft_sampling=sampling if draft_sampling is None else warp(draft_sampling),
            row_keys_B=row_keys(seed, rows(ids), jnp.asarray(np.tile(np.arange(num_samples), len(lengths)), jnp.int32)),
            limits_B=rows(limits),
            stop_ids=_padded(sorted(stop_ids), STOPS_MULTIPLE, -1),
        )
        padded_length = bucket(max(lengths))
        if pair.target.max_positions is not None:
            padded_length = min(padded_length, pair.target.max_positions)
        slots = _slots(pair, loop, padded_length, max(limit - length for limit, length in zip(limits, lengths)))
        tokens_BP = jnp.stack([_padded(tokens, padded_length, 0) for tokens in token_lists])
        lengths_B = np.asarray(lengths, np.int32)
        idle = -len(lengths) % pair.shares.ways  # prompts, so that all shares are equal
        if idle:
            request = _with_idle_rows(request, idle * num_samples, lengths[-1])
            tokens_BP, lengths_B = (_last_again(x, idle) for x in (tokens_BP, lengths_B))
        return cls(
            pair=pair,
            loop=loop,
            weights=pair.weights(drafter, slots),
            request=request,
            tokens_BP=tokens_BP,
            lengths_B=lengths_B,
            rows=len(lengths) * num_samples,
            slots=slots,
            num_samples=num_samples,
            stop_ids=stop_ids,
        )

    def prefill(self) -> DecodeState:
        return self.loop.prefill(
            self.weights,
            self.request,
            self.tokens_BP,
            jnp.asarray(self.lengths_B),
            slots=self.slots,
            num_samples=self.num_samples,
        )

    def row_index(self, row: int) -> dict[str, int]:
        return {"prompt_index": row // self.num_samples, "sample_index": row % self.num_samples}

    def before_stop(self, tokens: list[int]) -> list[int]:
        return tokens[:-1] if tokens and tokens[-1] in self.stop_ids else tokens

    def completions(self, state: DecodeState) -> list[Completion]:
        state = to_host(dataclasses.replace(state, cache=None, drafter_state=None))
        return [self._completion(state, row) for row in range(self.rows)]

    def _completion(self, state: DecodeState, row: int) -> Completion:
        emitted = slice(self.lengths_B[row // self.num_samples], state.lengths_B[row])
        tokens = state.tokens_BS[row, emitted].tolist()
        return Completion(
            **self.row_index(row),
            text=None if self.pair.tokenizer is None else self.pair.tokenizer.decode(self.before_stop(tokens)),
            tokens=tokens,
            from_draft=state.from_draft_BS[row, emitted].tolist(),
            log_probs=None if state.log_probs_BS is None else state.log_probs_BS[row, emitted].tolist(),
            finish=Finish(int(state.finish_B[row])).name.lower(),
            exact=self.loop.rule.exact and self.loop.drafter.exact,
            stats=RowStats.of(state.stats, row),
        )


def to_host(tree: Any) -> Any:
    """The whole of every array as numpy, also of what lies on devices of other processes (which must call it too)."""

    def elsewhere(x):
        return isinstance(x, jax.Array) and not x.is_fully_addressable

    def gather(x):
        return multihost_utils.process_allgather(x, tiled=True) if elsewhere(x) else x

    return jax.device_get(jax.tree.map(gather, tree))


def bucket(size: int) -> int:
    """16, 24, 32, 48, 64, 96, ...: from 16 on at most half as much again as asked for."""
    power = max(SMALLEST_BUCKET, 1 << (size - 1).bit_length())
    return power * 3 // 4 if size <= power * 3 // 4 and power > SMALLEST_BUCKET else power


def _slots(pair: Pair, loop: Loop, padded_length: int, budget: int) -> int:
    """Slots for any prompt and budget of the same buckets; never many more than the model has positions."""
    longest = padded_length + bucket(budget)
    if pair.target.max_positions is not None:
        longest = max(min(longest, pair.target.max_positions), padded_length)
    return -(-max(longest + loop.headroom, loop.window) // SLOTS_MULTIPLE) * SLOTS_MULTIPLE


def _padded(values: Sequence[int], multiple: int, filler: int) -> jax.Array:
    """``values`` as int32, filled up to a multiple of ``multiple``, at least once that."""
    size = max(-(-len(values) // multiple), 1) * multiple
    return jnp.asarray(list(values) + [filler] * (size - len(values)), jnp.int32)


def _with_idle_rows(request: Request, rows: int, length: int) -> Request:
    """With ``rows`` more like the last, but without a budget: they have ended before they begin."""

    def last(tree):
        return jax.tree.map(lambda x: _last_again(x, rows), tree)

    return Request(
        sampling=last(request.sampling),
        draft_sampling=last(request.draft_sampling),
        row_keys_B=last(request.row_keys_B),
        stop_ids=request.stop_ids,
        limits_B=last(request.limits_B).at[-rows:].set(length),
    )


def _last_again(x: Any, times: int) -> Any:
    return x[np.minimum(np.arange(len(x) + times), len(x) - 1)]

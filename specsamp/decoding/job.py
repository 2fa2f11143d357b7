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

from specsamp import validate
from specsamp.decoding import batch_rows, checks
from specsamp.decoding.loop import Loop
from specsamp.decoding.method import Method
from specsamp.decoding.pair import Pair
from specsamp.decoding.results import Completion, RowStats, RowText
from specsamp.decoding.state import DecodeState, Finish, RequestBatch, Weights
from specsamp.decoding.stops import Stops
from specsamp.decoding.text import Continuation
from specsamp.sampling.warp import Warp

SMALLEST_BUCKET = 16
SLOTS_MULTIPLE = 128
MANY_ROUNDS = np.iinfo(np.int32).max
TOKENS_PER_LOOK = 8  # that a row may write between two looks for strings that end texts


@dataclasses.dataclass(frozen=True, kw_only=True)
class Job:
    """A checked call: static loop, what is asked of each row, and the way back to completions.

    Row r is sample ``r % num_samples`` of prompt ``r // num_samples``.
    """

    pair: Pair
    method: Method
    loop: Loop
    weights: Weights
    prompts: tuple[tuple[int, ...], ...]  # token ids
    request: RequestBatch  # one row for each sample of each prompt
    slots: int
    num_samples: int
    stops: Stops

    @classmethod
    def create(
        cls,
        pair: Pair,
        prompts: Sequence[checks.Prompt],
        max_new_tokens: int | Sequence[int],
        method: Method,
        *,
        seed: int = 0,
        stop: Sequence[int | str] | None = None,
        num_samples: int = 1,
        return_log_probs: bool = False,
        prompt_ids: Sequence[int] | None = None,
        batch: int | None = None,
        spare: int = 0,
        slots: int | None = None,
        keep_rounds: bool = False,
    ) -> Job:
        """Checks the arguments of `generate` and makes arrays of them.

        Args:
          batch: rows that are decoded at a time; default all of them.
          spare: rows that are read beside them, to take the places of those that end; only memory counts them.
          slots: of the caches; default as many as prompts and budgets take.
          keep_rounds: the loop records rounds even if no string ends a text, so that all jobs share one.

        Raises:
          ValueError: before compilation, naming the value and the fix.
        """
        token_lists = checks.encode(pair, prompts)
        lengths = [len(tokens) for tokens in token_lists]
        limits = checks.limits(pair, method.drafter, lengths, max_new_tokens)
        num_samples = validate.integer("num_samples", num_samples, 1)
        seed = validate.integer("seed", seed, 0, 2**32)
        ids = range(len(lengths)) if prompt_ids is None else validate.integers("prompt_ids", prompt_ids, 0)
        if len(ids) != len(lengths):
            raise ValueError(f"{len(ids)} prompt_ids for {len(lengths)} prompts")
        stops = checks.stops(pair, stop)
        for warp in (method.sampling, method.draft_sampling):
            if isinstance(warp, Warp):  # anything else is refused where the request is made
                warp.check(pair.target.vocab_size)
        loop = method.loop(pair, keep_log_probs=return_log_probs, keep_rounds=keep_rounds or bool(stops.texts))
        if slots is None:
            budget = max(limit - length for limit, length in zip(limits, lengths))
            slots = _slots(pair, loop, _padded_length(pair, lengths), budget)
        checks.memory(loop, rows=(len(lengths) * num_samples if batch is None else batch) + spare, slots=slots)
        request = RequestBatch.create(
            sampling=method.sampling,
            draft_sampling=method.draft_sampling,
            limits=limits,
            seed=seed,
            prompt_ids=ids,
            num_samples=num_samples,
            stop_ids=stops.ids,
            num_tokens=pair.num_tokens,
            adaptive=method.adaptive,
            batch=batch,
        )
        return cls(
            pair=pair,
            method=method,
            loop=loop,
            weights=pair.weights(method.drafter, slots),
            prompts=tuple(map(tuple, token_lists)),
            request=request,
            slots=slots,
            num_samples=num_samples,
            stops=stops,
        )

    @property
    def rows(self) -> int:
        """The rows that are asked for."""
        return len(self.prompts) * self.num_samples

    def prefill(self) -> DecodeState:
        """Reads all prompts; idle rows are added until all data shards have as many."""
        idle = -len(self.prompts) % self.pair.shards.count
        return self.read(
            [*self.prompts, *[self.prompts[-1]] * idle],
            self.request.with_idle_rows(idle * self.num_samples),
            self.num_samples,
        )

    def read(self, prompts: Sequence[Sequence[int]], request: RequestBatch, num_samples: int = 1) -> DecodeState:
        """Reads some prompts, padded to the bucket of the longest, for the rows of ``request``."""
        lengths = [len(tokens) for tokens in prompts]
        tokens_BP = np.zeros((len(prompts), min(_padded_length(self.pair, lengths), self.slots)), np.int32)
        for row, tokens in zip(tokens_BP, prompts):
            row[: len(tokens)] = tokens
        arrays = jnp.asarray(tokens_BP), jnp.asarray(lengths, jnp.int32)
        return self.loop.prefill(self.weights, request, *arrays, slots=self.slots, num_samples=num_samples)

    def run(self, state: DecodeState, max_rounds: int = MANY_ROUNDS, min_running: int = 1) -> DecodeState:
        """Decodes for ``max_rounds`` rounds, or until fewer than ``min_running`` rows run; ``state`` is donated."""
        return self.loop.run(self.weights, state, max_rounds, min_running)

    def texts(self, state: DecodeState, rows: Sequence[int]) -> list[RowText]:
        """Brings to the host what some rows of the job have written so far, which are the first of ``state``."""
        state = written(state)
        return [self.text(state, place, row) for place, row in enumerate(rows)]

    def text(self, state: DecodeState, place: int, row: int) -> RowText:
        """Returns what a row of the job has written so far, and finds the string that ends it.

        Args:
          state: on the host, from `written`.
          place: the row's in ``state``.
        """
        emitted = slice(len(self.prompts[row // self.num_samples]), int(state.lengths_B[place]))
        log_probs_BS = state.log_probs_BS
        meter = state.meter and jax.tree.map(lambda x_BS: x_BS[place, emitted], state.meter)
        text = RowText(
            tokens=state.tokens_BS[place, emitted].tolist(),
            from_draft=state.from_draft_BS[place, emitted].tolist(),
            log_probs=None if log_probs_BS is None else log_probs_BS[place, emitted].tolist(),
            finish=Finish(int(state.finish_B[place])),
            stats=RowStats.of(state.stats, place, meter),
            meter=meter,
        )
        if self.stops.texts:
            count = self.stops.count(self.continuation(row), text.tokens)
            if count is not None:
                rounds = state.rounds_BS[place, emitted].tolist()
                return text.cut(count, rounds, self.loop.depth)
        return text

    @property
    def rounds_per_look(self) -> int:
        """The most rounds between two looks for strings that end texts: what is written beyond one is lost."""
        return -(-TOKENS_PER_LOOK // (self.loop.depth + 1)) if self.stops.texts else MANY_ROUNDS

    def decode(self) -> list[Completion]:
        """Decodes all rows together, and looks for strings that end texts every few rounds."""
        state = self.prefill()
        while True:
            state = self.run(state, self.rounds_per_look)
            texts = self.texts(state, range(self.rows))
            if all(text.finish != Finish.RUNNING for text in texts):
                return [self.completion(row, text) for row, text in enumerate(texts)]
            state = self.end(state, texts)

    def end(self, state: DecodeState, texts: Sequence[RowText]) -> DecodeState:
        """Ends the rows whose text has met a string that ends it; other rows of ``state`` stay as they are."""
        is_ended_B = np.zeros(len(state.lengths_B), bool)
        is_ended_B[: len(texts)] = [text.finish == Finish.STOP for text in texts]
        return batch_rows.end(state, is_ended_B)

    def continuation(self, row: int) -> Continuation | None:
        """Returns what decodes a row's text, if the pair has a tokenizer."""
        tokenizer = self.pair.tokenizer
        return None if tokenizer is None else Continuation(tokenizer, self.prompts[row // self.num_samples])

    def row_index(self, row: int) -> dict[str, int]:
        """Returns which prompt and which of its samples a row is."""
        return {"prompt_index": row // self.num_samples, "sample_index": row % self.num_samples}

    def completion(self, row: int, text: RowText) -> Completion:
        """Returns the result of a row that has ended."""
        decoder = self.continuation(row)
        return Completion(
            **self.row_index(row),
            text=None if decoder is None else self.stops.text(decoder, text.tokens),
            tokens=text.tokens,
            from_draft=text.from_draft,
            log_probs=text.log_probs,
            finish=text.finish.name.lower(),
            exact=self.method.exact,
            row_independent=self.method.row_independent,
            stats=text.stats,
            dropped=text.dropped,
        )


def written(state: DecodeState) -> DecodeState:
    """Returns on the host what rows have written so far: their state without caches, and without what was asked."""
    nothing = dict(
        cache=None, drafter_state=None, request=None, warp_state=(), draft_warp_state=(), adaptive_state=None
    )
    return to_host(dataclasses.replace(state, **nothing))


def to_host(tree: Any) -> Any:
    """Returns all arrays as NumPy's, also what lies on devices of other processes (which must call it too)."""

    def elsewhere(x):
        return isinstance(x, jax.Array) and not x.is_fully_addressable

    def gather(x):
        return multihost_utils.process_allgather(x, tiled=True) if elsewhere(x) else x

    return jax.device_get(jax.tree.map(gather, tree))


def bucket(size: int) -> int:
    """Returns the next of 16, 24, 32, 48, 64, 96, ...: from 16 on at most half as much again as ``size``."""
    power = max(SMALLEST_BUCKET, 1 << (size - 1).bit_length())
    return power * 3 // 4 if size <= power * 3 // 4 and power > SMALLEST_BUCKET else power


def _padded_length(pair: Pair, lengths: Sequence[int]) -> int:
    """Returns the bucket of the longest prompt; never more than the model has positions."""
    padded = bucket(max(lengths))
    return padded if pair.target.max_positions is None else min(padded, pair.target.max_positions)


def _slots(pair: Pair, loop: Loop, padded_length: int, budget: int) -> int:
    """Slots for any prompt and budget of the same buckets; never many more than the model has positions."""
    longest = padded_length + bucket(budget)
    if pair.target.max_positions is not None:
        longest = max(min(longest, pair.target.max_positions), padded_length)
    return -(-max(longest + loop.headroom, loop.window) // SLOTS_MULTIPLE) * SLOTS_MULTIPLE

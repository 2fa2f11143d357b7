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
from specsamp.decoding.loop import Loop
from specsamp.decoding.method import Method
from specsamp.decoding.pair import Pair
from specsamp.decoding.results import Completion, RowStats
from specsamp.decoding.state import DecodeState, Finish, Request, Weights

SMALLEST_BUCKET = 16
SLOTS_MULTIPLE = 128


@dataclasses.dataclass(frozen=True, kw_only=True)
class Job:
    """A checked call: static loop, arrays, and the way back to completions."""

    pair: Pair
    method: Method
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
    ) -> Job:
        """Checks the arguments of `generate` and makes arrays of them.

        Raises:
          ValueError: before compilation, naming the value and the fix.
        """
        loop = method.loop(pair, keep_log_probs=return_log_probs)
        token_lists = checks.encode(pair, prompts)
        lengths = [len(tokens) for tokens in token_lists]
        limits = checks.limits(pair, method.drafter, lengths, max_new_tokens)
        num_samples = checks.integer("num_samples", num_samples, 1)
        seed = checks.integer("seed", seed, 0, 2**32)
        ids = range(len(lengths)) if prompt_ids is None else checks.integers("prompt_ids", prompt_ids, 0)
        if len(ids) != len(lengths):
            raise ValueError(f"{len(ids)} prompt_ids for {len(lengths)} prompts")
        stop_ids = checks.stop_ids(pair, stop)
        padded_length = bucket(max(lengths))
        if pair.target.max_positions is not None:
            padded_length = min(padded_length, pair.target.max_positions)
        slots = _slots(pair, loop, padded_length, max(limit - length for limit, length in zip(limits, lengths)))
        checks.memory(loop, rows=len(lengths) * num_samples, slots=slots)
        request = Request.create(
            sampling=method.sampling,
            draft_sampling=method.draft_sampling,
            limits=limits,
            seed=seed,
            prompt_ids=ids,
            num_samples=num_samples,
            stop_ids=stop_ids,
            num_tokens=pair.num_tokens,
        )
        tokens_BP = jnp.stack([_padded(tokens, padded_length) for tokens in token_lists])
        lengths_B = np.asarray(lengths, np.int32)
        idle = -len(lengths) % pair.shards.count  # prompts, so that all shards are equal
        if idle:
            request = request.with_idle_rows(idle * num_samples)
            tokens_BP, lengths_B = (x[np.minimum(np.arange(len(x) + idle), len(x) - 1)] for x in (tokens_BP, lengths_B))
        return cls(
            pair=pair,
            method=method,
            loop=loop,
            weights=pair.weights(method.drafter, slots),
            request=request,
            tokens_BP=tokens_BP,
            lengths_B=lengths_B,
            rows=len(lengths) * num_samples,
            slots=slots,
            num_samples=num_samples,
            stop_ids=stop_ids,
        )

    def prefill(self) -> DecodeState:
        """Reads the prompts."""
        return self.loop.prefill(
            self.weights,
            self.request,
            self.tokens_BP,
            jnp.asarray(self.lengths_B),
            slots=self.slots,
            num_samples=self.num_samples,
        )

    def run(self, state: DecodeState, max_rounds: int = np.iinfo(np.int32).max) -> DecodeState:
        """Decodes for ``max_rounds`` rounds, or until all rows have ended; ``state`` is donated."""
        return self.loop.run(self.weights, state, max_rounds)

    def row_index(self, row: int) -> dict[str, int]:
        """Returns which prompt and which of its samples a row is."""
        return {"prompt_index": row // self.num_samples, "sample_index": row % self.num_samples}

    def before_stop(self, tokens: list[int]) -> list[int]:
        """Returns emitted tokens without the stop token at their end."""
        return tokens[:-1] if tokens and tokens[-1] in self.stop_ids else tokens

    def completions(self, state: DecodeState) -> list[Completion]:
        """Returns the results of the rows that were asked for, on the host."""
        state = to_host(
            dataclasses.replace(state, cache=None, drafter_state=None, request=None, warp_state=(), draft_warp_state=())
        )
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
            exact=self.method.exact,
            stats=RowStats.of(state.stats, row),
        )


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


def _slots(pair: Pair, loop: Loop, padded_length: int, budget: int) -> int:
    """Slots for any prompt and budget of the same buckets; never many more than the model has positions."""
    longest = padded_length + bucket(budget)
    if pair.target.max_positions is not None:
        longest = max(min(longest, pair.target.max_positions), padded_length)
    return -(-max(longest + loop.headroom, loop.window) // SLOTS_MULTIPLE) * SLOTS_MULTIPLE


def _padded(values: Sequence[int], size: int) -> jax.Array:
    """Returns ``values`` as int32, filled up with zeros to ``size``."""
    return jnp.asarray(list(values) + [0] * (size - len(values)), jnp.int32)

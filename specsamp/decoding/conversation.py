"""A text that grows by turns: what target and draft have read of it stays in their caches.

chat = Conversation(pair, max_tokens=4096, sampling=temperature(0.7))
for chunk in chat.stream([{"role": "user", "content": "Why is the sky blue?"}]):
    print(chunk.text, end="")
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence

import jax.numpy as jnp
import numpy as np

from specsamp import validate
from specsamp.decoding import checks
from specsamp.decoding.adaptive import Adaptive
from specsamp.decoding.checks import Prompt
from specsamp.decoding.drafter import Drafter
from specsamp.decoding.generate import chunks, use_compilation_cache
from specsamp.decoding.job import SLOTS_MULTIPLE, Job, to_host
from specsamp.decoding.pair import Pair
from specsamp.decoding.results import Chunk, RowStats
from specsamp.decoding.state import DecodeState
from specsamp.sampling.rejection import TokenRule
from specsamp.sampling.rules import Rule
from specsamp.sampling.warp import Warp

DEFAULT_MAX_TOKENS = 4096
CHUNK = 64  # tokens of a turn that are read in a call


class Conversation:
    """Keeps the caches of one row between texts: of each, only what is new is read.

    A text is given whole, as messages, a string or tokens; as much of its beginning as was read or written before is
    not read again. So an answer that is edited, or taken back, is right as well. What is written after the text number
    n, counted from 0, is what ``generate(..., prompt_ids=[n])`` writes after it, up to near-ties of rounding: every turn
    has noise of its own.

    Attributes:
      tokens: those of the last text, with what was written.
      tokens_read: of the last text, how many were read.
      stats: counts of what was written after it.
    """

    def __init__(
        self,
        pair: Pair,
        *,
        max_tokens: int | None = None,
        sampling: Warp | None = None,
        draft_sampling: Warp | None = None,
        draft_length: int | Adaptive | None = None,
        rule: Rule = TokenRule(),
        drafter: Drafter | None = None,
        seed: int = 0,
        stop: Sequence[int | str] | None = None,
    ):
        """Makes an empty conversation; arguments that are not named here are those of `generate`.

        Args:
          max_tokens: of all turns together, for which caches are made; default 4096, or as many as the models have
            positions for.

        Raises:
          ValueError: naming the value and the fix; the models have fewer positions, or rows are split over devices.
        """
        if pair.shards.count > 1:
            raise ValueError(
                f"a conversation is one row, and the mesh has {pair.shards.count} data shards: make a mesh with data=1"
            )
        use_compilation_cache()
        self._pair, self._seed, self._stop = pair, seed, stop
        self._method = checks.make_method(
            pair,
            draft_length=draft_length,
            drafter=drafter,
            rule=rule,
            sampling=sampling,
            draft_sampling=draft_sampling,
        )
        known = (pair.target.max_positions, self._method.drafter.max_positions)
        positions = min((one for one in known if one is not None), default=None)
        default = DEFAULT_MAX_TOKENS if positions is None else min(positions, DEFAULT_MAX_TOKENS)
        self.max_tokens = default if max_tokens is None else validate.integer("max_tokens", max_tokens, 2)
        if positions is not None and self.max_tokens > positions:
            raise ValueError(f"max_tokens = {max_tokens}, but the models have {positions} positions: lower it")
        loop = self._method.loop(pair)
        beyond = max(loop.headroom, CHUNK)  # a chunk is read whole, whatever of it is text
        self._slots = -(-(self.max_tokens + beyond) // SLOTS_MULTIPLE) * SLOTS_MULTIPLE
        checks.memory(loop, rows=1, slots=self._slots)
        self.tokens: list[int] = []
        self.tokens_read = 0
        self.stats: RowStats | None = None
        self._state: DecodeState | None = None
        self._turn = 0

    def stream(self, text: Prompt, max_new_tokens: int = 256, *, rounds_per_chunk: int = 1) -> Iterator[Chunk]:
        """Continues a text, a few rounds at a time; `tokens` is complete when the last chunk was taken.

        Raises:
          ValueError: before anything is decoded: the text and its continuation are longer than ``max_tokens``.
        """
        max_new_tokens = validate.integer("max_new_tokens", max_new_tokens, 1)
        rounds_per_chunk = validate.integer("rounds_per_chunk", rounds_per_chunk, 1)
        job = Job.create(
            self._pair,
            [text],
            max_new_tokens,
            self._method,
            seed=self._seed,
            stop=self._stop,
            prompt_ids=[self._turn],
            slots=self._slots,
        )
        (tokens,) = job.prompts
        if len(tokens) + max_new_tokens > self.max_tokens:
            raise ValueError(
                f"the conversation has {len(tokens)} tokens, and {max_new_tokens} more are asked for: beyond the "
                f"max_tokens = {self.max_tokens} that it was made for"
            )
        self._turn += 1
        return self._stream(job, tokens, rounds_per_chunk)

    def _stream(self, job: Job, tokens: Sequence[int], rounds_per_chunk: int) -> Iterator[Chunk]:
        self._state, state = None, self._state  # it is donated: a stream that is left behind begins anew
        self.tokens, self.stats = list(tokens), None
        decoded = chunks(job, lambda: self._read(job, state, tokens), rounds_per_chunk)
        while True:
            try:
                chunk = next(decoded)
            except StopIteration as end:
                kept, (written,) = end.value
                self._state, self.stats = dataclasses.replace(kept, request=None), written.stats
                return
            self.tokens += chunk.tokens
            yield chunk

    def _read(self, job: Job, state: DecodeState | None, tokens: Sequence[int]) -> DecodeState:
        """Reads what is new of a text."""
        start = 0 if state is None else self._known(state, tokens)
        self.tokens_read = len(tokens) - start
        tokens_BS = np.zeros((1, job.slots), np.int32)
        tokens_BS[0, : len(tokens)] = tokens
        arrays = (jnp.asarray(tokens_BS), jnp.asarray([start], jnp.int32), jnp.asarray([len(tokens)], jnp.int32))
        return job.loop.extend(job.weights, job.request, state, *arrays, chunk=CHUNK)

    def _known(self, state: DecodeState, tokens: Sequence[int]) -> int:
        """Returns how many tokens of a text need not be read: the caches hold all before the pending one."""
        before_BS, lengths_B = to_host((state.tokens_BS, state.lengths_B))
        before = before_BS[0, : int(lengths_B[0])].tolist()
        most = min(len(before), len(tokens))
        common = next((i for i in range(most) if before[i] != tokens[i]), most)
        return max(min(common, len(tokens) - 1, len(before) - 1) - 1, 0)

"""A conversation: a sequence that grows by turns, with caches that are kept between turns.

chat = Conversation(pair, max_tokens=4096, sampling=temperature(0.7))
for chunk in chat.stream([{"role": "user", "content": "Why is the sky blue?"}]):
    print(chunk.text, end="")
"""

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Unpack

from specsamp import validate
from specsamp.compilation_cache import use_compilation_cache
from specsamp.decoding.engine import Engine, context_of, count_known, round_slots, to_host
from specsamp.decoding.generate import chunks
from specsamp.decoding.method import Decoding, make_method
from specsamp.decoding.pair import Pair
from specsamp.decoding.request import Prompt, Request, make_requests
from specsamp.decoding.results import Chunk, RowStats
from specsamp.decoding.state import DecodeState

CHUNK = 64  # tokens of a turn that are read per call


class Conversation:
    """Keeps the caches of one sequence between turns: only the new tokens of each text are read.

    Each turn takes the whole text, as messages, a string or tokens. Only the part that differs from
    the caches is read, so an earlier answer may also be edited or removed. Turn n, counted from 0,
    has the tokens of ``generate(..., prompt_ids=[n])`` for the same text, up to rounding.

    Attributes:
      tokens: the last text and its continuation.
      tokens_read: number of tokens of the last text that were read, not found in the caches.
      stats: counts of the continuation.
    """

    def __init__(
        self,
        pair: Pair,
        *,
        max_tokens: int | None = None,
        seed: int = 0,
        stop: Sequence[int | str] | None = None,
        **decoding: Unpack[Decoding],
    ):
        """Makes an empty conversation.

        Args:
          seed, stop, decoding: as in `generate`.
          max_tokens: the number of tokens of all turns together; default 4096, or the number of
            positions of the models.

        Raises:
          ValueError: the models have fewer positions, or rows are split over devices; names the
            value and the fix.
        """
        use_compilation_cache()
        self._method = make_method(pair, **decoding)
        if pair.shards.count > 1:
            raise ValueError(
                f"a conversation has one row, but the mesh has {pair.shards.count} data shards: "
                "make a mesh with data=1"
            )
        self._pair, self._seed, self._stop = pair, seed, stop
        self._turn = 0
        self.max_tokens = context_of(pair, self._method.drafter, "max_tokens", max_tokens)
        # The last chunk of a prompt may reach beyond the text.
        headroom = max(self._method.loop(pair).headroom, CHUNK)
        slots = round_slots(self.max_tokens + headroom)
        self._engine = Engine.create(pair, self._method, self._requests([0], 1), slots=slots)
        self.tokens: list[int] = []
        self.tokens_read = 0
        self.stats: RowStats | None = None
        self._state: DecodeState | None = None

    def stream(
        self, text: Prompt, max_new_tokens: int = 256, *, rounds_per_chunk: int = 1
    ) -> Iterator[Chunk]:
        """Continues a text, a few rounds at a time; `tokens` is complete after the last chunk.

        Raises:
          ValueError: before anything is decoded: the text and its continuation are longer than
            ``max_tokens``.
        """
        max_new_tokens = validate.integer("max_new_tokens", max_new_tokens, 1)
        rounds_per_chunk = validate.integer("rounds_per_chunk", rounds_per_chunk, 1)
        (request,) = self._requests(text, max_new_tokens)
        if request.limit > self.max_tokens:
            raise ValueError(
                f"the conversation has {len(request.prompt)} tokens, and max_new_tokens = "
                f"{max_new_tokens} more exceed its max_tokens = {self.max_tokens}: lower "
                "max_new_tokens, or make a conversation with more max_tokens"
            )
        self._turn += 1
        return self._stream(request, rounds_per_chunk)

    def _requests(self, text: Prompt, max_new_tokens: int) -> list[Request]:
        return make_requests(
            self._pair,
            self._method,
            [text],
            max_new_tokens,
            seed=self._seed,
            stop=self._stop,
            prompt_ids=[self._turn],
        )

    def _stream(self, request: Request, rounds_per_chunk: int) -> Iterator[Chunk]:
        # Donated: after a stream that ends early, all is read again.
        state, self._state = self._state, None
        self.tokens, self.stats = list(request.prompt), None
        start = 0  # the caches hold all tokens before the pending one
        if state is not None:
            held = self._engine.num_held(state)[0]
            before = to_host(state.tokens_BS)[0, :held].tolist()
            end = int(to_host(state.lengths_B)[0])
            start = count_known(before, request.prompt, self._engine.loop, end)
        self.tokens_read = len(request.prompt) - start
        state = self._engine.extend([request], state, [start], [len(request.prompt)], CHUNK)
        decoding = chunks(self._engine, state, [request], rounds_per_chunk)
        while True:
            try:
                chunk = next(decoding)
            except StopIteration as end:
                if chunk.finish != "invalid":  # the caches of invalid logits may hold NaN
                    self._state = dataclasses.replace(end.value, request=None)
                return
            self.tokens += chunk.tokens
            self.stats = chunk.stats
            yield chunk

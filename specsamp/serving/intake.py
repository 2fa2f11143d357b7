"""Turns the requests of callers into requests of the engine of a service."""

import dataclasses
import secrets
import weakref
from typing import Any

import jax
import numpy as np

from specsamp import validate
from specsamp.decoding.drafter import hooks_of
from specsamp.decoding.engine import Engine, context_of, round_slots
from specsamp.decoding.method import Method
from specsamp.decoding.pair import Pair
from specsamp.decoding.request import Request, encode, make_requests, make_stops, with_samples
from specsamp.decoding.text import Stops
from specsamp.sampling.grammar import Follow, no_grammar, release
from specsamp.sampling.grammar import grammar as make_grammar
from specsamp.sampling.penalties import Yielding
from specsamp.sampling.warp import Warp, chain
from specsamp.serving.answer import TooLong
from specsamp.serving.prefill import chunk_sizes
from specsamp.serving.request_warps import exclude_early
from specsamp.serving.sampling_request import MAX_STOP_IDS, MAX_STOPS, SamplingRequest


class Intake:
    """Checks requests, and adds the warps of a service to their sampling.

    Attributes:
      method: with the warps of a service.
      repeats: whether a seed gives the same text again. It does not if the draft is updated or
        depends on other texts, unless the rule ignores drafts; the seeds of requests are not used
        then.
    """

    def __init__(
        self, pair: Pair, method: Method, *, context: int | None, has_grammars: bool, learns: bool
    ):
        """Takes the arguments of `Service`, and whether the draft is updated.

        Without a context, budgets are those of the requests.
        """
        self._pair = pair
        self._sampling = method.sampling
        self._context = context
        self._has_grammars = has_grammars
        stops = make_stops(pair, None)
        self._stop_ids = sorted(stops.ids)
        self._most_stop_ids = len(self._stop_ids) + MAX_STOPS + MAX_STOP_IDS
        hooks = hooks_of(method.drafter)
        self.repeats = method.rule.draft_independent or (hooks.row_independent and not learns)
        self._own_lengths = hooks.depth is None
        self.method = method
        self.method = self._with_sampling(method.sampling, stops)
        (self._example,) = make_requests(pair, self.method, [[0]], 1, stop=stops)

    def engine(self, rows: int) -> Engine:
        """Returns an engine for all requests."""
        keeps = dict(keep_log_probs=True, keep_rounds=True)
        loop = self.method.loop(self._pair, **keeps)
        slots = self._context + max(loop.headroom, chunk_sizes()[0])
        engine = Engine.create(
            self._pair,
            self.method,
            [self._example],
            batch=rows,
            spare=self._pair.shards.count,
            slots=round_slots(slots),
            stop_ids=self._most_stop_ids,
            **keeps,
        )
        return dataclasses.replace(engine, own_lengths=self._own_lengths)

    def make(self, asked: SamplingRequest, owner: Any) -> list[Request]:
        """Returns a request for each text.

        Args:
          owner: the grammar is kept as long as this object.

        Raises:
          ValueError: naming the value and the fix.
        """
        draft_length = asked.draft_length
        if draft_length is not None:
            if not self._own_lengths:
                raise ValueError(
                    f"draft_length = {draft_length!r}, but this server drafts trees: leave it out"
                )
            most = self.method.drafter.K + 1
            draft_length = validate.integer("draft_length", draft_length, 0, most)
        prompts = encode(self._pair, asked.prompts)
        budgets = [self._budget(asked, index, len(prompt)) for index, prompt in enumerate(prompts)]
        stop = [*(() if asked.ignore_eos else self._stop_ids), *asked.stop_ids, *asked.stop]
        stops = make_stops(self._pair, stop, asked.min_tokens)
        follow = None
        if asked.grammar is not None:
            if not self._has_grammars:
                raise ValueError("grammars are not served here: start the server with --grammars")
            follow = make_grammar(self._pair.tokenizer, *asked.grammar, ends=sorted(stops.ids))
            weakref.finalize(owner, release, follow)
        sampling = self._sampling if asked.sampling is None else asked.sampling
        method = self._with_sampling(sampling, stops, follow)
        # A draft that was updated with a text, or looks in it, depends on its random numbers. If
        # they verified proposals of this draft again, texts would not follow the target; and
        # callers repeat seeds.
        seed = asked.seed if self.repeats else secrets.randbits(64)
        requests = make_requests(self._pair, method, prompts, budgets, seed=seed, stop=stops)
        shapes = [jax.tree.map(np.shape, one.sampling) for one in (requests[0], self._example)]
        if shapes[0] != shapes[1]:
            raise ValueError(
                f"sampling must be of the kinds of warps in {self._sampling!r}; got "
                f"{asked.sampling!r}"
            )
        for request in requests:
            request.draft_length = draft_length
        return with_samples(requests, asked.num_samples)

    def _with_sampling(self, sampling: Warp, stops: Stops, follow: Follow | None = None) -> Method:
        """Returns the method with this sampling, after warps that follow a grammar, and exclude
        stop tokens from the start.
        """
        early = exclude_early(stops, self._most_stop_ids)
        first = [follow or no_grammar(), Yielding(early)] if self._has_grammars else [early]
        return dataclasses.replace(self.method, sampling=chain(*first, sampling))

    def _budget(self, asked: SamplingRequest, index: int, length: int) -> int:
        """Returns the budget of a prompt, at most the rest of the context."""
        context = self._context
        if context is None and asked.max_new_tokens is not None:
            return asked.max_new_tokens
        if context is None:
            context = context_of(self._pair, self.method.drafter, "context", None)
        room = context - length
        if room < 1:
            raise TooLong(
                f"prompt {index} has {length} tokens, of {context} for prompt and text: shorten it"
            )
        return room if asked.max_new_tokens is None else min(asked.max_new_tokens, room)

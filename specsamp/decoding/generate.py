"""Prompts in, completions out.

    completions = generate(pair, ["def fib(n):"], sampling=chain(temperature(0.8), top_p(0.95)))

All arguments are checked before anything is compiled (`specsamp.decoding.request`,
`specsamp.decoding.method`). Prompt lengths and budgets are rounded up to buckets; their values
within a bucket are array data, as are sampling parameters, seeds and stop tokens. So a program is
compiled once for each pair of buckets, number of prompts and samples, drafter, rule, chain of warps
(not their numbers), ``return_log_probs``, and with or without stop strings. Programs are kept on
disk between processes (`specsamp.compilation_cache`).
"""

import dataclasses
from collections.abc import Generator, Iterator, Sequence
from typing import Unpack

from specsamp import validate
from specsamp.compilation_cache import use_compilation_cache
from specsamp.decoding.engine import Engine
from specsamp.decoding.method import Decoding, make_method
from specsamp.decoding.pair import Pair
from specsamp.decoding.request import Prompt, Request, make_requests, with_samples
from specsamp.decoding.results import Chunk, Completion
from specsamp.decoding.state import DecodeState, Finish
from specsamp.decoding.text import TextStream


def generate(
    pair: Pair,
    prompts: Sequence[Prompt],
    max_new_tokens: int | Sequence[int] = 128,
    *,
    seed: int = 0,
    stop: Sequence[int | str] | None = None,
    num_samples: int = 1,
    return_log_probs: bool | str = False,
    prompt_ids: Sequence[int] | None = None,
    **decoding: Unpack[Decoding],
) -> list[Completion]:
    """Completes prompts; the tokens follow the target's warped distribution exactly, unless a lossy
    rule was chosen.

    Args:
      pair: target, draft, tokenizer.
      prompts: texts, lists of token ids, or conversations: lists of messages such as ``{"role":
        "user", "content": "Hi"}``, or ``{"messages": [...], "tools": [...]}``, formatted by the
        chat template. At least one token each.
      max_new_tokens: the budget of new tokens, one for all or one per prompt.
      seed: in [0, 2**64). The same seed and prompt id give the same random numbers in every batch.
        So calls for different samples need different seeds or ``prompt_ids``.
      stop: token ids or strings that end a completion, and are not part of its text. They replace
        the default, the pair's stop tokens or the tokenizer's end of text; with ``[]`` nothing
        ends it early. (A `SamplingRequest` adds its stops to the default.) The host searches for
        strings every few rounds: tokens decoded after a stop string are dropped, and counted in
        `Completion.dropped` only.
      num_samples: completions per prompt, from one prefill.
      return_log_probs: also return the log-probability of each token: True, under the target at
        temperature 1; "sampled", under the warped distribution that the token was sampled from.
      prompt_ids: the indices of the prompts in your data set: a completion depends on this id, not
        on its place in the call. Default 0, 1, 2, ...
      decoding: sampling, draft_sampling, draft_length, rule and drafter, or all of them as one
        method; and require_exact. See `specsamp.decoding.method.Decoding`.

    Returns:
      ``num_samples`` completions for each prompt, in order.

    Raises:
      ValueError: before compilation, naming the value and the fix.
    """
    use_compilation_cache()
    method = make_method(pair, **decoding)
    requests = make_requests(
        pair, method, prompts, max_new_tokens, seed=seed, stop=stop, prompt_ids=prompt_ids
    )
    batch = len(requests) * validate.integer("num_samples", num_samples, 1)
    engine = Engine.create(pair, method, requests, batch=batch, keep_log_probs=return_log_probs)
    requests = with_samples(requests, num_samples)
    state = engine.prefill(requests, num_samples)
    while True:
        state = engine.run(state, engine.rounds_per_look(requests))
        texts = engine.take(state, requests)
        if all(text.finish != Finish.RUNNING for text in texts):
            return [Completion.of(request, text, method) for request, text in zip(requests, texts)]
        state = engine.end(state, [text.finish == Finish.STOP for text in texts])


def stream(
    pair: Pair,
    prompts: Sequence[Prompt],
    max_new_tokens: int | Sequence[int] = 128,
    *,
    rounds_per_chunk: int = 8,
    seed: int = 0,
    stop: Sequence[int | str] | None = None,
    num_samples: int = 1,
    prompt_ids: Sequence[int] | None = None,
    **decoding: Unpack[Decoding],
) -> Iterator[Chunk]:
    """Yields the tokens of `generate`, a few rounds at a time.

    The loop stays on the device for ``rounds_per_chunk`` rounds; the last chunk of a sequence has
    its ``finish``. Text that is not yet complete (half of a multi-byte character) is held back. The
    other arguments are those of `generate`.
    """
    rounds_per_chunk = validate.integer("rounds_per_chunk", rounds_per_chunk, 1)
    use_compilation_cache()
    method = make_method(pair, **decoding)
    requests = make_requests(
        pair, method, prompts, max_new_tokens, seed=seed, stop=stop, prompt_ids=prompt_ids
    )
    batch = len(requests) * validate.integer("num_samples", num_samples, 1)
    engine = Engine.create(pair, method, requests, batch=batch)
    requests = with_samples(requests, num_samples)
    return chunks(engine, engine.prefill(requests, num_samples), requests, rounds_per_chunk)


def chunks(
    engine: Engine, state: DecodeState, requests: Sequence[Request], rounds_per_chunk: int
) -> Generator[Chunk, None, DecodeState]:
    """Yields the chunks of requests that were read into ``state``; returns the final state, in
    which all have ended.
    """
    streams = [
        request.continuation and TextStream(request.continuation, request.stops)
        for request in requests
    ]
    running, shown = [True] * len(requests), [0] * len(requests)
    while any(running):
        state = engine.run(state, rounds_per_chunk)
        texts = engine.take(state, requests)
        if any(request.stops.texts for request in requests):
            state = engine.end(state, [text.finish == Finish.STOP for text in texts])
        for row, (request, text) in enumerate(zip(requests, texts)):
            if not running[row]:
                continue
            chunk = Chunk.of(request, text, engine.method, shown=shown[row])
            if chunk is None:
                continue
            shown[row] = len(text.tokens)
            if streams[row] is not None:
                chunk = dataclasses.replace(
                    chunk, text=streams[row].push(text.tokens, chunk.finish is not None)
                )
            running[row] = chunk.finish is None
            yield chunk
    return state

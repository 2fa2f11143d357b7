"""Requests: prompts as token ids, budgets, seeds and stops, checked before anything is compiled."""

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any

import jax

from specsamp import validate
from specsamp.decoding.drafter import Drafter, hooks_of, positions_of
from specsamp.decoding.method import Method
from specsamp.decoding.pair import Pair, Tokenizer
from specsamp.decoding.text import Continuation, Stops
from specsamp.sampling.warp import Warp, for_rows, greedy

# Characters: each piece of a stream is compared with the beginnings of all stop texts.
LONGEST_STOP = 1000
# Variables of a template that depend on the use of a conversation: in decoding an answer follows.
RESERVED = {"add_generation_prompt", "complete"}
# A text; token ids; the messages of a conversation, or a mapping of them and variables of the
# template, such as tools.
Prompt = str | Sequence[int] | Sequence[Mapping[str, Any]] | Mapping[str, Any]


@dataclasses.dataclass(eq=False, kw_only=True)
class Request:
    """A sequence to decode.

    Attributes:
      prompt: token ids, at least one.
      max_new_tokens: the budget.
      sampling: the target's warp, with scalar numbers.
      draft_sampling: the draft's warp; None: the target's.
      seed, prompt_id, sample_index: the address of the random numbers.
      prompt_index: the index of the prompt in the call.
      draft_length: the largest number of drafted tokens per round that may be verified; None: all.
      stops: tokens and strings that end the sequence.
      tokenizer: decodes the tokens; None: the result has no text.
    """

    prompt: tuple[int, ...]
    max_new_tokens: int
    sampling: Warp = greedy()
    draft_sampling: Warp | None = None
    seed: int = 0
    prompt_id: int = 0
    sample_index: int = 0
    prompt_index: int = 0
    draft_length: int | None = None
    stops: Stops = Stops()
    tokenizer: Tokenizer | None = None

    @property
    def limit(self) -> int:
        """Returns the length, prompt included, at which the budget ends."""
        return len(self.prompt) + self.max_new_tokens

    @functools.cached_property
    def continuation(self) -> Continuation | None:
        """Returns the decoder of the tokens after the prompt; None without a tokenizer."""
        return None if self.tokenizer is None else Continuation(self.tokenizer, self.prompt)


def make_requests(
    pair: Pair,
    method: Method,
    prompts: Sequence[Prompt],
    max_new_tokens: int | Sequence[int],
    *,
    seed: int = 0,
    stop: Sequence[int | str] | Stops | None = None,
    prompt_ids: Sequence[int] | None = None,
) -> list[Request]:
    """Returns a request for each prompt; arguments and errors are those of `generate`, or ``stop``
    is made already.
    """
    token_lists = encode(pair, prompts)
    lengths = [len(tokens) for tokens in token_lists]
    budgets = check_budgets(pair, method.drafter, lengths, max_new_tokens)
    seed = validate.integer("seed", seed, 0, 2**64)
    ids = (
        range(len(lengths))
        if prompt_ids is None
        else validate.integers("prompt_ids", prompt_ids, 0)
    )
    if len(ids) != len(lengths):
        raise ValueError(f"{len(ids)} prompt_ids for {len(lengths)} prompts")
    if not (hooks_of(method.drafter).row_independent or method.rule.draft_independent):
        check_own_noise(ids, "where a draft depends on other texts")
    stops = stop if isinstance(stop, Stops) else make_stops(pair, stop)
    for warp in (method.sampling, method.draft_sampling):
        if isinstance(warp, Warp):  # `for_rows` refuses anything else
            warp.check(pair.target.vocab_size)
            if warp.asks_host and pair.shards.mesh is not None:
                raise ValueError(
                    "a grammar asks the host for every token, which programs on a mesh cannot: "
                    "decode on one device"
                )
    sampling = _by_prompt(method.sampling, len(lengths))
    draft_sampling = _by_prompt(method.draft_sampling, len(lengths))
    return [
        Request(
            prompt=tuple(tokens),
            max_new_tokens=budgets[index],
            sampling=sampling[index],
            draft_sampling=draft_sampling[index],
            seed=seed,
            prompt_id=ids[index],
            prompt_index=index,
            stops=stops,
            tokenizer=pair.tokenizer,
        )
        for index, tokens in enumerate(token_lists)
    ]


def check_own_noise(prompt_ids: Sequence[int], where: str) -> None:
    """Raises ValueError for texts with the same random numbers, which must not verify a draft that
    depends on them.
    """
    if len(set(prompt_ids)) < len(prompt_ids):
        twice = next(one for one in prompt_ids if prompt_ids.count(one) > 1)
        raise ValueError(
            f"prompt_ids has {twice} twice: {where}, give each prompt noise of its own"
        )


def with_samples(requests: Sequence[Request], num_samples: int) -> list[Request]:
    """Returns ``num_samples`` copies of each request, in order, with different random numbers."""
    return [
        dataclasses.replace(request, sample_index=sample)
        for request in requests
        for sample in range(num_samples)
    ]


def encode(pair: Pair, prompts: Sequence[Prompt]) -> list[list[int]]:
    """Returns the token ids of every prompt."""
    if not validate.is_list(prompts):
        raise ValueError(
            f"prompts must be a list of prompts; for one prompt, write [prompt]; got {prompts!r}"
        )
    if len(prompts) == 0:
        raise ValueError("no prompts were given")
    return [_encode_one(pair, index, prompt) for index, prompt in enumerate(prompts)]


def _encode_one(pair: Pair, index: int, prompt: Prompt) -> list[int]:
    if isinstance(prompt, str):
        if pair.tokenizer is None:
            raise ValueError(
                "a text prompt needs a tokenizer in the pair; otherwise give lists of token ids"
            )
        _check_unicode(f"prompt {index}", prompt)
        tokens = pair.tokenizer.encode(prompt) if prompt else []
    elif isinstance(prompt, (bytes, bytearray)):
        raise ValueError(
            f"prompt {index} is bytes: give a text (bytes.decode()) or a list of token ids"
        )
    elif not validate.is_list(prompt) and not (
        isinstance(prompt, Mapping) and "messages" in prompt
    ):
        raise ValueError(
            f"prompt {index} must be a text, a list of token ids or a list of messages; got "
            f"{prompt!r}"
        )
    elif isinstance(prompt, Mapping) or len(prompt) > 0 and isinstance(prompt[0], Mapping):
        if pair.tokenizer is None:
            raise ValueError(
                "a conversation needs a tokenizer in the pair; otherwise give lists of token ids"
            )
        if isinstance(prompt, Mapping) and (taken := RESERVED & prompt.keys()):
            raise ValueError(f"prompt {index}: leave out {', '.join(sorted(taken))}")
        variables = prompt if isinstance(prompt, Mapping) else {"messages": prompt}
        with validate.located(f"prompt {index}"):
            tokens = pair.tokenizer.encode_chat(**variables)
    else:
        tokens = list(prompt)
    if len(tokens) == 0:
        raise ValueError(
            f"prompt {index} is empty: give at least one token, such as a beginning-of-text token"
        )
    return validate.integers(f"prompt {index}", tokens, 0, pair.target.vocab_size)


def _check_unicode(name: str, text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"{name} is not valid Unicode: {error}") from error


def check_budgets(
    pair: Pair, drafter: Drafter, lengths: Sequence[int], max_new_tokens: int | Sequence[int]
) -> list[int]:
    """Returns the budget of each prompt; raises ValueError if a sequence is longer than a model has
    positions.
    """
    if validate.is_list(max_new_tokens):
        budgets = validate.integers("max_new_tokens", max_new_tokens, 1)
        if len(budgets) != len(lengths):
            raise ValueError(
                f"{len(budgets)} max_new_tokens for {len(lengths)} prompts: give one, or one per "
                "prompt"
            )
    else:
        budgets = [validate.integer("max_new_tokens", max_new_tokens, 1)] * len(lengths)
    for name, part in (("target", pair.target), ("draft", drafter)):
        positions = positions_of(part)
        for index, (length, budget) in enumerate(zip(lengths, budgets)):
            if length + budget > positions:
                raise ValueError(
                    f"prompt {index} has {length} tokens and a budget of {budget}, together "
                    f"{length + budget}, more than the {name}'s {positions} positions: shorten the "
                    "prompt or lower max_new_tokens"
                )
    return budgets


def make_stops(pair: Pair, stop: Sequence[int | str] | None, least: int = 0) -> Stops:
    """Returns the stops of a call; by default the pair's stop tokens, or the tokenizer's end of
    text.

    A string ends a text with any tokens that spell it, after ``least`` tokens. Only the name of a
    token without text, such as ``<|im_end|>``, stands for the token.
    """
    if stop is None and pair.stop is not None:
        return Stops(
            frozenset(validate.integers("the pair's stop", pair.stop, 0, pair.target.vocab_size))
        )
    if stop is None:
        eos = None if pair.tokenizer is None else pair.tokenizer.eos_id
        return Stops() if eos is None else Stops(frozenset([eos]))
    if not validate.is_list(stop):
        raise ValueError(f"stop must be a list; for one entry, write [stop]; got {stop!r}")
    ids, texts, sure = [], [], []
    for entry in stop:
        if not isinstance(entry, str):
            ids.append(validate.integer("a stop id", entry, 0, pair.target.vocab_size))
            continue
        if pair.tokenizer is None:
            raise ValueError(
                f"the stop text {entry!r} needs a tokenizer in the pair; give token ids"
            )
        if not entry:
            raise ValueError(
                "a stop text is empty: it would end every text before it began; leave it out"
            )
        if len(entry) > LONGEST_STOP:
            raise ValueError(
                f"a stop text has {len(entry)} characters: at most {LONGEST_STOP} are looked for"
            )
        _check_unicode(f"the stop text {entry!r}", entry)
        token = pair.tokenizer.token_id(entry)
        if token is not None and pair.tokenizer.token_bytes(token) is None:
            ids.append(validate.integer("a stop id", token, 0, pair.target.vocab_size))
            continue
        texts.append(entry)
        # Whether the token writes it at the beginning of a text and in the middle.
        written = pair.tokenizer.token_bytes
        if token is not None and not least:
            if written(token) == written(token, token) == entry.encode():
                sure.append(token)
    return Stops(frozenset(ids), tuple(texts), least, frozenset(sure))


def _by_prompt(warp: Warp | None, count: int) -> list[Warp | None]:
    """Returns the warp of each prompt, with scalar numbers."""
    if warp is None:
        return [None] * count
    rows = for_rows(warp, count)
    return [jax.tree.map(lambda numbers: numbers[index], rows) for index in range(count)]

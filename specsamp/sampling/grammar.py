"""Grammars: texts that a JSON schema, a regular expression or a Lark grammar allows, sampled
exactly.

    ends = [pair.tokenizer.eos_id]
    as_json = grammar(pair.tokenizer, "json_schema", {"type": "object"}, ends=ends)
    generate(pair, prompts, 200, sampling=chain(as_json, temperature(0.8)))

Tokens that lead out of the grammar get probability zero at every position, in the draft and in the
target, drafted positions included. The masks come from llguidance, which runs on the host: the
state of a row is a number there, and a program asks for masks and successors by callbacks. A
program with callbacks is not kept in the compilation cache, and has one device.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import itertools
import json
import reprlib
import threading
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from absl import logging

from specsamp import validate
from specsamp.sampling.warp import Warp, register_warp

Array = jax.Array

LAST = 2**31 - 2  # the largest number of a text: states are int32
FREE = 0  # the state of a row that has no grammar, or has left it: every token is allowed
KINDS = ("json_schema", "regex", "lark")
MOST_SOURCE = 16_384  # characters of a grammar: large ones take seconds for a mask
MOST_MATCHERS = 512  # that are kept; others are made again from the tokens of their texts


def grammar(tokenizer: Any, kind: str, source: Any, *, ends: Sequence[int]) -> Follow:
    """Excludes tokens that lead out of a grammar, which the text follows from its first token.

    Args:
      tokenizer: the target's, of a tokenizer.json.
      kind: "json_schema", "regex" or "lark" (llguidance's dialect).
      source: the schema as a dictionary or its text, the expression, or the grammar.
      ends: tokens that end a text; allowed where the grammar may end.

    Returns:
      A warp. Its host memory lasts until `release`.

    Raises:
      ValueError: naming what is wrong.
    """
    validate.choice("kind", kind, KINDS)
    validate.integers("ends", ends, 0, tokenizer.vocab_size)
    if not ends:
        raise ValueError("a grammar needs a token that ends its texts: the stop tokens are empty")
    try:
        import llguidance
    except ImportError as error:
        raise ValueError(f"a grammar takes a library ({error}): pip install llguidance") from error
    if kind == "json_schema" and isinstance(source, dict):
        source = json.dumps(source, ensure_ascii=False)
    if not isinstance(source, str) or len(source) > MOST_SOURCE:
        raise ValueError(
            f"{kind} must be a text or a schema of at most {MOST_SOURCE} characters; got "
            f"{reprlib.repr(source)}"
        )
    # Else spaces may never end.
    options = {"defaults": {"whitespace_flexible": False}} if kind == "json_schema" else {}
    known = _tokenizer(tokenizer)
    try:
        text = getattr(llguidance.LLMatcher, f"grammar_from_{kind}")(source, **options)
        problem = llguidance.LLMatcher.validate_grammar(text, known)
    except ValueError as error:  # a schema that is no JSON
        problem = str(error)
    if problem:
        raise ValueError(f"{kind} is not understood: {' '.join(problem.split())[:300]}")
    limits = llguidance.LLParserLimits(verbose_errors=False)
    matcher = llguidance.LLMatcher(known, text, log_level=0, limits=limits)
    if not np.any(_allowed(matcher, tokenizer.vocab_size)) and not matcher.is_accepting():
        raise ValueError(f"{kind} allows no text, or is too large: {_reason(matcher)}")
    return Follow(np.int32(_TEXTS.begin(matcher, tuple(ends))))


def no_grammar() -> Follow:
    """Excludes nothing: for a batch in which other rows follow a grammar."""
    return Follow(np.int32(FREE))


def fault(warp: Follow) -> str | None:
    """Returns why a grammar left one of its texts without any token; None: it has not."""
    return _TEXTS.faults.get(int(warp.value))


def release(warp: Follow) -> None:
    """Gives the host memory of a grammar back, at its next use; rows that still follow it are free
    from then on.
    """
    _TEXTS.released.append(int(warp.value))


@register_warp
class Follow(Warp):
    """Excludes what a grammar excludes; see `grammar`. The state is the number of the text so far,
    int32 ``[B]``.
    """

    value: Array  # [] or [B] int32: the grammar's empty text; FREE: none

    asks_host = True

    def init(self, tokens_BP: Array, lengths_B: Array, vocab_size: int) -> Any:
        return jnp.broadcast_to(jnp.asarray(self.value, jnp.int32), lengths_B.shape)

    def advance(self, state: Any, tokens_B: Array) -> Any:
        def ask() -> Array:
            like = jax.ShapeDtypeStruct(state.shape, jnp.int32)
            return jax.pure_callback(
                _TEXTS.after, like, state, tokens_B, vmap_method="broadcast_all"
            )

        return jax.lax.cond(jnp.any(state != FREE), ask, lambda: state)

    def __call__(self, logits: Array, state: Any = ()) -> Array:
        vocab_size = logits.shape[-1]
        size = -(-vocab_size // 8)

        def masked() -> Array:
            like = jax.ShapeDtypeStruct((*state.shape, size), jnp.uint8)
            ask = functools.partial(_TEXTS.masks, size=size)
            bits_BN = jax.pure_callback(ask, like, state, vmap_method="broadcast_all")
            is_allowed_BV = (
                jnp.unpackbits(bits_BN, axis=-1, count=vocab_size, bitorder="little") > 0
            )
            return jnp.where(is_allowed_BV, logits, -jnp.inf)

        return jax.lax.cond(jnp.any(state != FREE), masked, lambda: logits)


@dataclasses.dataclass(eq=False)
class _Text:
    """Represents a text that a row has begun: the empty text with its matcher, or another text and
    one more token.
    """

    number: int
    ends: tuple[int, ...]
    matcher: Any = None
    before: _Text | None = None
    token: int = -1
    # None: the token is not allowed.
    after: dict[int, _Text | None] = dataclasses.field(default_factory=dict)


class _Texts:
    """The texts that rows have begun, by number, and the last used matchers that have read them;
    for several threads.

    A text keeps its number, however often a program asks, so that callbacks are functions.

    Attributes:
      released: numbers of grammars that nobody needs. Whoever appends may hold the lock: it may be
        the garbage collector.
      faults: why grammars left a text without any token, by their numbers.
    """

    def __init__(self):
        self.released: collections.deque[int] = collections.deque()
        self.faults: dict[int, str] = {}
        self._lock = threading.Lock()
        self._numbers = itertools.count()
        self._texts: dict[int, _Text] = {}
        self._matchers: collections.OrderedDict[_Text, Any] = collections.OrderedDict()

    def begin(self, matcher: Any, ends: tuple[int, ...]) -> int:
        """Returns the number of a grammar's empty text."""
        with self._lock:
            self._forget()
            return self._add(matcher=matcher, ends=ends).number

    def after(self, numbers: Any, tokens: Any) -> np.ndarray:
        """Returns the numbers of texts with one more token; FREE where it is not allowed."""
        numbers, tokens = np.asarray(numbers), np.asarray(tokens)
        with self._lock:
            self._forget()
            found = [
                self._next(*pair) for pair in zip(numbers.ravel().tolist(), tokens.ravel().tolist())
            ]
        return np.asarray(found, np.int32).reshape(numbers.shape)

    def masks(self, numbers: Any, size: int) -> np.ndarray:
        """Returns the bits of the allowed tokens, uint8 ``[..., size]``: all of a free row, none
        where a matcher failed.
        """
        numbers = np.asarray(numbers)
        each, where = np.unique(numbers, return_inverse=True)
        bits = np.zeros((each.size, size), np.uint8)
        with self._lock:
            for row, number in zip(bits, each.tolist()):
                text = self._texts.get(number)
                matcher = None if text is None else self._matcher(text)
                if matcher is None:
                    row[:] = np.iinfo(np.uint8).max
                    continue
                allowed = _allowed(matcher, 8 * size)
                row[: len(allowed)] = allowed
                for token in text.ends if matcher.is_accepting() else ():
                    row[token // 8] |= 1 << token % 8
                if not np.any(row):
                    self._blame(text, matcher)
        return bits[where].reshape(*numbers.shape, size)

    def _blame(self, text: _Text, matcher: Any) -> None:
        """Keeps why a text cannot go on."""
        while text.before is not None:
            text = text.before
        self.faults[text.number] = _reason(matcher)
        logging.error("a grammar failed: %s", self.faults[text.number])

    def _forget(self) -> None:
        """Forgets all texts of released grammars."""
        while self.released:
            number = self.released.popleft()
            self.faults.pop(number, None)
            left = [self._texts.get(number)]
            while left:
                if (text := left.pop()) is not None:
                    left += text.after.values()
                    del self._texts[text.number]
                    self._matchers.pop(text, None)

    def _add(self, **fields: Any) -> _Text:
        # Of a text that was released, or the next.
        while (number := next(self._numbers) % LAST + 1) in self._texts:
            pass
        text = _Text(number, **fields)
        self._texts[text.number] = text
        return text

    def _next(self, number: int, token: int) -> int:
        text = self._texts.get(number)
        if text is None:
            return FREE
        if token not in text.after:
            matcher = self._matcher(text).deep_copy()
            is_allowed = matcher.try_consume_tokens([token]) == 1 or matcher.is_error()
            text.after[token] = (
                self._add(before=text, token=token, ends=text.ends) if is_allowed else None
            )
            if is_allowed:
                self._keep(text.after[token], matcher)
        return FREE if text.after[token] is None else text.after[token].number

    def _matcher(self, text: _Text) -> Any:
        """Returns a matcher that has read a text; it must not read on."""
        tokens, at = [], text
        while at not in self._matchers and at.before is not None:
            tokens, at = [at.token, *tokens], at.before
        matcher = self._matchers.get(at, at.matcher)
        if tokens:  # it was not kept
            matcher = matcher.deep_copy()
            matcher.consume_tokens(tokens)
        self._keep(text, matcher)
        return matcher

    def _keep(self, text: _Text, matcher: Any) -> None:
        self._matchers[text] = matcher
        self._matchers.move_to_end(text)
        if len(self._matchers) > MOST_MATCHERS:
            self._matchers.popitem(last=False)


_TEXTS = _Texts()


def _allowed(matcher: Any, count: int) -> np.ndarray:
    """Returns the bits of the allowed ones of the first ``count`` tokens, uint8; [] where a matcher
    has failed.
    """
    if matcher.is_error():
        return np.zeros(0, np.uint8)
    bits = np.frombuffer(matcher.compute_bitmask(), np.uint8)[: -(-count // 8)].copy()
    if matcher.is_error():  # only now
        return np.zeros(0, np.uint8)
    if len(bits) * 8 > count:  # the last byte has tokens beyond, such as the end of the grammar
        bits[-1] &= (1 << count % 8) - 1
    return bits


def _reason(matcher: Any) -> str:
    """Returns why a matcher allows no token, in one line."""
    told = matcher.get_error().partition("<")[0] if matcher.is_error() else ""
    return " ".join(told.split())[:200] if "error" in told else "no token goes on"


@functools.lru_cache(maxsize=8)
def _tokenizer(tokenizer: Any) -> Any:
    """Returns llguidance's form of a tokenizer, which takes about a second to make, with an end of
    text that nobody else has.
    """
    import llguidance

    if not hasattr(tokenizer, "to_json"):
        raise ValueError(
            f"a grammar needs a pair with a tokenizer.json; got {type(tokenizer).__name__}"
        )
    content, end = (
        json.loads(tokenizer.to_json()),
        {"id": tokenizer.vocab_size, "content": "<|end of the grammar|>"},
    )
    switches = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    content["added_tokens"] = [*content.get("added_tokens", ()), end | switches | {"special": True}]
    try:
        return llguidance.LLTokenizer(json.dumps(content), eos_token=[end["id"]])
    except ValueError as error:
        raise ValueError(
            f"grammars need a tokenizer whose ids have no gaps ({error}): decode without one"
        ) from error

"""Reads what clients ask in OpenAI's protocol: the bodies of /v1/completions and /v1/chat/completions, read and checked.

Every field is served, or ignored because it changes no text, or refused with the reason: none is dropped in silence.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from specsamp.decoding.checks import Prompt
from specsamp.sampling.penalties import penalties
from specsamp.sampling.warp import Warp, chain, min_p, temperature, top_k, top_p
from specsamp.serving.json_fields import ApiError, Fields, is_text, show
from specsamp.serving.service import MAX_STOPS

DEFAULT_MAX_TOKENS = 16  # of a completion; an answer in a chat has as many as there is room for
MAX_SAMPLES = 128
MAX_SEED = 2**32 - 1

# Fields that each kind of warp takes; temperature is always there. In the order in which the warps are chained.
WARPS = {
    "penalties": ("repetition_penalty", "presence_penalty", "frequency_penalty"),
    "temperature": ("temperature",),
    "top_k": ("top_k",),
    "top_p": ("top_p",),
    "min_p": ("min_p",),
}
OPTIONAL_WARPS = tuple(name for name in WARPS if name != "temperature")
NEUTRAL = {"repetition_penalty": 1, "presence_penalty": 0, "frequency_penalty": 0}
NEUTRAL |= {"temperature": 1, "top_k": 0, "top_p": 1, "min_p": 0}
ALL_TOKENS = 2**31 - 1  # top_k that keeps every token

IGNORED = ("user", "metadata", "store", "safety_identifier", "prompt_cache_key", "service_tier")
# Fields that are not served, with the values that ask for nothing.
REFUSED = {
    "best_of": (1,),
    "echo": (False,),
    "suffix": ("",),
    "logit_bias": ({},),
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "parallel_tool_calls": (True, False),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "response_format": ({"type": "text"},),
    "modalities": (["text"],),
    "audio": (),
    "prediction": (),
    "reasoning_effort": (),
    "web_search_options": (),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Asked:
    """Holds a checked request.

    Attributes:
      is_chat: it came to /v1/chat/completions.
      max_tokens: None: as many as there is room for.
      sampling: with the kinds of warps that the server offers.
      seed: None: any.
      include_usage: at the end of a stream.
    """

    is_chat: bool
    prompts: Sequence[Prompt]
    max_tokens: int | None
    sampling: Warp
    n: int
    seed: int | None
    stop: tuple[str, ...]
    stream: bool
    include_usage: bool
    log_probs: bool


def read_request(document: Any, *, is_chat: bool, model: str, warps: Collection[str]) -> Asked:
    """Checks a request.

    Args:
      document: its JSON.
      model: the name of the one that is served.
      warps: the kinds that the server offers, of `OPTIONAL_WARPS`.

    Raises:
      ApiError: naming the field, the value and the fix.
    """
    fields = Fields(document)
    asked = fields.text("model")
    if asked is not None and asked != model:
        raise ApiError(
            f"the model {show(asked)} is not served here: ask for {model!r}",
            param="model",
            status=404,
            code="model_not_found",
        )
    n = fields.integer("n", 1, MAX_SAMPLES) or 1
    if fields.peek("best_of") == n:  # the best n of n are all of them
        fields.take("best_of")
    for name, neutral in REFUSED.items():
        value = fields.take(name)
        if value is not None and not any(type(value) is type(one) and value == one for one in neutral):
            raise ApiError(f"{name} = {show(value)} is not supported: leave it out", param=name)
    for name in IGNORED:
        fields.take(name)
    stream = fields.boolean("stream")
    read = _read_chat if is_chat else _read_completion
    found = Asked(
        is_chat=is_chat,
        n=n,
        stream=stream,
        include_usage=_read_stream_options(fields, stream),
        seed=fields.integer("seed", 0, MAX_SEED),
        stop=_read_stop(fields),
        sampling=_read_sampling(fields, warps),
        **read(fields),
    )
    fields.end()
    return found


def make_warp(numbers: Mapping[str, float], warps: Collection[str]) -> Warp:
    """Returns the chain of the kinds ``warps`` and of temperature, with these numbers; what is not given is neutral."""
    given = NEUTRAL | dict(numbers)
    makers = {
        "penalties": lambda: penalties(*(given[name] for name in WARPS["penalties"])),
        "temperature": lambda: temperature(given["temperature"]),
        "top_k": lambda: top_k(given["top_k"] if given["top_k"] > 0 else ALL_TOKENS),
        "top_p": lambda: top_p(given["top_p"]),
        "min_p": lambda: min_p(given["min_p"]),
    }
    return chain(*(make() for name, make in makers.items() if name == "temperature" or name in warps))


def _read_completion(fields: Fields) -> dict[str, Any]:
    log_probs = fields.integer("logprobs", 0, 5)
    if log_probs:
        raise ApiError(
            f"logprobs = {log_probs} asks for other tokens than the text's, whose log-probabilities are not kept: 0 "
            "gives those of the text",
            param="logprobs",
        )
    max_tokens = fields.integer("max_tokens", 1, 2**31 - 1)
    return {
        "prompts": _read_prompts(fields),
        "max_tokens": DEFAULT_MAX_TOKENS if max_tokens is None else max_tokens,
        "log_probs": log_probs is not None,
    }


def _read_chat(fields: Fields) -> dict[str, Any]:
    log_probs, others = fields.boolean("logprobs"), fields.integer("top_logprobs", 0, 20)
    if others:
        raise ApiError(
            f"top_logprobs = {others} asks for other tokens than the text's, whose log-probabilities are not kept: "
            "logprobs = true gives those of the text",
            param="top_logprobs",
        )
    limits = [fields.integer(name, 1, 2**31 - 1) for name in ("max_completion_tokens", "max_tokens")]
    limits = {limit for limit in limits if limit is not None}
    if len(limits) > 1:
        raise ApiError("max_tokens and max_completion_tokens differ: give one of them", param="max_tokens")
    return {
        "prompts": [_read_messages(fields)],
        "max_tokens": next(iter(limits), None),
        "log_probs": log_probs,
    }


def _read_prompts(fields: Fields) -> list[Prompt]:
    """Returns the prompts: a text, texts, token ids, or lists of token ids."""
    value = fields.take("prompt")
    if is_text(value):
        return [value]
    if isinstance(value, list) and value:
        if _is_tokens(value):
            return [value]
        if all(map(is_text, value)) or all(isinstance(one, list) and one and _is_tokens(one) for one in value):
            return value
    fields.refuse("prompt", value, "a text, token ids, or a list of texts or of lists of token ids")


def _read_messages(fields: Fields) -> list[dict[str, str]]:
    value = fields.take("messages")
    if not isinstance(value, list) or not value:
        fields.refuse("messages", value, "a list of messages, at least one")
    messages = []
    for number, one in enumerate(value):
        where = f"messages[{number}]"
        message = Fields(one, where)
        role, content = message.text("role"), message.take("content")
        message.take("name")
        message.end()
        if role is None:
            message.refuse("role", role, "a text such as user")
        messages.append({"role": role, "content": _read_content(content, f"{where}.content")})
    return messages


def _read_content(content: Any, where: str) -> str:
    """Returns a message's text, also if it comes in parts."""
    if isinstance(content, list) and content:
        parts = []
        for part in content:
            fields = Fields(part, where)
            kind, text = fields.take("type"), fields.text("text")
            if kind != "text" or text is None:
                raise ApiError(f"{where} has a part that is no text; got {show(part)}", param=where)
            fields.end()
            parts.append(text)
        return "".join(parts)
    if not is_text(content):
        raise ApiError(f"{where} must be a text of valid Unicode; got {show(content)}", param=where)
    return content


def _read_stop(fields: Fields) -> tuple[str, ...]:
    value = fields.take("stop")
    texts = [] if value is None else [value] if isinstance(value, str) else value
    if not isinstance(texts, list) or len(texts) > MAX_STOPS or not all(is_text(one) and one for one in texts):
        fields.refuse("stop", value, f"a text, or a list of at most {MAX_STOPS}, none of them empty")
    return tuple(texts)


def _read_stream_options(fields: Fields, stream: bool) -> bool:
    value = fields.take("stream_options")
    if value is None:
        return False
    if not stream:
        raise ApiError("stream_options are of streams: leave them out, or set stream", param="stream_options")
    options = Fields(value, "stream_options")
    include_usage = options.boolean("include_usage")
    options.boolean("include_obfuscation")
    options.end()
    return include_usage


def _read_sampling(fields: Fields, warps: Collection[str]) -> Warp:
    numbers = {
        "temperature": fields.number("temperature", 0, 1000),
        "top_k": fields.integer("top_k", -1, ALL_TOKENS),
        "top_p": fields.number("top_p", 0, 1),
        "min_p": fields.number("min_p", 0, 1),
        "presence_penalty": fields.number("presence_penalty", -2, 2),
        "frequency_penalty": fields.number("frequency_penalty", -2, 2),
        "repetition_penalty": fields.number("repetition_penalty", 0.01, 100),
    }
    numbers = {name: value for name, value in numbers.items() if value is not None}
    if numbers.get("top_p") == 0:
        fields.refuse("top_p", 0, "above 0; temperature = 0 takes the most probable token")
    if numbers.get("top_k") == -1:  # as other servers say it
        numbers["top_k"] = 0
    for kind in set(OPTIONAL_WARPS) - set(warps):
        for name in WARPS[kind]:
            value = numbers.get(name, NEUTRAL[name])
            if value != NEUTRAL[name]:
                raise ApiError(
                    f"{name} = {show(value)} is not offered: this server was started without {kind} in --warps",
                    param=name,
                )
    return make_warp(numbers, warps)


def _is_tokens(value: list) -> bool:
    return all(type(one) is int for one in value)

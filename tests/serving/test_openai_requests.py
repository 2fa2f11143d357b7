"""What requests of OpenAI's protocol mean, and how those that mean nothing are refused."""

import json

import pytest

from specsamp.sampling.penalties import Penalties
from specsamp.sampling.warp import MinP, Temperature, TopK, TopP
from specsamp.serving.request_warps import OPTIONAL_WARPS, make_warp
from support import extras

pytestmark = extras.needs("pydantic")
if extras.is_here("pydantic"):
    from specsamp.serving.openai_requests import MAX_MESSAGE, ApiError, parse_body, read_request

HI = [{"role": "user", "content": "Hi"}]


def read(document, is_chat=False):
    return read_request(document, is_chat=is_chat, model="m")


def sampling(numbers, warps=OPTIONAL_WARPS):
    return read({"prompt": "a"} | numbers).sampling(warps)


def test_defaults_are_those_of_the_protocol():
    asked = read({"prompt": "a"})
    assert (asked.prompts, asked.max_tokens, asked.n, asked.seed, asked.stops) == (["a"], 16, 1, None, ())
    assert not (asked.is_chat or asked.stream or asked.include_usage or asked.log_probs)
    assert sampling({}) == make_warp({}, OPTIONAL_WARPS)
    assert [type(warp) for warp in sampling({}).warps] == [Penalties, Temperature, TopK, TopP, MinP]
    assert [type(warp) for warp in sampling({}, ()).warps] == [Temperature]
    chat = read({"messages": HI}, is_chat=True)
    assert chat.is_chat and chat.max_tokens is None and chat.prompts == [HI]


def test_every_number_reaches_its_warp():
    given = {"temperature": 0.5, "top_k": 7, "top_p": 0.25, "min_p": 0.125}
    given |= {"repetition_penalty": 1.5, "presence_penalty": -1, "frequency_penalty": 0.5}
    penalised, heat, k, p, least = sampling(given).warps
    assert (heat.value, k.value, p.value, least.value) == (0.5, 7, 0.25, 0.125)
    assert (penalised.repetition, penalised.presence, penalised.frequency) == (1.5, -1, 0.5)
    assert sampling({"top_k": -1}) == sampling({}), "as other servers say it"


def test_fields_that_are_served():
    asked = read(
        {"prompt": [[1, 2], [3]], "max_tokens": 3, "n": 2, "seed": 5, "stop": "x", "logprobs": 0, "model": "m"}
    )
    assert (asked.prompts, asked.max_tokens, asked.n, asked.seed, asked.stops) == ([[1, 2], [3]], 3, 2, 5, ("x",))
    assert asked.log_probs
    parts = [{"type": "text", "text": "H"}, {"type": "text", "text": "i"}]
    document = {"messages": [{"role": "user", "content": parts, "name": "Ann"}], "logprobs": True, "top_logprobs": 0}
    document |= {"max_completion_tokens": 4, "max_tokens": 4, "stream": True, "stream_options": {"include_usage": True}}
    asked = read(document, is_chat=True)
    assert asked.prompts == [HI] and asked.max_tokens == 4 and asked.stream and asked.include_usage
    assert read({"prompt": [5, 6]}).prompts == [[5, 6]] and read({"prompt": ["a", "b"]}).prompts == ["a", "b"]


def test_what_asks_for_nothing_is_taken():
    document = {"prompt": "a", "best_of": 3, "n": 3, "echo": False, "suffix": None, "logit_bias": {}, "user": "me"}
    assert read(document | {"metadata": {"a": "b"}, "store": True, "stream_options": None}).n == 3
    read({"messages": HI, "tools": [], "tool_choice": "none", "response_format": {"type": "text"}}, is_chat=True)


@pytest.mark.parametrize(
    "changes, param, message",
    [
        ({"prompt": None}, "prompt", "a text, token ids, or a list"),
        ({"prompt": 5}, "prompt", "got 5"),
        ({"prompt": [1, True]}, "prompt", "token ids"),
        ({"prompt": "\ud800"}, "prompt", "token ids"),
        ({"max_tokens": 0}, "max_tokens", "an integer from 1 to 2147483647; got 0"),
        ({"max_tokens": 1e3}, "max_tokens", "got 1000.0"),
        ({"temperature": -0.1}, "temperature", "a number from 0 to 1000; got -0.1"),
        ({"temperature": float("inf")}, "temperature", "got inf"),
        ({"top_p": 0}, "top_p", "above 0"),
        ({"top_k": 2.5}, "top_k", "got 2.5"),
        ({"n": 0}, "n", "an integer from 1 to 128"),
        ({"seed": -1}, "seed", "from 0 to 4294967295; got -1"),
        ({"stop": ["a"] * 5}, "stop", "a list of at most 4"),
        ({"stop": [""]}, "stop", "none of them empty"),
        ({"stream": "yes"}, "stream", "true or false; got 'yes'"),
        ({"stream_options": {}}, "stream_options", "set stream"),
        ({"stream": True, "stream_options": 5}, "stream_options", "must be a JSON object; got 5"),
        ({"stream": True, "stream_options": {"a": 1}}, "stream_options.a", "unknown field 'stream_options.a'"),
        ({"stream": True, "stream_options": {"include_usage": 1}}, "stream_options.include_usage", "got 1"),
        ({"logprobs": 2}, "logprobs", "logprobs must be 0.* got 2"),
        ({"echo": True}, "echo", "echo = True is not supported"),
        ({"echo": 0}, "echo", "echo = 0 is not supported"),
        ({"best_of": 2}, "best_of", "not supported"),
        ({"logit_bias": {"5": 1}}, "logit_bias", "not supported"),
        ({"response_format": {"type": "json_object"}}, "response_format", "not supported"),
        ({"messages": HI}, "messages", "unknown field 'messages'"),
        ({"temprature": 1}, "temprature", "unknown field 'temprature': leave it out"),
        ({"model": 5}, "model", "a text"),
    ],
    ids=lambda given: str(given)[:40],
)
def test_what_is_wrong_is_named_with_its_value(changes, param, message):
    with pytest.raises(ApiError, match=message) as caught:
        read({"prompt": "a"} | changes)
    error = caught.value.body["error"]
    assert (caught.value.status, error["param"], error["type"]) == (400, param, "invalid_request_error")


@pytest.mark.parametrize(
    "changes, param, message",
    [
        ({"messages": None}, "messages", "at least one"),
        ({"messages": "Hi"}, "messages", "a list of messages"),
        ({"messages": ["Hi"]}, "messages[0]", "must be a JSON object; got 'Hi'"),
        ({"messages": [{"content": "Hi"}]}, "messages[0].role", "a text such as user"),
        ({"messages": [{"role": "user"}]}, "messages[0].content", "got None"),
        ({"messages": [*HI, {"role": "user", "content": 5}]}, "messages[1].content", "got 5"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0].content", "image_url"),
        ({"messages": [*HI, HI[0] | {"tool_calls": []}]}, "messages[1].tool_calls", "unknown field"),
        ({"top_logprobs": 3}, "top_logprobs", "logprobs = true returns them.* got 3"),
        ({"logprobs": 1}, "logprobs", "true or false"),
        ({"max_tokens": 1, "max_completion_tokens": 2}, "max_tokens", "differ: give one"),
    ],
    ids=lambda given: str(given)[:40],
)
def test_what_is_wrong_in_a_chat(changes, param, message):
    with pytest.raises(ApiError, match=message) as caught:
        read({"messages": HI} | changes, is_chat=True)
    assert caught.value.body["error"]["param"] == param


def test_null_is_as_if_left_out_whatever_the_field():
    """A client that keeps a conversation sends answers back as it got them, with their fields that are null."""
    answer = {"role": "assistant", "content": "Hi", "refusal": None, "tool_calls": None, "audio": None, "name": None}
    asked = read({"messages": [*HI, answer, *HI], "verbosity": None}, is_chat=True)
    assert asked.prompts == [[*HI, {"role": "assistant", "content": "Hi"}, *HI]]


def test_another_model_and_warps_that_are_not_offered():
    with pytest.raises(ApiError, match="'gpt-5' is not served here: ask for 'm'") as caught:
        read({"prompt": "a", "model": "gpt-5"})
    assert (caught.value.status, caught.value.body["error"]["code"]) == (404, "model_not_found")
    with pytest.raises(ApiError, match="presence_penalty = 1 is not offered: .* without penalties in --warps"):
        sampling({"presence_penalty": 1}, ["top_p"])
    assert sampling({"presence_penalty": 0, "top_k": 0}, ()) == make_warp({}, ())


def test_bodies_that_are_no_json():
    for body, message in (
        (b"", "no JSON"),
        (b"\xff\xfe", "no JSON"),
        (b'{"temperature": NaN}', "NaN is no JSON"),
        (b'{"n": ' + b"1" * 5000 + b"}", "no JSON"),
        (b"[" * 200_000 + b"]" * 200_000, "nested too deeply"),
    ):
        with pytest.raises(ApiError, match=message):
            parse_body(body)


def test_messages_are_short_and_can_be_sent():
    for document in (None, [{}]):
        with pytest.raises(ApiError, match="the body must be a JSON object"):
            read(document)
    with pytest.raises(ApiError) as caught:
        read({"prompt": "a", "x" * 100_000: 1})
    assert len(json.dumps(caught.value.body)) < 2 * MAX_MESSAGE
    deep = json.loads("[" * 900 + "]" * 900)
    with pytest.raises(ApiError, match="prompt must be"):
        read({"prompt": deep})
    with pytest.raises(ApiError, match="names are valid Unicode.*ud800") as caught:
        read({"prompt": "a", "\ud800": 1})
    json.dumps(caught.value.body).encode()

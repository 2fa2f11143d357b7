"""The meaning of requests in OpenAI's protocol, and the refusal of requests without a meaning."""

import json
import pathlib

import pytest

from specsamp.sampling.penalties import Bias, Penalties
from specsamp.sampling.warp import MinP, Temperature, TopK, TopP
from specsamp.serving.request_warps import MAX_BIASES, make_warp
from support import extras
from support.refusals import table_of

pytestmark = extras.needs("pydantic")
if extras.is_here("pydantic"):
    from specsamp.serving.openai_requests import MAX_MESSAGE, ApiError, parse_body, read_request

HI = [{"role": "user", "content": "Hi"}]
REFUSED = table_of(pathlib.Path(__file__).with_name("refusals.txt"))


def read(document, is_chat=False):
    return read_request(document, is_chat=is_chat, model="m")


def sampling(numbers):
    return read({"prompt": "a"} | numbers).sampling()


def test_defaults_are_those_of_the_protocol():
    asked = read({"prompt": "a"})
    assert (asked.prompts, asked.max_tokens, asked.n, asked.seed, asked.stops) == (
        ["a"],
        16,
        1,
        None,
        (),
    )
    assert not (asked.is_chat or asked.stream or asked.include_usage or asked.log_probs)
    assert [type(warp) for warp in sampling({}).warps] == [
        Bias,
        Penalties,
        Temperature,
        TopK,
        TopP,
        MinP,
    ]
    assert sampling({}).warps[1:] == make_warp({}).warps[1:]
    assert (sampling({}).warps[0].tokens == -1).all()
    chat = read({"messages": HI}, is_chat=True)
    assert chat.is_chat and chat.max_tokens is None and chat.prompts == [HI]


def test_every_number_reaches_its_warp():
    given = {"temperature": 0.5, "top_k": 7, "top_p": 0.25, "min_p": 0.125}
    given |= {"repetition_penalty": 1.5, "presence_penalty": -1, "frequency_penalty": 0.5}
    given |= {"logit_bias": {"7": -100, "0": 1.5}}
    biased, penalised, heat, k, p, least = sampling(given).warps
    assert biased.tokens[0, :3].tolist() == [7, 0, -1]
    assert biased.values[0, :3].tolist() == [-100, 1.5, 0]
    assert biased.tokens.shape == (1, MAX_BIASES), "as of any request"
    assert (heat.value, k.value, p.value, least.value) == (0.5, 7, 0.25, 0.125)
    assert (penalised.repetition, penalised.presence, penalised.frequency) == (1.5, -1, 0.5)
    assert sampling({"top_k": -1}).warps[1:] == sampling({}).warps[1:], "as other servers say it"


def test_fields_that_are_served():
    asked = read({"prompt": [[1, 2], [3]], "n": 2, "seed": 5, "stop": "x", "logprobs": 0})
    assert asked.prompts == [[1, 2], [3]] and asked.log_probs
    assert (asked.n, asked.seed, asked.stops) == (2, 5, ("x",))
    parts = [{"type": "text", "text": "H"}, {"type": "text", "text": "i"}]
    document = {
        "messages": [{"role": "user", "content": parts, "name": "Ann"}],
        "logprobs": True,
        "top_logprobs": 0,
    }
    document |= {
        "max_completion_tokens": 4,
        "max_tokens": 4,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    asked = read(document, is_chat=True)
    assert asked.prompts == [[HI[0] | {"name": "Ann"}]]
    assert asked.max_tokens == 4
    assert asked.stream
    assert asked.include_usage
    assert read({"prompt": [5, 6]}).prompts == [[5, 6]]


def test_fields_without_effect_are_accepted():
    document = {
        "prompt": "a",
        "best_of": 3,
        "n": 3,
        "echo": False,
        "suffix": None,
        "logit_bias": {},
        "user": "me",
    }
    assert (
        read(
            document | {"tools": [], "metadata": {"a": "b"}, "store": True, "stream_options": None}
        ).n
        == 3
    )


def test_tools_reach_the_template_and_make_a_grammar():
    shape = {"properties": {"x": {"type": "integer"}, "title": {"enum": ["description"]}}}
    described = {"x": {"type": "integer", "description": "a number", "default": 1}}
    function = {
        "parameters": {"title": "Add", "properties": shape["properties"] | described},
        "name": "add",
        "description": "",
    }
    tools = [{"type": "function", "function": function | {"strict": True}}]
    call = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"x": 1}'}}
    called = {"role": "assistant", "content": None, "tool_calls": [call]}
    document = {
        "messages": [called, {"role": "tool", "content": "2", "tool_call_id": "c1"}],
        "tools": tools,
    }
    kinds = [
        read(document | {"tool_choice": one}, True).grammar
        for one in ("none", "auto", "required", tools[0])
    ]
    assert kinds[0] is None and kinds[1][0] == "lark" and kinds[2] == kinds[3]
    arguments = json.loads(kinds[2][1])["anyOf"][0]["properties"]["arguments"]
    assert arguments == {"$id": "tool:0", "type": "object", **shape}, "without annotations"
    (prompt,) = read(document, is_chat=True).prompts
    call["function"]["arguments"] = {"x": 1}
    del called["content"]  # a null counts as absent, as in transformers
    assert prompt == {"messages": [called, document["messages"][1]], "tools": tools}
    assert [*prompt["tools"][0]["function"]] == [*tools[0]["function"]], "in the client's order"
    call["function"]["arguments"] = ""
    (prompt,) = read(document, is_chat=True).prompts
    assert prompt["messages"][0]["tool_calls"][0]["function"]["arguments"] == {}, (
        "of a function without any"
    )


def answers():
    """Yields answers as openai-python holds them: read whole, and assembled from a stream."""
    from openai.lib.streaming.chat import ChatCompletionStreamState
    from openai.types.chat import ChatCompletionChunk, ChatCompletionMessage

    call = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"x": 1}'}}
    deltas = {
        "a text": [{"role": "assistant", "content": ""}, {"content": "So"}, {"content": "."}],
        "no text": [{"role": "assistant"}],
        "a call": [{"role": "assistant", "content": ""}, {"tool_calls": [{"index": 0} | call]}],
        "a refusal": [{"role": "assistant"}, {"refusal": "No."}],
    }
    for name, parts in deltas.items():
        state = ChatCompletionStreamState(
            input_tools=[{"type": "function", "function": {"name": "add", "strict": True}}]
        )
        head = {"id": "1", "object": "chat.completion.chunk", "created": 1, "model": "m"}
        for delta in [*parts, {}]:
            choice = {"index": 0, "delta": delta, "finish_reason": None if delta else "stop"}
            state.handle_chunk(ChatCompletionChunk.model_validate(head | {"choices": [choice]}))
        yield name, state.get_final_completion().choices[0].message
    whole = {"role": "assistant", "content": "So.", "reasoning_content": "Hm"}
    yield "a text", ChatCompletionMessage.model_validate(whole)


@extras.needs("openai")
def test_answers_as_openai_python_keeps_them_are_history():
    """Agents send back the message that the client assembles, with indices and parsed arguments."""
    contents = {"a text": "So.", "no text": "", "a call": "", "a refusal": "No."}
    calls = [{"id": "c1", "type": "function", "function": {"name": "add", "arguments": {"x": 1}}}]
    for name, message in answers():
        expected = {"role": "assistant", "content": contents[name]}
        if name == "a call":
            expected = {"role": "assistant", "tool_calls": calls}
        if "reasoning_content" in message.model_dump():
            expected["reasoning_content"] = "Hm"
        for sent in (message.model_dump(exclude_none=True), message.model_dump()):
            document = json.loads(json.dumps({"messages": [*HI, sent, *HI]}))
            assert read(document, is_chat=True).prompts == [[*HI, expected, *HI]], (name, sent)


@pytest.mark.parametrize(
    "changes, told, is_chat",
    [(*case, name == "chat") for name, cases in REFUSED.items() for case in cases],
)
def test_invalid_field_is_named_with_its_value(changes, told, is_chat):
    document = {"messages": HI} if is_chat else {"prompt": "a"}
    param, message = told.split(": ", 1)
    with pytest.raises(ApiError, match=message) as caught:
        read(document | json.loads(changes), is_chat)
    error = caught.value.body["error"]
    assert (caught.value.status, error["param"]) == (400, param)
    assert error["type"] == "invalid_request_error"


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
    with pytest.raises(ApiError, match="at most 300"):
        read({"prompt": "a", "logit_bias": {str(id): 1 for id in range(301)}})
    deep = json.loads("[" * 900 + "]" * 900)
    with pytest.raises(ApiError, match="prompt must be"):
        read({"prompt": deep})
    with pytest.raises(ApiError, match="names are valid Unicode.*ud800") as caught:
        read({"prompt": "a", "\ud800": 1})
    json.dumps(caught.value.body).encode()

"""The meaning of requests in OpenAI's protocol, and the refusal of requests without a meaning."""

import json

import pytest

from specsamp.sampling.penalties import Bias, Penalties
from specsamp.sampling.warp import MinP, Temperature, TopK, TopP
from specsamp.serving.request_warps import MAX_BIASES, make_warp
from support import extras

pytestmark = extras.needs("pydantic")
if extras.is_here("pydantic"):
    from specsamp.serving.openai_requests import MAX_MESSAGE, ApiError, parse_body, read_request

HI = [{"role": "user", "content": "Hi"}]


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
    described = {"x": {"type": "integer", "description": "a number"}}
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
    assert arguments == {"$id": "tool:0", "type": "object", **shape}, "without comments"
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


# Changes of a request; the field that the refusal names, and a pattern of its message.
COMPLETIONS = [
    ({"prompt": None}, "prompt", "a text, token ids, or a list"),
    ({"prompt": 5}, "prompt", "got 5"),
    ({"prompt": [1, True]}, "prompt", "token ids"),
    ({"prompt": "\ud800"}, "prompt", "token ids"),
    ({"max_tokens": 0}, "max_tokens", "an integer from 1 to 2147483647; got 0"),
    ({"temperature": -0.1}, "temperature", "a number from 0 to 1000; got -0.1"),
    ({"temperature": float("inf")}, "temperature", "got inf"),
    ({"top_p": 0}, "top_p", "above 0"),
    ({"top_k": 2.5}, "top_k", "got 2.5"),
    ({"n": 0}, "n", "an integer from 1 to 128"),
    ({"seed": -1}, "seed", "from 0 to 18446744073709551615; got -1"),
    ({"seed": 2**64}, "seed", "got 18446744073709551616"),
    ({"seed": "7"}, "seed", "got '7'"),
    ({"priority": 1001}, "priority", "an integer from -1000 to 1000; got 1001"),
    ({"stop_token_ids": 5}, "stop_token_ids", "a list of at most 16 token ids; got 5"),
    ({"stop_token_ids": [1] * 17}, "stop_token_ids", "at most 16"),
    ({"stop_token_ids": [True]}, "stop_token_ids[0]", "token ids"),
    ({"ignore_eos": 1}, "ignore_eos", "true or false; got 1"),
    ({"draft_length": -1}, "draft_length", "an integer from 0 to 1024; got -1"),
    ({"draft_length": 2000}, "draft_length", "got 2000"),
    ({"draft_length": True}, "draft_length", "got True"),
    ({"stop": ["a"] * 33}, "stop", "a list of at most 32"),
    ({"stop": [""]}, "stop", "none of them empty"),
    ({"stream": "yes"}, "stream", "true or false; got 'yes'"),
    ({"stream_options": {}}, "stream_options", "set stream"),
    ({"stream": True, "stream_options": 5}, "stream_options", "must be a JSON object; got 5"),
    (
        {"stream": True, "stream_options": {"a": 1}},
        "stream_options.a",
        "unknown field 'stream_options.a'",
    ),
    (
        {"stream": True, "stream_options": {"include_usage": 1}},
        "stream_options.include_usage",
        "got 1",
    ),
    ({"logprobs": 21}, "logprobs", "an integer from 0 to 20; got 21"),
    ({"logprobs": True}, "logprobs", "got True"),
    ({"logprobs": -1}, "logprobs", "got -1"),
    ({"logprobs": 1, "stream": True}, "logprobs", "logprobs = 1 is not streamed: leave out stream"),
    ({"echo": True, "stream": True}, "echo", "echo = True is not streamed"),
    ({"echo": "yes"}, "echo", "got 'yes'"),
    ({"mark_drafted": 1}, "mark_drafted", "true or false; got 1"),
    ({"best_of": 2}, "best_of", "not supported"),
    (
        {"logit_bias": 5},
        "logit_bias",
        "an object of at most 300 token ids, each with a number from -100 to 100; got 5",
    ),
    ({"logit_bias": {"5": 101}}, "logit_bias", "from -100 to 100; got {'5': 101}"),
    ({"logit_bias": {"5": float("-inf")}}, "logit_bias", "from -100 to 100"),
    ({"logit_bias": {"5": True}}, "logit_bias", "from -100 to 100"),
    ({"logit_bias": {"a": 1}}, "logit_bias", "token ids"),
    ({"logit_bias": {"05": 1, "5": 2}}, "logit_bias", "token ids"),
    ({"logit_bias": {str(id): 1 for id in range(301)}}, "logit_bias", "at most 300"),
    ({"min_tokens": -1}, "min_tokens", "an integer from 0 to 2147483647; got -1"),
    (
        {"min_tokens": 17},
        "min_tokens",
        "min_tokens = 17 is above max_tokens = 16: lower it, or raise max_tokens",
    ),
    (
        {"response_format": {"type": "json"}},
        "response_format.type",
        "must be text, json_object, json_schema or regex",
    ),
    ({"response_format": "json_object"}, "response_format", "must be a JSON object"),
    (
        {"response_format": {"type": "json_schema"}},
        "response_format.json_schema",
        "goes with the type json_schema",
    ),
    (
        {"response_format": {"type": "json_object", "json_schema": {"schema": {}}}},
        "response_format.json_schema",
        "goes with the type json_schema",
    ),
    (
        {"response_format": {"type": "json_schema", "json_schema": "{}"}},
        "response_format.json_schema",
        "must be an object with the JSON schema as its schema",
    ),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"type": "object"}}},
        "response_format.json_schema",
        "must have a schema",
    ),
    ({"response_format": {"type": "regex"}}, "response_format.pattern", "goes with the type regex"),
    (
        {"response_format": {"type": "text", "pattern": "a"}},
        "response_format.pattern",
        "goes with the type regex",
    ),
    ({"messages": HI}, "messages", "unknown field 'messages'"),
    ({"temprature": 1}, "temprature", "unknown field 'temprature': leave it out"),
    ({"model": 5}, "model", "a text"),
]
CHAT = [
    ({"messages": None}, "messages", "at least one"),
    ({"messages": "Hi"}, "messages", "a list of messages"),
    ({"messages": ["Hi"]}, "messages[0]", "must be a JSON object; got 'Hi'"),
    ({"messages": [{"content": "Hi"}]}, "messages[0].role", "a text such as user"),
    ({"messages": [{"role": "user"}]}, "messages[0].content", "got None"),
    ({"messages": [*HI, {"role": "user", "content": 5}]}, "messages[1].content", "got 5"),
    (
        {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
        "messages[0].content",
        "image_url",
    ),
    (
        {"messages": [*HI, HI[0] | {"tool_calls": [{}]}]},
        "messages[1].tool_calls[0].id",
        "as the protocol has it; got None",
    ),
    ({"messages": [*HI, {"role": "user", "tool_calls": []}]}, "messages[1].content", "got None"),
    (
        {"messages": [*HI, HI[0] | {"audio": {"id": "a"}}]},
        "messages[1].audio",
        r"unknown field 'messages\[1\].audio': leave it out",
    ),
    (
        {"messages": [*HI, HI[0] | {"function_call": {"name": "f"}}]},
        "messages[1].function_call",
        "unknown field",
    ),
    (
        {"messages": [*HI, HI[0] | {"reasoning_content": 5}]},
        "messages[1].reasoning_content",
        "a text of valid Unicode; got 5",
    ),
    ({"tools": [{"type": "function"}]}, "tools[0].function", "got None"),
    (
        {"tools": [{"type": "function", "function": {"name": "a b"}}]},
        "tools[0].function.name",
        "letters, digits, _ and -.*got 'a b'",
    ),
    (
        {"tools": [{"type": "function", "function": {"name": "a", "parameters": []}}]},
        "tools[0].function.parameters",
        r"a JSON schema, an object; got \[\]",
    ),
    ({"tools": [{"type": "web_search"}]}, "tools[0].type", "got 'web_search'"),
    ({"tool_choice": "required"}, "tool_choice", "must have the function that tool_choice names"),
    ({"tool_choice": "always"}, "tool_choice", "none, auto, required, or a tool; got 'always'"),
    (
        {
            "tools": [{"type": "function", "function": {"name": "a"}}],
            "response_format": {"type": "json_object"},
        },
        "response_format",
        "give one of them",
    ),
    ({"top_logprobs": 3}, "top_logprobs", "set logprobs to true"),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs", "from 0 to 20; got 21"),
    ({"logprobs": True, "top_logprobs": 2, "stream": True}, "top_logprobs", "is not streamed"),
    ({"echo": True}, "echo", "unknown field 'echo'"),
    ({"logprobs": 1}, "logprobs", "true or false"),
    ({"max_tokens": 1, "max_completion_tokens": 2}, "max_tokens", "differ: give one"),
    ({"max_completion_tokens": 1, "min_tokens": 2}, "min_tokens", "above max_tokens = 1"),
]


@pytest.mark.parametrize(
    "changes, param, message, is_chat",
    [(*case, cases is CHAT) for cases in (COMPLETIONS, CHAT) for case in cases],
)
def test_invalid_field_is_named_with_its_value(changes, param, message, is_chat):
    document = {"messages": HI} if is_chat else {"prompt": "a"}
    with pytest.raises(ApiError, match=message) as caught:
        read(document | changes, is_chat)
    error = caught.value.body["error"]
    assert (caught.value.status, error["param"], error["type"]) == (
        400,
        param,
        "invalid_request_error",
    )


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

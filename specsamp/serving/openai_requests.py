"""Requests of OpenAI's protocol: the bodies of /v1/completions and /v1/chat/completions as models
of pydantic.

Every field is served, or ignored because it changes no text, or refused with the reason. A field
that is null counts as left out, because clients send back the messages of earlier answers, with
nulls for example for the refusal.
"""

import json
import secrets
from collections.abc import Mapping
from reprlib import repr  # short
from typing import Annotated, Any, ClassVar, Literal

from pydantic import (
    AfterValidator,
    AliasChoices,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    Json,
    PrivateAttr,
    ValidationError,
    model_validator,
)
from pydantic.functional_validators import ModelWrapValidatorHandler

from specsamp.decoding.request import Prompt
from specsamp.sampling.warp import Warp
from specsamp.serving.request_warps import ALL_TOKENS, MAX_BIASES, NEUTRAL, make_warp
from specsamp.serving.sampling_request import (
    MAX_STOP_IDS,
    MAX_STOPS,
    MOST_PRIORITY,
    SamplingRequest,
)
from specsamp.serving.scores import MOST_TOPS

DEFAULT_MAX_TOKENS = 16  # of a completion; an answer in a chat has as many as there is room for
MAX_SAMPLES = 128
MAX_SEED = 2**64 - 1
MAX_MESSAGE = 500  # characters
MAX_TOOLS = 64
ANYTHING = "as the protocol has it"  # the requirement of a field without a description

IGNORED = ("user", "metadata", "store", "safety_identifier", "service_tier")
IGNORED += ("prompt_cache_key", "prompt_cache_options", "prompt_cache_retention")
# Fields that are not served, with the values that change nothing.
REFUSED = {
    "best_of": (1,),
    "suffix": ("",),
    **dict.fromkeys(("tools", "functions"), ([],)),
    **dict.fromkeys(("tool_choice", "function_call"), ("none", "auto")),
    "parallel_tool_calls": (True, False),
    "modalities": (["text"],),
    "audio": (),
    "prediction": (),
    "reasoning_effort": (),
    "web_search_options": (),
}


class ApiError(Exception):
    """A request that is refused, in the protocol's form."""

    def __init__(
        self, message: str, *, param: str | None = None, status: int = 400, code: str | None = None
    ):
        super().__init__(message)
        self.status = status
        message = message if len(message) <= MAX_MESSAGE else message[:MAX_MESSAGE] + " ..."
        kind = "invalid_request_error" if status < 500 else "server_error"
        param = param and param[:MAX_MESSAGE]
        self.body = {"error": {"message": message, "type": kind, "param": param, "code": code}}


def parse_body(body: bytes) -> Any:
    """Returns the JSON of a body; raises `ApiError` if the body is not JSON."""

    def refuse(constant: str) -> None:
        raise ValueError(f"{constant} is no JSON")

    try:
        return json.loads(body, parse_constant=refuse)
    except RecursionError as error:
        raise ApiError("the body is nested too deeply") from error
    except ValueError as error:  # not UTF-8 either, or a number of thousands of digits
        raise ApiError(f"the body is no JSON: {error}") from error


def _check_unicode(text: str) -> str:
    text.encode()  # JSON can write half a character, for which this raises ValueError
    return text


UnicodeText = Annotated[str, AfterValidator(_check_unicode)]
MaybeText = Annotated[UnicodeText | None, Field(description="a text of valid Unicode")]
StopText = Annotated[UnicodeText, Field(min_length=1)]
Tokens = Annotated[list[int], Field(min_length=1)]
FunctionName = Annotated[str, Field(pattern="^[A-Za-z0-9_-]{1,64}$")]
# JSON has no other keys than texts.
TokenName = Annotated[str, Field(pattern="^(0|[1-9][0-9]{0,8})$")]
LogitBias = Annotated[float, Field(ge=-100, le=100)]
PromptList = Annotated[list[UnicodeText] | list[Tokens], Field(min_length=1)]


def _integer(default: int | None, least: int, most: int) -> Any:
    return Field(default, ge=least, le=most, description=f"an integer from {least} to {most}")


def _number(default: float, least: float, most: float) -> Any:
    return Field(default, ge=least, le=most, description=f"a number from {least:g} to {most:g}")


def _switch() -> Any:
    return Field(False, description="true or false")


class _Fields(BaseModel):
    """Refuses unknown fields, and values of other types.

    The description of a field completes the message "FIELD must be ...; got VALUE".
    """

    model_config = ConfigDict(extra="forbid", strict=True)

    @model_validator(mode="before")
    @classmethod
    def _leave_out_nulls(cls, document: Any) -> Any:
        if not isinstance(document, dict):
            return document
        return {name: value for name, value in document.items() if value is not None}


class StreamOptions(_Fields):
    include_usage: bool = _switch()
    include_obfuscation: bool = _switch()


def _ignored() -> Any:
    """Returns a field that a client computed from other fields, or that changes no text."""
    return Field(None, exclude=True)


class Part(_Fields):
    """Holds a part of a message; the refusal of an answer is a text, too."""

    type: Literal["text", "refusal"]
    text: UnicodeText = Field(validation_alias=AliasChoices("text", "refusal"))
    prompt_cache_breakpoint: Any = _ignored()


class Function(_Fields):
    name: FunctionName = Field(description="a name of at most 64 letters, digits, _ and -")
    description: UnicodeText = ""
    parameters: dict[str, Any] = Field({}, description="a JSON schema, an object")
    strict: bool = True  # calls always follow their schema


class Tool(_Fields):
    type: Literal["function"]
    function: Function
    _document: dict[str, Any] = PrivateAttr()

    @model_validator(mode="wrap")
    @classmethod
    def _keep_the_document(cls, document: Any, make: ModelWrapValidatorHandler) -> Any:
        tool = make(document)
        tool._document = document  # templates write a tool's fields in its order
        return tool


class CalledFunction(_Fields):
    name: FunctionName
    # Some engines write nothing.
    arguments: Annotated[Json[dict[str, Any]], BeforeValidator(lambda text: text or "{}")]
    parsed_arguments: Any = _ignored()


class Call(_Fields):
    index: Any = _ignored()
    id: UnicodeText
    type: Literal["function"]
    function: CalledFunction


class Message(_Fields):
    """A message; the assistant's also have the fields of answers in openai-python."""

    role: UnicodeText = Field(description="a text such as user")
    content: UnicodeText | Annotated[list[Part], Field(min_length=1)] = Field(
        description="a text of valid Unicode, or a list of parts of the type text"
    )
    name: MaybeText = None
    reasoning_content: MaybeText = None
    reasoning: MaybeText = None
    tool_calls: list[Call] = Field([], description="calls as an answer has them")
    tool_call_id: UnicodeText | None = Field(
        None, description="the id of the call that this message answers"
    )
    refusal: MaybeText = Field(None, exclude=True)
    annotations: Any = _ignored()
    parsed: Any = _ignored()

    @model_validator(mode="before")
    @classmethod
    def _an_answer_may_have_no_text(cls, document: Any) -> Any:
        if not isinstance(document, dict) or document.get("content") is not None:
            return document
        is_answer = document.get("role") == "assistant" or document.get("tool_calls")
        return document | {"content": document.get("refusal") or ""} if is_answer else document

    def turn(self) -> dict[str, Any]:
        """Returns the message for a template, with its parts joined.

        An empty content is left out of messages with calls: clients have a null there, or an empty
        text if the answer was streamed.
        """
        turn = self.model_dump(exclude_defaults=True)
        if self.tool_calls and not self.content:
            del turn["content"]
        elif not isinstance(self.content, str):
            turn["content"] = "".join(part.text for part in self.content)
        return turn


class ResponseFormat(_Fields):
    """The response format; other servers have OpenAI's first three types alone."""

    type: Literal["text", "json_object", "json_schema", "regex"] = Field(
        description="text, json_object, json_schema or regex"
    )
    json_schema: dict[str, Any] | None = Field(
        None, description="an object with the JSON schema as its schema"
    )
    pattern: MaybeText = None

    @property
    def grammar(self) -> tuple[str, Any] | None:
        """Returns the kind and the source of the grammar; None: texts are free."""
        if self.type == "json_object":
            return "json_schema", {"type": "object"}
        if self.type == "json_schema":
            return "json_schema", self.json_schema["schema"]
        return ("regex", self.pattern) if self.type == "regex" else None


class GenerationRequest(_Fields):
    """The fields of both endpoints. Subclasses give ``prompts``, ``max_tokens`` and
    ``log_probs``.
    """

    model: MaybeText = None
    n: int = _integer(1, 1, MAX_SAMPLES)
    stop_token_ids: list[int] = Field(
        [], max_length=MAX_STOP_IDS, description=f"a list of at most {MAX_STOP_IDS} token ids"
    )
    ignore_eos: bool = _switch()
    min_tokens: int = _integer(0, 0, 2**31 - 1)
    draft_length: int | None = _integer(None, 0, 1024)
    mark_drafted: bool = _switch()
    seed: int | None = _integer(None, 0, MAX_SEED)
    priority: int = _integer(0, -MOST_PRIORITY, MOST_PRIORITY)
    stop: StopText | list[StopText] = Field(
        [],
        max_length=MAX_STOPS,
        description=f"a text, or a list of at most {MAX_STOPS}, none of them empty",
    )
    stream: bool = _switch()
    stream_options: StreamOptions | None = None
    response_format: ResponseFormat | None = Field(None, description="an object with a type")
    temperature: float = _number(1, 0, 1000)
    top_k: int = _integer(0, -1, ALL_TOKENS)
    top_p: float = Field(
        1,
        gt=0,
        le=1,
        description="above 0 and at most 1 (temperature = 0 takes the likeliest token)",
    )
    min_p: float = _number(0, 0, 1)
    logit_bias: dict[TokenName, LogitBias] = Field(
        {},
        max_length=MAX_BIASES,
        description=f"an object of at most {MAX_BIASES} token ids, each with a number from -100 to "
        "100",
    )
    presence_penalty: float = _number(0, -2, 2)
    frequency_penalty: float = _number(0, -2, 2)
    repetition_penalty: float = _number(1, 0.01, 100)

    @property
    def is_scored(self) -> bool:
        """Returns whether log-probabilities of more than the text's own tokens are needed."""
        return bool(self.tops or self.log_probs and self.echo)

    @property
    def stops(self) -> tuple[str, ...]:
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)

    @property
    def grammar(self) -> tuple[str, Any] | None:
        return self.response_format and self.response_format.grammar

    @property
    def include_usage(self) -> bool:
        """Returns whether a stream ends with the counts of tokens."""
        return self.stream_options is not None and self.stream_options.include_usage

    def sampling(self) -> Warp:
        """Returns the request's distribution."""
        biases = {int(token): by for token, by in self.logit_bias.items()}
        return make_warp({name: getattr(self, name) for name in NEUTRAL} | {"logit_bias": biases})

    def for_service(self, client: str) -> SamplingRequest:
        """Returns the request of a client; without a seed it has a new one."""
        return SamplingRequest(
            prompts=self.prompts,
            max_new_tokens=self.max_tokens,
            sampling=self.sampling(),
            seed=secrets.randbelow(MAX_SEED + 1) if self.seed is None else self.seed,
            stop=self.stops,
            stop_ids=self.stop_token_ids,
            ignore_eos=self.ignore_eos,
            min_tokens=self.min_tokens,
            draft_length=self.draft_length,
            num_samples=self.n,
            grammar=self.grammar,
            is_streamed=self.stream,
            is_scored=self.is_scored,
            client=client,
            priority=self.priority,
        )


class CompletionRequest(GenerationRequest):
    is_chat: ClassVar[bool] = False
    prompt: UnicodeText | Tokens | PromptList = Field(
        description="a text, token ids, or a list of texts or of lists of token ids"
    )
    max_tokens: int = _integer(DEFAULT_MAX_TOKENS, 1, 2**31 - 1)
    logprobs: int | None = _integer(None, 0, MOST_TOPS)
    echo: bool = _switch()

    @property
    def prompts(self) -> list[str] | list[list[int]]:
        is_single = isinstance(self.prompt, str) or isinstance(self.prompt[0], int)
        return [self.prompt] if is_single else self.prompt

    @property
    def log_probs(self) -> bool:
        return self.logprobs is not None

    @property
    def tops(self) -> int:
        return self.logprobs or 0


class ChatRequest(GenerationRequest):
    is_chat: ClassVar[bool] = True
    messages: list[Message] = Field(min_length=1, description="a list of messages, at least one")
    max_tokens: int | None = _integer(None, 1, 2**31 - 1)  # None: as many as there is room for
    max_completion_tokens: int | None = _integer(None, 1, 2**31 - 1)
    logprobs: bool = _switch()
    top_logprobs: int = _integer(0, 0, MOST_TOPS)
    echo: ClassVar[bool] = False
    tools: list[Tool] = Field(
        [], max_length=MAX_TOOLS, description=f"a list of at most {MAX_TOOLS} functions"
    )
    tool_choice: Literal["none", "auto", "required"] | Tool = Field(
        "auto", description="none, auto, required, or a tool"
    )

    @property
    def prompts(self) -> list[Prompt]:
        turns = [message.turn() for message in self.messages]
        told = [tool._document for tool in self.tools]
        return [{"messages": turns, "tools": told} if told else turns]

    @property
    def functions(self) -> list[Function]:
        """Returns the functions that the answer may call."""
        offered, choice = [tool.function for tool in self.tools], self.tool_choice
        if isinstance(choice, Tool):
            return [one for one in offered if one.name == choice.function.name]
        return [] if choice == "none" else offered

    @property
    def grammar(self) -> tuple[str, Any] | None:
        """Returns the grammar of a call: JSON with name and arguments; for the choice "auto", also
        texts without a brace.
        """
        if not self.functions:
            return super().grammar
        whole = {"type": "object", "required": ["name", "arguments"], "additionalProperties": False}
        calls, spacing = (
            [],
            {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "},
        )
        # With an id, so that references stay within a tool's schema.
        for number, one in enumerate(self.functions):
            arguments = {
                "$id": f"tool:{number}",
                **_without_comments(one.parameters),
                "type": "object",
            }
            calls.append(
                whole | {"properties": {"name": {"const": one.name}, "arguments": arguments}}
            )
        schema = json.dumps({"anyOf": calls, "x-guidance": spacing}, ensure_ascii=False)
        if self.tool_choice != "auto":
            return "json_schema", schema
        return "lark", f"start: call | TEXT\ncall: %json {schema}\nTEXT: /([^{{](.|\\n)*)?/"

    @property
    def log_probs(self) -> bool:
        return self.logprobs

    @property
    def tops(self) -> int:
        return self.top_logprobs


# Keys of JSON schemas whose texts exclude nothing. (A property of such a name has no text.)
COMMENTS = {"title", "description", "$comment"}


def _without_comments(schema: Any) -> Any:
    """Returns a JSON schema without its comments, which can be long."""
    if isinstance(schema, list):
        return [_without_comments(one) for one in schema]
    if not isinstance(schema, dict):
        return schema
    return {
        key: value if key in ("const", "enum") else _without_comments(value)
        for key, value in schema.items()
        if not (key in COMMENTS and isinstance(value, str))
    }


class TokenizeRequest(_Fields):
    """Holds a request to `/tokenize`: a prompt, or the messages of a chat."""

    model: MaybeText = None
    prompt: MaybeText = None
    messages: list[Message] | None = Field(
        None, min_length=1, description="a list of messages, at least one"
    )


class DetokenizeRequest(_Fields):
    model: MaybeText = None
    tokens: Tokens = Field(description="a list of token ids")


def read_fields(kind: type[_Fields], document: Any, model: str) -> Any:
    """Returns the checked fields of a document; raises `ApiError`, also if they name another model
    than ``model``.
    """
    try:
        request = kind.model_validate(document)
    except ValidationError as error:
        raise _refusal(kind, document, error) from error
    if request.model not in (None, model):
        message = f"the model {repr(request.model)} is not served here: ask for {model!r}"
        raise ApiError(message, param="model", status=404, code="model_not_found")
    return request


def read_request(document: Any, *, is_chat: bool, model: str) -> CompletionRequest | ChatRequest:
    """Checks a request.

    Args:
      document: its JSON.
      model: the name of the served model.

    Raises:
      ApiError: naming the field, the value and the fix.
    """
    kind = ChatRequest if is_chat else CompletionRequest
    fields = _without_ignored(kind, document) if isinstance(document, dict) else document
    request = read_fields(kind, fields, model)
    if request.stream_options is not None and not request.stream:
        raise ApiError(
            "stream_options are of streams: leave them out, or set stream", param="stream_options"
        )
    if is_chat and request.top_logprobs and not request.logprobs:
        raise ApiError("top_logprobs needs logprobs: set logprobs to true", param="top_logprobs")
    if request.stream and (request.is_scored or request.echo):
        name = "echo" if request.echo else "top_logprobs" if is_chat else "logprobs"
        raise ApiError(
            f"{name} = {getattr(request, name)!r} is not streamed: leave out stream, or {name}",
            param=name,
        )
    if is_chat and request.max_completion_tokens is not None:
        if request.max_tokens not in (None, request.max_completion_tokens):
            raise ApiError(
                "max_tokens and max_completion_tokens differ: give one of them", param="max_tokens"
            )
        request.max_tokens = request.max_completion_tokens
    form = request.response_format
    if is_chat and request.functions and form not in (None, ResponseFormat(type="text")):
        raise ApiError(
            "a text follows response_format or calls tools: give one of them",
            param="response_format",
        )
    if is_chat and request.tool_choice not in ("none", "auto") and not request.functions:
        raise ApiError("tools must have the function that tool_choice names", param="tool_choice")
    for kind, name in (("json_schema", "json_schema"), ("regex", "pattern")):
        if form is not None and (form.type == kind) != (getattr(form, name) is not None):
            where = f"response_format.{name}"
            raise ApiError(f"{where} goes with the type {kind}, and only with it", param=where)
    if (
        form is not None
        and form.json_schema is not None
        and not isinstance(form.json_schema.get("schema"), dict)
    ):
        raise ApiError(
            "response_format.json_schema must have a schema, an object",
            param="response_format.json_schema",
        )
    if request.max_tokens is not None and request.min_tokens > request.max_tokens:
        limits = f"min_tokens = {request.min_tokens} is above max_tokens = {request.max_tokens}"
        raise ApiError(f"{limits}: lower it, or raise max_tokens", param="min_tokens")
    return request


def _without_ignored(kind: type[_Fields], document: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the fields that are served; raises `ApiError` for a refused one with a value that
    would change a text.
    """
    document = {
        name: value for name, value in document.items() if value is not None and name not in IGNORED
    }
    if document.get("best_of") == document.get("n", 1):  # the best n of n are all of them
        document.pop("best_of", None)
    for name, neutral in REFUSED.items():
        value = None if name in kind.model_fields else document.pop(name, None)
        if value is not None and not any(
            type(value) is type(one) and value == one for one in neutral
        ):
            raise ApiError(f"{name} = {repr(value)} is not supported: leave it out", param=name)
    return document


def _refusal(kind: type[_Fields] | None, document: Any, error: ValidationError) -> ApiError:
    """Returns the first problem that pydantic found, in the words of the field's description."""
    problem = error.errors(include_url=False, include_context=False)[0]
    where, value, wanted = "", document, ANYTHING
    for part in problem["loc"]:
        if isinstance(part, int):
            where, value = f"{where}[{part}]", value[part]
        elif kind is not None:
            where, value = f"{where}.{part}".removeprefix("."), value.get(part)
            wanted = part in kind.model_fields and kind.model_fields[part].description or ANYTHING
            parts = {
                "messages": Message,
                "stream_options": StreamOptions,
                "response_format": ResponseFormat,
            }
            parts |= {"tools": Tool, "tool_calls": Call, "function": Function}
            kind = parts.get(part)
        else:
            break  # later parts name a branch of a union
    if problem["type"] == "extra_forbidden":
        return ApiError(f"unknown field {repr(where)}: leave it out", param=where)
    if problem["type"] == "model_type":
        wanted = "a JSON object"
    elif problem["type"] == "string_unicode":
        wanted = "an object whose names are valid Unicode"
    return ApiError(
        f"{where or 'the body'} must be {wanted}; got {repr(value)}", param=where or None
    )

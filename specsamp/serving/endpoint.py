"""The endpoint: OpenAI's completions and chat completions over HTTP, in front of a service.

app = Endpoint(service=service, model="python").app()  # for any ASGI server

web_server.py runs it under uvicorn. The library starlette is required. When a client disconnects,
its slots are free after the step; a slow reader delays no slot.
"""

import asyncio
import dataclasses
import functools
import hmac
import pathlib
import time
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

from absl import logging
from prometheus_client import CONTENT_TYPE_PLAIN_0_0_4
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from specsamp.checkpoints.chat import CannotRender
from specsamp.decoding.request import encode
from specsamp.serving.answer import Answer, Busy, Failed, TooLong, Unmet
from specsamp.serving.openai_replies import LAST_EVENT, Reply, json_bytes, to_event
from specsamp.serving.openai_requests import (
    ApiError,
    DetokenizeRequest,
    TokenizeRequest,
    parse_body,
    read_fields,
    read_request,
)
from specsamp.serving.service import Service
from specsamp.serving.statistics import Statistics

JSON = "application/json"
PAGE = pathlib.Path(__file__).with_name("page.html")
# The page may load nothing from elsewhere, and no other page may embed it.
PAGE_POLICY = (
    "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; connect-src "
    "'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
CLOSE = {"connection": "close"}  # nothing that follows is read
RETRY_AFTER_SECONDS = 1
ERRORS = {  # of the service, and their form in the protocol
    TooLong: {"code": "context_length_exceeded"},  # clients look for it, to shorten a conversation
    CannotRender: {"status": 503},  # this server cannot, or is too busy to
    ValueError: {},
    RecursionError: {},
    Busy: {"status": 429, "code": "rate_limit_exceeded"},
    Failed: {"status": 503},
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Endpoint:
    """The paths of the protocol, in front of a service.

    Attributes:
      service: started, of a pair with a tokenizer; its method's sampling is that of
        `request_warps.make_warp`.
      model: the name of the pair for clients.
      has_chat: whether the tokenizer has a chat template.
      keys: accepted keys; none: no key is checked.
      max_body: the most bytes of a request.
      timeout: seconds for a client to send its request, and to read each chunk of its answer.
      say: called with a line about each request.
      statistics: the counts of `/metrics`.
    """

    service: Service
    model: str
    has_chat: bool = True
    keys: Sequence[str] = dataclasses.field(default=(), repr=False)
    max_body: int = 1 << 20
    timeout: float = 60.0
    say: Callable[[str], None] = logging.info
    statistics: Statistics = dataclasses.field(default_factory=Statistics)

    def app(self) -> ASGIApp:
        """Returns the application."""
        app = Starlette(
            routes=[
                Route("/", self.page),
                Route("/health", self.health),
                Route("/metrics", self.metrics),
                Route("/tokenize", self.tokenize, methods=["POST"]),
                Route("/detokenize", self.detokenize, methods=["POST"]),
                Route("/v1/models", self.models),
                Route("/v1/models/{name:path}", self.one_model),
                Route(
                    "/v1/completions",
                    functools.partial(self._answer, is_chat=False),
                    methods=["POST"],
                ),
                Route(
                    "/v1/chat/completions",
                    functools.partial(self._answer, is_chat=True),
                    methods=["POST"],
                ),
            ],
            exception_handlers={ApiError: _refuse, HTTPException: _refuse_path, Exception: _fail},
        )
        app.router.redirect_slashes = False  # to an address that a client's header names
        return _Watch(app, self)

    async def page(self, request: Request) -> Response:
        """Replies with a page that shows a text while it is decoded; a person enters the key."""
        headers = {"content-security-policy": PAGE_POLICY, "x-content-type-options": "nosniff"}
        return Response(PAGE.read_bytes(), 200, headers, "text/html; charset=utf-8")

    async def metrics(self, request: Request) -> Response:
        """Replies with counts for Prometheus."""
        batch = self.service.batch
        gauges = {
            "rows": ("Rows at most.", batch.usage.rows),
            "rows_busy": ("Rows that decode a text.", len(batch.table.decoding)),
            "texts_waiting": (
                "Texts that wait for a row, or are being read.",
                self.service.unfinished - len(batch.table.decoding),
            ),
            "slots": ("Slots of each row now.", batch.table.size.slots),
            "prompt_tokens_copied": (
                "Tokens of prompts that a row held already.",
                batch.prefill.tokens_copied,
            ),
        }
        return Response(
            self.statistics.text(gauges), 200, {"content-type": CONTENT_TYPE_PLAIN_0_0_4}
        )

    async def health(self, request: Request) -> Response:
        """Replies with the counts of busy rows since the start."""
        batch, unfinished = self.service.batch, self.service.unfinished
        rows = {
            "rows": batch.usage.rows,
            "busy_rows": len(batch.table.decoding),
            "unfinished_texts": unfinished,
        }
        counts = {
            "slices": batch.usage.slices,
            "rounds": batch.usage.rounds,
            "busy_rounds_of_rows": batch.usage.busy,
        }
        return _reply({"status": "ok", "model": self.model, **rows, **counts})

    async def tokenize(self, request: Request) -> Response:
        """Replies with the token ids of a text or of a chat, as a completion would read them."""
        self._check_key(request)
        asked = read_fields(TokenizeRequest, parse_body(await self._body(request)), self.model)
        if (asked.prompt is None) == (asked.messages is None):
            raise ApiError("give a prompt or messages", param="prompt")
        prompt = (
            asked.prompt
            if asked.messages is None
            else [message.turn() for message in asked.messages]
        )
        (tokens,) = await run_in_threadpool(self._call, encode, self.service.pair, [prompt])
        return _reply(
            {"count": len(tokens), "max_model_len": self.service.context, "tokens": tokens}
        )

    async def detokenize(self, request: Request) -> Response:
        """Replies with the text of token ids."""
        self._check_key(request)
        asked = read_fields(DetokenizeRequest, parse_body(await self._body(request)), self.model)
        (tokens,) = await run_in_threadpool(self._call, encode, self.service.pair, [asked.tokens])
        return _reply({"prompt": self.service.pair.tokenizer.decode(tokens)})

    async def models(self, request: Request) -> Response:
        self._check_key(request)
        return _reply({"object": "list", "data": [self._described()]})

    async def one_model(self, request: Request) -> Response:
        self._check_key(request)
        if request.path_params["name"] != self.model:
            raise ApiError(
                f"no such model: {self.model!r} is served here", status=404, code="model_not_found"
            )
        return _reply(self._described())

    def _described(self) -> dict:
        room = {"max_model_len": self.service.context}
        return {"id": self.model, "object": "model", "created": 0, "owned_by": "specsamp", **room}

    async def _answer(self, request: Request, is_chat: bool) -> Response:
        client = self._check_key(request)
        if is_chat and not self.has_chat:
            raise ApiError(
                f"{self.model!r} has no chat template: use /v1/completions", code="no_chat_template"
            )
        document = parse_body(await self._body(request))
        asked = read_request(document, is_chat=is_chat, model=self.model)
        chunks = asyncio.Queue()
        # The service's thread delivers chunks, but an asyncio queue is filled by its own event loop
        # only.
        deliver = functools.partial(
            asyncio.get_running_loop().call_soon_threadsafe, chunks.put_nowait
        )
        answer = await run_in_threadpool(
            self._call, lambda: self.service.submit(asked.for_service(client), deliver)
        )
        reply = Reply(
            asked, answer, self.model, exact=self.service.method.exact, repeats=self.service.repeats
        )
        request.state.answered = answer, reply
        return _Answering(answer, reply, chunks, self.timeout)

    def _call(self, function: Callable, *arguments: Any) -> Any:
        """Calls the service, and gives its errors the form of the protocol."""
        try:
            return function(*arguments)
        except tuple(ERRORS) as error:
            form = next(form for kind, form in ERRORS.items() if isinstance(error, kind))
            raise ApiError(str(error), **form) from error

    async def _body(self, request: Request) -> bytes:
        """Reads the body of a request; raises ApiError if it is too large or comes too slowly."""
        if request.headers.get("content-type", "").partition(";")[0].strip().lower() != JSON:
            raise ApiError(f"send JSON, with the header content-type: {JSON}", status=415)
        if request.headers.get("content-encoding", "identity").strip().lower() != "identity":
            raise ApiError(
                "compressed bodies are not taken: leave content-encoding out", status=415
            )
        too_large = ApiError(
            f"the body is larger than the {self.max_body} bytes that are taken", status=413
        )
        # The server has checked that it is a number. A body that is too large is not awaited.
        if int(request.headers.get("content-length", 0)) > self.max_body:
            raise too_large
        body = bytearray()
        try:
            async with asyncio.timeout(self.timeout):
                async for part in request.stream():
                    body += part
                    if len(body) > self.max_body:
                        raise too_large
        except TimeoutError as error:
            raise ApiError(
                f"the body did not come within {self.timeout:g} seconds", status=408
            ) from error
        except ClientDisconnect as error:
            raise ApiError("the client left", status=400) from error
        return bytes(body)

    def _check_key(self, request: Request) -> str:
        """Returns the name of the client: of its key if there are several, else its address; raises
        `ApiError` for a wrong key.
        """
        address = request.client.host if request.client else ""
        kind, _, given = request.headers.get("authorization", "").partition(" ")
        # Compared as bytes: texts that are not ASCII would raise.
        right = [
            n
            for n, key in enumerate(self.keys)
            if hmac.compare_digest(given.strip().encode(), key.encode())
        ]
        if self.keys and not (right and kind.lower() == "bearer"):
            raise ApiError(
                "a key is needed: send it in the header authorization",
                status=401,
                code="invalid_api_key",
            )
        return f"key {right[0]}" if len(self.keys) > 1 else address


class _Watch:
    """Counts and logs each request of an application; refuses requests with two lengths.

    If a proxy reads the length of a body from one header and this server from another, a part of
    the body is a request that the proxy has not seen. So the connection is closed, and the bytes
    behind the request are not read.
    """

    def __init__(self, app: Starlette, endpoint: Endpoint):
        self._app, self._endpoint = app, endpoint
        self._paths = {route.path for route in app.routes}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        begin, statuses = time.monotonic(), []

        async def watched(message: Message) -> None:
            if message["type"] == "http.response.start":
                statuses.append(message["status"])
            await send(message)

        app = self._app
        if {b"content-length", b"transfer-encoding"} <= {name for name, _ in scope["headers"]}:
            twice = ApiError("content-length and transfer-encoding contradict each other: send one")
            app = _reply(twice.body, twice.status, CLOSE)
        try:
            await app(scope, receive, watched)
        finally:
            self._record(scope, statuses[0] if statuses else 499, begin)
        return None

    def _record(self, scope: Scope, status: int, begin: float) -> None:
        endpoint, path = self._endpoint, scope["path"]
        endpoint.statistics.count_answer(path if path in self._paths else "other", status)
        seconds, client = time.monotonic() - begin, (scope.get("client") or ("",))[0]
        said = f"{client} {scope['method']} {ascii(path[:80])} {status} {seconds:.3f} s"
        answer, reply = scope.get("state", {}).get("answered", (None, None))
        if reply is not None and reply.is_complete:
            first, stats = (answer.first or time.monotonic()) - begin, reply.stats
            endpoint.statistics.count_texts(reply.prompt_tokens, stats, first, seconds)
            said += (
                f", {reply.prompt_tokens} tokens read, {stats.emitted} written in {stats.rounds} "
                f"rounds, first after {first:.3f} s"
            )
        elif answer is not None:
            said += ", not taken to its end"
        if path not in ("/health", "/metrics"):
            endpoint.say(said)


class _Answering(Response):
    """Streams an answer, and cancels it when the client disconnects or does not read."""

    def __init__(self, answer: Answer, reply: Reply, chunks: asyncio.Queue, timeout: float):
        super().__init__()
        self._answer, self._reply, self._chunks, self._timeout = answer, reply, chunks, timeout

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        gone = asyncio.ensure_future(_wait_for_the_end(receive))
        sending = asyncio.ensure_future(self._send(scope, receive, send))
        try:
            await asyncio.wait({gone, sending}, return_when=asyncio.FIRST_COMPLETED)
            if sending.done():
                sending.result()
        except TimeoutError:
            pass  # the client does not read; the server closes the connection
        finally:
            self._answer.cancel()
            gone.cancel()
            sending.cancel()
            await asyncio.gather(gone, sending, return_exceptions=True)

    async def _send(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def send_in_time(message: Message) -> None:
            async with asyncio.timeout(self._timeout):
                await send(message)

        if not self._answer.asked.is_streamed:
            response = await self._whole()
            await response(scope, receive, send_in_time)
            return
        headers = {"cache-control": "no-cache"}
        await StreamingResponse(self._events(), 200, headers, "text/event-stream").stream_response(
            send_in_time
        )

    async def _documents(self) -> AsyncIterator[dict]:
        """Yields what each chunk adds to a stream, until all texts have ended; raises Failed."""
        while not self._reply.is_complete:
            chunk = await self._chunks.get()
            if isinstance(chunk, Failed):
                raise chunk
            if (document := self._reply.chunk(chunk)) is not None:
                yield document

    async def _whole(self) -> Response:
        try:
            async for _ in self._documents():
                pass
        except Failed as failed:
            return _reply(*_failure(failed))
        return _reply(self._reply.whole())

    async def _events(self) -> AsyncIterator[bytes]:
        try:
            for document in self._reply.begin():
                yield to_event(document)
            async for document in self._documents():
                yield to_event(document)
            for document in self._reply.end():
                yield to_event(document)
            yield LAST_EVENT
        except Failed as failed:
            yield to_event(_failure(failed)[0])


def _failure(failed: Failed) -> tuple[dict, int]:
    """Returns the document and the status of an answer that has failed."""
    status = 400 if isinstance(failed, Unmet) else 500
    return ApiError(str(failed), status=status).body, status


async def _wait_for_the_end(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def _reply(document: dict, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    return Response(json_bytes(document), status, headers, JSON)


async def _refuse(request: Request, error: ApiError) -> Response:
    headers = {401: {"www-authenticate": "Bearer"}, 408: CLOSE, 413: CLOSE, 415: CLOSE}.get(
        error.status, {}
    )
    if error.status == 429:
        headers = {"retry-after": str(RETRY_AFTER_SECONDS)}
    return _reply(error.body, error.status, headers)


async def _refuse_path(request: Request, error: HTTPException) -> Response:
    known = (
        "GET /, /health, /metrics, /v1/models; POST /v1/completions, /v1/chat/completions, "
        "/tokenize, /detokenize"
    )
    message = f"{request.method} {request.url.path} is not served here: {known}"
    return _reply(
        ApiError(message, status=error.status_code).body,
        error.status_code,
        dict(error.headers or {}),
    )


async def _fail(request: Request, error: Exception) -> Response:
    return _reply(ApiError(f"the server failed: {type(error).__name__}", status=500).body, 500)

"""The endpoint: OpenAI's completions and chat completions over HTTP, in front of a service.

app = make_app(service, model="python")         # for any ASGI server; web_server.py runs it under uvicorn

Takes the library starlette. A client that leaves, or that does not read, costs its own answer and nobody else's: its
rows are free after the slice, and no row ever waits for a client.
"""

from __future__ import annotations

import asyncio
import functools
import hmac
import secrets
from collections.abc import AsyncIterator, Collection

from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Message, Receive, Scope, Send

from specsamp.checkpoints.chat import CannotRender
from specsamp.serving.answer import Answer, Busy, Failed, TooLong
from specsamp.serving.openai_replies import LAST_EVENT, Reply, json_bytes, to_event
from specsamp.serving.openai_requests import MAX_SEED, ApiError, GenerationRequest, parse_body, read_request
from specsamp.serving.service import Service

JSON = "application/json"
CLOSE = {"connection": "close"}  # what is left of a body is not read
RETRY_AFTER_SECONDS = 1


def make_app(
    service: Service,
    *,
    model: str,
    warps: Collection[str] = (),
    has_chat: bool = True,
    key: str | None = None,
    max_body: int = 1 << 20,
    timeout: float = 60.0,
) -> Starlette:
    """Makes the application.

    Args:
      service: started, of a pair with a tokenizer.
      model: the name that it has here.
      warps: kinds that the service's method has besides temperature, see `request_warps.make_warp`.
      has_chat: the tokenizer has a chat template.
      key: which requests must bring as a bearer's; None: nobody is asked.
      max_body: bytes of a request.
      timeout: seconds that a client has to send its request, and to take each chunk of its answer.
    """
    endpoint = _Endpoint(service, model, warps, has_chat, key, max_body, timeout)
    app = Starlette(
        routes=[
            Route("/health", endpoint.health),
            Route("/v1/models", endpoint.models),
            Route("/v1/models/{name:path}", endpoint.model),
            Route("/v1/completions", endpoint.completions, methods=["POST"]),
            Route("/v1/chat/completions", endpoint.chat, methods=["POST"]),
        ],
        exception_handlers={ApiError: _refuse, HTTPException: _refuse_path, Exception: _fail},
    )
    app.router.redirect_slashes = False  # to an address that a client's header names
    return app


class _Endpoint:
    def __init__(
        self,
        service: Service,
        model: str,
        warps: Collection[str],
        has_chat: bool,
        key: str | None,
        max_body: int,
        timeout: float,
    ):
        self._service, self._model, self._warps, self._has_chat = service, model, warps, has_chat
        self._key, self._max_body, self._timeout = key, max_body, timeout

    async def health(self, request: Request) -> Response:
        """Says how busy the rows are; the counts grow from the start on."""
        usage, unfinished = self._service.batch.usage, self._service.unfinished
        counts = {"slices": usage.slices, "rounds": usage.rounds, "busy_rounds_of_rows": usage.busy}
        return _reply({"status": "ok", "rows": usage.rows, "unfinished_texts": unfinished, **counts})

    async def models(self, request: Request) -> Response:
        self._check_key(request)
        return _reply({"object": "list", "data": [self._described()]})

    async def model(self, request: Request) -> Response:
        self._check_key(request)
        if request.path_params["name"] != self._model:
            raise ApiError(f"no such model: {self._model!r} is served here", status=404, code="model_not_found")
        return _reply(self._described())

    async def completions(self, request: Request) -> Response:
        return await self._answer(request, is_chat=False)

    async def chat(self, request: Request) -> Response:
        return await self._answer(request, is_chat=True)

    def _described(self) -> dict:
        room = {"max_model_len": self._service.context}
        return {"id": self._model, "object": "model", "created": 0, "owned_by": "specsamp", **room}

    async def _answer(self, request: Request, is_chat: bool) -> Response:
        self._check_key(request)
        if is_chat and not self._has_chat:
            raise ApiError(f"{self._model!r} has no chat template: use /v1/completions", code="no_chat_template")
        document = parse_body(await self._body(request))
        asked = read_request(document, is_chat=is_chat, model=self._model)
        chunks = asyncio.Queue()
        # The service's thread hands chunks over; a queue of a loop takes them in that loop only.
        deliver = functools.partial(asyncio.get_running_loop().call_soon_threadsafe, chunks.put_nowait)
        answer = await run_in_threadpool(self._ask, asked, deliver)
        reply = Reply(asked, answer, self._model, exact=self._service.method.exact)
        return _Answering(asked, answer, reply, chunks, self._timeout)

    def _ask(self, asked: GenerationRequest, deliver) -> Answer:
        try:
            return self._service.ask(
                asked.prompts,
                asked.max_tokens,
                deliver=deliver,
                sampling=asked.sampling(self._warps),
                seed=secrets.randbelow(MAX_SEED + 1) if asked.seed is None else asked.seed,
                stop=asked.stops,
                num_samples=asked.n,
                is_streamed=asked.stream,
            )
        except TooLong as error:  # which clients look for, to shorten a conversation
            raise ApiError(str(error), code="context_length_exceeded") from error
        except CannotRender as error:  # this server cannot, or is too busy to
            raise ApiError(str(error), status=503) from error
        except (ValueError, RecursionError) as error:
            raise ApiError(str(error)) from error
        except Busy as busy:
            raise ApiError(str(busy), status=429, code="rate_limit_exceeded") from busy
        except Failed as failed:
            raise ApiError(str(failed), status=503) from failed

    async def _body(self, request: Request) -> bytes:
        """Reads a request to its end, if that comes soon enough and before it is too large."""
        if request.headers.get("content-type", "").partition(";")[0].strip().lower() != JSON:
            raise ApiError(f"send JSON, with the header content-type: {JSON}", status=415)
        body = bytearray()
        try:
            async with asyncio.timeout(self._timeout):
                async for part in request.stream():
                    body += part
                    if len(body) > self._max_body:
                        raise ApiError(f"the body is larger than the {self._max_body} bytes that are taken", status=413)
        except TimeoutError as error:
            raise ApiError(f"the body did not come within {self._timeout:g} seconds", status=408) from error
        except ClientDisconnect as error:
            raise ApiError("the client left", status=400) from error
        return bytes(body)

    def _check_key(self, request: Request) -> None:
        if self._key is None:
            return
        kind, _, given = request.headers.get("authorization", "").partition(" ")
        # Compared as bytes: texts that are not ASCII would raise.
        is_right = hmac.compare_digest(given.strip().encode(), self._key.encode())
        if kind.lower() != "bearer" or not is_right:
            raise ApiError("a key is wanted: send it in the header authorization", status=401, code="invalid_api_key")


class _Answering(Response):
    """Sends an answer as it comes, and drops it when the client leaves or does not read."""

    def __init__(self, asked: GenerationRequest, answer: Answer, reply: Reply, chunks: asyncio.Queue, timeout: float):
        super().__init__()
        self._asked, self._answer, self._reply, self._chunks, self._timeout = asked, answer, reply, chunks, timeout

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        gone = asyncio.ensure_future(_wait_for_the_end(receive))
        sending = asyncio.ensure_future(self._send(scope, receive, send))
        try:
            await asyncio.wait({gone, sending}, return_when=asyncio.FIRST_COMPLETED)
            if sending.done():
                sending.result()
        except TimeoutError:
            pass  # it does not read; the server closes the connection
        finally:
            self._answer.cancel()
            gone.cancel()
            sending.cancel()
            await asyncio.gather(gone, sending, return_exceptions=True)

    async def _send(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def send_in_time(message: Message) -> None:
            async with asyncio.timeout(self._timeout):
                await send(message)

        if not self._asked.stream:
            response = await self._whole()
            await response(scope, receive, send_in_time)
            return
        headers = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache")]
        await send_in_time({"type": "http.response.start", "status": 200, "headers": headers})
        async for event in self._events():
            await send_in_time({"type": "http.response.body", "body": event, "more_body": True})
        await send_in_time({"type": "http.response.body", "body": b"", "more_body": False})

    async def _whole(self) -> Response:
        while not self._reply.is_complete:
            chunk = await self._chunks.get()
            if isinstance(chunk, Failed):
                return _reply(ApiError(str(chunk), status=500).body, 500)
            self._reply.chunk(chunk)
        return _reply(self._reply.whole())

    async def _events(self) -> AsyncIterator[bytes]:
        for event in self._reply.begin():
            yield to_event(event)
        while not self._reply.is_complete:
            chunk = await self._chunks.get()
            if isinstance(chunk, Failed):
                yield to_event(ApiError(str(chunk), status=500).body)
                return
            event = self._reply.chunk(chunk)
            if event is not None:
                yield to_event(event)
        for event in self._reply.end():
            yield to_event(event)
        yield LAST_EVENT


async def _wait_for_the_end(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def _reply(document: dict, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    return Response(json_bytes(document), status, headers, JSON)


async def _refuse(request: Request, error: ApiError) -> Response:
    headers = {401: {"www-authenticate": "Bearer"}, 408: CLOSE, 413: CLOSE, 415: CLOSE}.get(error.status, {})
    if error.status == 429:
        headers = {"retry-after": str(RETRY_AFTER_SECONDS)}
    return _reply(error.body, error.status, headers)


async def _refuse_path(request: Request, error: HTTPException) -> Response:
    known = "GET /health, /v1/models; POST /v1/completions, /v1/chat/completions"
    message = f"{request.method} {request.url.path} is not served here: {known}"
    return _reply(ApiError(message, status=error.status_code).body, error.status_code, dict(error.headers or {}))


async def _fail(request: Request, error: Exception) -> Response:
    return _reply(ApiError(f"the server failed: {type(error).__name__}", status=500).body, 500)

"""A service of a model that counts bytes, with programs that all tests share, and HTTP servers."""

import contextlib
import dataclasses
import http.client
import json
import queue
import threading
import time

from specsamp import SamplingRequest, generate
from specsamp.decoding.method import make_method
from specsamp.serving.answer import Failed
from specsamp.serving.request_warps import make_warp
from specsamp.serving.service import Service
from specsamp.serving.sizes import Chunks, Resize, ScoreChunks
from support.byte_tokenizer import ByteTokenizer
from support.fakes import counting_pair

CONTEXT, ROWS, WAITING, K = 40, 2, 4, 2


@dataclasses.dataclass(frozen=True)
class ChattyBytes(ByteTokenizer):
    """Bytes with a chat template, which accepts the role user alone."""

    def encode_chat(self, messages):
        if any(one["role"] != "user" for one in messages):
            raise ValueError("the chat template takes users only")
        return self.encode("|".join(one["content"] for one in messages))


# Consecutive bytes, up to a hot temperature; the draft errs at one byte.
PAIR = dataclasses.replace(
    counting_pair(stumbles_at=ord("k"), max_positions=None), tokenizer=ChattyBytes()
)


METHOD = make_method(PAIR, draft_length=K, sampling=make_warp({}))


def make_service():
    return Service(
        PAIR, METHOD, rows=ROWS, context=CONTEXT, max_waiting=WAITING, rounds_per_slice=2
    )


def submit(service, prompts, budget, deliver, **options):
    """Queues a request, and returns its answer."""
    request = SamplingRequest(prompts=prompts, max_new_tokens=budget, **options)
    return service.submit(request, deliver)


def sampling_request(prompts, budget=8, temperature=0.0, top_p=1.0, **options):
    sampling = make_warp({"temperature": temperature, "top_p": top_p})
    return SamplingRequest(prompts=prompts, max_new_tokens=budget, sampling=sampling, **options)


class Caller:
    """A caller with one request, whose chunks it collects by row."""

    def __init__(self, service, prompts, budget=8, **options):
        self.pieces = queue.SimpleQueue()
        request = sampling_request(prompts, budget, **options)
        self.num_samples = request.num_samples
        self.answer = service.submit(request, self.pieces.put)
        self.got = [[] for _ in self.answer.requests]

    def wait(self):
        """Returns tokens, finish and text of each row."""
        while not all(pieces and pieces[-1].finish for pieces in self.got):
            piece = self.pieces.get(timeout=120)
            if isinstance(piece, Failed):
                raise piece
            self.got[piece.prompt_index * self.num_samples + piece.sample_index].append(piece)
        texts = []
        for request, pieces in zip(self.answer.requests, self.got):
            tokens = sum((piece.tokens for piece in pieces), [])
            text = request.stops.text(request.continuation, tokens)
            texts.append((tokens, pieces[-1].finish, text))
        return texts


@contextlib.contextmanager
def running(service):
    """Starts a service, and ends it."""
    service.start()
    try:
        yield service
    finally:
        service.close()
        service.join()


def alone(
    prompts, budget, temperature=0.0, top_p=1.0, stop=(), num_samples=1, numbers=(), **options
):
    """Returns completions of `generate` with the settings of a request, in the service's shapes, so
    that nothing is compiled.
    """
    sampling = make_warp({"temperature": temperature, "top_p": top_p} | dict(numbers))
    stop = [PAIR.tokenizer.eos_id, *(stop or ["never written"])]
    options = dict(draft_length=K, sampling=sampling, stop=stop, return_log_probs=True) | options
    done = []
    for index, prompt in enumerate(prompts):
        done += generate(PAIR, [prompt], budget, num_samples=ROWS, prompt_ids=[index], **options)[
            :num_samples
        ]
    return done


def compile_all(batch):
    """Compiles all sizes, all changes of the size, and all scores, for any request."""
    sizes = batch.sizes
    programs = [*sizes.all, *map(Chunks, sizes.slots)]
    programs += [Resize(old, new) for old in sizes.all for new in sizes.all if old != new]
    programs += [ScoreChunks(slots, size) for slots in sizes.slots for size in batch._chunks]
    for program in programs:
        sizes.programs.make(program)


class Gate:
    """Blocks runs of the loop while it is closed."""

    def __init__(self, monkeypatch):
        from specsamp.decoding.engine import Engine

        is_open, run = threading.Event(), Engine.run
        self.open = is_open.set
        monkeypatch.setattr(
            Engine, "run", lambda *arguments: (is_open.wait(120), run(*arguments))[1]
        )


def wait_until(holds):
    """Blocks until ``holds`` is true, by the work of another thread."""
    end = time.monotonic() + 120
    while not holds():
        assert time.monotonic() < end, "it did not happen"
        time.sleep(0.005)


@contextlib.contextmanager
def serving(service, timeout=60.0, **options):
    """Runs an endpoint in a thread; yields the server, with its port as ``server.port``."""
    from specsamp.serving.endpoint import Endpoint
    from specsamp.serving.web_server import WebServer, bind

    app = Endpoint(service=service, model="bytes", timeout=timeout, **options).app()
    with bind("127.0.0.1", 0, timeout) as bound:
        server = WebServer(app, service, timeout)
        server.port = bound.getsockname()[1]
        thread = threading.Thread(target=server.run, kwargs={"sockets": [bound]})
        thread.start()
        try:
            wait_until(lambda: server.started)
            yield server
        finally:
            server.should_exit = True
            thread.join()


def post(server, path, document, **headers):
    """Returns status, headers and JSON of a request, whose document may be bytes."""
    body = document if isinstance(document, bytes) else json.dumps(document).encode()
    return request(server, "POST", path, body, {"content-type": "application/json"} | headers)


def request(server, method, path, body=None, headers=()):
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=120)
    with contextlib.closing(connection):
        connection.request(method, path, body, dict(headers))
        response = connection.getresponse()
        return response.status, response.headers, json.loads(response.read())


def read_all(raw):
    """Returns all bytes from a socket until it is closed."""
    received = b""
    while part := raw.recv(1 << 16):
        received += part
    return received

"""The endpoint under the official client and hostile requests, after which it still answers."""

import asyncio
import json
import signal
import socket

import pytest

from support import extras

pytestmark = extras.needs("starlette", "uvicorn", "pydantic", "prometheus_client", "openai")
if extras.is_here("openai"):
    import openai
if extras.is_here("starlette"):
    from specsamp.serving.endpoint import Endpoint

from specsamp import bias, chain
from specsamp.checkpoints.chat import CannotRender
from specsamp.serving.request_warps import make_warp
from support.services import (
    CONTEXT,
    PAIR,
    ROWS,
    WAITING,
    ChattyBytes,
    Gate,
    alone,
    make_service,
    post,
    read_all,
    request,
    serving,
    submit,
    wait_until,
)

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
KEY = "sk-right"


@pytest.fixture(scope="module")
def server(service):
    with serving(service) as running:
        yield running


@pytest.fixture(scope="module")
def strict(service):
    """Starts a server with a key and small limits, in front of the same service."""
    with serving(service, timeout=0.5, keys=[KEY], max_body=200, has_chat=False) as running:
        yield running


@pytest.fixture(scope="module")
def client(server):
    url = f"http://127.0.0.1:{server.port}/v1"
    with openai.OpenAI(base_url=url, api_key="none", max_retries=0, timeout=120) as made:
        yield made


@pytest.fixture
def gate(monkeypatch):
    made = Gate(monkeypatch)
    yield made
    made.open()


def check_that_it_answers(server, service):
    status, _, document = post(
        server, COMPLETIONS, {"prompt": "abc", "max_tokens": 3, "temperature": 0}
    )
    assert (status, document["choices"][0]["text"]) == (200, "def")
    wait_until(lambda: service.unfinished == 0)


def test_a_seeded_answer_is_that_of_generate(client):
    """Two prompts with two samples each have the completions and counts of `generate`."""
    settings = {"temperature": 4.5, "top_p": 0.9, "seed": 7}
    answer = client.completions.create(
        model="bytes", prompt=["ab", "x"], max_tokens=9, n=2, logprobs=0, **settings
    )
    expected = alone(["ab", "x"], 9, num_samples=2, **settings)
    assert len({one.text for one in expected}) == 4, "the control: it is sampled"
    for choice, one in zip(answer.choices, expected, strict=True):
        assert (choice.text, choice.finish_reason) == (one.text, one.finish)
        assert choice.logprobs.token_logprobs == pytest.approx(one.log_probs)
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    details = answer.usage.completion_tokens_details
    emitted = sum(one.stats.emitted for one in expected)
    usage = answer.usage.prompt_tokens, answer.usage.completion_tokens, answer.usage.total_tokens
    assert usage == (3, emitted, 3 + emitted)
    assert details.accepted_prediction_tokens == sum(one.stats.accepted for one in expected)
    drafted = details.accepted_prediction_tokens + details.rejected_prediction_tokens
    assert drafted == sum(one.stats.drafted for one in expected)


def test_without_a_seed_answers_differ(client):
    def ask():
        return (
            client.completions.create(model="bytes", prompt="a", max_tokens=30, temperature=6.0)
            .choices[0]
            .text
        )

    assert ask() != ask()


def test_a_stream_is_the_whole_in_pieces(client):
    settings = dict(model="bytes", prompt=["ab", "c"], max_tokens=20, temperature=4.5, seed=3)
    whole = client.completions.create(**settings)
    texts, reasons, chunks = ["", ""], [None, None], 0
    for chunk in client.completions.create(
        stream=True, stream_options={"include_usage": True}, **settings
    ):
        for choice in chunk.choices:
            chunks += 1
            texts[choice.index] += choice.text
            reasons[choice.index] = choice.finish_reason
    assert texts == [choice.text for choice in whole.choices] and chunks > 4
    assert reasons == [choice.finish_reason for choice in whole.choices]
    assert chunk.choices == [] and chunk.usage == whole.usage


@pytest.mark.parametrize("length", [0, 1])
def test_a_request_has_its_own_draft_length(client, length):
    """The completion is that of `generate` with this length; counts have the names of vLLM."""
    settings = {"temperature": 4.5, "top_p": 0.9, "seed": 2**40 + 7}
    answer = client.completions.create(
        model="bytes", prompt="ab", max_tokens=20, extra_body={"draft_length": length}, **settings
    )
    (one,) = alone(["ab"], 20, draft_length=length, **settings)
    assert answer.choices[0].text == one.text != alone(["ab"], 20, **settings | {"seed": 7})[0].text
    counted = answer.metrics["speculative_decoding"]
    assert counted["acceptance_histogram"] == [*one.stats.accepted_counts, *[0] * (2 - length)]
    assert counted["num_draft_tokens"] == one.stats.drafted
    assert (counted["draft_acceptance_rate"] is None) == (length == 0)


def test_the_least_tokens_of_a_text(client):
    """The first tokens exclude stop tokens, as a bias does that ends after these tokens."""
    stops = [ord("d"), ord("f")]
    settings = dict(model="bytes", prompt="ab", max_tokens=20)
    for least in (0, 6):
        body = {"stop_token_ids": stops, "min_tokens": least}
        answer = client.completions.create(extra_body=body, temperature=3.0, seed=5, **settings)
        ends = [PAIR.tokenizer.eos_id, *stops]
        excluded = bias(dict.fromkeys(ends, -float("inf")), until=least)
        (one,) = alone(
            ["ab"], 20, sampling=chain(excluded, make_warp({"temperature": 3.0})), stop=ends, seed=5
        )
        assert answer.choices[0].text == one.text
        assert answer.usage.completion_tokens == len(one.tokens) >= least
        assert not set(one.tokens[:least]) & set(ends)
        assert least or len(one.tokens) < 6, "the control"
    for stop, least, written in (("e", 2, "cd"), ("e", 3, "cd\0")):  # greedy: "cdefg"
        body = {"stop_token_ids": [ord(stop)], "min_tokens": least}
        answer = client.completions.create(extra_body=body, temperature=0, **settings).choices[0]
        assert answer.text[:3] == written and (answer.finish_reason == "stop") == (least == 2)


def test_likeliest_tokens_and_an_echo(client):
    """Log-probabilities are the loop's own; from an echo, clients compute a text's likelihood."""
    settings = dict(model="bytes", prompt=["abx", "h"], max_tokens=5, temperature=3.0, seed=2)
    plain, scored, echoed = (
        client.completions.create(**settings, **more).choices
        for more in (dict(logprobs=0), dict(logprobs=3), dict(logprobs=1, echo=True))
    )
    for prompt, own, around, whole in zip(settings["prompt"], plain, scored, echoed, strict=True):
        assert around.text == own.text and whole.text == prompt + own.text
        recorded = pytest.approx(own.logprobs.token_logprobs, abs=1e-4)
        assert around.logprobs.token_logprobs == recorded
        assert whole.logprobs.token_logprobs[len(prompt) :] == recorded
        assert whole.logprobs.token_logprobs[0] is None and whole.logprobs.top_logprobs[0] is None
        likeliest = [max(tops.values()) for tops in around.logprobs.top_logprobs]
        assert all(map(float.__le__, around.logprobs.token_logprobs, likeliest))
    assert echoed[0].logprobs.token_logprobs[2] < -5 < -1 < echoed[0].logprobs.token_logprobs[1], (
        "x is a surprise after b"
    )
    assert set(echoed[0].logprobs.top_logprobs[1]) == {"b"}


def test_stop_tokens_budgets_and_tokens(client, server, service):
    settings = dict(model="bytes", prompt="ab", temperature=0, max_tokens=10**6)
    (choice,) = client.completions.create(
        extra_body={"stop_token_ids": [ord("f"), 5]}, **settings
    ).choices
    assert (choice.text, choice.finish_reason) == ("cde", "stop")
    answer = client.completions.create(extra_body={"ignore_eos": True}, **settings)
    assert answer.usage.total_tokens == CONTEXT, "a budget beyond the context is cut"
    for ignore in (False, True):
        asked = submit(service, ["a"], 1, deliver=lambda _: None, ignore_eos=ignore, stop_ids=[3])
        assert asked.requests[0].stops.ids == {3, *(() if ignore else (PAIR.tokenizer.eos_id,))}
    _, _, found = post(server, "/tokenize", {"messages": [{"role": "user", "content": "hi"}]})
    assert found == {"count": 2, "max_model_len": CONTEXT, "tokens": [104, 105]}
    assert post(server, "/detokenize", {"tokens": [104, 105]})[2] == {"prompt": "hi"}
    for path, asked in ("/tokenize", {}), ("/detokenize", {"tokens": [-1]}):
        assert post(server, path, asked)[0] == 400
    assert post(server, "/tokenize", {"prompt": "a", "model": "gpt-5"})[0] == 404
    wait_until(lambda: service.unfinished == 0)


def test_chat_answer_has_the_form_of_openai(client):
    messages = [
        {"role": "user", "content": "abc"},
        {"role": "user", "content": [{"type": "text", "text": "xy"}]},
    ]
    settings = dict(
        model="bytes", messages=messages, temperature=0, max_completion_tokens=3, logprobs=True
    )
    answer = client.chat.completions.create(**settings)
    (choice,) = answer.choices
    assert (choice.message.role, choice.message.content, choice.finish_reason) == (
        "assistant",
        "z{|",
        "length",
    )
    assert choice.logprobs.content[0].bytes == [122] and answer.usage.prompt_tokens == 6
    with client.chat.completions.create(stream=True, **settings) as stream:
        chunks = list(stream)
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == "z{|"
    assert chunks[-1].choices[0].finish_reason == "length"


def test_template_refusals_become_api_errors(client, monkeypatch):
    """A refusal of the template is the client's mistake; a failure to render is not."""

    def ask(role):
        client.chat.completions.create(
            model="bytes", messages=[{"role": role, "content": "Be brief."}]
        )

    def fail(self, messages):
        raise CannotRender("no process")

    with pytest.raises(openai.BadRequestError, match="the chat template takes users only"):
        ask("system")
    monkeypatch.setattr(ChattyBytes, "encode_chat", fail)
    with pytest.raises(openai.APIStatusError, match="no process") as found:
        ask("user")
    assert found.value.status_code == 503


def test_model_list_has_the_served_model(client, server):
    (model,) = client.models.list().data
    assert model.id == "bytes" and client.models.retrieve("bytes").id == "bytes"
    with pytest.raises(openai.NotFoundError, match="no such model: 'bytes' is served here"):
        client.models.retrieve("gpt/5")
    with pytest.raises(openai.NotFoundError, match="'gpt-5' is not served here"):
        client.completions.create(model="gpt-5", prompt="a")
    status, _, document = request(server, "GET", "/health")
    assert status == 200 and document["status"] == "ok" and document["busy_rounds_of_rows"] > 0


def test_hostile_documents_get_protocol_errors(server, service):
    for document, message in (
        (b"", "no JSON"),
        ({"prompt": "a" * 41}, "prompt 0 has 41 tokens, of 40 for prompt and text: shorten it"),
        ({"prompt": "a", "draft_length": 3}, "draft_length must be"),
        (
            {"prompt": "a", "logit_bias": {"257": 1}},
            "a biased token must be an id below 257; got 257",
        ),
    ):
        status, headers, found = post(server, COMPLETIONS, document)
        assert status == 400 and headers["content-type"] == "application/json"
        assert set(found["error"]) == {"message", "type", "param", "code"}
        assert message in found["error"]["message"], found
        assert (found["error"]["code"] == "context_length_exceeded") == ("shorten" in message)
    check_that_it_answers(server, service)


def test_other_paths_and_methods(server):
    for method, path, status in (("GET", COMPLETIONS, 405), ("POST", f"{COMPLETIONS}/", 404)):
        found, _, document = request(server, method, path)
        assert found == status
        assert "is not served here: GET /, /health" in document["error"]["message"]
    body = json.dumps({"prompt": "a"}).encode()
    status, _, document = request(server, "POST", COMPLETIONS, body, {"content-type": "text/plain"})
    assert status == 415 and "content-type: application/json" in document["error"]["message"], (
        "as browsers would send"
    )


def test_a_key_a_size_and_a_time(strict, service):
    """Wrong keys, large or missing bodies, cut requests, and bytes that are no HTTP are refused."""
    asked = {"prompt": "abc", "max_tokens": 3, "temperature": 0}
    right = {"authorization": f"Bearer {KEY}"}
    for wrong in (
        {},
        {"authorization": "Bearer sk-wrong"},
        {"authorization": KEY},
        {"authorization": "Bearer \xff"},
    ):
        status, headers, document = post(strict, COMPLETIONS, asked, **wrong)
        assert (status, headers["www-authenticate"]) == (401, "Bearer") and KEY not in str(document)
        assert request(strict, "GET", "/v1/models", headers=wrong)[0] == 401
    assert request(strict, "GET", "/health")[0] == 200
    status, _, document = post(strict, COMPLETIONS, asked | {"user": "x" * 200}, **right)
    assert status == 413 and "larger than the 200 bytes" in document["error"]["message"]
    status, _, document = post(strict, CHAT, {"messages": []}, **right)
    assert status == 400 and "no chat template: use /v1/completions" in document["error"]["message"]
    head = f"POST {COMPLETIONS} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
    head += f"authorization: Bearer {KEY}\r\ncontent-length: 90\r\n\r\n"
    for sent, answered in (
        (head + '{"prompt"', "408"),
        (head.replace("length: 90", "length: 900"), "413"),
        (head[:40], ""),
        ("\x00\x01nonsense\r\n\r\n", "400"),
    ):
        with socket.create_connection(("127.0.0.1", strict.port), timeout=120) as raw:
            raw.sendall(sent.encode())
            assert read_all(raw)[9:12].decode() == answered
    with socket.create_connection(("127.0.0.1", strict.port)) as raw:
        raw.sendall((head + "{").encode())  # and closes the connection
    status, _, document = post(strict, COMPLETIONS, asked, **right)
    assert (status, document["choices"][0]["text"]) == (200, "def") and service.unfinished == 0


def begin(server, **document):
    """Sends a request, and returns its connection with the answer unread."""
    raw = socket.create_connection(("127.0.0.1", server.port), timeout=120)
    body = json.dumps({"prompt": "a", "max_tokens": CONTEXT - 1, "temperature": 0} | document)
    head = f"POST {COMPLETIONS} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
    raw.sendall(f"{head}content-length: {len(body)}\r\n\r\n{body}".encode())
    return raw


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_frees_its_row(server, service, gate, stream):
    """The row is free long before the end of the completion."""
    before = service.batch.usage.rounds
    with begin(server, stream=stream):
        wait_until(lambda: any(service.batch.table.entries))
        (ticket,) = [one for one in service.batch.table.entries if one is not None]
    wait_until(lambda: ticket.answer.is_over)
    gate.open()
    wait_until(lambda: service.unfinished == 0)
    assert service.batch.usage.rounds - before <= 2 and not any(service.batch.table.entries)
    check_that_it_answers(server, service)


def test_client_that_never_reads_frees_its_row(server, service):
    before = service.batch.usage.busy
    with begin(server, stream=True), begin(server, stream=False):
        # Each of the two completions takes at least a third of its tokens in rounds.
        wait_until(
            lambda: (
                service.batch.usage.busy - before >= 2 * (CONTEXT // 3) and service.unfinished == 0
            )
        )
        check_that_it_answers(server, service)


@pytest.mark.parametrize("stream", [True, False])
def test_client_that_takes_no_bytes_is_disconnected(service, stream):
    """For example, a client sends request after request over a connection, and reads nothing."""
    app = Endpoint(service=service, model="bytes", timeout=0.1).app()
    body = json.dumps({"prompt": "abc", "max_tokens": 3, "stream": stream}).encode()
    asked = [{"type": "http.request", "body": body}]
    scope = {
        "type": "http",
        "method": "POST",
        "path": COMPLETIONS,
        "headers": [(b"content-type", b"application/json")],
    }

    async def receive():
        return asked.pop() if asked else await asyncio.Event().wait()

    async def never(message):
        await asyncio.Event().wait()

    asyncio.run(asyncio.wait_for(app(scope | {"query_string": b""}, receive, never), 120))
    wait_until(lambda: service.unfinished == 0)


def test_request_to_a_full_server_is_refused(server, service, gate):
    waiting = [begin(server, max_tokens=2) for _ in range(ROWS + WAITING)]
    wait_until(lambda: service.unfinished == ROWS + WAITING)
    status, headers, document = post(server, COMPLETIONS, {"prompt": "a"})
    assert (status, headers["retry-after"]) == (429, "1")
    assert document["error"]["code"] == "rate_limit_exceeded"
    assert "6 completions are in progress" in document["error"]["message"]
    gate.open()
    for raw in waiting:
        with raw:
            assert raw.recv(12) == b"HTTP/1.1 200"
    check_that_it_answers(server, service)


def test_stream_error_is_its_last_event(client, server, service, monkeypatch):
    monkeypatch.setattr(type(service.delivery), "_text", lambda *_: 1 / 0)
    with pytest.raises(openai.APIError, match="decoding failed: ZeroDivisionError"):
        list(client.completions.create(model="bytes", prompt="a", stream=True))
    status, _, document = post(server, COMPLETIONS, {"prompt": "a"})
    assert status == 500 and document["error"]["type"] == "server_error"
    monkeypatch.undo()
    check_that_it_answers(server, service)


def test_interrupt_ends_texts_with_a_reason(monkeypatch):
    """Clients get the message in streams and answers; the server counts the ended completions."""
    service = make_service()
    service.start()
    gate = Gate(monkeypatch)
    with serving(service) as server, begin(server, stream=True) as stream, begin(server) as whole:
        wait_until(lambda: service.unfinished == 2)
        server.handle_exit(signal.SIGINT, None)
        gate.open()
        assert all(b"the server was stopped" in read_all(raw) for raw in (stream, whole))
    assert server.ended == 2 and service.unfinished == 0
    service.join()

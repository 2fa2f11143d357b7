"""The endpoint from outside: counts, log lines, the page, unclear requests, shares of clients."""

import collections
import concurrent.futures
import contextlib
import http.client
import json
import re
import socket

import pytest

from specsamp.serving.answer import Busy
from specsamp.serving.service import Service
from support import extras
from support.services import (
    METHOD,
    PAIR,
    Gate,
    post,
    read_all,
    request,
    serving,
    submit,
    wait_until,
)

pytestmark = extras.needs("starlette", "uvicorn", "pydantic", "prometheus_client")
if extras.is_here("prometheus_client"):
    from prometheus_client.parser import text_string_to_metric_families

COMPLETIONS = "/v1/completions"
ASKED = {"prompt": "abc", "max_tokens": 6, "temperature": 0}


@pytest.fixture(scope="module")
def lines():
    return []


@pytest.fixture(scope="module")
def server(service, lines):
    with serving(service, say=lines.append) as running:
        yield running


def raw_request(server, head, body=b""):
    """Sends bytes, and returns the status and the document of the answer."""
    with socket.create_connection(("127.0.0.1", server.port), timeout=120) as raw:
        raw.sendall(head.replace("\n", "\r\n").encode() + b"\r\n\r\n" + body)
        raw.shutdown(socket.SHUT_WR)
        received = read_all(raw)
    return int(received[9:12]), received.partition(b"\r\n\r\n")[2]


def counts(server):
    """Returns the samples of /metrics by name and labels, parsed by the library of Prometheus."""
    status, document = raw_request(server, "GET /metrics HTTP/1.1\nhost: x\nconnection: close")
    assert status == 200
    families = list(text_string_to_metric_families(document.decode()))
    assert all(family.documentation and family.type != "unknown" for family in families)
    return {
        (one.name, *sorted(one.labels.items())): one.value
        for family in families
        for one in family.samples
    }


def test_counts_are_those_of_the_answers(server):
    before = collections.Counter(counts(server))
    _, _, document = post(server, COMPLETIONS, ASKED)
    assert post(server, COMPLETIONS, {"prompt": 5})[0] == 400
    assert post(server, "/v1/" + "x" * 500, {})[0] == 404
    wait_until(
        lambda: (
            counts(server)["specsamp_time_to_first_token_seconds_count",]
            > before["specsamp_time_to_first_token_seconds_count",]
        )
    )
    after = counts(server)
    gained = {name: value - before[name] for name, value in after.items()}
    stats = document["metrics"]["speculative_decoding"]
    for name, value in (
        ("prompt_tokens_total", 3),
        ("generation_tokens_total", 6),
        ("rounds_total", stats["num_spec_steps"]),
        ("draft_tokens_total", stats["num_draft_tokens"]),
    ):
        assert gained[f"specsamp_{name}",] == value, name
    histogram = stats["acceptance_histogram"]
    for position in range(2):
        accepted = gained["specsamp_accepted_tokens_total", ("position", str(position))]
        assert accepted == sum(histogram[position + 1 :])
        assert gained["specsamp_verified_tokens_total", ("position", str(position))] >= accepted
    for path, status in (COMPLETIONS, "200"), (COMPLETIONS, "400"), ("other", "404"):
        assert gained["specsamp_requests_total", ("path", path), ("status", status)] == 1
    assert after["specsamp_rows",] == 2 and after["specsamp_rows_busy",] == 0


def test_each_request_is_a_line(server, lines):
    lines.clear()
    post(server, COMPLETIONS, ASKED)
    wait_until(lambda: len(lines) == 1)  # the line follows the answer
    raw_request(server, "GET /a%1b%0ab HTTP/1.1\nhost: x\nconnection: close")
    wait_until(lambda: len(lines) == 2)
    pattern = (
        r"127\.0\.0\.1 POST '/v1/completions' 200 \d+\.\d{3} s, 3 tokens read, "
        r"6 written in \d rounds, first after \d+\.\d{3} s"
    )
    assert re.fullmatch(pattern, lines[0]), lines[0]
    assert re.fullmatch(r"127\.0\.0\.1 GET '/a\\x1b\\nb' 404 \d+\.\d{3} s", lines[1]), (
        "nothing that a terminal obeys"
    )


def test_the_page_loads_nothing_from_elsewhere(server):
    """The page also writes no text as HTML."""
    with socket.create_connection(("127.0.0.1", server.port), timeout=120) as raw:
        raw.sendall(b"GET / HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")
        head, _, page = read_all(raw).decode().partition("\r\n\r\n")
    assert head.startswith("HTTP/1.1 200") and "nosniff" in head and "default-src 'none'" in head
    assert "<script" in page and not re.search(r"http|innerHTML|eval\(| (src|href|onclick)=", page)


def test_tokens_are_marked_by_their_author(server):
    asked = ASKED | {"mark_drafted": True, "logprobs": 0}
    _, _, answer = post(server, COMPLETIONS, asked)
    (choice,), stats = answer["choices"], answer["metrics"]["speculative_decoding"]
    assert len(choice["from_draft"]) == len(choice["logprobs"]["tokens"]) == 6
    assert sum(choice["from_draft"]) == stats["num_accepted_draft_tokens"] > 0


@pytest.mark.parametrize(
    "headers, status, message",
    [
        ("content-encoding: gzip\ncontent-length: 2", 415, "compressed bodies"),
        ("content-length: 1000000000000", 413, "larger than"),
        ("content-length: 2\ntransfer-encoding: chunked", 400, "contradict"),
        ("transfer-encoding: gzip", 501, ""),
    ],
)
def test_bodies_that_are_refused_at_once(server, headers, status, message):
    head = (
        f"POST {COMPLETIONS} HTTP/1.1\nhost: x\nconnection: close\ncontent-type: "
        f"application/json\n{headers}"
    )
    found, document = raw_request(server, head, b"{}")
    assert found in (status, 400) and message in document.decode()
    assert not message or set(json.loads(document)["error"]) == {"message", "type", "param", "code"}


# A request that a proxy may have taken for a part of a body.
HIDDEN = b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n"
BOTH = "content-length: 4\ntransfer-encoding: chunked"


@pytest.mark.parametrize(
    "path, headers, body",
    [
        (COMPLETIONS, BOTH, "0\n\n"),
        ("/nothing", "Transfer-Encoding: Chunked\nContent-Length: 0", "0\n\n"),
        (COMPLETIONS, "content-length: 2\ncontent-length: 3", "{}"),
        (COMPLETIONS, "content-length : 2", "{}"),
        (COMPLETIONS, "transfer-encoding: chunked\ntransfer-encoding: chunked", "0\n\n"),
        (COMPLETIONS, "transfer-encoding: xchunked", "0\n\n"),
        (COMPLETIONS, "transfer-encoding: chunked", "1\n{}\n0\n\n"),
    ],
)
def test_request_smuggling_gets_no_second_answer(server, path, headers, body):
    head = f"POST {path} HTTP/1.1\nhost: x\ncontent-type: application/json\n{headers}\n\n{body}"
    with socket.create_connection(("127.0.0.1", server.port), timeout=60) as raw:
        raw.sendall(head.replace("\n", "\r\n").encode() + HIDDEN)
        received = b""
        with contextlib.suppress(ConnectionResetError):  # closed with unread bytes
            while part := raw.recv(1 << 16):
                received += part
    assert received[:9] == b"HTTP/1.1 " and received[9:12] in (b"400", b"501"), received
    assert received.count(b"HTTP/1.1 ") == 1 and b"unfinished_texts" not in received


def test_connection_lives_for_the_stated_time(service, server):
    """The default of uvicorn, five seconds, closed connections before clients used them again."""
    with serving(service, timeout=45.0) as patient:
        assert patient.config.timeout_keep_alive == 90
    with contextlib.closing(
        http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
    ) as kept:
        for _ in range(2):
            kept.request("GET", "/health")
            assert kept.getresponse().read() and kept.sock is not None


def test_slow_headers_are_closed_with_json_errors(service, server, monkeypatch):
    monkeypatch.setattr("specsamp.serving.web_server.SPARE_CONNECTIONS", 2 - service.capacity)
    with serving(service) as small, contextlib.ExitStack() as held:
        for _ in range(2):
            raw = held.enter_context(
                socket.create_connection(("127.0.0.1", small.port), timeout=120)
            )
            raw.sendall(b"GET /health HTTP/1.1\r\nhost")
        with socket.create_connection(("127.0.0.1", small.port), timeout=120) as third:
            received = third.recv(1 << 16)
        assert received.startswith(b"HTTP/1.1 503") and b'"too many connections' in received
        assert request(server, "GET", "/health")[0] == 200


@pytest.mark.parametrize("keys, order", [(["a", "b"], "aba"), ([], "aab")])
def test_keys_are_clients_where_there_are_several(monkeypatch, keys, order):
    """With keys a, a and b, the third request overtakes the second; without keys it does not."""
    gate = Gate(monkeypatch)
    made = Service(PAIR, METHOD, rows=1, context=40, max_waiting=9)
    answers = []
    take = made.submit
    monkeypatch.setattr(made, "submit", lambda *of: answers.append(take(*of)) or answers[-1])
    made.start()
    with serving(made, keys=keys) as server, concurrent.futures.ThreadPoolExecutor(3) as threads:
        asked = []
        for number, name in enumerate("aab"):
            key = name if name in keys or not keys else keys[0]
            headers = {"authorization": f"Bearer {key}"}
            asked.append(
                threads.submit(post, server, COMPLETIONS, ASKED | {"max_tokens": 30}, **headers)
            )
            wait_until(lambda: made.unfinished == number + 1)
        gate.open()
        assert all(one.result()[0] == 200 for one in asked)
    first = sorted(zip("aab", answers), key=lambda both: both[1].first)
    assert "".join(name for name, _ in first) == order


def test_a_client_has_no_more_than_its_places():
    made = Service(PAIR, METHOD, rows=1, context=40, max_waiting=9, max_per_client=2)
    for client in "aab":
        submit(made, ["ab"], 4, client=client, deliver=print)
    with pytest.raises(Busy, match="you have 2 completions in progress; the limit per client is 2"):
        submit(made, ["ab"], 4, client="a", deliver=print)
    with pytest.raises(ValueError, match="needs 3 completions; the limit is 2: request fewer"):
        submit(made, ["ab"] * 3, 4, client="c", deliver=print)  # Busy would be for ever
    made.close()

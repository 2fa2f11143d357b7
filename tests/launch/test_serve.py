"""The command that serves a pair prints its address, ends by an interrupt, and refuses bad settings
at once.
"""

import importlib
import os
import signal
import socket
import sys
import threading

import pytest

from support import extras
from support.run_script import call, only_shared_flags, refuse, save_tiny_pair

pytestmark = extras.needs("starlette", "uvicorn", "pydantic")
KEY = "SPECSAMP_SERVE_KEY"


def test_a_server_answers_until_it_is_interrupted(tmp_path, monkeypatch):
    """The server runs in this process, reads its keys from the environment, and ends by SIGTERM."""
    from support.services import post, request, wait_until

    save_tiny_pair(tmp_path, ["def f(x):"])
    monkeypatch.setenv(KEY, "sk-0\nsk-1\n")
    answers = []

    def ask(server):
        wait_until(lambda: server.started)
        asked = {
            "prompt": "def f(x):",
            "max_tokens": 3,
            "seed": 1,
            "logit_bias": {"1": 2},
            "min_tokens": 2,
        }
        answers.append(post(server, "/v1/completions", asked, authorization="Bearer sk-1"))
        answers.append(
            post(server, "/v1/chat/completions", {"messages": []}, authorization="Bearer sk-1")
        )
        answers.append(request(server, "GET", "/v1/models"))
        os.kill(os.getpid(), signal.SIGTERM)

    ask_beside(ask, monkeypatch)
    options = "--port=0 --rows=1 --context=24 --model=mine --config.draft_length=0"
    done = call("serve", f"--config=configs/trained_pair.py:{tmp_path}", *options.split())
    assert done.returncode == 130
    assert done.stderr.endswith("interrupted; 0 texts were being written and were ended\n")
    assert "1 rows, 24 tokens of prompt and text" in done.stdout
    assert "/v1 serves 'mine', with a key; Ctrl-C ends it" in done.stdout
    assert "http://127.0.0.1:" in done.stdout
    (status, _, answer), (refused, _, no_chat), (unknown, _, _) = answers
    assert status == 200
    assert answer["model"] == "mine"
    assert 2 <= answer["usage"]["completion_tokens"] <= 3
    assert refused == 400 and "no chat template: use /v1/completions" in no_chat["error"]["message"]
    assert unknown == 401


def ask_beside(ask, monkeypatch):
    """Calls ``ask`` with the server, in a thread, while the server runs."""
    from specsamp.serving.web_server import WebServer

    run = WebServer.run

    def run_and_ask(server, sockets):
        server.port = sockets[0].getsockname()[1]
        thread = threading.Thread(target=ask, args=[server])
        thread.start()
        try:
            run(server, sockets)
        finally:
            thread.join()

    monkeypatch.setattr(WebServer, "run", run_and_ask)


def test_a_service_that_fails_ends_the_server(tmp_path, monkeypatch):
    """The pending request gets status 500, and the process ends with the error."""
    from specsamp.serving.service import Service
    from support.services import post, wait_until

    save_tiny_pair(tmp_path, ["def f(x):"])
    wait = Service._wait
    monkeypatch.setattr(Service, "_wait", lambda self: wait(self) and 1 / 0)
    answers = []

    def ask(server):
        wait_until(lambda: server.started)
        answers.append(post(server, "/v1/completions", {"prompt": "def f(x):"}))

    ask_beside(ask, monkeypatch)
    options = "--port=0 --rows=1 --context=24 --config.draft_length=0"
    with pytest.raises(
        RuntimeError, match="the service failed: ZeroDivisionError: division by zero"
    ):
        call("serve", f"--config=configs/trained_pair.py:{tmp_path}", *options.split())
    ((status, _, document),) = answers
    assert status == 500 and "the service failed: ZeroDivisionError" in document["error"]["message"]


class Compiling:
    """A service that is interrupted while it waits for its compiler."""

    def close(self):
        self.is_closed = True

    def join(self):
        raise KeyboardInterrupt


@pytest.mark.parametrize("at_once", [True, False])
def test_second_interrupt_does_not_wait_for_compilation(monkeypatch, at_once):
    """The first interrupt closes the service; after the second, a normal exit would still block."""
    with only_shared_flags():  # another script may have defined flags of these names
        serve = importlib.import_module("launch.serve")
    ended, service = [], Compiling()
    monkeypatch.setattr(serve.distributed, "end_now", lambda *given: ended.append(given))
    serve.end(service, at_once)
    assert service.is_closed
    assert ended == [("interrupted twice; what was being compiled is lost", 130)]


def test_occupied_port_is_refused(no_pair):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        done = call("serve", f"--port={port}")
    assert done.returncode == 2 and done.stderr.count("\n") == 1
    assert f"--host=127.0.0.1 --port={port}: Address already in use" in done.stderr


def test_server_without_its_libraries_names_the_packages(no_pair, monkeypatch):
    monkeypatch.setitem(sys.modules, "specsamp.serving.web_server", None)
    assert "pip install starlette uvicorn pydantic jinja2" in refuse("serve", "--port=0")


def test_key_of_the_environment_is_checked(no_pair, monkeypatch):
    monkeypatch.setenv(KEY, "two words")
    error = refuse("serve", "--port=0")
    assert f"the environment variable {KEY} must hold keys" in error and "two words" not in error

"""The command that serves a pair: it says where, ends by an interrupt, and refuses what it cannot serve at once."""

import asyncio
import importlib
import signal
import socket
import sys
import threading

import pytest

from support import extras
from support.run_script import call, save_tiny_pair

pytestmark = extras.needs("starlette", "uvicorn", "pydantic")
KEY = "SPECSAMP_SERVE_KEY"


def test_a_server_answers_until_it_is_interrupted(tmp_path, monkeypatch):
    """Serves in a thread of this process, with a key from the environment and with penalties."""
    from specsamp.serving.web_server import WebServer
    from support.services import post, request, wait_until

    save_tiny_pair(tmp_path, ["def f(x):"])
    monkeypatch.setenv(KEY, "sk-1\n")
    answers = []

    def run(server, sockets):
        server.port = sockets[0].getsockname()[1]
        thread = threading.Thread(target=lambda: asyncio.run(server.serve(sockets)))
        thread.start()
        wait_until(lambda: server.started)
        asked = {"prompt": "def f(x):", "max_tokens": 3, "seed": 1, "min_p": 0.1, "presence_penalty": 1}
        answers.append(post(server, "/v1/completions", asked, authorization="Bearer sk-1"))
        answers.append(post(server, "/v1/chat/completions", {"messages": []}, authorization="Bearer sk-1"))
        answers.append(request(server, "GET", "/v1/models"))
        server.handle_exit(signal.SIGINT, None)
        thread.join()
        raise KeyboardInterrupt

    monkeypatch.setattr(WebServer, "run", run)
    options = "--port=0 --rows=1 --context=24 --model=mine --warps=penalties,min_p --config.draft_length=0"
    done = call("serve", f"--config=configs/trained_pair.py:{tmp_path}", *options.split())
    assert done.returncode == 130
    assert done.stderr.endswith("interrupted; 0 texts were being written and were ended\n")
    assert "1 rows, 24 tokens of prompt and text, sampling by temperature, penalties, min_p" in done.stdout
    assert "/v1 serves 'mine', with a key; Ctrl-C ends it" in done.stdout and "http://127.0.0.1:" in done.stdout
    (status, _, answer), (refused, _, no_chat), (unknown, _, _) = answers
    assert status == 200 and answer["model"] == "mine" and answer["usage"]["completion_tokens"] <= 3
    assert refused == 400 and "no chat template: use /v1/completions" in no_chat["error"]["message"]
    assert unknown == 401


@pytest.fixture
def never(monkeypatch):
    """No weights are read and none are made."""

    def fail(*_, **__):
        raise AssertionError("a pair was read")

    for name in ("load_pair", "read_pair", "bare_pair"):
        monkeypatch.setattr(importlib.import_module("launch.lib.experiment"), name, fail)


def test_a_port_that_somebody_has(never):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        done = call("serve", f"--port={port}")
    assert done.returncode == 2 and done.stderr.count("\n") == 1
    assert f"--host=127.0.0.1 --port={port}: Address already in use" in done.stderr


def test_without_its_libraries_it_says_what_to_install(never, monkeypatch):
    monkeypatch.setitem(sys.modules, "specsamp.serving.web_server", None)
    done = call("serve", "--port=0")
    assert done.returncode == 2 and "pip install starlette uvicorn pydantic jinja2" in done.stderr


def test_a_key_of_the_environment_is_checked_as_well(never, monkeypatch):
    monkeypatch.setenv(KEY, "two words")
    done = call("serve", "--port=0")
    assert done.returncode == 2 and f"the environment variable {KEY} must hold a key" in done.stderr
    assert "two words" not in done.stderr

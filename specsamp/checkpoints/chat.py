"""Chat templates, which turn the messages of a conversation into the format that an instruction-tuned model expects.

    template = read_chat_template(folder)
    text = template.render([{"role": "user", "content": "Why is the sky blue?"}])

A template is a Jinja program that comes with a checkpoint. It runs in a separate process with limits on time and memory,
in the sandbox of the library jinja2 (chat_sandbox.py). A pool of such processes is reused.
"""

from __future__ import annotations

import atexit
import contextlib
import dataclasses
import importlib.util
import json
import os
import pathlib
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any

from etils import epath

from specsamp import storage

MAX_SECONDS = 5.0  # of a processor, for one conversation; real templates take milliseconds
MORE_SECONDS = 25.0  # by the clock, for a machine with other work and to start the process
MAX_BYTES = 256 * 2**20  # of a process that runs templates
PROCESSES = 4  # at a time
OUT_OF_MEMORY = 3  # the status that chat_sandbox.py ends with


class CannotRender(ValueError):
    """Raised if a template cannot run because its library or its process is missing."""


class ProcessEnded(CannotRender):
    """Raised if the process of a template ended for another reason than a limit."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ChatTemplate:
    """A template and its special tokens.

    Attributes:
      path: of its file, for error messages.
      source: the Jinja program.
      special_tokens: name and text of each, such as ``("bos_token", "<s>")``.
    """

    path: str
    source: str
    special_tokens: tuple[tuple[str, str], ...] = ()

    def render(self, messages: Sequence[Mapping[str, str]], **options: Any) -> str:
        """Returns the text of a conversation, up to the beginning of the model's answer.

        Args:
          messages: turns with a ``role``, such as user, and a ``content``.
          options: variables of the template, such as ``enable_thinking``.

        Raises:
          ValueError: a message lacks role or content; or the template is not a Jinja program, refuses the messages,
            violates the sandbox, or exceeds its time or memory; names the file.
          CannotRender: jinja2 is not installed, or no process can run the template.
        """
        _check(messages)
        if importlib.util.find_spec("jinja2") is None:
            raise CannotRender("chat templates take a library: pip install jinja2")
        messages = [dict(message) for message in messages]
        variables = {"messages": messages, "add_generation_prompt": True, **dict(self.special_tokens), **options}
        answer = _run(self.source, variables)
        if "error" in answer:
            raise ValueError(f"the chat template of {self.path} does not accept these messages: {answer['error']}")
        return answer["text"]


def read_chat_template(folder: epath.Path) -> ChatTemplate | None:
    """Returns the template of a checkpoint, or None.

    Raises:
      ValueError: tokenizer_config.json is damaged, or its template is not a string.
    """
    path = folder / "tokenizer_config.json"
    content = storage.read_json(path) if path.exists() else {}
    source = content.get("chat_template")
    if (folder / "chat_template.jinja").exists():
        path = folder / "chat_template.jinja"
        source = path.read_text(encoding="utf-8")
    if isinstance(source, list):  # several templates with names
        named = {entry.get("name"): entry.get("template") for entry in source if isinstance(entry, dict)}
        source = named.get("default")
    if source is None:
        return None
    if not isinstance(source, str):
        raise ValueError(f"{path} has a chat_template of type {type(source).__name__}; it must be a string")
    tokens = {name: value for name, value in content.items() if name.endswith("_token") and value is not None}
    texts = {name: value.get("content") if isinstance(value, dict) else value for name, value in tokens.items()}
    return ChatTemplate(
        path=str(path),
        source=source,
        special_tokens=tuple(sorted((name, text) for name, text in texts.items() if isinstance(text, str))),
    )


def knows_conversations(tokenizer: Any) -> bool:
    """Returns whether a tokenizer has a chat template that accepts a user's message.

    Raises:
      CannotRender: the template cannot run.
    """
    try:
        tokenizer.encode_chat([{"role": "user", "content": "Hello"}])
    except CannotRender:
        raise
    except ValueError:
        return False
    return True


def _check(messages: Sequence[Mapping[str, str]]) -> None:
    """Raises ValueError unless ``messages`` is a list of messages."""
    if not messages:
        raise ValueError("the conversation has no messages: give at least one")
    for number, message in enumerate(messages):
        for key in ("role", "content"):
            if not isinstance(message, Mapping) or not isinstance(message.get(key), str):
                raise ValueError(f"message {number} must have a text as its {key}; got {message!r:.200}")


_free = threading.Semaphore(PROCESSES)
_idle: list[subprocess.Popen] = []  # the processes that run templates, while they run none


def _run(source: str, variables: Mapping[str, Any]) -> dict[str, str]:
    """Runs a template; returns its output as "text", or an "error"."""
    try:
        request = json.dumps([source, variables])
    except (TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"messages and options of a conversation must be JSON values: {error}") from error
    free, seconds = _free, MAX_SECONDS + MORE_SECONDS
    if not free.acquire(timeout=seconds):
        raise CannotRender(f"all {PROCESSES} processes of templates were busy for {seconds:g} seconds: try again")
    try:
        with contextlib.suppress(ProcessEnded):  # as where the system is short of memory: a new one tries again
            return _answer(_take_process(), request)
        return _answer(_take_process(), request)
    finally:
        free.release()


def _take_process() -> subprocess.Popen:
    """Returns an idle process, or a new one.

    Raises:
      CannotRender: the process does not start.
    """
    with contextlib.suppress(IndexError):
        while (process := _idle.pop()).poll() is not None:
            process.communicate()  # closes its pipes
        return process
    program = pathlib.Path(__file__).with_name("chat_sandbox.py")
    try:
        return subprocess.Popen(
            [sys.executable, "-P", str(program), str(MAX_SECONDS), str(MAX_BYTES)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            encoding="utf-8",
            errors="replace",
            env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
            start_new_session=True,  # the terminal interrupts this program, not the template
        )
    except OSError as error:
        raise CannotRender(f"the process that runs chat templates does not start: {error}") from error


def _answer(process: subprocess.Popen, request: str) -> dict[str, str]:
    """Returns the answer of a process, which becomes idle again, or the limit that ended the process.

    Raises:
      CannotRender: the process took too much wall time.
      ProcessEnded: it ended for another reason; the message has the last line of its stderr.
    """
    answer, seconds, start = None, MAX_SECONDS + MORE_SECONDS, time.monotonic()
    timer = threading.Timer(seconds, process.kill)
    timer.daemon = True
    timer.start()
    try:
        with contextlib.suppress(OSError, ValueError):  # of a process that ended
            print(request, file=process.stdin, flush=True)
            answer = json.loads(process.stdout.readline())
    finally:
        timer.cancel()
        if answer is None:
            process.kill()
            last_line = process.communicate()[1].strip().rpartition("\n")[2]
    if answer is not None:
        _idle.append(process)
        return answer
    if process.returncode == -signal.SIGPROF:
        return {"error": f"it takes more than {MAX_SECONDS:g} seconds"}
    if process.returncode == OUT_OF_MEMORY:
        return {"error": f"it takes more than {MAX_BYTES:,} bytes of memory"}
    if time.monotonic() - start >= seconds:
        raise CannotRender(f"the process that runs chat templates did not finish in {seconds:g} seconds of wall time")
    raise ProcessEnded(f"the process that runs chat templates ended with status {process.returncode}: {last_line}")


@atexit.register
def _end_idle() -> None:
    while _idle:
        process = _idle.pop()
        process.kill()
        process.communicate()


def _leave_to_parent() -> None:
    """Drops the parent's processes after a fork, since parent and child would read each other's answers."""
    global _free
    _free = threading.Semaphore(PROCESSES)
    _idle.clear()


os.register_at_fork(after_in_child=_leave_to_parent)

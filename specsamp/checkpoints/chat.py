"""Chat templates: turn the messages of a conversation into the text that a tuned model was trained on.

    template = read_chat_template(folder)
    text = template.render([{"role": "user", "content": "Why is the sky blue?"}])

A template is a Jinja program that comes with a checkpoint. It runs in a process of its own, with limits on its time and
memory, in the sandbox of the library jinja2 (chat_sandbox.py). A few conversations at a time have such a process, which
runs one template after another.
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
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from etils import epath

from specsamp import storage

CONFIG, FILE = "tokenizer_config.json", "chat_template.jinja"  # the second comes first, where there is one
DEFAULT = "default"  # of several templates, the one for plain conversations
MAX_SECONDS = 5.0  # of a processor, for one conversation; real templates take milliseconds
MORE_SECONDS = 5.0  # by the clock, for a machine with other work
MAX_BYTES = 256 * 2**20  # of a process that runs templates
START_SECONDS = 60.0  # for such a process, which imports jinja2
PROCESSES = 4  # at a time
OUT_OF_MEMORY = 3  # the status that chat_sandbox.py ends with


class CannotRender(ValueError):
    """A template is there and cannot run, through no fault of its own: its library or its process is missing."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ChatTemplate:
    """A template and the special tokens that it writes.

    Attributes:
      path: of its file, for messages.
      source: the Jinja program.
      special_tokens: name and text of each, such as ``("bos_token", "<s>")``.
    """

    path: str
    source: str
    special_tokens: tuple[tuple[str, str], ...] = ()

    def render(self, messages: Sequence[Mapping[str, str]], **options: Any) -> str:
        """Returns the text of a conversation, which ends where the model's answer begins.

        Args:
          messages: turns with a ``role``, such as user, and a ``content``.
          options: variables that the template knows, such as ``enable_thinking``.

        Raises:
          ValueError: a message without role or content; or the template is no Jinja program, refuses the messages,
            leaves its sandbox, or takes too much time or memory; with the file.
          CannotRender: jinja2 is not installed, or no process runs the template.
        """
        _check(messages)
        if importlib.util.find_spec("jinja2") is None:
            raise CannotRender("chat templates take a library: pip install jinja2")
        messages = [dict(message) for message in messages]
        variables = {"messages": messages, "add_generation_prompt": True, **dict(self.special_tokens), **options}
        answer = _run(self.source, variables)
        if "error" in answer:
            raise ValueError(f"the chat template of {self.path} does not take these messages: {answer['error']}")
        return answer["text"]


def read_chat_template(folder: epath.Path) -> ChatTemplate | None:
    """Returns the template of a checkpoint, or None.

    Raises:
      ValueError: tokenizer_config.json is damaged, or has a template that is no text.
    """
    path = folder / CONFIG
    content = storage.read_json(path) if path.exists() else {}
    source = content.get("chat_template")
    if (folder / FILE).exists():
        path = folder / FILE
        source = path.read_text(encoding="utf-8")
    if isinstance(source, list):  # of several, by name
        source = {one.get("name"): one.get("template") for one in source if isinstance(one, dict)}.get(DEFAULT)
    if source is None:
        return None
    if not isinstance(source, str):
        raise ValueError(f"{path} has a chat_template that is {type(source).__name__}; a text is wanted")
    tokens = {name: value for name, value in content.items() if name.endswith("_token") and value is not None}
    texts = {name: value.get("content") if isinstance(value, dict) else value for name, value in tokens.items()}
    return ChatTemplate(
        path=str(path),
        source=source,
        special_tokens=tuple(sorted((name, text) for name, text in texts.items() if isinstance(text, str))),
    )


def knows_conversations(tokenizer: Any) -> bool:
    """Returns whether a tokenizer has a chat template, which takes a user's message.

    Raises:
      CannotRender: it has one, which cannot run.
    """
    try:
        tokenizer.encode_chat([{"role": "user", "content": "Hello"}])
    except CannotRender:
        raise
    except ValueError:
        return False
    return True


def _check(messages: Sequence[Mapping[str, str]]) -> None:
    """Raises ValueError unless these are messages."""
    if not messages:
        raise ValueError("a conversation without messages: give at least one")
    for number, message in enumerate(messages):
        if not isinstance(message, Mapping):
            raise ValueError(f"message {number} must be an object with role and content; got {message!r}")
        for key in ("role", "content"):
            if not isinstance(message.get(key), str):
                raise ValueError(f"message {number} has {key} = {message.get(key)!r}; a text is wanted")


_free = threading.Semaphore(PROCESSES)
_idle: list[subprocess.Popen] = []  # the processes that run templates, while they run none


def _run(source: str, variables: Mapping[str, Any]) -> dict[str, str]:
    """Returns the "text" that a template wrote, or its "error"."""
    try:
        request = json.dumps([source, variables])
    except (TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"messages and options of a conversation must be values of JSON: {error}") from error
    free, seconds = _free, MAX_SECONDS + MORE_SECONDS
    if not free.acquire(timeout=seconds):
        raise CannotRender(f"{PROCESSES} other conversations took their templates {seconds:g} seconds: try again later")
    try:
        process = _take_idle()
        answer = _ask(process, request) if process is not None else None
        if answer is None:  # none was idle, or it had just ended
            process = _start()
            answer = _ask(process, request)
        if answer is None:
            raise CannotRender(f"the process that runs chat templates ended, {_how(process)}")
        return answer
    finally:
        free.release()


def _take_idle() -> subprocess.Popen | None:
    """Returns a process that is idle and alive, if there is one."""
    with contextlib.suppress(IndexError):
        while (process := _idle.pop()).poll() is not None:
            _end(process)
        return process
    return None


def _ask(process: subprocess.Popen, request: str) -> dict[str, str] | None:
    """Returns the answer of a process, which is idle then, or the limit that ended it; None if something else did.

    Raises:
      CannotRender: by the clock it took too long.
    """
    answer, seconds, begin = None, MAX_SECONDS + MORE_SECONDS, time.monotonic()
    try:
        with _killed_after(process, seconds), contextlib.suppress(OSError, ValueError):  # of a process that ended
            print(request, file=process.stdin, flush=True)
            answer = json.loads(process.stdout.readline())
    finally:
        if answer is None:
            _end(process)
    if answer is not None:
        _idle.append(process)
        return answer
    if process.returncode == -signal.SIGPROF:
        return {"error": f"it takes more than {MAX_SECONDS:g} seconds"}
    if process.returncode == OUT_OF_MEMORY:
        return {"error": f"it takes more than {MAX_BYTES:,} bytes of memory"}
    if time.monotonic() - begin >= seconds:
        raise CannotRender(f"a chat template was not done in {seconds:g} seconds by the clock: is the machine busy?")
    return None


def _start() -> subprocess.Popen:
    """Starts a process that runs templates.

    Raises:
      CannotRender: it does not start; with the last line that it wrote.
    """
    command = [sys.executable, "-P", str(pathlib.Path(__file__).with_name("chat_sandbox.py"))]
    with tempfile.TemporaryFile() as errors:
        try:
            process = subprocess.Popen(
                [*command, str(MAX_SECONDS), str(MAX_BYTES)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                encoding="utf-8",
                env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
                start_new_session=True,  # the terminal interrupts this program, not the template
            )
        except OSError as error:
            raise CannotRender(f"the process that runs chat templates does not start: {error}") from error
        is_ready = False
        try:
            with _killed_after(process, START_SECONDS):
                is_ready = process.stdout.readline() == "ready\n"
        finally:
            if not is_ready:
                _end(process)
        if not is_ready:
            errors.seek(0)
            last = errors.read().decode(errors="replace").strip().rpartition("\n")[2]
            raise CannotRender(f"the process that runs chat templates does not start, {_how(process)}: {last}")
    return process


@contextlib.contextmanager
def _killed_after(process: subprocess.Popen, seconds: float) -> Iterator[None]:
    """Ends a process unless the block is done in time; what waits for its answer then reads the end of it."""
    timer = threading.Timer(seconds, process.kill)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _how(process: subprocess.Popen) -> str:
    """Returns how a process ended."""
    code = process.returncode
    return f"by {signal.Signals(-code).name}" if code < 0 else f"with status {code}"


def _end(process: subprocess.Popen) -> None:
    process.kill()
    process.communicate()


@atexit.register
def _end_idle() -> None:
    while _idle:
        _end(_idle.pop())


def _leave_to_parent() -> None:
    """Forgets the processes of the program that this one is a copy of: answers to two would cross."""
    global _free
    _free = threading.Semaphore(PROCESSES)
    while _idle:
        process = _idle.pop()
        process.stdin.close()
        process.stdout.close()
        process.returncode = 0  # it is not a child of this program


os.register_at_fork(after_in_child=_leave_to_parent)

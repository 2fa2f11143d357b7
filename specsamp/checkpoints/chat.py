"""Chat templates, which turn the messages of a conversation into the format that an
instruction-tuned model expects.

    template = read_chat_template(folder)
    text = template.render([{"role": "user", "content": "Why is the sky blue?"}])

A template is a Jinja program that comes with a checkpoint. It runs in a separate process with
limits on time and memory, in the sandbox of the library jinja2 (chat_sandbox.py).
"""

import atexit
import contextlib
import dataclasses
import importlib.util
import json
import os
import pathlib
import re
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
# Names of a message's reasoning, the usual one first.
THOUGHTS = ("reasoning_content", "thinking", "reasoning")
TOOL_TEMPLATE = "additional_chat_templates/tool_use.jinja"  # in the folder of chat_template.jinja
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
      tool_source: the program for conversations with ``tools``, where it is another one.
      special_tokens: name and text of each, such as ``("bos_token", "<s>")``.
    """

    path: str
    source: str
    tool_source: str | None = None
    special_tokens: tuple[tuple[str, str], ...] = ()

    def render(self, messages: Sequence[Mapping[str, str]], **options: Any) -> str:
        """Returns the text of a conversation, up to the beginning of the model's answer.

        Args:
          messages: turns with a ``role`` (user, for example) and a ``content``, which a turn with
            ``tool_calls`` may leave out.
          options: variables of the template, such as ``tools`` or ``enable_thinking``.

        Raises:
          ValueError: a message lacks role or content; or the template is not a Jinja program, does
            not read an option, refuses the messages, violates the sandbox, or exceeds its time or
            memory; names the file.
          CannotRender: jinja2 is not installed, or no process can run the template.
        """
        messages = _turns(messages)
        if importlib.util.find_spec("jinja2") is None:
            raise CannotRender("chat templates take a library: pip install jinja2")
        # None is not undefined.
        usual = {"add_generation_prompt": True, "tools": None, "documents": None}
        variables = {"messages": messages, **usual, **dict(self.special_tokens), **options}
        has_tools = variables["tools"] is not None and self.tool_source is not None
        source = self.tool_source if has_tools else self.source
        for name, value in options.items():
            if name not in usual and not re.search(rf"\b{re.escape(name)}\b", source):
                raise ValueError(
                    f"the chat template of {self.path} does not read {name} = {value!r:.40}: leave "
                    "it out"
                )
        try:
            request = json.dumps([source, variables])
        except (TypeError, ValueError, RecursionError) as error:
            raise ValueError(
                f"messages and options of a conversation must be JSON values: {error}"
            ) from error
        answer = _worker.run(request)
        if "error" in answer:
            raise ValueError(
                f"the chat template of {self.path} does not accept these messages: "
                f"{answer['error']}"
            )
        return answer["text"]


def read_chat_template(folder: epath.Path) -> ChatTemplate | None:
    """Returns the template of a checkpoint, or None.

    Raises:
      ValueError: tokenizer_config.json is damaged, or its template is not a string.
    """
    path = folder / "tokenizer_config.json"
    source = storage.read_json(path).get("chat_template") if path.exists() else None
    if (folder / "chat_template.jinja").exists():
        path = folder / "chat_template.jinja"
        source = path.read_text(encoding="utf-8")
    named = {"default": source}
    if isinstance(source, list):  # several templates with names
        named = {
            entry.get("name"): entry.get("template") for entry in source if isinstance(entry, dict)
        }
    if (folder / TOOL_TEMPLATE).exists():
        named["tool_use"] = (folder / TOOL_TEMPLATE).read_text(encoding="utf-8")
    for_tools = named.get("tool_use")
    source = named.get("default") or for_tools
    if source is None:
        return None
    for each in (source, for_tools):
        if each is not None and not isinstance(each, str):
            raise ValueError(
                f"{path} has a chat_template of type {type(each).__name__}; it must be a string"
            )
    tokens = tuple(sorted(read_special_tokens(folder).items()))
    return ChatTemplate(path=str(path), source=source, tool_source=for_tools, special_tokens=tokens)


def read_special_tokens(folder: epath.Path) -> dict[str, str]:
    """Returns the texts of a checkpoint's special tokens by their names, such as ``eos_token``."""
    # The second is preferred.
    files = (folder / "special_tokens_map.json", folder / "tokenizer_config.json")
    texts = {}
    for path in files:
        for name, value in (storage.read_json(path) if path.exists() else {}).items():
            text = value.get("content") if isinstance(value, dict) else value
            if name.endswith("_token") and isinstance(text, str):
                texts[name] = text
    return texts


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


def _turns(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Returns messages in the form of templates: without nulls, and with thoughts under each usual
    name.

    A message with calls may have no content: it is left out, as transformers does, and not an empty
    text.

    Raises:
      ValueError: there are none, or one lacks its role or content.
    """
    if not messages:
        raise ValueError("the conversation has no messages: give at least one")
    turns = []
    for number, message in enumerate(messages):
        turn, needed = message, ("role", "content")
        if isinstance(message, Mapping):
            turn = {key: value for key, value in message.items() if value is not None}
            if turn.get("tool_calls") and "content" not in turn:
                needed = ("role",)
        for key in needed:
            if not isinstance(turn, Mapping) or not isinstance(turn.get(key), str):
                raise ValueError(
                    f"message {number} must have a text as its {key} (images are not read); "
                    f"got {message!r:.200}"
                )
        thoughts = [turn[key] for key in THOUGHTS if key in turn]
        turns.append(
            {"thinking": thoughts[0], **turn, "reasoning_content": thoughts[0]}
            if thoughts
            else turn
        )
    return turns


class _Worker:
    """Runs templates in one process, which starts with the first and is replaced if it ends."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.process: subprocess.Popen | None = None

    def run(self, request: str) -> dict[str, str]:
        """Returns the output of a template as "text", or an "error".

        Raises:
          CannotRender: the process is busy, does not start, ends or takes too much wall time.
        """
        seconds = MAX_SECONDS + MORE_SECONDS
        if not self.lock.acquire(timeout=seconds):
            raise CannotRender(
                f"the process that runs chat templates was busy for {seconds:g} seconds: try again"
            )
        try:
            # It may have ended since the last request, for example where memory is short.
            with contextlib.suppress(ProcessEnded):
                return self._answer(request)
            return self._answer(request)
        finally:
            self.lock.release()

    def _answer(self, request: str) -> dict[str, str]:
        process = self.process = self.process or _start_process()
        answer, seconds, start = None, MAX_SECONDS + MORE_SECONDS, time.monotonic()
        timer = threading.Timer(seconds, process.kill)
        timer.daemon = True
        timer.start()
        try:
            with contextlib.suppress(OSError, ValueError):  # the process ended
                print(request, file=process.stdin, flush=True)
                answer = json.loads(process.stdout.readline())
        finally:
            timer.cancel()
            last_line = "" if answer is not None else self.end()
        if answer is not None:
            return answer
        if process.returncode == -signal.SIGPROF:
            return {"error": f"it takes more than {MAX_SECONDS:g} seconds"}
        if process.returncode == OUT_OF_MEMORY:
            return {"error": f"it takes more than {MAX_BYTES:,} bytes of memory"}
        if time.monotonic() - start >= seconds:
            raise CannotRender(
                f"the process that runs chat templates did not finish in {seconds:g} seconds of "
                "wall time"
            )
        raise ProcessEnded(
            "the process that runs chat templates ended with status "
            f"{process.returncode}: {last_line}"
        )

    def end(self) -> str:
        """Ends the process; returns the last line of its stderr."""
        process, self.process = self.process, None
        if process is None:
            return ""
        process.kill()
        return process.communicate()[1].strip().rpartition("\n")[2]


def _start_process() -> subprocess.Popen:
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
        raise CannotRender(
            f"the process that runs chat templates does not start: {error}"
        ) from error


_worker = _Worker()


def _start_anew() -> None:
    """Drops the parent's process after a fork: answers to parent and child would mix."""
    global _worker
    _worker = _Worker()


os.register_at_fork(after_in_child=_start_anew)
atexit.register(lambda: _worker.end())

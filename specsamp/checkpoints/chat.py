"""Chat templates: turn the messages of a conversation into the text that a tuned model was trained on.

    template = read_chat_template(folder)
    text = template.render([{"role": "user", "content": "Why is the sky blue?"}])

A template is a Jinja program that comes with a checkpoint. It runs in a process of its own, with limits on its time and
memory, in the sandbox of the library jinja2 (chat_sandbox.py).
"""

from __future__ import annotations

import atexit
import dataclasses
import importlib.util
import json
import os
import pathlib
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from typing import Any

from etils import epath

from specsamp import storage

CONFIG, FILE = "tokenizer_config.json", "chat_template.jinja"  # the second comes first, where there is one
DEFAULT = "default"  # of several templates, the one for plain conversations
MAX_SECONDS = 5.0  # of a processor, for one conversation; real templates take milliseconds
MAX_BYTES = 256 * 2**20  # of the process that runs templates


class NoTemplateLibrary(ValueError):
    """A template is there, and the library that runs it is not installed."""


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
          NoTemplateLibrary: jinja2 is not installed.
        """
        _check(messages)
        if importlib.util.find_spec("jinja2") is None:
            raise NoTemplateLibrary("chat templates take a library: pip install jinja2")
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
      NoTemplateLibrary: it has one, which cannot run.
    """
    try:
        tokenizer.encode_chat([{"role": "user", "content": "Hello"}])
    except NoTemplateLibrary:
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


_lock = threading.Lock()
_idle: list[subprocess.Popen] = []  # the process that runs templates, while it runs none


def _run(source: str, variables: Mapping[str, Any]) -> dict[str, str]:
    """Returns the "text" that a template wrote, or its "error"."""
    try:
        request = json.dumps([source, variables])
    except (TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"messages and options of a conversation must be values of JSON: {error}") from error
    with _lock:
        process = _idle.pop() if _idle else _start()
        try:
            print(request, file=process.stdin, flush=True)
            answer = json.loads(process.stdout.readline())
            _idle.append(process)
            return answer
        except (OSError, ValueError):  # the system ended the process
            return {"error": f"it takes more than {MAX_SECONDS:g} seconds, or more than {MAX_BYTES:,} bytes of memory"}
        finally:
            if not _idle:
                _end(process)


def _start() -> subprocess.Popen:
    """Starts the process that runs templates."""
    command = [sys.executable, "-P", str(pathlib.Path(__file__).with_name("chat_sandbox.py"))]
    return subprocess.Popen(
        [*command, str(MAX_SECONDS), str(MAX_BYTES)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        encoding="utf-8",
        env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        start_new_session=True,  # the terminal interrupts this program, not the template
    )


def _end(process: subprocess.Popen) -> None:
    process.kill()
    process.communicate()


@atexit.register
def _end_idle() -> None:
    while _idle:
        _end(_idle.pop())

"""Chat templates: turn the messages of a conversation into the text that a tuned model was trained on.

    template = read_chat_template(folder)
    text = template.render([{"role": "user", "content": "Why is the sky blue?"}])

A template is a Jinja program that comes with a checkpoint. It runs in the sandbox of the library jinja2: it reads the
messages and the special tokens, calls what `_environment` offers, and reaches nothing else.
"""

from __future__ import annotations

import contextvars
import dataclasses
import datetime
import functools
import itertools
import json
from collections.abc import Mapping, Sequence
from typing import Any

from etils import epath

from specsamp import storage

CONFIG, FILE = "tokenizer_config.json", "chat_template.jinja"  # the second comes first, where there is one
DEFAULT = "default"  # of several templates, the one for plain conversations
MAX_STEPS = 10**5  # passes of loops and calls of a template for one conversation; real ones take some for each message


class NoTemplateLibrary(ValueError):
    """A template is there, and the library that runs it is not installed."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ChatTemplate:
    """A template with what it is given besides messages.

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
          ValueError: a turn that is none, a template that is no Jinja program or refuses the conversation, or one that
            leaves its sandbox; with the file.
          NoTemplateLibrary: jinja2 is not installed.
        """
        _check(messages)
        try:
            import jinja2
        except ImportError as error:
            raise NoTemplateLibrary("chat templates take a library: pip install jinja2") from error

        given = {"add_generation_prompt": True, **dict(self.special_tokens), **options}
        _steps_left.set(MAX_STEPS)
        try:
            return _compile(self.source).render(messages=[dict(message) for message in messages], **given)
        except (jinja2.TemplateError, TypeError, ValueError, ArithmeticError, LookupError, RecursionError) as error:
            raise ValueError(f"the chat template of {self.path} does not take these messages: {error}") from error


def read_chat_template(folder: epath.Path) -> ChatTemplate | None:
    """Returns the template of a checkpoint; None: it has none.

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


_steps_left: contextvars.ContextVar[int] = contextvars.ContextVar("steps left to the template that runs")


def _take_steps(count: int) -> None:
    """Counts steps of the template that runs; raises ValueError if it has none left."""
    left = _steps_left.get() - count
    if left < 0:
        raise ValueError(f"it takes more than {MAX_STEPS} passes of loops and calls")
    _steps_left.set(left)


def _counted(values: Any) -> Any:
    """Returns what a loop runs over, whose passes are counted before they begin."""
    if not hasattr(values, "__len__"):
        values = list(itertools.islice(values, _steps_left.get() + 1))
    _take_steps(len(values))
    return values


@functools.cache
def _compile(source: str) -> Any:
    return _environment().from_string(source)


@functools.cache
def _environment() -> Any:
    """Returns the sandbox, in which templates find what they find in transformers."""
    import jinja2.nodes
    import jinja2.sandbox

    class Sandbox(jinja2.sandbox.ImmutableSandboxedEnvironment):
        """Besides, no template fills the memory by repeating a text, and none loops or calls itself for ever."""

        intercepted_binops = frozenset({"*", "**"})

        def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
            if operator == "**" or not all(isinstance(value, (int, float)) for value in (left, right)):
                raise jinja2.sandbox.SecurityError(f"{operator} is for products of numbers only")
            return super().call_binop(context, operator, left, right)

        def call(self, *arguments: Any, **named: Any) -> Any:
            _take_steps(1)
            return super().call(*arguments, **named)

        def _parse(self, *source: Any) -> Any:
            tree = super()._parse(*source)
            for loop in tree.find_all(jinja2.nodes.For):
                loop.iter = jinja2.nodes.Filter(loop.iter, "counted", [], [], None, None, lineno=loop.lineno)
            return tree.set_environment(self)

    sandbox = Sandbox(trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"])
    sandbox.filters |= {"tojson": _to_json, "counted": _counted}
    sandbox.globals |= {"raise_exception": _refuse, "strftime_now": _format_now}
    return sandbox


def _to_json(value: Any, indent: int | None = None, **options: Any) -> str:
    """Returns JSON as text, where Jinja's own filter would make it safe for HTML."""
    return json.dumps(value, ensure_ascii=False, indent=indent, **options)


def _refuse(message: str) -> None:
    raise ValueError(message)


def _format_now(pattern: str) -> str:
    return datetime.datetime.now().strftime(pattern)

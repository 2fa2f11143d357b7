"""Checks whether pairs of public names would load, without downloading weights.

    for finding in check_pair("qwen-3b", "Qwen/Qwen2.5-3B", "Qwen/Qwen2.5-0.5B"):
        print(finding.model, finding.problem or "loads")

The config, the tokenizer and the headers of tensors are read, and checked as always before weights are read. Values are
not: whether a tied model repeats its embedding, and the ids of a reduced vocabulary.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import TypeVar

from specsamp.checkpoints.hub import why_not
from specsamp.checkpoints.hugging_face import Checkpoint, open_checkpoint
from specsamp.checkpoints.public_pair import open_draft

T = TypeVar("T")


@dataclasses.dataclass(frozen=True, kw_only=True)
class NameCheck:
    """The result for one name of a pair."""

    pair: str
    role: str  # "target", "draft" or "head"
    model: str
    problem: str | None  # why it would not load; None: it would
    notes: tuple[str, ...] = ()  # what differs without harm


def check_pair(name: str, target: str, draft: str, *, is_head: bool = False, chat: bool = False) -> Iterator[NameCheck]:
    """Yields the results for the target and for its draft model or head.

    Args:
      name: of the pair.
      target, draft: the names that are checked.
      is_head: the draft is a head.
      chat: prompts are messages, which take a chat template.

    Raises:
      ConnectionError: the hub cannot be asked. ValueError: its library is not installed.
    """

    def open_target() -> Checkpoint:
        checkpoint = open_checkpoint(target)
        checkpoint.check_headers()
        if checkpoint.require_tokenizer().chat is None and chat:
            raise ValueError("no chat template, which the messages of this pair's prompts need")
        return checkpoint

    def open_its_draft() -> list[str]:
        if opened is None:
            raise ValueError("not checked: a draft is checked against its target, which does not load")
        found, notes = open_draft(opened, draft, is_head=is_head, headers_only=True)
        if not is_head:
            found.check_headers()
        return notes

    opened, problem = _tried(target, open_target)
    yield NameCheck(pair=name, role="target", model=target, problem=problem)
    notes, problem = _tried(draft, open_its_draft)
    role = "head" if is_head else "draft"
    yield NameCheck(pair=name, role=role, model=draft, problem=problem, notes=tuple(notes or ()))


def _tried(name: str, look: Callable[[], T]) -> tuple[T | None, str | None]:
    """Returns the result of ``look`` and None; or None and the problem with the name."""
    if (problem := why_not(name)) is not None:
        return None, problem
    try:
        return look(), None
    except (ValueError, OSError) as error:
        return None, " ".join(str(error).split())

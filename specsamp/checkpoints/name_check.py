"""Checks whether pairs of public names would load, without downloading weights.

    for finding in check_pair(NamedPair(name="qwen-3b", target="Qwen/Qwen2.5-3B", draft="Qwen/Qwen2.5-0.5B")):
        print(finding.model, finding.problem or "loads")

Of each name the config, the tokenizer and the headers of its tensors are read, and checked as they are before weights
are. What only values show is left: whether a tied model repeats its embedding, and the ids of a reduced vocabulary.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import TypeVar

from specsamp.checkpoints.heads import open_head
from specsamp.checkpoints.hub import why_not
from specsamp.checkpoints.hugging_face import Checkpoint, open_checkpoint
from specsamp.checkpoints.public_pair import check_head_of, differences

T = TypeVar("T")


@dataclasses.dataclass(frozen=True, kw_only=True)
class NamedPair:
    """The names of a target and of its draft model or head."""

    name: str  # of the pair
    target: str
    draft: str
    is_head: bool = False  # the draft is a head
    chat: bool = False  # prompts are messages, which a chat template must write out


@dataclasses.dataclass(frozen=True, kw_only=True)
class NameCheck:
    """The result for one name of a pair."""

    pair: str
    role: str  # "target", "draft" or "head"
    model: str
    problem: str | None  # why it would not load; None: it would
    notes: tuple[str, ...] = ()  # what differs without harm


def check_pair(pair: NamedPair) -> Iterator[NameCheck]:
    """Yields the results for the target and for its draft model or head.

    Raises:
      ConnectionError: the hub cannot be asked. ValueError: its library is not installed.
    """
    target, problem = _tried(pair.target, lambda: _open_target(pair))
    yield NameCheck(pair=pair.name, role="target", model=pair.target, problem=problem)
    role = "head" if pair.is_head else "draft"

    def open_draft() -> list[str]:
        if not pair.is_head:
            draft = _open(pair.draft)
            return [] if target is None else differences(target, draft)
        if target is None:
            raise ValueError("not checked: a head is checked against its target, which does not load")
        head = open_head(pair.draft, target.config, headers_only=True)
        check_head_of(target, head.config, head.name)
        return head.notes(target.name)

    notes, problem = _tried(pair.draft, open_draft)
    yield NameCheck(pair=pair.name, role=role, model=pair.draft, problem=problem, notes=tuple(notes or ()))


def _open_target(pair: NamedPair) -> Checkpoint:
    checkpoint = _open(pair.target)
    if checkpoint.require_tokenizer().chat is None and pair.chat:
        raise ValueError("no chat template, which the messages of this pair's prompts need")
    return checkpoint


def _open(name: str) -> Checkpoint:
    checkpoint = open_checkpoint(name)
    checkpoint.check_headers()
    return checkpoint


def _tried(name: str, look: Callable[[], T]) -> tuple[T | None, str | None]:
    """Returns the result of ``look`` and None; or None and the problem with the name."""
    if (problem := why_not(name)) is not None:
        return None, problem
    try:
        return look(), None
    except (ValueError, OSError) as error:
        return None, " ".join(str(error).split())

"""Checks whether pairs of public names would load, without downloading weights.

    for check in check_pair("qwen-3b", "Qwen/Qwen2.5-3B", "Qwen/Qwen2.5-0.5B"):
        print(check.model, check.problem or "loads")

Configs, tokenizers and the headers of tensors are checked. The values of tensors are not: whether a tied model repeats its
embedding, and the ids of a reduced vocabulary.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from specsamp.checkpoints.hub import why_not
from specsamp.checkpoints.hugging_face import open_checkpoint
from specsamp.checkpoints.public_pair import open_draft


@dataclasses.dataclass(frozen=True, kw_only=True)
class NameCheck:
    """The result for one name of a pair."""

    pair: str
    role: str  # "target", "draft" or "head"
    model: str
    problem: str | None  # the reason why it would not load, None if it would
    notes: tuple[str, ...] = ()  # what differs without harm


def check_pair(name: str, target: str, draft: str, *, is_head: bool = False, chat: bool = False) -> Iterator[NameCheck]:
    """Yields the results for the target and for its draft model or head.

    Args:
      name: of the pair.
      target, draft: the names that are checked.
      is_head: the draft is a head.
      chat: prompts are messages, so that the target needs a chat template.

    Raises:
      ConnectionError: the hub does not answer. ValueError: its library is not installed.
    """
    opened = None
    for role, model in (("target", target), ("head" if is_head else "draft", draft)):
        problem, notes = why_not(model), []
        try:
            if problem is not None:
                pass
            elif role == "target":
                checkpoint = open_checkpoint(target)
                checkpoint.check_headers()
                if checkpoint.require_tokenizer().chat is None and chat:
                    raise ValueError("no chat template, which the messages of this pair's prompts need")
                opened = checkpoint
            elif opened is None:
                problem = "not checked: a draft is checked against its target, which does not load"
            else:
                found, notes = open_draft(opened, draft, is_head=is_head, headers_only=True)
                if not is_head:
                    found.check_headers()
        except (ValueError, OSError) as error:
            problem = " ".join(str(error).split())
        yield NameCheck(pair=name, role=role, model=model, problem=problem, notes=tuple(notes))

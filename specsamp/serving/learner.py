"""What a draft model may learn by while it is used; `specsamp.training.online` has such a
learner.
"""

from collections.abc import Callable, Sequence
from typing import Any

from specsamp.decoding.drafters import ModelDrafter
from specsamp.decoding.method import Method

# Takes a whole text; returns new parameters of the draft, or None.
Learner = Callable[[Sequence[int]], Any]


def check_learner(learner: Learner | None, method: Method, prompt_ids: Sequence[int] = ()) -> None:
    """Raises ValueError where no parameters of a draft model could learn, or the same noise would
    meet two drafts.
    """
    if learner is None:
        return
    if not isinstance(method.drafter, ModelDrafter):
        raise ValueError(
            f"learner was given, but {type(method.drafter).__name__} has no draft model of its "
            "own: take ModelDrafter"
        )
    if len(set(prompt_ids)) < len(prompt_ids) and not method.rule.draft_independent:
        twice = next(one for one in prompt_ids if prompt_ids.count(one) > 1)
        raise ValueError(
            f"prompt_ids has {twice} twice: with a learner, give each prompt noise of its own"
        )

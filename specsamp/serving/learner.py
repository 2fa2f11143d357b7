"""What a draft model may learn by while it is used; `specsamp.training.online` has such a
learner.
"""

from collections.abc import Callable, Sequence
from typing import Any

from specsamp.decoding.drafters import ModelDrafter
from specsamp.decoding.method import Method
from specsamp.decoding.request import check_own_noise

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
    if not method.rule.draft_independent:
        check_own_noise(prompt_ids, "with a learner")

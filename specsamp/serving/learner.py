"""What a draft model may learn by while it is used; `specsamp.training.online` has such a learner."""

from collections.abc import Callable, Sequence
from typing import Any

from specsamp.decoding.drafters import ModelDrafter
from specsamp.decoding.method import Method

Learner = Callable[[Sequence[int]], Any]  # takes a whole text; returns new parameters of the draft, or None


def check_learner(learner: Learner | None, method: Method) -> None:
    """Raises ValueError where no parameters of a draft model could learn."""
    if learner is not None and not isinstance(method.drafter, ModelDrafter):
        raise ValueError(
            f"learner was given, but {type(method.drafter).__name__} has no draft model of its own: take ModelDrafter"
        )

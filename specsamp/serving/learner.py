"""The type of learners, which update a draft model while it decodes; see
`specsamp.training.online`.
"""

from collections.abc import Callable, Sequence
from typing import Any

from specsamp.decoding.drafters import ModelDrafter
from specsamp.decoding.method import Method
from specsamp.decoding.request import check_own_noise

# From a whole text to new parameters of the draft, or None.
Learner = Callable[[Sequence[int]], Any]


def check_learner(learner: Learner | None, method: Method, prompt_ids: Sequence[int] = ()) -> None:
    """Raises ValueError if the drafter has no parameters to update, or two prompts have the same
    noise.
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

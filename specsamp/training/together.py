"""Trains a target together with its draft: a draft model, or a module for multi-token prediction.

    loss = cross-entropy of the target + weight * loss of the draft

The gradient of the draft's loss reaches the target multiplied by ``pull``. With 0 the target is
trained on text alone (but gradients of both are clipped by their common norm). With 1 and the
draft's objective "cross_entropy" this is multi-token prediction (DeepSeek-V3, arXiv 2412.19437,
section 2.2): the module's loss trains the layers, the embedding and the output that it shares with
the target. With a divergence the target is also pulled towards distributions that its draft can
follow.
"""

import dataclasses
from typing import Any

import jax

from specsamp import validate
from specsamp.models.heads import DRAFT_IDS
from specsamp.training.feature_heads import TrainHead
from specsamp.training.training_task import Task, TrainModel

TARGET, DRAFT = "target", "draft"  # the parts of the parameters


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainTogether(Task):
    """Trains a target and a draft model or head in the same steps; a `Task` without a teacher.

    Attributes:
      drafting: the task of the draft, whose teacher is the target.
      weight: of the draft's loss.
      pull: how much of its gradient reaches the target.
    """

    drafting: TrainModel | TrainHead
    weight: float = 1.0
    pull: float = 0.0

    def __post_init__(self):
        validate.number("together.weight", self.weight, 0, above=True)
        validate.number("together.pull", self.pull, 0)
        if (
            self.pull
            and isinstance(self.drafting, TrainModel)
            and self.drafting.objective == "cross_entropy"
        ):
            raise ValueError(
                "together.pull has no effect: a draft's cross-entropy on text does not call its "
                "target"
            )

    def init(self, key, teacher_params=None):
        target = self.drafting.target.init(key)
        return {
            TARGET: target,
            DRAFT: self.drafting.init(jax.random.fold_in(key, 1), self.drafting.teacher(target)),
        }

    def param_axes(self):
        return {TARGET: self.drafting.target.param_axes(), DRAFT: self.drafting.param_axes()}

    def loss(self, params, teacher_params, tokens_BT, key, step=0):
        """See `Task.loss`; also returns both losses and the other numbers of the draft's task."""

        def pulled(x: Any) -> Any:
            still = jax.lax.stop_gradient(x)
            return still + self.pull * (x - still) if self.pull else still

        # In float32: `teacher` of a head would round gradients.
        teacher = jax.tree.map(pulled, params[TARGET])
        if isinstance(self.drafting, TrainHead):
            teacher = {"target": teacher, DRAFT_IDS: None}
        of_draft, told = self.drafting.loss(params[DRAFT], teacher, tokens_BT, key, step)
        of_target, _ = TrainModel(self.drafting.target).loss(params[TARGET], None, tokens_BT, key)
        losses = {"target_loss": of_target, "draft/loss": of_draft}
        told = losses | {f"draft/{name}": value for name, value in told.items()}
        return of_target + self.weight * of_draft, told

    def measure(self, params, teacher_params, tokens_BT, warp):
        """Returns the target's loss as "loss", and the numbers of the draft's task."""
        told = self.drafting.measure(
            params[DRAFT], self.drafting.teacher(params[TARGET]), tokens_BT, warp
        )
        alone = TrainModel(self.drafting.target).measure(params[TARGET], None, tokens_BT, warp)
        named = {"loss_of_draft": told.pop("loss")}
        return named | {f"draft/{name}": value for name, value in told.items()} | alone

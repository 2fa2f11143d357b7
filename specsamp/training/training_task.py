"""Tasks of training: a target on text, or a draft on its target.

A task is static and hashable, as models are; parameters and tokens are arguments of its methods.
"""

import abc
import dataclasses
from typing import Any

import jax

from specsamp import validate
from specsamp.models.transformer import TransformerLM
from specsamp.sampling.warp import Warp, log_probs
from specsamp.training.objective import DIVERGENCES, greedy_agreement, overlap, text_loss

Array = jax.Array


class Task(abc.ABC):
    """The interface between the trainer and a task; losses and measurements are averages over
    positions.

    By default all of ``model`` is trained, without a teacher.
    """

    model: TransformerLM

    def init(self, key: Array, teacher_params: Any = None) -> Any:
        """Returns the initial float32 parameters: random, or copied from a given teacher."""
        return self.model.init(key)

    def param_axes(self) -> Any:
        """Returns the logical axes of the parameters, see `specsamp.mesh.layout.Layout`."""
        return self.model.param_axes()

    def teacher(self, target_params: Any, draft_ids: Any = None) -> Any:
        """Returns ``teacher_params`` for a target's parameters, and the ids of a reduced vocabulary
        if there is one.
        """
        return target_params

    def teacher_axes(self) -> Any:
        """Returns the logical axes of ``teacher_params``; None if they are absent or replicated."""
        return None

    @abc.abstractmethod
    def loss(
        self, params: Any, teacher_params: Any, tokens_BT: Array, key: Array, step: Array | int = 0
    ) -> tuple[Array, dict[str, Array]]:
        """Returns the loss, a scalar, and further scalars for the log.

        Args:
          params: the parameters being trained.
          teacher_params: parameters that this task does not train (a target's), or None.
          tokens_BT: ``[B, T + 1]`` int32: inputs and, shifted by one, labels.
          key: of this microbatch, for tasks that draw random numbers.
          step: the number of updates, for tasks that change with it.
        """

    @abc.abstractmethod
    def measure(
        self, params: Any, teacher_params: Any, tokens_BT: Array, warp: Warp
    ) -> dict[str, Array]:
        """Returns scalars on held-out tokens ``[B, T + 1]``.

        Names that begin with "loss" do not depend on ``warp``, under which the other numbers
        compare a draft with its target. The loss of a model is its cross-entropy, also of a draft
        that is trained on another objective.
        """


@dataclasses.dataclass(frozen=True)
class TrainModel(Task):
    """Trains a model on text, or a draft to imitate its target on given text.

    Attributes:
      model: a target, or a draft.
      target: the model whose parameters are ``teacher_params``; None: cross-entropy on the text is
        minimised.
      objective: with a target, one of `DIVERGENCES`, or "cross_entropy": the text alone, without a
        call of the target.

    Raises:
      ValueError: an unknown objective, or two vocabularies.
    """

    model: TransformerLM
    target: TransformerLM | None = None
    objective: str = "forward_kl"

    def __post_init__(self):
        validate.choice("objective", self.objective, (*DIVERGENCES, "cross_entropy"))
        if self.target is not None and self.model.vocab_size != self.target.vocab_size:
            raise ValueError(
                f"draft vocabulary {self.model.vocab_size} != target {self.target.vocab_size}"
            )

    def teacher_axes(self):
        return None if self.target is None else self.target.param_axes()

    def loss(self, params, teacher_params, tokens_BT, key, step=0):
        logits_BTV = self.model.forward(params, tokens_BT[:, :-1]).logits_BTV
        text = text_loss(logits_BTV, tokens_BT[:, 1:])
        if self.target is None or self.objective == "cross_entropy":
            return text, {}
        target_BTV = self.target.forward(teacher_params, tokens_BT[:, :-1]).logits_BTV
        both = jax.nn.log_softmax(target_BTV), jax.nn.log_softmax(logits_BTV)
        return DIVERGENCES[self.objective](*both).mean(), {"text_loss": text}

    def measure(self, params, teacher_params, tokens_BT, warp):
        logits_BTV = self.model.forward(params, tokens_BT[:, :-1]).logits_BTV
        measured = {"loss": text_loss(logits_BTV, tokens_BT[:, 1:])}
        if self.target is None:
            return measured
        target_BTV = self.target.forward(teacher_params, tokens_BT[:, :-1]).logits_BTV
        both = log_probs(warp, target_BTV), log_probs(warp, logits_BTV)
        return measured | {
            "acceptance": overlap(*both).mean(),
            "greedy_agreement": greedy_agreement(*both).mean(),
        }

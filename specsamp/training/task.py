"""What is trained: a target on text, or a draft on a target.

A task is static and hashable, as models are. ``loss`` takes the parameters being trained, the
``frozen`` ones it may look at (the target's, or None) and rows of ``T + 1`` tokens.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Protocol

import jax

from specsamp.models.transformer import TransformerLM
from specsamp.sampling.warp import Warp, log_probs
from specsamp.training.objective import DIVERGENCES, cross_entropy, greedy_agreement, overlap

Array = jax.Array


class Task(Protocol):
    """Trains ``model``; both functions return numbers, averaged over all positions."""

    model: TransformerLM

    def loss(self, params: Any, frozen: Any, rows_BT: Array) -> Array:
        """What is minimised, a scalar."""

    def measure(self, params: Any, frozen: Any, rows_BT: Array, warp: Warp) -> dict[str, Array]:
        """What held-out text is verified by: "loss" is cross-entropy on it, also of a draft that is trained on another
        objective; distributions are compared under ``warp``."""


@dataclasses.dataclass(frozen=True)
class Pretrain:
    """Cross-entropy on text: a target, or the baseline of a draft."""

    model: TransformerLM

    def loss(self, params, frozen, rows_BT):
        return _text_loss(self.model, params, rows_BT)[0]

    def measure(self, params, frozen, rows_BT, warp):
        return {"loss": self.loss(params, frozen, rows_BT)}


@dataclasses.dataclass(frozen=True)
class Distill:
    """Makes a draft imitate a target on given text.

    ``objective`` is one of `DIVERGENCES`, or "cross_entropy": the text alone, which does not ask the
    target at all. ``text_share`` adds that much cross-entropy to a divergence.
    """

    model: TransformerLM  # the draft
    target: TransformerLM
    objective: str = "forward_kl"
    text_share: float = 0.0

    def __post_init__(self):
        known = (*DIVERGENCES, "cross_entropy")
        if self.objective not in known:
            raise ValueError(f"no objective {self.objective!r}: choose one of {', '.join(known)}")
        if not 0 <= self.text_share <= 1:
            raise ValueError(f"text_share must be in [0, 1]; got {self.text_share}")
        if self.model.vocab_size != self.target.vocab_size:
            raise ValueError(f"draft vocabulary {self.model.vocab_size} != target {self.target.vocab_size}")

    def loss(self, params, frozen, rows_BT):
        text, draft_BTV = _text_loss(self.model, params, rows_BT)
        if self.objective == "cross_entropy":
            return text
        divergence = DIVERGENCES[self.objective](self._target_law(frozen, rows_BT), draft_BTV).mean()
        return (1 - self.text_share) * divergence + self.text_share * text

    def measure(self, params, frozen, rows_BT, warp):
        text, _ = _text_loss(self.model, params, rows_BT)
        target_BTV = log_probs(warp, self.target.forward(frozen, rows_BT[:, :-1]).logits_BTV)
        draft_BTV = log_probs(warp, self.model.forward(params, rows_BT[:, :-1]).logits_BTV)
        return {
            "loss": text,
            "acceptance": overlap(target_BTV, draft_BTV).mean(),
            "greedy_agreement": greedy_agreement(target_BTV, draft_BTV).mean(),
        }

    def _target_law(self, frozen, rows_BT):
        return jax.lax.stop_gradient(jax.nn.log_softmax(self.target.forward(frozen, rows_BT[:, :-1]).logits_BTV))


def _text_loss(model: TransformerLM, params: Any, rows_BT: Array) -> tuple[Array, Array]:
    log_probs_BTV = jax.nn.log_softmax(model.forward(params, rows_BT[:, :-1]).logits_BTV)
    return cross_entropy(log_probs_BTV, rows_BT[:, 1:]).mean(), log_probs_BTV

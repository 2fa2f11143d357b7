"""LayerSkip: trains a target so that its own first layers can draft (Elhoushi et al., arXiv
2404.16710).

Target and draft are one model. Layers are dropped at random, deep layers more often, and the output
reads the streams of inner layers like that of the last.

    dropout   p(l, t) = S(t) D(l) p_max,   D(l) = 2^(l / (L-1)) - 1
              S(t) = 2^(t / (T-1)) - 1, or 1 in fine-tuning
    loss      sum_l w(l, t) CE(l),         w(l, t) = e(l) C(l, t) / sum_l e(l) C(l, t)

L layers are counted from 0, steps t from 0 to T - 1. ``CE(l)`` is the cross-entropy of the draft at
exit l + 1: final norm and output applied to the stream behind layer l. The curriculum ``C(l, t)``
is 1 for the layers that are read at step t; the last layer is read at every step.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from specsamp import validate
from specsamp.models.transformer import TransformerLM
from specsamp.sampling.warp import log_probs
from specsamp.training.objective import greedy_agreement, overlap, text_loss
from specsamp.training.training_task import Task

Array = jax.Array

CURRICULA = ("rotational", "gradual")


def read_layers(
    curriculum: str, num_layers: int, step: Array | int, steps: int, rotation: int
) -> Array:
    """Returns C(l, t), ``[L]`` bool: the layers whose streams are read at a step.

    "rotational" reads every ``rotation``-th layer, beginning with layer t modulo ``rotation``.
    "gradual" begins with the last layer and goes down evenly; from half of the steps on it reads
    all.
    """
    layer_L = jnp.arange(num_layers)
    last = num_layers - 1
    if curriculum == "rotational":
        is_read_L = (layer_L - step) % rotation == 0
    else:
        is_read_L = 2 * step * last >= steps * (last - layer_L)
    return is_read_L | (layer_L == last)


def loss_weights(exit_scale: float, is_read_L: Array) -> Array:
    """Returns w(l, t), ``[L]`` float32 of sum 1.

    With the ``exit_scale`` s, ``e(l) = s l (l+1) / 2``, and ``e(L-1) = L - 1 + s (L-2) (L-1) / 2``
    for the last layer.
    """
    layer_L = jnp.arange(len(is_read_L), dtype=jnp.float32)
    last = len(is_read_L) - 1
    inner_L = layer_L * (layer_L + 1) / 2
    outer = last + exit_scale * (last - 1) * last / 2
    weights_L = jnp.where(layer_L == last, outer, exit_scale * inner_L) * is_read_L
    return weights_L / weights_L.sum()


@dataclasses.dataclass(frozen=True, kw_only=True)
class LayerSkip(Task):
    """Minimises cross-entropy on text at the last layer and at inner ones, with layers dropped; a
    `Task`.

    Attributes:
      model: the target, which drafts with its first layers
        (`specsamp.decoding.drafters.EarlyExitDrafter`).
      steps: T of the training.
      from_scratch: whether dropout grows with the steps; in fine-tuning every step has that of the
        last.
      dropout: p_max, the probability that the last layer is dropped for a sequence.
      exit_scale: s, how much inner layers count; 0: not at all.
      curriculum: one of `CURRICULA`, see `read_layers`.
      rotation: R of the rotational curriculum: a step reads one inner layer in so many.

    Raises:
      ValueError: an unknown word, a number out of range, or a model of a single layer.
    """

    model: TransformerLM
    steps: int
    from_scratch: bool = True
    dropout: float = 0.1
    exit_scale: float = 0.2
    curriculum: str = "rotational"
    rotation: int = 8

    def __post_init__(self):
        validate.choice("layer_skip.curriculum", self.curriculum, CURRICULA)
        validate.number("layer_skip.dropout", self.dropout, 0, 1)
        validate.number("layer_skip.exit_scale", self.exit_scale, 0)
        for name in ("rotation", "steps"):
            validate.integer(f"layer_skip.{name}", getattr(self, name), 1)
        if self.model.num_layers < 2:
            raise ValueError("a model of one layer has no earlier exit: give it two or more layers")

    def loss(self, params, teacher_params, tokens_BT, key, step=0):
        num_layers = self.model.num_layers
        drawn_BL = jax.random.uniform(key, (len(tokens_BT), num_layers))
        streams = self.model.forward_streams(
            params,
            tokens_BT[:, :-1],
            tuple(range(num_layers)),
            kept_BL=drawn_BL >= self.dropout_at(step)[None],
        )

        # A layer that is not read costs nothing. Logits are computed again for the gradient, one
        # layer at a time.
        @jax.checkpoint
        def exit_loss(params: Any, x_BTD: Array) -> Array:
            return text_loss(self.model.read_out(params, x_BTD), tokens_BT[:, 1:])

        def nothing(params: Any, x_BTD: Array) -> Array:
            return jnp.zeros(())

        is_read_L = read_layers(self.curriculum, num_layers, step, self.steps, self.rotation)
        weights_L = loss_weights(self.exit_scale, is_read_L)
        losses = [
            jax.lax.cond(w > 0, exit_loss, nothing, params, x_BTD)
            for w, x_BTD in zip(weights_L, streams)
        ]
        return (weights_L * jnp.stack(losses)).sum(), {"text_loss": losses[-1]}

    def measure(self, params, teacher_params, tokens_BT, warp):
        """Returns the loss at each exit, and the acceptance of a token that is drafted there."""
        labels_BT = tokens_BT[:, 1:]
        *inner, last_BTD = self.model.forward_streams(
            params, tokens_BT[:, :-1], tuple(range(self.model.num_layers))
        )
        target_BTV = self.model.read_out(params, last_BTD)
        measured = {"loss": text_loss(target_BTV, labels_BT)}
        for exit_layer, x_BTD in enumerate(inner, start=1):
            draft_BTV = self.model.read_out(params, x_BTD)
            pair = log_probs(warp, target_BTV), log_probs(warp, draft_BTV)
            measured |= {
                f"loss/exit_{exit_layer}": text_loss(draft_BTV, labels_BT),
                f"acceptance/exit_{exit_layer}": overlap(*pair).mean(),
                f"greedy_agreement/exit_{exit_layer}": greedy_agreement(*pair).mean(),
            }
        return measured

    def dropout_at(self, step: Array | int) -> Array:
        """Returns the probability p(l, t) that each layer is dropped at a step, ``[L]``."""
        scale = jnp.exp2(step / max(self.steps - 1, 1)) - 1 if self.from_scratch else 1.0
        last = self.model.num_layers - 1
        return scale * self.dropout * (jnp.exp2(jnp.arange(last + 1) / last) - 1)

"""A target and its draft, trained together: the gradients of both, and the loss of a module."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numpy.testing import assert_allclose

from specsamp import TransformerLM
from specsamp.models.config import tiny
from specsamp.training.feature_heads import TrainHead
from specsamp.training.together import DRAFT, TARGET, TrainTogether
from specsamp.training.training_task import TrainModel
from support.refusals import refusal
from support.weights import drawn_params
from training.test_eagle import KEY, LENGTH, MODULE, REDUCED, TOKENS, V
from training.test_eagle import TARGET as MODEL

STEPS = 2
MTP = TrainHead(head=MODULE, target=MODEL, test_steps=STEPS, objective="cross_entropy")
DISTILLED = TrainModel(TransformerLM(tiny(vocab_size=V, width=8, num_layers=1, num_heads=2)), MODEL)
close = functools.partial(jax.tree.map, functools.partial(assert_allclose, rtol=1e-4, atol=1e-6))


of_text = jax.jit(jax.value_and_grad(TrainModel(MODEL).loss, has_aux=True))


@functools.partial(jax.jit, static_argnums=0)
def of_draft(drafting, draft, target):
    """Returns the draft's loss, and its gradients for draft and target."""
    return jax.value_and_grad(
        lambda d, t: drafting.loss(d, drafting.teacher(t), TOKENS, KEY)[0], (0, 1)
    )(draft, target)


@pytest.mark.slow
@pytest.mark.parametrize("drafting, pull", [(DISTILLED, 0.0), (MTP, 0.4)])
def test_target_gradient_includes_a_part_of_drafts(drafting, pull):
    task = TrainTogether(drafting=drafting, weight=0.7, pull=pull)
    params = drawn_params(task)
    (loss, told), found = jax.jit(jax.value_and_grad(task.loss, has_aux=True))(
        params, None, TOKENS, KEY
    )

    (alone, _), own = of_text(params[TARGET], None, TOKENS, KEY)
    drafted, (by_draft, by_target) = of_draft(drafting, params[DRAFT], params[TARGET])
    assert max(jnp.abs(leaf).max() for leaf in jax.tree.leaves(by_target)) > 1e-3, (
        "or nothing is seen"
    )
    close(found[DRAFT], jax.tree.map(lambda x: 0.7 * x, by_draft))
    close(found[TARGET], jax.tree.map(lambda x, y: x + 0.7 * pull * y, own, by_target))
    assert_allclose([loss, told["draft/loss"]], [alone + 0.7 * drafted, drafted], rtol=1e-5)


def test_settings_without_effect_are_refused():
    with refusal("together.pull has no effect: a draft's cross-entropy"):
        TrainTogether(drafting=dataclasses.replace(DISTILLED, objective="cross_entropy"), pull=0.5)
    with refusal("cross_entropy needs the whole vocabulary"):
        TrainHead(head=REDUCED, target=MODEL, objective="cross_entropy")


@pytest.mark.slow
def test_module_loss_is_the_text_cross_entropy():
    params, target = drawn_params(MODULE), drawn_params(MODEL, 1)
    found = jax.jit(MTP.loss)(params, MTP.teacher(target), TOKENS, KEY)[0]
    weights = MODULE.training_weights(params, None)
    prepared = {"params": target}
    _, features_SBTD = MTP._steps(weights, target, TOKENS)
    expected = 0.0
    for step in range(STEPS):  # rows t > step predict the token after t
        logits = MODULE.logits(
            weights, features_SBTD[step], lambda x: MODEL.unembed_normed(prepared, x), step
        )
        log_probs = np.asarray(jax.nn.log_softmax(logits), np.float64)[:, step + 1 :]
        labels = np.asarray(TOKENS)[:, step + 2 :]
        expected -= MTP.decay**step * np.take_along_axis(log_probs, labels[..., None], -1).mean()
    assert features_SBTD.shape[2] == LENGTH
    assert_allclose(found, expected, rtol=1e-5)

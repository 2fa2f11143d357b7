"""The target drafts for itself with a window, as from a masked cache; texts do not change."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import pytest

from decoding.test_early_exit import MODELS, TEXTS, TOKENS, drafted, pair_of, plain, tokens
from specsamp import Loop, TokenRule, WindowDrafter, chain, generate, temperature
from specsamp.jax_names import jaxprs
from specsamp.models.visibility import Visibility
from support.fakes import prefill
from support.refusals import refused_calls

WINDOW, SINKS, K = 6, 2, 3


def test_text_equals_plain_decoding():
    made = drafted("n-grams", lambda target: WindowDrafter(target, K, WINDOW, SINKS))
    assert tokens(made) == plain("n-grams")
    assert 0 < sum(row.stats.accepted for row in made) < sum(row.stats.drafted for row in made)


@pytest.mark.slow
def test_window_over_whole_text_is_always_accepted():
    """Other positions: the distributions of a masked target below."""
    made = drafted("learned", lambda target: WindowDrafter(target, K, 35, 4))
    assert tokens(made) == plain("learned")
    for row in made:  # the budget cuts the last round
        assert row.stats.accepted >= TOKENS - row.stats.rounds
        assert row.stats.rounds == TOKENS // (K + 1)


@pytest.mark.slow
def test_window_larger_than_the_cache_is_accepted():
    pair = pair_of("relative, cpu")
    config = dataclasses.replace(pair.target.config, max_positions=1024)
    pair = dataclasses.replace(pair, target=dataclasses.replace(pair.target, config=config))
    made = drafted("relative, cpu", lambda target: WindowDrafter(target, K, 700), pair)
    assert tokens(made) == plain("relative, cpu")
    assert all(row.stats.rounds == TOKENS // (K + 1) for row in made)


# Drafts have the distributions of a target whose mask shows the sinks and the window alone.


class CutsLater:
    """A target that cuts the window out of its cache one slot too late."""

    def __init__(self, model):
        self.model = model

    def cut_cache(self, cache, kept, first_B, *rest):
        return self.model.cut_cache(cache, kept, first_B + 1, *rest)

    def __call__(self, *arguments, **options):
        return self.model(*arguments, **options)


class ReadsASlotTooFar(WindowDrafter):
    """A mutant: its window ends with the pending token's slot, which holds a rejected token."""

    def propose(self, weights, state, prefix, cache, sample):
        shifted = dataclasses.replace(self)
        object.__setattr__(shifted, "model", CutsLater(self.model))
        return WindowDrafter.propose(shifted, weights, state, prefix, cache, sample)


def worst_difference(name, drafter, monkeypatch, rounds=6):
    """Returns the largest difference of drafted distributions from a masked target's."""
    model, slots = MODELS[name], 40
    loop = Loop(target=model, drafter=drafter, rule=TokenRule())
    weights = pair_of(name).weights(drafter, slots)
    state = prefill(
        loop, weights.target, None, TEXTS, 28, chain(temperature(1.0)), samples=4, slots=slots
    )
    draft_of = jax.jit(lambda request, state: loop.draft(weights, request, state)[0])
    mask_of, worst = Visibility.mask, 0.0

    @jax.jit
    def masked(fed_B, offset, before_B, cache):
        def mask(visible, num_slots):
            slots_1S = jnp.arange(num_slots)[None]
            is_near_BS = (slots_1S < drafter.sinks) | (slots_1S >= (before_B - WINDOW)[:, None])
            return mask_of(visible, num_slots) & is_near_BS[:, None]

        with monkeypatch.context() as patch:
            patch.setattr(Visibility, "mask", mask)
            output = model(weights.target, fed_B[:, None], before_B + offset, cache)
        return jax.nn.softmax(output.logits_BTV[:, 0]), output.cache

    for _ in range(rounds):
        draft = draft_of(state.request, state)
        before_B, cache = state.lengths_B - 1, state.cache
        fed_B = jnp.take_along_axis(state.tokens_BS, before_B[:, None], axis=1)[:, 0]
        for k in range(K):
            expected_BV, cache = masked(fed_B, k, before_B, cache)
            worst = max(
                worst, float(jnp.abs(jnp.exp(draft.log_probs_BRV[:, k]) - expected_BV).max())
            )
            fed_B = draft.tokens_BK[:, k]
        state = loop.run(weights, state, 1)
    assert int(state.lengths_B.min()) > SINKS + WINDOW
    return worst


@pytest.mark.slow
@pytest.mark.parametrize("name", ["relative, cpu", "n-grams"])
def test_drafts_have_the_distributions_of_a_masked_target(name, monkeypatch):
    """With relative positions, a copy has the nearest distances only, so that sinks would
    differ.
    """
    sinks = 0 if name.startswith("relative") else SINKS
    assert worst_difference(name, WindowDrafter(MODELS[name], K, WINDOW, sinks), monkeypatch) < 1e-5


@pytest.mark.slow
def test_window_of_other_slots_is_caught(monkeypatch):
    wrong = ReadsASlotTooFar(MODELS["n-grams"], K, WINDOW, SINKS)
    assert worst_difference("n-grams", wrong, monkeypatch) > 1e-3


def readers(jaxpr, slots):
    """Returns the names of the operations that read an array of a cache with this many slots."""
    names = set()
    for equation in jaxpr.eqns:
        inner = list(jaxprs.jaxprs_in_params(equation.params))
        for each in inner:
            names |= readers(each, slots)
        shapes = [getattr(operand.aval, "shape", ()) for operand in equation.invars]
        if not inner and any(len(shape) == 4 and slots in shape for shape in shapes):
            names.add(equation.primitive.name)
    return names


def test_a_draft_reads_slices_of_the_cache_alone():
    """The control is a window over the whole context, whose copy has as many slots as the cache."""
    model, slots = MODELS["rotary"], 46

    def read(window):
        drafter = WindowDrafter(model, K, window, SINKS)
        loop = Loop(target=model, drafter=drafter, rule=TokenRule())
        weights = pair_of("rotary").weights(drafter, slots)
        state = prefill(loop, weights.target, None, TEXTS, 4, chain(temperature(1.0)), slots=slots)
        draft = jax.make_jaxpr(
            lambda cache: loop.draft(
                weights, state.request, dataclasses.replace(state, cache=cache)
            )
        )
        return readers(draft(state.cache).jaxpr, slots)

    assert read(WINDOW) == {"slice", "dynamic_slice"}
    assert "dot_general" in read(slots - SINKS - K)


make = functools.partial(WindowDrafter, MODELS["learned"], K=3, window=8)

test_refused_windows = refused_calls(
    {
        "not the pair's target": lambda: generate(pair_of("rotary"), TEXTS, 4, drafter=make()),
        "K .*>= 1.*got 0": lambda: make(K=0),
        "window .*>= 1.*got 0": lambda: make(window=0),
    }
)

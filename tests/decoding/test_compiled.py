"""The optimised program of the loop, read on this platform, has no copies of caches or weights, no
sorts, and no transfers to the host.
"""

import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specsamp import (
    Adaptive,
    BlockRule,
    Confidence,
    CoupledRule,
    EarlyExitDrafter,
    Loop,
    ModelDrafter,
    NoDrafter,
    TokenRule,
    TransformerLM,
    chain,
    temperature,
    top_k,
    top_p,
)
from specsamp.decoding.state import RequestBatch, Weights
from specsamp.models.config import draft_1m, target_38m
from specsamp.models.slots import MAX_UNROLLED_ROWS
from support.extras import slow_but
from support.weights import shapes_of

OPTIMISED = True

SLOTS = 256
# XLA settles the tested properties before it generates machine code.
WITHOUT_LLVM = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}


def compiled_run(
    batch,
    K,
    rule=TokenRule(),
    vocab_size=4096,
    layout="default",
    num_layers=1,
    early_exit=False,
    adaptive=None,
    **changes,
):
    """Compiles `Loop.run` for abstract shapes; with ``early_exit``, the first layer drafts."""
    target = TransformerLM(
        target_38m(num_layers=num_layers, vocab_size=vocab_size, **changes), layout
    )
    draft = TransformerLM(draft_1m(vocab_size=vocab_size, **changes), layout)
    drafter = ModelDrafter(draft, K) if K else NoDrafter()
    if early_exit:
        drafter = EarlyExitDrafter(target, 1, K)
    loop = Loop(
        target=target, drafter=drafter, rule=rule, adaptive=adaptive and adaptive.for_batch(batch)
    )
    sampling = chain(temperature(0.8), top_k(50), top_p(0.95))
    request = RequestBatch.create(sampling=sampling, limits=[100] * batch)
    params = [shapes_of(model) for model in (target, draft)]
    weights = jax.eval_shape(
        lambda t, d: Weights(
            target=target.fit_slots(target.prepare(t), SLOTS),
            draft=drafter.fit_slots(drafter.prepare(d), SLOTS),
        ),
        *params,
    )
    prompts = jnp.zeros((batch, 16), jnp.int32)
    lengths = jnp.full((batch,), 16)
    state = jax.eval_shape(
        lambda w: loop.prefill(w, request, prompts, lengths, slots=SLOTS), weights
    )
    state = dataclasses.replace(state, request=None)
    return loop.program.lower(weights, request, state, 1000).compile(WITHOUT_LLVM)


def moved(text, operation):
    """Returns the shapes that ``operation`` materialises anywhere in the program."""
    found = re.findall(rf"= \w+\[([\d,]*)\]\S* {operation}\(", text)
    return {tuple(int(n) for n in shape.split(",")) for shape in found if shape}


def copied_caches(text, batch):
    """Returns the copied or transposed shapes that are at least as large as a cache."""
    copies = moved(text, "copy") | moved(text, "transpose")
    return {
        shape for shape in copies if SLOTS in shape and np.prod(shape) >= batch * 2 * SLOTS * 64
    }


FEW = (4, 4, "relative", "default")
MANY = (MAX_UNROLLED_ROWS + 3, 2, "rotary", "default")
CALLS = [FEW, MANY, (1, 4, "relative", "cpu")]


@pytest.mark.parametrize("batch, K, positions, layout", slow_but(CALLS, FEW, MANY))
def test_caches_and_weights_are_not_copied(batch, K, positions, layout):
    """Caches are updated in place, and weights are stored in the layout of every call."""
    num_layers = 2 if (batch, K) == (4, 4) else 1  # nothing is copied between layers either
    text = compiled_run(
        batch, K, positions=positions, layout=layout, num_layers=num_layers
    ).as_text()
    assert not copied_caches(text, batch)
    copies = moved(text, "copy") | moved(text, "transpose")
    target = {(8, 512, 64), (8, 64, 512), (64, 8, 512), (512, 8, 64)}
    target |= {(512, 2048), (2048, 512), (4096, 512)}
    draft = {(2, 128, 64), (2, 64, 128), (64, 2, 128), (128, 2, 64), (512, 128), (4096, 128)}
    cpu_target = {(512, 1536), (512, 4096), (4096, 512)}
    cpu_draft = {(128, 384), (128, 4096)}
    assert not copies & (target | draft | cpu_target | cpu_draft)


SMALL = dict(positions="rotary", num_layers=2, vocab_size=512)
PACED = Adaptive(lengths=(0, 1, 3), costs_ms=(1, 2, 3), stop=Confidence(0.3))
COPY_NO_CACHE = {
    "an early exit": (3, dict(early_exit=True)),
    "widths, with a draft model that catches up": (3, dict(adaptive=PACED)),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", COPY_NO_CACHE)
def test_other_ways_to_draft_copy_no_cache(name):
    """Caches are not copied between widths, without a draft, or for a draft that catches up."""
    batch, options = COPY_NO_CACHE[name]
    text = compiled_run(batch, 3, **SMALL, **options).as_text()
    assert not copied_caches(text, batch)


def test_copy_of_an_old_cache_is_caught():
    """The control: a loop that keeps the old cache alive has a copy."""

    def keeps_the_old(cache, new, start):
        def body(i, caches):
            cache, old = caches
            return jax.lax.dynamic_update_slice(cache, new, (0, 0, start + i, 0)), cache

        return jax.lax.fori_loop(0, 5, body, (cache, cache))

    arguments = jnp.zeros((1, 8, SLOTS, 64)), jnp.ones((1, 8, 1, 64)), 3
    text = (
        jax.jit(keeps_the_old, donate_argnums=0).lower(*arguments).compile(WITHOUT_LLVM).as_text()
    )
    assert (1, 8, SLOTS, 64) in moved(text, "copy")


SORTS = r'\bsort\(|\btopk\(|custom_call_target="TopK"'


@pytest.mark.parametrize("rule", slow_but([BlockRule(), CoupledRule()], BlockRule()))
def test_nothing_is_sorted_and_nothing_leaves_the_device(rule):
    text = compiled_run(1, 3, rule, vocab_size=512).as_text()
    assert not re.search(SORTS, text)
    assert not re.search("infeed|outfeed|callback", text)
    for sorting in (jnp.sort, lambda x: jax.lax.top_k(x, 40)):
        control = jax.jit(sorting).lower(np.zeros((4, 4096))).compile().as_text()
        assert re.search(SORTS, control)


@pytest.mark.slow
def test_memory_grows_with_the_scored_distributions_only():
    """Temporaries, without weights and caches, grow as B x (K+1) x V floats."""

    def temporaries(batch, K, vocab_size):
        return compiled_run(batch, K, vocab_size=vocab_size).memory_analysis().temp_size_in_bytes

    def distributions(batch, K, vocab_size):
        return 4 * batch * (K + 1) * vocab_size

    small = (2, 2, 4096)
    before = temporaries(*small)
    for large in [(2, 2, 32768), (8, 8, 4096)]:
        growth = (temporaries(*large) - before) / (distributions(*large) - distributions(*small))
        assert growth < 7, (
            f"{small} -> {large}: temporaries grow by {growth:.1f} floats per scored probability"
        )

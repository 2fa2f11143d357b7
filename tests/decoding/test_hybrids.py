"""Decoding with recurrent layers: joint distributions through the whole loop, mutants, refusals."""

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specsamp import (
    BlockRule,
    Conversation,
    FeatureDrafter,
    Loop,
    ModelDrafter,
    NgramDrafter,
    NgramTree,
    Pair,
    RecursiveRule,
    TokenRule,
    TransformerLM,
    TreeShape,
    WindowDrafter,
    chain,
    generate,
    temperature,
)
from specsamp.decoding.engine import count_known
from specsamp.models.mtp import MTPConfig
from specsamp.models.recurrent import REWIND, RecurrentCache
from specsamp.models.slots import read_slots, write_slots
from support.fakes import FALSE_ALARM, decode, p_value
from support.hybrids import RECURRENT, hybrid
from support.refusals import refusal
from support.weights import shapes_of

V, LENGTH, SAMPLES, HEAT = 2, 4, 1000, 2.0
SAMPLING = chain(temperature(HEAT))
# The older state of one prompt takes up the first chunk in decoding, of the second in prefill.
PROMPTS = [[0, 1, 1, 0] * 12, [0, 1, 1, 0] * 13]
SMALL = dataclasses.replace(RECURRENT, num_value_heads=1, key_size=4, value_size=4)
CONFIG = hybrid(vocab_size=V, width=16, num_heads=2, recurrent=SMALL)
MODEL = TransformerLM(CONFIG)
forward = jax.jit(MODEL.forward)
# As in the checkpoints of Qwen3.5: a layer of attention after the final norm.
MODULE = MTPConfig(
    layer=dataclasses.replace(CONFIG, num_layers=1, recurrent=None),
    target_layers=CONFIG.num_layers,
    hidden_layers=(CONFIG.num_layers,),
    norm_output=True,
).head()


@functools.cache
def params(seed):
    shapes = shapes_of(MODEL)
    rng = np.random.default_rng(seed)

    def draw(path, x):
        if path[-1].key == "log_rate":
            return jnp.full(x.shape, -4.0)
        of_state = "recurrence" in jax.tree_util.keystr(path) and path[-1].key == "output"
        # Large outputs of the states, so that mistakes in them show.
        return jnp.asarray(rng.normal(size=x.shape) * (2.0 if of_state else 0.4), jnp.float32)

    return jax.tree_util.tree_map_with_path(draw, shapes)


@functools.cache
def weights(seed):
    return MODEL.prepare(params(seed))


@functools.cache
def expected(seed):
    """Returns the distribution of the next tokens of each prompt, from calls without a cache."""
    joints = []
    for prompt in PROMPTS:
        texts = list(itertools.product(range(V), repeat=LENGTH))
        whole = jnp.asarray([[*prompt, *text] for text in texts])
        logits = forward(weights(seed)["params"], whole).logits_BTV
        log_probs = np.asarray(jax.nn.log_softmax(logits / HEAT))[:, len(prompt) - 1 : -1]
        chosen = np.take_along_axis(log_probs, np.array(texts)[..., None], axis=-1)
        joint = np.exp(chosen.sum((1, 2), dtype=np.float64))
        joints.append(joint.reshape((V,) * LENGTH) / joint.sum())
    return joints


def p_value_of(rule, drafter, samples=SAMPLES):
    loop = Loop(target=MODEL, drafter=drafter, rule=rule)
    budgets = [LENGTH, LENGTH + 1]
    is_module = isinstance(drafter, FeatureDrafter)
    draft = MODULE.prepare(MODULE.init(jax.random.key(1))) if is_module else weights(1)
    run = decode(loop, weights(5), draft, PROMPTS, budgets, SAMPLING, samples=samples)
    emitted = run.emitted(LENGTH).reshape(len(PROMPTS), samples, LENGTH)
    return p_value(list(zip(emitted, expected(5))), powered=False)


CASES = {
    "model": (BlockRule(), ModelDrafter(MODEL, 2)),
    "module": (TokenRule(), FeatureDrafter(MODEL, MODULE, 2)),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_hybrid_texts_have_the_target_distribution(case):
    """A draft model that is a hybrid itself reads tokens that the target may reject."""
    assert p_value_of(*CASES[case]) > FALSE_ALARM


def wrong_state(cache, state_BNKV, num_chunks_B, num_held):
    """Advances the position, but not the state."""
    return ADVANCE(cache, cache.state_BNKV, num_chunks_B, num_held)


def replayed_twice(cache, state_BNKV, num_chunks_B, num_held):
    """Advances the state but not the position, so that the next call replays the same inputs."""
    after = ADVANCE(cache, cache.state_BNKV, jnp.zeros_like(num_chunks_B), num_held)
    return dataclasses.replace(after, state_BNKV=state_BNKV)


def stale_input(cache, inputs_BMTX, start_B):
    """Shows the convolution a rejected token, from the pending token's slot, in the slot before."""
    at_B = SMALL.taps - 1 + jnp.maximum(start_B - cache.position_B, 0)
    stale = read_slots(cache.inputs_BMWX, at_B, 1)
    changed = dataclasses.replace(
        cache, inputs_BMWX=write_slots(cache.inputs_BMWX, stale, at_B - 1)
    )
    return APPEND(changed, inputs_BMTX, start_B)


ADVANCE = RecurrentCache.advance
APPEND = RecurrentCache.append
MUTANTS = {"advance": (wrong_state, replayed_twice), "append": (stale_input,)}


def error_of_calls():
    """Returns the largest error of logits when each call's last token is wrong and then removed."""
    text_BT = jnp.asarray(np.random.default_rng(0).integers(0, V, size=(1, 103)))
    expected_BTV = forward(weights(5)["params"], text_BT).logits_BTV
    call = jax.jit(lambda *given, **more: MODEL(*given, **more))
    cache = MODEL.init_cache(1, 128)
    error = 0.0
    cache = call(
        weights(5), text_BT[:, :48], jnp.array([0]), cache, lengths_B=jnp.array([41])
    ).cache
    for start in range(40, 100, 2):
        fed_BT = text_BT[:, start : start + 3].at[:, 2].set(1 - text_BT[:, start + 2])
        output = call(weights(5), fed_BT, jnp.array([start]), cache)
        cache = output.cache
        moved = output.logits_BTV[:, :2] - expected_BTV[:, start : start + 2]
        error = max(error, float(jnp.abs(moved).max()))
    return error


def test_calls_after_rejections_equal_one_call():
    assert error_of_calls() < 1e-4


def errors_of_long_text(length, read=512, kept=2):
    """Returns each token's largest difference of logits between calls whose last token is wrong and
    then removed, and prompt calls of ``read`` tokens.
    """
    text_BT = jnp.asarray(np.random.default_rng(0).integers(0, V, size=(1, length)))
    slots, params = length + read, weights(5)

    def read_prompt(cache, tokens_BT, start):
        lengths_B = (start + read)[None]
        output = MODEL(params, tokens_BT, start[None], cache, lengths_B=lengths_B)
        return output.cache, output.logits_BTV

    def decode_round(cache, tokens_BT, start):
        fed_BT = jnp.concatenate([tokens_BT, 1 - tokens_BT[:, -1:]], axis=1)
        output = MODEL(params, fed_BT, start[None], cache)
        return output.cache, output.logits_BTV[:, :-1]

    def scan(call, step, stop):
        def body(cache, start):
            tokens_BT = jax.lax.dynamic_slice_in_dim(text_BT, start, step, axis=1)
            return call(cache, tokens_BT, start)

        starts = jnp.arange(0, stop, step)
        _, logits = jax.jit(lambda: jax.lax.scan(body, MODEL.init_cache(1, slots), starts))()
        return np.asarray(logits).reshape(-1, V)

    by_prompt = scan(read_prompt, read, length)
    by_rounds = scan(decode_round, kept, length)
    return np.abs(by_prompt[: len(by_rounds)] - by_rounds).max(axis=-1)


@pytest.mark.slow
def test_rejection_errors_stay_small_over_10000_tokens():
    errors = errors_of_long_text(20 * 512)
    assert errors[-1000:].max() < 2 * errors[:1000].max() < 2e-4


@pytest.mark.slow
@pytest.mark.parametrize("name, mutant", [(n, each) for n in MUTANTS for each in MUTANTS[n]])
def test_a_mistake_in_the_recurrent_cache_moves_logits(name, mutant, monkeypatch):
    monkeypatch.setattr(RecurrentCache, name, mutant)
    assert error_of_calls() > 1e-2


@pytest.mark.slow
def test_convolution_over_rejected_token_is_caught(monkeypatch):
    expected(5)
    monkeypatch.setattr(RecurrentCache, "append", stale_input)
    jax.clear_caches()
    try:
        assert p_value_of(*CASES["module"]) < FALSE_ALARM
    finally:
        monkeypatch.undo()
        jax.clear_caches()


@functools.cache
def pair():
    return Pair(target=MODEL, target_params=params(5))


@pytest.mark.parametrize(
    "drafter, message",
    [
        (NgramDrafter(REWIND + 1), "recurrent layers of the target take back at most 16 tokens"),
        (NgramTree(tree=TreeShape.of_widths(2, 1)), "states do not branch"),
        (WindowDrafter(MODEL, 2, window=8), "cannot draft with a window"),
    ],
)
def test_drafters_that_a_hybrid_cannot_serve_are_refused(drafter, message):
    rule = RecursiveRule() if isinstance(drafter, NgramTree) else TokenRule()
    with refusal(message):
        generate(pair(), [[0, 1]], 4, drafter=drafter, rule=rule)


def test_a_long_call_without_lengths_is_refused():
    cache = MODEL.init_cache(1, 64)
    start_B = jnp.zeros(1, jnp.int32)
    tokens_BT = jnp.zeros((1, REWIND + 2), jnp.int32)
    with refusal("give lengths_B"):
        jax.eval_shape(functools.partial(MODEL, weights(5)), tokens_BT, start_B, cache)


def test_call_before_the_older_state_is_nan():
    """Wrong logits would pass as right; NaN ends the row as invalid."""
    cache, lengths_B = MODEL.init_cache(1, 64), jnp.array([60])
    tokens_BT = jnp.zeros((1, 64), jnp.int32)
    call = jax.jit(MODEL.__call__)
    cache = call(weights(5), tokens_BT, jnp.array([0]), cache, lengths_B=lengths_B).cache
    for start, is_valid in ((59, True), (32, True), (31, False)):
        output = call(weights(5), tokens_BT[:, :2], jnp.array([start]), cache)
        assert bool(jnp.isfinite(output.logits_BTV).all()) == is_valid


@pytest.mark.parametrize("kept, known", [(39, 38), (30, 29), (20, 0), (5, 0)])
def test_prefix_is_reused_up_to_the_older_state(kept, known):
    """No state lies before the older one: `Conversation` and `Batch` read a shorter prefix anew."""
    loop = Loop(target=MODEL, drafter=NgramDrafter(4), rule=TokenRule())
    before, text = [0] * 40, [0] * kept + [1] * 30
    assert count_known(before, text, loop) == known


@pytest.mark.slow
def test_hybrid_conversation_continues_and_edits_its_text():
    chat = Conversation(pair(), max_tokens=128, draft_length=2, drafter=NgramDrafter(2))
    text = PROMPTS[0]
    for _ in range(2):
        list(chat.stream(text, 6))
        alone = generate(pair(), [text], 6, draft_length=0)[0].tokens
        assert chat.tokens == [*text, *alone]
        text = [*chat.tokens, 1, 0]
    assert chat.tokens_read < 10
    text = [1, *PROMPTS[0]]
    list(chat.stream(text, 6))
    assert chat.tokens == [*text, *generate(pair(), [text], 6, draft_length=0)[0].tokens]
    assert chat.tokens_read == len(text)

"""Every family against results of Hugging Face transformers for the same weights: whole prompts,
chunks, single tokens.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specsamp import NgramDrafter, Pair, TransformerLM, generate
from specsamp.checkpoints.architectures import FAMILIES
from specsamp.checkpoints.hugging_face import open_checkpoint, read_params
from specsamp.mesh.layout import make_mesh
from specsamp.mesh.sharded import shard
from specsamp.models.config import ExpertsConfig
from support import golden
from support.calls import call, forward, stale_cache
from support.extras import slow_but

CLOSE = 2e-5  # of the largest logit; measured: 5e-6. Each of the mistakes below is beyond 1e-4
LENGTH, CHUNK, SLOTS = 24, 8, 40
# Single tokens require one more program: most families read their text in chunks.
ONE_BY_ONE = ("gemma3", "gpt2", "gpt_neox", "llama3")


@functools.cache
def read(name, folder):
    checkpoint = open_checkpoint(golden.read(name).write_checkpoint(folder / name), dtype="float32")
    model = TransformerLM(checkpoint.config)
    return model, read_params(checkpoint, model)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("checkpoints")


def distance(logits, expected):
    return np.abs(np.asarray(logits) - expected).max() / np.abs(expected).max()


@pytest.mark.parametrize(
    "name", slow_but(golden.NAMES, *ONE_BY_ONE, "gemma4", "gpt_oss", "mimo", "qwen3_moe")
)
def test_logits_and_greedy_text_equal_transformers(name, folder):
    """The logits agree in one pass, and in chunks over a stale cache with a repeated last chunk;
    then the greedy text agrees.
    """
    model, params = read(name, folder)
    theirs = golden.read(name)
    assert theirs.logits_BTV.std() > 0.5
    assert distance(forward(model, params, theirs.tokens_BT).logits_BTV, theirs.logits_BTV) < CLOSE

    weights = model.fit_slots(model.prepare(params), SLOTS)
    cache = stale_cache(model, SLOTS, batch=2)
    tokens_BT = theirs.tokens_BT
    wrong_BT = (theirs.tokens_BT + 7) % model.vocab_size
    for start, fed in (
        (0, tokens_BT),
        (8, tokens_BT),
        (16, wrong_BT),
        (13, wrong_BT),
        (12, tokens_BT),
        (16, tokens_BT),
    ):
        output = call(model, weights, fed[:, start : start + CHUNK], jnp.full(2, start), cache)
        cache = output.cache
        if fed is tokens_BT:
            assert distance(output.logits_BTV, theirs.logits_BTV[:, start : start + CHUNK]) < CLOSE

    # The greedy text begins within the prompt, so later cache entries are stale again.
    text_BT = np.concatenate([tokens_BT[:, : golden.PROMPT], theirs.greedy_BT], axis=1)
    width = 1 if name in ONE_BY_ONE else CHUNK
    for start in sorted({*range(golden.PROMPT - 1, LENGTH - width, width), LENGTH - 1 - width}):
        output = call(model, weights, text_BT[:, start : start + width], jnp.full(2, start), cache)
        cache = output.cache
        np.testing.assert_array_equal(
            np.argmax(output.logits_BTV, axis=-1), text_BT[:, start + 1 : start + 1 + width]
        )


def test_drafted_greedy_text_equals_transformers(folder):
    """Gemma 3 mixes layers: windows are shorter than the prompt, and drafts are rejected."""
    model, params = read("gemma3", folder)
    theirs = golden.read("gemma3")
    prompts = theirs.tokens_BT[:, : golden.PROMPT].tolist()
    completions = generate(
        Pair(target=model, target_params=params), prompts, 12, drafter=NgramDrafter(K=3)
    )
    assert [completion.tokens for completion in completions] == theirs.greedy_BT.tolist()
    assert all(completion.stats.drafted > completion.stats.accepted for completion in completions)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["granite", "olmo2", "olmo3"])
def test_drafted_text_on_a_mesh_equals_transformers(name, folder):
    model, params = read(name, folder)
    theirs = golden.read(name)
    pair = shard(
        Pair(target=model, target_params=params), make_mesh(2, 2, devices=jax.devices()[:4])
    )
    weights = pair.target.fit_slots(pair.target.prepare(pair.target_params), SLOTS)
    cache = pair.target.init_cache(2, SLOTS)
    output = jax.jit(pair.target)(weights, theirs.tokens_BT, jnp.zeros(2, jnp.int32), cache)
    assert distance(output.logits_BTV, theirs.logits_BTV) < CLOSE
    prompts = theirs.tokens_BT[:, : golden.PROMPT].tolist()
    completions = generate(pair, prompts, 12, drafter=NgramDrafter(K=3))
    assert [completion.tokens for completion in completions] == theirs.greedy_BT.tolist()
    assert sum(completion.stats.drafted for completion in completions) > 0


def test_golden_files_are_small_and_complete():
    assert sum(path.stat().st_size for path in golden.FOLDER.iterdir()) < 2e6
    alone = {name for name, family in FAMILIES.items() if family.text is None}
    assert {golden.read(name).config["architectures"][0] for name in golden.NAMES} == alone


QWEN_EXPERTS = ExpertsConfig(
    num_experts=8, experts_per_token=3, width=20, normalised=True, dense_layers=(1,)
)
GPT_OSS_EXPERTS = ExpertsConfig(
    num_experts=4, experts_per_token=2, width=64, normalised=True, bias=True, limit=20.0
)
# Changes that keep all shapes of parameters: each must change the logits.
MISTAKES = [
    ("llama3", dict(rotary_scaling=None)),
    ("llama_yarn", dict(rotary_scaling=None)),
    ("mistral", dict(window=6)),
    *(
        ("granite", {name: None})
        for name in ("embedding_scale", "residual_scale", "attention_scale", "logit_divisor")
    ),
    ("olmo2", dict(post_norms=False)),
    ("olmo2", dict(joint_norm=False)),
    ("olmo3", dict(window_rotary_base=None)),
    ("olmo3", dict(rotary_scaling=None)),
    ("olmo3", dict(global_layers=())),
    ("gemma", dict(embedding_scale=None)),
    ("gemma", dict(norm_offset=False)),
    ("phi3", dict(rotary_scaling=None)),
    ("phi3", dict(window=8)),
    ("smollm3", dict(rotary_scaling=None)),
    ("smollm3", dict(global_layers=())),
    ("qwen2_window", dict(global_layers=(0, 1))),
    ("gemma2", dict(attention_cap=None)),
    ("gemma2", dict(logit_cap=None)),
    ("gemma2", dict(attention_scale=None)),
    ("gemma3", dict(window_rotary_base=None)),
    ("gemma3", dict(embedding_scale=None)),
    ("gemma3", dict(norm_offset=False)),
    ("gemma4", dict(value_norm=False)),
    ("gemma4", dict(layer_scale=False)),
    ("gemma4", dict(attention_scale=None)),
    ("gemma4", dict(rotary_scaling=None)),
    ("gpt_neox", dict(parallel=False)),
    ("gpt_neox", dict(rotary_size=None)),
    ("gpt2", dict(activation="gelu_exact")),
    ("qwen3_moe", dict(experts=QWEN_EXPERTS)),
    ("mixtral", dict(experts=ExpertsConfig(num_experts=4, experts_per_token=1, width=48))),
    ("gpt_oss", dict(attention_sinks=False)),
    ("gpt_oss", dict(activation="silu")),
    ("gpt_oss", dict(experts=GPT_OSS_EXPERTS)),
    ("gpt_oss", dict(global_layers=(0,))),
]


@pytest.mark.slow
@pytest.mark.parametrize("name, change", MISTAKES)
def test_each_of_these_mistakes_would_be_seen(name, change, folder):
    """Each mistake keeps all shapes of parameters, and changes the logits."""
    model, params = read(name, folder)
    theirs = golden.read(name)
    wrong = TransformerLM(dataclasses.replace(model.config, **change))
    with jax.disable_jit():  # each would be compiled for one call
        logits = wrong.forward(params, theirs.tokens_BT[:1, :12]).logits_BTV
    assert distance(logits, theirs.logits_BTV[:1, :12]) > 5 * CLOSE

"""Public heads that draft blocks: golden forward passes, the layouts of three packages, and files
that do not fit.
"""

import json
import pathlib
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numpy.testing import assert_allclose
from safetensors.numpy import save_file

from specsamp import TransformerConfig
from specsamp.checkpoints.public_heads import open_head, read_head
from specsamp.checkpoints.trained_pair import ASSETS, load_pair
from support import golden, golden_heads
from support.checkpoint_shapes import edit
from support.extras import slow_but
from support.refusals import refusal, refused_calls

TARGET = TransformerConfig(vocab_size=64, width=32, num_layers=12, num_heads=4, positions="rotary")
TOY_TARGET = TransformerConfig(
    vocab_size=16, width=8, num_layers=9, num_heads=2, positions="rotary"
)
EMBEDDING = jnp.asarray(golden.weights("embed_tokens.weight", (64, 32)))
OUTPUT = golden.weights("lm_head.weight", (64, 32))
START = jnp.zeros(1, jnp.int32)


def load(folder, target=TARGET):
    checkpoint = open_head(folder, target, dtype="float32")
    head = checkpoint.config.head()
    params = read_head(checkpoint, head)
    return head, params, head.prepare(params)


def run_blocks(head, weights, hidden, tokens):
    """Returns rows, logits and confidences of a block at every position, given the true tokens
    before; ``[A, b, ...]``.
    """
    (_, length), size = tokens.shape, head.config.block_size
    anchors = jnp.arange(length - size)
    caches = head.init_cache(1, length + len(anchors) * size)
    features = head.fuse(weights, jnp.split(hidden, len(head.hidden_layers), axis=-1))
    caches = head.read(weights, features, START, caches)
    block_tokens = (
        jnp.full((len(anchors), size), head.config.mask_id).at[:, 0].set(tokens[0, anchors])
    )
    first = length + size * jnp.arange(len(anchors))
    rows, _ = head(
        weights, EMBEDDING[block_tokens].reshape(1, -1, 32), anchors[None], first[None], caches
    )
    rows = rows.reshape(len(anchors), size, -1)
    before = tokens[0, anchors[:, None] + jnp.arange(size)[None] - head.config.first_row]
    before = before.at[:, 0].set(tokens[0, anchors])
    state = head.begin(weights, len(anchors))
    logits = []
    odds = []
    base = head.logits(weights, rows, lambda x: x @ OUTPUT.T)
    for k in range(size):
        corrected, state = head.correct(weights, base[:, k], rows[:, k], before[:, k], state)
        logits.append(corrected)
        if head.config.confidence is not None:
            odds.append(head.confidence(weights, rows[:, k], before[:, k]))
    return rows, jnp.stack(logits, 1), odds and jnp.stack(odds, 1)


NAMES = sorted(path.stem for path in golden_heads.BLOCKS.glob("*.safetensors"))


def test_the_golden_pass_of_dflash(tmp_path):
    """The second round overwrites the first block with two rows of context and a new block."""
    head, _, weights = load(toy(tmp_path), TOY_TARGET)
    assert head.hidden_layers == (1, 3)
    embedding = jnp.asarray(0.3 * np.sin(1.3 * np.arange(128) + 100).reshape(16, 8), jnp.float32)
    golden_rows = [
        [-1.270369, -0.756346, 1.582775, 0.892070, -0.612838, -1.241468, 0.644084, -0.205167],
        [-0.877222, -1.101834, 1.565736, 1.203556, -1.096256, -0.783227, 0.541668, -0.352559],
    ]
    caches, start = head.init_cache(1, 16), 0
    for length, pending, shift, golden_row in (
        (5, 4, 0.0, golden_rows[0]),
        (2, 9, 0.3, golden_rows[1]),
    ):
        hidden = jnp.split(
            jnp.asarray(np.sin(0.7 * np.arange(16 * length) + shift).reshape(1, length, 16)),
            2,
            axis=-1,
        )
        caches = head.read(weights, head.fuse(weights, hidden), jnp.array([start]), caches)
        start += length
        block = embedding[jnp.asarray([[pending, 15, 15, 15]])]
        rows, caches = head(weights, block, jnp.array([[start]]), jnp.array([[start]]), caches)
        assert_allclose(rows[0, 1], golden_row, atol=1e-5)


@pytest.mark.parametrize("name", slow_but(NAMES, "dflash2", "dspark_gated"))
def test_heads_of_speculators(tmp_path, name):
    """Covers windows, corrections, confidences and reduced vocabularies; written heads are read
    back unchanged.
    """
    golden_run = golden_heads.write_head(name, tmp_path / "theirs", golden_heads.BLOCKS)
    head, params, weights = load(tmp_path / "theirs")
    assert head.hidden_layers == (0, 3), "its ids 1 and 4 name what enters layers"
    rows, logits, odds = jax.jit(run_blocks, static_argnums=0)(
        head, weights, golden_run["hidden"], jnp.asarray(golden_run["tokens"])
    )
    assert_allclose(rows, golden_run["rows"], atol=2e-5)
    assert_allclose(logits, golden_run["logits"], atol=4e-5)
    if head.config.confidence is not None:
        assert_allclose(odds, golden_run["confidence"], atol=1e-5)
    golden_heads.write_again(tmp_path, head, params, TARGET)


# The toy of the golden forward pass, in the layouts of z-lab and of DeepSpec.

TOY = golden_heads.TOY | dict(
    num_hidden_layers=2, head_dim=4, rms_norm_eps=1e-6, model_type="qwen3"
)
DFLASH = dict(mask_token_id=15, target_layer_ids=[1, 3])
ZLAB = TOY | dict(
    architectures=["DFlashDraftModel"], block_size=4, num_target_layers=9, dflash_config=DFLASH
)
DEEPSPEC = TOY | dict(architectures=["Qwen3DSparkModel"], block_size=4, markov_rank=2, **DFLASH)
NORMS = {
    "input_layernorm": 8,
    "post_attention_layernorm": 8,
    "self_attn.q_norm": 4,
    "self_attn.k_norm": 4,
}


def shapes(markov=False):
    tensors = {"fc.weight": (8, 16), "hidden_norm.weight": (8,), "norm.weight": (8,)}
    for prefix in ("layers.0", "layers.1"):
        of_layer = golden_heads._layer(prefix, 8)
        del of_layer["embed_tokens.weight"]
        tensors |= of_layer | {f"{prefix}.{name}.weight": (size,) for name, size in NORMS.items()}
    pairs = {"markov_head.markov_w1.weight": (16, 2), "markov_head.markov_w2.weight": (16, 2)}
    return tensors | (pairs if markov else {})


def toy(folder, content=ZLAB, markov=False, **tensors):
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(content))
    save_file(golden_heads.recipe(shapes(markov)) | tensors, folder / "model.safetensors")
    return folder


@pytest.mark.parametrize(
    "change, fields",
    [
        ({}, {}),
        (dict(block_size=None, dflash_config=DFLASH | dict(block_size=4)), {}),
        (dict(dflash_config=DFLASH | dict(target_layer_ids=[-1, 8])), dict(hidden_layers=(-1, 8))),
        (dict(dflash_config=DFLASH | dict(causal=True)), dict(causal=True)),
        (
            dict(dflash_config=DFLASH | dict(final_logit_softcapping=30.0, output_multiplier=0.5)),
            dict(output_scale=0.5),
        ),
        (dict(dflash_config=DFLASH | dict(input_embedding_scale=3.0)), dict(embedding_scale=3.0)),
    ],
)
def test_configs_of_z_lab(tmp_path, change, fields):
    config = load(toy(tmp_path, ZLAB | change), TOY_TARGET)[0].config
    assert config.block_size == 4 and config.mask_id == 15 and not config.from_anchor
    assert {name: getattr(config, name) for name in fields} == fields


@pytest.mark.parametrize(
    "change", [dict(block_size=5), dict(target_layer_ids=[1, 4]), dict(mask_token_id=14)]
)
def test_a_key_with_two_values_is_refused(tmp_path, change):
    content = ZLAB | dict(dflash_config=DFLASH | dict(block_size=4) | change) | DFLASH
    (key,) = change
    with refusal(f"config.json says {key} twice, with different values"):
        open_head(toy(tmp_path, content), TOY_TARGET)


@pytest.mark.parametrize("size", [4, 7, 9, 16])
def test_block_size_unlike_the_file_is_refused(tmp_path, size):
    """No tensor shows the block size, and a head with a wrong size drafts noise."""
    folder = shutil.copytree(ASSETS / "python" / "block", tmp_path / "head")
    target = load_pair("python").target.config
    assert open_head(folder, target).config.block_size == 8
    edit(folder / "config.json", lambda content: content.update(block_size=size))
    with refusal(f"block_size = {size}, .* speculative_tokens = 8: correct the wrong key"):
        open_head(folder, target)


def test_windows_of_z_lab(tmp_path):
    kinds = ["sliding_attention", "full_attention"]
    window = dict(layer_types=kinds, dflash_config=DFLASH | dict(use_swa=True, swa_window_size=5))
    config = open_head(toy(tmp_path, ZLAB | window), TOY_TARGET).config
    assert [config.layer.window_of(i) for i in range(2)] == [5, None]
    assert not config.windows_both_ways


def test_deepspec_head_drafts_from_its_first_row(tmp_path):
    config = open_head(toy(tmp_path, DEEPSPEC, markov=True), TOY_TARGET).config
    assert config.kind == "DSpark"
    assert config.from_anchor
    assert config.markov_rank == 2
    assert config.confidence is None
    assert config.max_tokens == 4
    assert open_head(toy(tmp_path, ZLAB), TOY_TARGET).config.max_tokens == 3


def block(**change):
    return open_head(toy(pathlib.Path(), ZLAB | change), TOY_TARGET)


def dflash(**change):
    return block(dflash_config=DFLASH | change)


test_refused_block_heads = refused_calls(
    {
        "mask_id must be an integer.* 16": lambda: dflash(mask_token_id=16),
        "target_layer_ids.*10": lambda: dflash(target_layer_ids=[1, 10]),
        "fc.weight reads 2 layers .* names 1.*drops the id": lambda: dflash(target_layer_ids=[1]),
        "num_target_layers = 8, but .* number of layers is 9": lambda: block(num_target_layers=8),
        "block_size": lambda: block(block_size=1),
        "hidden_size = 16, but the target's width is 8": lambda: block(hidden_size=16, head_dim=8),
    }
)

"""Beside transformers itself, where it is installed (else this file is not collected): nothing here is needed that the
golden files do not prove, which are what it said of the same models.

    pip install torch transformers
"""

import pathlib
import random

import huggingface_hub
import jax
import numpy as np
import pytest
import torch
import transformers

from specsamp.checkpoints.architectures import parse_config
from specsamp.checkpoints.export import export
from specsamp.checkpoints.hugging_face import open_checkpoint, read_params
from specsamp.checkpoints.pair import load_pair
from specsamp.models.config import tiny
from specsamp.models.transformer import TransformerLM
from support import golden, golden_maker
from support.checkpoint_shapes import CONFIG, edit, random_params

pytestmark = pytest.mark.filterwarnings("ignore")
CLOSE = 2e-5  # of the largest logit


def assert_close(logits, expected):
    assert np.abs(np.asarray(logits) - expected).max() < CLOSE * np.abs(expected).max()


@pytest.mark.parametrize("name", golden.NAMES)
def test_the_golden_files_are_what_transformers_says(name):
    made = golden_maker.make(golden_maker.configs()[name], golden_maker.SEEDS.get(name, 0))
    stored = golden.read(name)
    assert made.shapes == stored.shapes
    assert_close(made.logits_BTV, stored.logits_BTV)
    np.testing.assert_array_equal(made.greedy_BT, stored.greedy_BT)


def randomised(config, draw):
    """Another small shape of the same family."""
    fields = config.to_dict()
    key_heads, group = draw.choice([1, 2, 3]), draw.choice([1, 2])
    if config.model_type in ("gpt2", "gpt_neox"):
        group = 1
    heads = key_heads * group
    width = 8 * heads * draw.choice([1, 2])
    names = (
        dict(n_embd=width, n_head=heads)
        if config.model_type == "gpt2"
        else dict(hidden_size=width, num_attention_heads=heads, intermediate_size=draw.choice([24, 56]))
    )
    if "num_key_value_heads" in fields:
        names |= dict(num_key_value_heads=key_heads, head_dim=draw.choice([8, 16]))
    if fields.get("sliding_window"):
        names["sliding_window"] = draw.choice([1, 3, 9, 30])
    names["tie_word_embeddings"] = draw.choice([True, False])
    return type(config)(**fields | names)


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("name", golden.NAMES)
def test_random_shapes_of_every_family(name, seed, tmp_path):
    config = randomised(golden_maker.configs()[name], random.Random(f"{name} {seed}"))
    made = golden_maker.make(config, seed, greedy=False)
    checkpoint = open_checkpoint(made.write_checkpoint(tmp_path / "model"), dtype="float32")
    model = TransformerLM(checkpoint.config)
    params = read_params(checkpoint, model)
    assert_close(jax.jit(model.forward)(params, made.tokens_BT).logits_BTV, made.logits_BTV)


def read_there(content):
    """A config.json that says all that transformers makes of one."""
    config = transformers.AutoConfig.for_model(content["model_type"]).from_dict(dict(content)).to_dict()
    return config | dict(architectures=content["architectures"])


@pytest.mark.parametrize("name", golden.NAMES)
def test_a_key_that_is_left_out_means_what_it_means_there(name):
    """Or is asked for; also a null, where transformers takes it."""
    content, read = golden.read(name).config, lambda content: parse_config("config.json", content, "float32")[1]
    for key in content.keys() - {"architectures", "model_type"}:
        without = {other: value for other, value in content.items() if other != key}
        for changed in (without, without | {key: None}):
            try:
                ours = read(changed)
            except ValueError:
                continue
            try:
                there = read_there(changed)
            except (TypeError, ValueError, huggingface_hub.errors.StrictDataclassError):
                continue  # a null
            assert ours == read(there), key


ORIGINAL = dict(original_max_position_embeddings=40)


@pytest.mark.parametrize(
    "name, changes",
    [
        ("llama3", ORIGINAL),
        ("llama_yarn", ORIGINAL),
        ("gemma3", ORIGINAL),
        ("llama2", dict(partial_rotary_factor=0.5)),
        ("mistral", dict(layer_types=["full_attention", "sliding_attention"])),
        ("mistral", dict(layer_types=["full_attention", "full_attention"])),
        ("qwen3", dict(partial_rotary_factor=0.5)),
        ("gpt_neox", dict(partial_rotary_factor=0.5)),
        ("llama2", dict(tie_word_embeddings=True)),
        ("gpt_neox", dict(tie_word_embeddings=True)),
    ],
    ids=str,
)
def test_what_a_config_says_in_two_ways_is_read_as_there(name, changes, tmp_path):
    """The last two have an output embedding of their own."""
    folder = golden.read(name).write_checkpoint(tmp_path / "model")
    edit(folder / "config.json", lambda config: config.update(changes))
    checkpoint = open_checkpoint(folder, dtype="float32")
    model = TransformerLM(checkpoint.config)
    tokens_BT = golden.read(name).tokens_BT
    ours = jax.jit(model.forward)(read_params(checkpoint, model), tokens_BT).logits_BTV
    assert_close(ours, theirs(folder, tokens_BT))


@torch.inference_mode()
def theirs(folder: pathlib.Path, tokens_BT: np.ndarray) -> np.ndarray:
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    return model(torch.tensor(tokens_BT, dtype=torch.int64)).logits.numpy()


@pytest.mark.parametrize(
    "config", [CONFIG, tiny(vocab_size=304, positions="rotary", num_kv_heads=1)], ids=["gated", "ungated"]
)
def test_what_is_exported_is_the_same_model_there(config, tokenizer, tmp_path):
    params = random_params(config)
    export(tmp_path, config, params, tokenizer)
    tokens_BT = np.random.default_rng(0).integers(0, 279, size=(2, 20), dtype=np.int32)
    assert_close(TransformerLM(config).forward(params, tokens_BT).logits_BTV, theirs(tmp_path, tokens_BT))
    text = "def f(x): return é"
    assert transformers.AutoTokenizer.from_pretrained(tmp_path).encode(text) == tokenizer.encode(text)


def test_the_shipped_target_is_the_same_model_there(tmp_path):
    pair = load_pair("python")
    export(tmp_path, pair.target.config, pair.target_params, pair.tokenizer)
    tokens_BT = np.asarray([pair.tokenizer.encode("def fibonacci(n):\n    if n < 2:\n        return n\n")])
    ours = pair.target.forward(pair.target_params, tokens_BT).logits_BTV
    assert_close(ours, theirs(tmp_path, tokens_BT))

"""Small heads in the format of the package speculators, and their logits by that package.

As in golden.py, weights are made from their names. The scripts that wrote the files are
``tests/support/head_maker.py`` of commit 89baef4f and, for the assistant,
``tests/support/assistant_maker.py`` of commit 8e45e43c.
"""

import json
import pathlib

import numpy as np
import safetensors
from safetensors.numpy import load_file, save_file

from specsamp.checkpoints import head_export
from specsamp.checkpoints.public_heads import open_head
from support import golden

FOLDER = pathlib.Path(__file__).parents[1] / "checkpoints" / "golden_heads"
NAMES = sorted(path.stem for path in FOLDER.glob("*.safetensors"))
BLOCKS = FOLDER / "blocks"
ASSISTANT = FOLDER / "assistants" / "gemma4.safetensors"
MAPS = ("d2t", "t2d")


def read(name, source=FOLDER):
    """Returns the head's configuration and shapes, and the arrays of its golden file."""
    path = source / f"{name}.safetensors"
    with safetensors.safe_open(path, framework="numpy") as file:
        return {key: json.loads(value) for key, value in file.metadata().items()}, load_file(path)


def write_head(name, folder, source=FOLDER):
    """Writes the head as a folder; returns hidden states ``[1, T, 3 D]``, tokens and logits."""
    described, arrays = read(name, source)
    tensors = {
        key: arrays[key] if key in MAPS else golden.weights(key, tuple(shape))
        for key, shape in described["shapes"].items()
    }
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(described["config"]))
    save_file(tensors, folder / "model.safetensors")
    return arrays


def write_again(folder, head, params, target):
    """Writes a head that was read from "theirs", and checks that its tensors and fields are equal.

    Returns the written head, opened.
    """
    head_export.write_head(folder / "ours", head, params, target_name="org/target", K=3)
    ours, theirs = (load_file(folder / side / "model.safetensors") for side in ("ours", "theirs"))
    assert ours.keys() == theirs.keys()
    for key, tensor in theirs.items():
        np.testing.assert_array_equal(ours[key], tensor)
        assert ours[key].dtype == tensor.dtype
    again = open_head(folder / "ours", target, dtype="float32")
    assert again.config == head.config
    return again


# The toy of the golden forward passes: width 8, two heads of 4, one key head, inner width 12, 16
# tokens.
TOY = dict(
    vocab_size=16, hidden_size=8, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1
)
TOY |= dict(intermediate_size=12, rms_norm_eps=1e-5, max_position_embeddings=64, rope_theta=1e4)
EAGLE1 = TOY | dict(architectures=["LlamaForCausalLM"], model_type="llama", bias=True)
EAGLE3 = TOY | dict(architectures=["LlamaForCausalLMEagle3"], draft_vocab_size=6)


def _layer(prefix, query_width):
    heads = {"q": (8, query_width), "k": (4, query_width), "v": (4, query_width), "o": (8, 8)}
    inner = {"gate": (12, 8), "up": (12, 8), "down": (8, 12)}
    return {
        **{f"{prefix}.self_attn.{name}_proj.weight": shape for name, shape in heads.items()},
        **{f"{prefix}.mlp.{name}_proj.weight": shape for name, shape in inner.items()},
        f"{prefix}.post_attention_layernorm.weight": (8,),
        "embed_tokens.weight": (16, 8),
    }


EAGLE3_SHAPES = _layer("midlayer", 16) | {
    "fc.weight": (8, 24),
    "norm.weight": (8,),
    "lm_head.weight": (6, 8),
}
EAGLE3_SHAPES |= {"midlayer.hidden_norm.weight": (8,), "midlayer.input_layernorm.weight": (8,)}


def recipe(shapes):
    """Returns weights of the golden passes: tensor j by name, element i; norms are near one."""
    tensors = {}
    for j, name in enumerate(sorted(shapes)):
        wave = np.sin(1.3 * np.arange(np.prod(shapes[name])) + j).reshape(shapes[name])
        tensors[name] = (1 + 0.1 * wave if "norm" in name else 0.3 * wave).astype(np.float32)
    return tensors

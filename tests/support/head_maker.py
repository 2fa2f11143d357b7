"""Writes the golden heads, from the models of the package speculators; see golden_heads.py.

pip install speculators==0.9.0 torch
PYTHONPATH=tests python -m support.head_maker
"""

import json
import pathlib
import tempfile

import numpy as np
import safetensors
import torch
from safetensors.numpy import save_file
from speculators import SpeculatorsConfig, VerifierConfig
from speculators.models.eagle3 import Eagle3SpeculatorConfig
from speculators.models.eagle3.core import Eagle3DraftModel
from speculators.proposals.greedy import GreedyTokenProposalConfig
from transformers import LlamaConfig, Qwen3Config

from support import golden, golden_heads

LENGTH, VOCABULARY, DRAFT = 7, 64, 24
SHAPE = dict(vocab_size=VOCABULARY, hidden_size=32, num_hidden_layers=1, num_attention_heads=4, num_key_value_heads=2)
SHAPE |= dict(intermediate_size=48, max_position_embeddings=128, rms_norm_eps=1e-5, head_dim=8)
LLAMA3 = dict(rope_type="llama3", rope_theta=500.0, factor=4.0, low_freq_factor=1.0, high_freq_factor=4.0)
LLAMA3 |= dict(original_max_position_embeddings=8)
HEADS = {
    "eagle3_llama": (LlamaConfig(**SHAPE, rope_parameters=LLAMA3), dict()),
    "eagle3_residual": (LlamaConfig(**SHAPE | dict(head_dim=12)), dict(norm_before_residual=True, norm_before_fc=True)),
    "eagle3_1_qwen3": (Qwen3Config(**SHAPE | dict(head_dim=16)), dict(fc_norm=True, norm_output=True)),
}
IDS = np.sort(np.random.default_rng(0).permutation(VOCABULARY)[:DRAFT])


def make(layer, switches) -> Eagle3DraftModel:
    layer._attn_implementation = "eager"
    config = Eagle3SpeculatorConfig(
        transformer_layer_config=layer,
        draft_vocab_size=DRAFT,
        eagle_aux_hidden_state_layer_ids=[2, 6, 9],
        speculators_config=SpeculatorsConfig(
            algorithm="eagle3",
            proposal_methods=[GreedyTokenProposalConfig(speculative_tokens=3)],
            default_proposal_method="greedy",
            verifier=VerifierConfig(name_or_path=None, architectures=[]),
        ),
        **switches,
    )
    model = Eagle3DraftModel(config).eval()
    for name, value in model.state_dict().items():
        if value.is_floating_point():
            value.copy_(torch.from_numpy(golden.weights(name, tuple(value.shape))))
    model.d2t.copy_(torch.from_numpy(IDS - np.arange(DRAFT)))
    model.t2d.copy_(torch.from_numpy(np.isin(np.arange(VOCABULARY), IDS)))
    return model


def write(name: str, layer, switches) -> None:
    model = make(layer, switches)
    hidden = golden.weights("hidden", (1, LENGTH, 3 * 32))
    tokens = (np.arange(LENGTH, dtype=np.int64) * 11 + 5)[None] % VOCABULARY
    seen = []
    model.lm_head.register_forward_hook(lambda _, inputs, output: seen.append(output))
    with torch.no_grad():
        model(
            torch.from_numpy(hidden), torch.from_numpy(tokens), torch.zeros((1, LENGTH), dtype=torch.long), ttt_steps=1
        )
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        config = json.loads(pathlib.Path(folder, "config.json").read_text(encoding="utf-8"))
        with safetensors.safe_open(pathlib.Path(folder, "model.safetensors"), framework="pt") as file:
            shapes = {key: file.get_slice(key).get_shape() for key in file.keys()}
    arrays = {
        "hidden": hidden,
        "tokens": tokens,
        "logits": seen[0].numpy(),
        "d2t": IDS - np.arange(DRAFT),
        "t2d": np.isin(np.arange(VOCABULARY), IDS),
    }
    metadata = {"config": json.dumps(config), "shapes": json.dumps(shapes)}
    golden_heads.FOLDER.mkdir(exist_ok=True)
    save_file(arrays, golden_heads.FOLDER / f"{name}.safetensors", metadata=metadata)


def write_pickle() -> None:
    """Writes the toy EAGLE-1 head as torch.save does, attributes of its OrderedDict included."""
    tensors = golden_heads.recipe(golden_heads.EAGLE1_SHAPES)
    state = torch.nn.Linear(1, 1).state_dict()
    state.clear()
    state.update({name: torch.from_numpy(tensor) for name, tensor in tensors.items()})
    torch.save(state, golden_heads.FOLDER / "eagle1.bin")


if __name__ == "__main__":
    write_pickle()
    for name, parts in HEADS.items():
        write(name, *parts)

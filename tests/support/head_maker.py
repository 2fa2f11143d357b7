"""Computes the golden heads anew, with the models of the package speculators; see golden_heads.py.

pip install speculators==0.9.0 torch
PYTHONPATH=tests python -m support.head_maker                      # of the configurations that the files hold
PYTHONPATH=tests python -m support.head_maker NAME CONFIG.json     # a new one
"""

import json
import pathlib
import sys
import tempfile

import numpy as np
import safetensors
import torch
from safetensors.numpy import save_file
from speculators.models.eagle3 import Eagle3SpeculatorConfig
from speculators.models.eagle3.core import Eagle3DraftModel

from support import golden, golden_heads

LENGTH, VOCABULARY, DRAFT = 7, 64, 24
IDS = np.sort(np.random.default_rng(0).permutation(VOCABULARY)[:DRAFT])
MAPS = {"d2t": IDS - np.arange(DRAFT), "t2d": np.isin(np.arange(VOCABULARY), IDS)}


def make(config: dict) -> tuple[dict, dict]:
    """Returns the arrays of a golden file, and the shapes of the head's tensors."""
    config = Eagle3SpeculatorConfig.from_dict(config)
    config.transformer_layer_config._attn_implementation = "eager"
    model = Eagle3DraftModel(config).eval()
    for name, value in model.state_dict().items():
        if value.is_floating_point():
            value.copy_(torch.from_numpy(golden.weights(name, tuple(value.shape))))
    for name, value in MAPS.items():
        getattr(model, name).copy_(torch.from_numpy(value))
    hidden = golden.weights("hidden", (1, LENGTH, 3 * 32))
    tokens = (np.arange(LENGTH, dtype=np.int64) * 11 + 5)[None] % VOCABULARY
    seen = []
    model.lm_head.register_forward_hook(lambda _, inputs, output: seen.append(output))
    inputs = hidden, tokens, np.zeros((1, LENGTH), np.int64)
    with torch.no_grad(), tempfile.TemporaryDirectory() as folder:
        model(*map(torch.from_numpy, inputs), ttt_steps=1)
        model.save_pretrained(folder)
        with safetensors.safe_open(pathlib.Path(folder, "model.safetensors"), framework="pt") as file:
            shapes = {key: file.get_slice(key).get_shape() for key in file.keys()}
    return {"hidden": hidden, "tokens": tokens, "logits": seen[0].numpy(), **MAPS}, shapes


def write(name: str, config: dict) -> None:
    arrays, shapes = make(config)
    metadata = {"config": json.dumps(config), "shapes": json.dumps(shapes)}
    save_file(arrays, golden_heads.FOLDER / f"{name}.safetensors", metadata=metadata)


def write_pickle() -> None:
    """Writes the toy EAGLE-1 head as torch.save does, attributes of its OrderedDict included."""
    tensors = golden_heads.recipe(golden_heads.EAGLE1_SHAPES)
    state = torch.nn.Linear(1, 1).state_dict()
    state.clear()
    state.update({name: torch.from_numpy(tensor) for name, tensor in tensors.items()})
    torch.save(state, golden_heads.FOLDER / "eagle1.bin")


if __name__ == "__main__":
    if len(sys.argv) == 3:
        write(sys.argv[1], json.loads(pathlib.Path(sys.argv[2]).read_text(encoding="utf-8")))
    else:
        write_pickle()
        for name in golden_heads.NAMES:
            write(name, golden_heads.read(name)[0]["config"])

"""Small models of every family: tokens, logits and greedy text by Hugging Face transformers.

Files have ``config.json``, names and shapes, tokens and results, but no weights: these are made
from their names, by a generator whose raw bits NumPy keeps for ever. `golden_maker.py` writes the
files.
"""

import dataclasses
import functools
import json
import math
import pathlib
import zlib

import numpy as np
import safetensors
from safetensors.numpy import load_file, save_file

FOLDER = pathlib.Path(__file__).parents[1] / "checkpoints" / "golden"
# A Llama 3 whose text ends with this many mask tokens; not a family of its own.
PARD, MASKS = "pard", 4
NAMES = sorted({path.stem for path in FOLDER.glob("*.safetensors")} - {PARD})
PROMPT = 12  # tokens before the greedy text, of each row


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class Golden:
    """Inputs and results of transformers for one model."""

    config: dict  # of config.json
    shapes: dict[str, tuple[int, ...]]  # of the checkpoint's tensors
    tokens_BT: np.ndarray
    logits_BTV: np.ndarray
    greedy_BT: np.ndarray  # tokens after the first PROMPT ones

    def write_checkpoint(self, folder):
        """Writes the model as a folder in the format of the hub."""
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.json").write_text(json.dumps(self.config))
        save_file(
            {name: weights(name, shape) for name, shape in self.shapes.items()},
            folder / "model.safetensors",
        )
        return folder


@functools.cache
def read(name):
    path = FOLDER / f"{name}.safetensors"
    with safetensors.safe_open(path, framework="numpy") as file:
        described = {key: json.loads(value) for key, value in file.metadata().items()}
    shapes = {name: tuple(shape) for name, shape in described["shapes"].items()}
    return Golden(config=described["config"], shapes=shapes, **load_file(path))


def weights(name, shape):
    """Returns uniform weights, so large that attention is neither flat nor on a single token."""
    raw = np.random.PCG64(zlib.crc32(name.encode())).random_raw(math.prod(shape))
    noise = ((raw >> 40).astype(np.float64) / 2**24 - 0.5) * math.sqrt(12)
    if name.endswith("bias"):
        noise = 0.3 * noise
    elif name.endswith("A_log"):  # states of recurrent layers last for some tokens
        noise = 0.3 * noise - 3
    elif len(shape) == 1:  # the scale of a norm
        noise = 1 + 0.3 * noise
    else:
        noise = (
            noise * (2.0 if "k_proj" in name or "q_proj" in name else 1.0) / math.sqrt(min(shape))
        )
    return noise.reshape(shape).astype(np.float32)

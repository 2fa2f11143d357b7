"""The model of the tests' checkpoints, and functions that read and edit them."""

import dataclasses
import json

from specsamp import TransformerLM
from specsamp.checkpoints.head_export import write_head
from specsamp.checkpoints.hugging_face import open_checkpoint
from specsamp.models.config import tiny
from specsamp.models.eagle import Eagle3Config
from specsamp.models.heads import FeatureHead
from support.weights import drawn_params

CONFIG = tiny(
    vocab_size=304,
    width=32,
    num_heads=4,
    num_kv_heads=2,
    positions="rotary",
    gated=True,
    activation="silu",
    tied=False,
)


def random_params(config, seed=0):
    return drawn_params(TransformerLM(config), seed, noise=0.2)


def write_random_head(folder, target_name):
    """Writes an EAGLE-3 head for the model, which has too few layers for the usual choice."""
    head = FeatureHead(
        Eagle3Config(
            layer=dataclasses.replace(CONFIG, num_layers=1),
            target_layers=CONFIG.num_layers,
            hidden_layers=(0, 1),
            draft_vocab_size=64,
            own_output=True,
        )
    )
    write_head(folder, head, drawn_params(head), target_name=target_name, K=3)
    return folder


def open_all(folder):
    checkpoint = open_checkpoint(folder, dtype="float32")
    return checkpoint, checkpoint.tensors


def edit(path, change):
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))

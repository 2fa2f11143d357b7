"""The shipped head for SmolLM2-135M-Instruct; this target is not shipped."""

import json

from configs import hf
from specsamp import TransformerConfig
from specsamp.checkpoints.hub import ASSETS, find_folder
from specsamp.checkpoints.public_heads import open_head, read_head
from support.weights import shapes_of

FOLDER = ASSETS / "smollm2-head"
TARGET = TransformerConfig(
    vocab_size=49_152,
    width=576,
    num_layers=30,
    num_heads=9,
    num_kv_heads=3,
    feedforward_width=1536,
    max_positions=8192,
    positions="rotary",
    rotary_base=100_000.0,
    gated=True,
    activation="silu",
)


def test_smollm2_head_names_its_target():
    """Golden logits of such files: test_heads.py."""
    checkpoint = open_head("smollm2-head", TARGET, dtype="float32")
    head = checkpoint.config.head()
    assert head.hidden_layers == (1, 14, 26) and head.config.draft_vocab_size == 8192
    assert read_head(checkpoint, head).keys() == shapes_of(head).keys()
    assert find_folder("smollm2-head") == (FOLDER, False)
    pair = hf.find("smollm2")
    verifier = json.loads((FOLDER / "config.json").read_text())["speculators_config"]["verifier"]
    assert (pair.draft, pair.target) == ("smollm2-head", verifier["name_or_path"])

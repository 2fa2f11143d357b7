"""Computes the golden heads anew, with the models of the package speculators; see golden_heads.py.

pip install speculators==0.9.0 torch
PYTHONPATH=tests python -m support.head_maker                    # the committed configurations
PYTHONPATH=tests python -m support.head_maker NAME CONFIG.json   # a new one
"""

import json
import pathlib
import sys
import tempfile

import numpy as np
import safetensors
import torch
from safetensors.numpy import save_file
from speculators.models.dflash import DFlashDraftModel, DFlashSpeculatorConfig
from speculators.models.dflash2 import DFlash2DraftModel, DFlash2SpeculatorConfig
from speculators.models.dspark import DSparkDraftModel, DSparkSpeculatorConfig
from speculators.models.eagle3 import Eagle3SpeculatorConfig
from speculators.models.eagle3.core import Eagle3DraftModel

from support import golden, golden_heads

VOCABULARY, DRAFT, BLOCK, WIDTH = 64, 24, 4, 32
IDS = np.sort(np.random.default_rng(0).permutation(VOCABULARY)[:DRAFT])
MAPS = {"d2t": IDS - np.arange(DRAFT), "t2d": np.isin(np.arange(VOCABULARY), IDS)}
MODELS = {
    "eagle3": (Eagle3SpeculatorConfig, Eagle3DraftModel),
    "dflash": (DFlashSpeculatorConfig, DFlashDraftModel),
    "dflash2": (DFlash2SpeculatorConfig, DFlash2DraftModel),
    "dspark": (DSparkSpeculatorConfig, DSparkDraftModel),
}


def make(config: dict) -> tuple[dict, dict]:
    """Returns the arrays of a golden file, and the shapes of the head's tensors."""
    config_class, model_class = MODELS[config["speculators_model_type"]]
    config = config_class.from_dict(config)
    config.transformer_layer_config._attn_implementation = "eager"
    model = model_class(config).eval()
    for name, value in model.state_dict().items():
        if value.is_floating_point():
            value.copy_(torch.from_numpy(golden.weights(name, tuple(value.shape))))
    maps = MAPS if config.draft_vocab_size != VOCABULARY else {}
    for name, value in maps.items():
        getattr(model, name).copy_(torch.from_numpy(value))
    is_eagle = model_class is Eagle3DraftModel
    length, layers, run = (7, 3, run_eagle) if is_eagle else (9, 2, run_blocks)
    hidden = golden.weights("hidden", (1, length, layers * WIDTH))
    tokens = (np.arange(length, dtype=np.int64) * 11 + 5)[None] % VOCABULARY
    with torch.no_grad(), tempfile.TemporaryDirectory() as folder:
        found = run(model, torch.from_numpy(hidden), torch.from_numpy(tokens))
        model.save_pretrained(folder)
        with safetensors.safe_open(
            pathlib.Path(folder, "model.safetensors"), framework="pt"
        ) as file:
            shapes = {key: file.get_slice(key).get_shape() for key in file.keys()}
    arrays = {name: np.ascontiguousarray(value.numpy()) for name, value in found.items()}
    return {"hidden": hidden, "tokens": tokens, **arrays, **maps}, shapes


def run_eagle(model, hidden, tokens) -> dict:
    """Returns the logits of all positions."""
    seen = []
    model.lm_head.register_forward_hook(lambda _, inputs, output: seen.append(output))
    model(hidden, tokens, torch.zeros_like(tokens), ttt_steps=1)
    return {"logits": seen[0]}


def run_blocks(model, hidden, tokens) -> dict:
    """Returns logits and confidences of all blocks, given the true tokens, ``[A, b, ...]``."""
    anchors = tokens.shape[1] - BLOCK
    given = (
        hidden,
        tokens,
        torch.ones(tokens.shape),
        hidden[..., :WIDTH],
        torch.zeros_like(tokens),
    )
    rows, logits, _, _, indices = model._backbone_forward(*given, max_anchors=anchors)
    rows, logits = rows.view(anchors, BLOCK, -1), logits.view(anchors, BLOCK, -1)
    before = tokens[0, indices].view(anchors, BLOCK)
    if not model.config.sample_from_anchor:
        before = torch.cat([before[:, :1], before[:, :-1]], dim=1)
    found = {"rows": rows, "logits": logits, "before": before}
    if (markov := getattr(model, "markov_head", None)) is not None:
        found["logits"] = logits + markov.block_bias(prev_token_ids=before, hidden_states=rows)
        parts = (
            [rows, markov.prev_embeddings(before)]
            if model.config.confidence_head_with_markov
            else [rows]
        )
        found["confidence"] = model.confidence_head(torch.cat(parts, dim=-1))
    if (selector := getattr(model, "candidate_selector", None)) is not None:
        ids, scores = selector.select(logits, rows, before)
        found["logits"] = torch.full_like(logits, -torch.inf).scatter(-1, ids, scores)
    return found


def write(path: pathlib.Path, config: dict) -> None:
    arrays, shapes = make(config)
    save_file(arrays, path, metadata={"config": json.dumps(config), "shapes": json.dumps(shapes)})


if __name__ == "__main__":
    if len(sys.argv) == 3:
        config = json.loads(pathlib.Path(sys.argv[2]).read_text(encoding="utf-8"))
        is_eagle = config["speculators_model_type"] == "eagle3"
        write(
            (golden_heads.FOLDER if is_eagle else golden_heads.BLOCKS)
            / f"{sys.argv[1]}.safetensors",
            config,
        )
    else:
        for path in (
            *golden_heads.FOLDER.glob("*.safetensors"),
            *golden_heads.BLOCKS.glob("*.safetensors"),
        ):
            write(path, golden_heads.read(path.stem, path.parent)[0]["config"])

"""Writes the golden heads that draft blocks, from the models of the package speculators; see golden_heads.py.

pip install speculators==0.9.0 torch
PYTHONPATH=tests python -m support.block_maker
"""

import json
import pathlib
import tempfile

import numpy as np
import safetensors
import torch
from safetensors.numpy import save_file
from speculators import SpeculatorsConfig, VerifierConfig
from speculators.models.dflash import DFlashDraftModel, DFlashSpeculatorConfig
from speculators.models.dflash2 import DFlash2DraftModel, DFlash2SpeculatorConfig
from speculators.models.dspark import DSparkDraftModel, DSparkSpeculatorConfig
from speculators.proposals.greedy import GreedyTokenProposalConfig
from transformers import Qwen3Config

from support import golden, golden_heads

LENGTH, VOCABULARY, DRAFT, BLOCK, WIDTH = 9, 64, 24, 4, 32
SHAPE = dict(vocab_size=VOCABULARY, hidden_size=WIDTH, num_hidden_layers=2, num_attention_heads=4, head_dim=12)
SHAPE |= dict(num_key_value_heads=2, intermediate_size=48, max_position_embeddings=128, rms_norm_eps=1e-6)
WINDOW = dict(use_sliding_window=True, sliding_window=3, layer_types=["sliding_attention", "full_attention"])
REDUCED = dict(draft_vocab_size=DRAFT)
DSPARK = (DSparkSpeculatorConfig, DSparkDraftModel)
HEADS = {
    "dflash": (DFlashSpeculatorConfig, DFlashDraftModel, WINDOW, REDUCED),
    "dspark_vanilla": (*DSPARK, {}, dict(markov_rank=6)),
    "dspark_gated": (*DSPARK, {}, dict(markov_rank=6, markov_head_type="gated", confidence_head_with_markov=False)),
    "dspark_recurrent": (*DSPARK, WINDOW, REDUCED | dict(markov_rank=6, markov_head_type="rnn")),
    "dflash2": (DFlash2SpeculatorConfig, DFlash2DraftModel, WINDOW, dict(conv_group_size=8, selector_rank=6)),
}
IDS = np.sort(np.random.default_rng(0).permutation(VOCABULARY)[:DRAFT])


def make(config_class, model_class, of_layer, fields):
    layer = Qwen3Config(**SHAPE, **of_layer)
    layer._attn_implementation = "eager"
    config = config_class(
        transformer_layer_config=layer,
        block_size=BLOCK,
        mask_token_id=VOCABULARY - 1,
        aux_hidden_state_layer_ids=[1, 4],
        speculators_config=SpeculatorsConfig(
            algorithm=config_class.model_fields["speculators_model_type"].default,
            proposal_methods=[GreedyTokenProposalConfig(speculative_tokens=3)],
            default_proposal_method="greedy",
            verifier=VerifierConfig(name_or_path=None, architectures=[]),
        ),
        **({"draft_vocab_size": VOCABULARY} | fields),
    )
    model = model_class(config).eval()
    for name, value in model.state_dict().items():
        if value.is_floating_point():
            value.copy_(torch.from_numpy(golden.weights(name, tuple(value.shape))))
    if config.draft_vocab_size != VOCABULARY:
        model.d2t.copy_(torch.from_numpy(IDS - np.arange(DRAFT)))
        model.t2d.copy_(torch.from_numpy(np.isin(np.arange(VOCABULARY), IDS)))
    return model


def run(model, hidden, tokens):
    """Returns logits and confidences of all blocks, given the true tokens before, ``[A, b, ...]``."""
    anchors = LENGTH - BLOCK
    given = (hidden, tokens, torch.ones((1, LENGTH)), hidden[..., :WIDTH], torch.zeros((1, LENGTH), dtype=torch.long))
    rows, logits, _, _, indices = model._backbone_forward(*given, max_anchors=anchors)
    rows, logits = rows.view(anchors, BLOCK, -1), logits.view(anchors, BLOCK, -1)
    before = tokens[0, indices].view(anchors, BLOCK)
    if not model.config.sample_from_anchor:
        before = torch.cat([before[:, :1], before[:, :-1]], dim=1)
    found = {"rows": rows, "logits": logits, "before": before}
    if (markov := getattr(model, "markov_head", None)) is not None:
        found["logits"] = logits + markov.block_bias(prev_token_ids=before, hidden_states=rows)
        parts = [rows, markov.prev_embeddings(before)] if model.config.confidence_head_with_markov else [rows]
        found["confidence"] = model.confidence_head(torch.cat(parts, dim=-1))
    if (selector := getattr(model, "candidate_selector", None)) is not None:
        ids, scores = selector.select(logits, rows, before)
        found["logits"] = torch.full_like(logits, -torch.inf).scatter(-1, ids, scores)
    return {name: value.numpy() for name, value in found.items()}


def write(name, *parts) -> None:
    model = make(*parts)
    hidden = golden.weights("hidden", (1, LENGTH, 2 * WIDTH))
    tokens = (np.arange(LENGTH, dtype=np.int64) * 11 + 5)[None] % VOCABULARY
    with torch.no_grad():
        arrays = run(model, torch.from_numpy(hidden), torch.from_numpy(tokens))
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        config = json.loads(pathlib.Path(folder, "config.json").read_text(encoding="utf-8"))
        with safetensors.safe_open(pathlib.Path(folder, "model.safetensors"), framework="pt") as file:
            shapes = {key: file.get_slice(key).get_shape() for key in file.keys()}
    arrays |= {"hidden": hidden, "tokens": tokens}
    if "d2t" in shapes:
        arrays |= {"d2t": IDS - np.arange(DRAFT), "t2d": np.isin(np.arange(VOCABULARY), IDS)}
    metadata = {"config": json.dumps(config), "shapes": json.dumps(shapes)}
    golden_heads.BLOCKS.mkdir(exist_ok=True)
    arrays = {key: np.ascontiguousarray(value) for key, value in arrays.items()}
    save_file(arrays, golden_heads.BLOCKS / f"{name}.safetensors", metadata=metadata)


if __name__ == "__main__":
    for name, parts in HEADS.items():
        write(name, *parts)

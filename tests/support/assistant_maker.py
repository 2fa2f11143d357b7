"""Computes the golden assistant of Gemma 4 anew, with the models of transformers.

pip install torch transformers
PYTHONPATH=tests python -m support.assistant_maker

Its target is the golden model gemma4. For some prefixes of its texts, the assistant scores three
tokens in turn, with the keys, values and hidden state of the prefix without its last token.
"""

import json
import pathlib
import tempfile

import numpy as np
import torch
import transformers
from safetensors.numpy import save_file

from support import golden, golden_heads

LENGTHS, DRAFTED = (2, 5, 13, 24), (7, 11)


def score(target, assistant, tokens) -> np.ndarray:
    """Returns the logits of three drafted tokens, ``[B, 3, V]``."""
    read = target(tokens[:, :-1], output_hidden_states=True, return_shared_kv_states=True)
    feature, logits = read.hidden_states[-1][:, -1:], []
    for token in (tokens[:, -1:], *(torch.full_like(tokens[:, :1], x) for x in DRAFTED)):
        found = assistant(
            inputs_embeds=torch.cat([target.get_input_embeddings()(token), feature], dim=-1),
            position_ids=torch.tensor([[tokens.shape[1] - 1]]),
            shared_kv_states=read.shared_kv_states,
        )
        feature = found.last_hidden_state
        # transformers fills with the least score less one.
        logits.append(found.logits.masked_fill(found.logits == found.logits.min(), -torch.inf))
    return torch.cat(logits, dim=1).numpy()


def make(config: dict) -> None:
    kind = transformers.AutoConfig.for_model(**config)
    assistant = transformers.AutoModelForCausalLM.from_config(kind, attn_implementation="eager")
    tensors, order = assistant.eval().state_dict(), np.random.default_rng(0).permutation(96)
    tensors.pop("masked_embedding.token_ordering").copy_(torch.from_numpy(order))
    del tensors["lm_head.weight"]  # tied
    shapes = {name: tuple(value.shape) for name, value in tensors.items()}
    for name, shape in shapes.items():
        tensors[name].copy_(torch.from_numpy(golden.weights(name, shape)))
    theirs = golden.read("gemma4")
    with tempfile.TemporaryDirectory() as folder, torch.no_grad():
        target = transformers.AutoModelForCausalLM.from_pretrained(
            theirs.write_checkpoint(pathlib.Path(folder)),
            attn_implementation="eager",
            dtype=torch.float32,
        ).eval()
        tokens = torch.tensor(theirs.tokens_BT, dtype=torch.long)
        logits = [score(target, assistant, tokens[:, :length]) for length in LENGTHS]
    arrays = {"order": order, "logits": np.stack(logits)}
    described = {"config": json.dumps(config), "shapes": json.dumps(shapes)}
    golden_heads.ASSISTANT.parent.mkdir(exist_ok=True)
    save_file(arrays, golden_heads.ASSISTANT, metadata=described)


if __name__ == "__main__":
    make(golden_heads.read(golden_heads.ASSISTANT.stem, golden_heads.ASSISTANT.parent)[0]["config"])

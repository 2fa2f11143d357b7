"""Computes the golden files anew, with the models of Hugging Face transformers; see golden.py.

pip install torch transformers
PYTHONPATH=tests python -m support.golden_maker                    # the committed configurations
PYTHONPATH=tests python -m support.golden_maker NAME CONFIG.json   # a new one
"""

import json
import pathlib
import sys
import tempfile

import numpy as np
import torch
import transformers
from safetensors.numpy import save_file

from support import golden

ROWS, LENGTH = 2, 24
AS_QWEN2 = dict(architectures=["Qwen2ForCausalLM"], model_type="qwen2")


def make(config):
    """Returns the golden file's content of a model; a MiMo, which transformers lacks, is a Qwen 2
    with one more module.
    """
    is_mimo = config["model_type"] == "mimo"
    kind = transformers.AutoConfig.for_model(**config | (AS_QWEN2 if is_mimo else {}))
    with tempfile.TemporaryDirectory() as folder:
        folder = pathlib.Path(folder)
        transformers.AutoModelForCausalLM.from_config(kind).save_pretrained(folder)
        with golden.safetensors.safe_open(folder / "model.safetensors", framework="numpy") as file:
            shapes = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}
        tokens_BT = np.random.default_rng(0).integers(0, 96, size=(ROWS, LENGTH), dtype=np.int64)
        if "pard_token" in config:
            tokens_BT[:, -golden.MASKS :] = config["pard_token"]
        content = dict(shapes=shapes, tokens_BT=tokens_BT.astype(np.int32))
        shown = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        golden.Golden(config=shown, **content, logits_BTV=None, greedy_BT=None).write_checkpoint(
            folder
        )
        model = transformers.AutoModelForCausalLM.from_pretrained(
            folder, attn_implementation="eager", dtype=torch.float32
        ).eval()
    if is_mimo:
        content["shapes"] = shapes | module_shapes(shapes, config["hidden_size"])
    with torch.inference_mode():
        tokens = torch.tensor(tokens_BT)
        logits_BTV = model(tokens).logits.numpy()
        prompts = tokens[:, : golden.PROMPT]
        count = LENGTH - golden.PROMPT
        lengths = dict(
            max_new_tokens=count, min_new_tokens=count, attention_mask=torch.ones_like(prompts)
        )
        text_BT = model.generate(
            prompts, do_sample=False, use_cache=True, pad_token_id=0, **lengths
        )
        best = torch.topk(model(text_BT).logits[:, golden.PROMPT - 1 : -1], 2).values
    closest = float((best[..., 0] - best[..., 1]).min())
    if closest < 1e-3:
        raise ValueError(
            f"greedy text hangs on a difference of {closest}: take another seed of its tokens"
        )
    greedy_BT = text_BT[:, golden.PROMPT :].numpy().astype(np.int32)
    return golden.Golden(config=config, **content, logits_BTV=logits_BTV, greedy_BT=greedy_BT)


def module_shapes(shapes, width):
    """Returns the shapes of a MiMo's module, which test_mimo.py describes."""
    prefix = "model.mtp_layers.0"
    module = {
        name.replace("model.layers.0", prefix): shapes[name]
        for name in shapes
        if "model.layers.0" in name
    }
    for norm in ("token_layernorm", "hidden_layernorm", "final_layernorm"):
        module[f"{prefix}.{norm}.weight"] = (width,)
    return module | {f"{prefix}.input_proj.weight": (width, 2 * width)}


def write(name, made):
    arrays = dict(tokens_BT=made.tokens_BT, logits_BTV=made.logits_BTV, greedy_BT=made.greedy_BT)
    described = dict(config=json.dumps(made.config), shapes=json.dumps(made.shapes))
    save_file(arrays, golden.FOLDER / f"{name}.safetensors", metadata=described)
    print(f"{name:16} logits of size {made.logits_BTV.std():.2f}, greedy {made.greedy_BT[0][:8]}")


if __name__ == "__main__":
    if len(sys.argv) == 3:
        write(sys.argv[1], make(json.loads(pathlib.Path(sys.argv[2]).read_text(encoding="utf-8"))))
    else:
        for name in (*golden.NAMES, golden.PARD):
            write(name, make(golden.read(name).config))

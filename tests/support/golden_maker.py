"""Writes the golden files, from the models of Hugging Face transformers; see golden.py.

pip install torch transformers
PYTHONPATH=tests python -m support.golden_maker
"""

import dataclasses
import json
import pathlib
import tempfile

import numpy as np
import torch
import transformers
from safetensors.numpy import save_file

from support import golden

ROWS, LENGTH = 2, 24
TINY = dict(vocab_size=96, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, max_position_embeddings=64)
TINY |= dict(intermediate_size=48, bos_token_id=None, eos_token_id=None, pad_token_id=None, attention_dropout=0.0)
LLAMA3 = dict(
    rope_type="llama3",
    rope_theta=500.0,
    factor=4.0,
    low_freq_factor=1.0,
    high_freq_factor=4.0,
    original_max_position_embeddings=8,
)
YARN = dict(rope_type="yarn", rope_theta=500.0, factor=4.0, original_max_position_embeddings=8)
GEMMA = TINY | dict(head_dim=16, num_key_value_heads=2, query_pre_attn_scalar=24, sliding_window=5, pad_token_id=0)
QWEN_EXPERTS = dict(num_experts=8, num_experts_per_tok=3, moe_intermediate_size=20, norm_topk_prob=False)
QWEN_EXPERTS |= dict(num_key_value_heads=2, head_dim=16)
GPT2 = dict(vocab_size=96, n_embd=32, n_layer=2, n_head=4, n_positions=64, bos_token_id=None, eos_token_id=None)
GPT2 |= dict(resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)


def configs() -> dict[str, transformers.PreTrainedConfig]:
    t = transformers
    grouped = dict(num_key_value_heads=2)
    return {
        "llama2": t.LlamaConfig(**TINY),
        "llama3": t.LlamaConfig(**TINY, **grouped, rope_parameters=LLAMA3, tie_word_embeddings=True),
        "llama_biases": t.LlamaConfig(
            **TINY,
            **grouped,
            head_dim=12,
            attention_bias=True,
            mlp_bias=True,
            rope_parameters=dict(rope_type="linear", rope_theta=1e4, factor=4.0),
        ),
        "llama_yarn": t.LlamaConfig(**TINY, num_key_value_heads=1, rope_parameters=YARN),
        "mistral": t.MistralConfig(**TINY, **grouped, sliding_window=5),
        "qwen2": t.Qwen2Config(**TINY, **grouped, tie_word_embeddings=True),
        "qwen2_window": t.Qwen2Config(
            **TINY, **grouped, use_sliding_window=True, sliding_window=5, max_window_layers=1
        ),
        "mimo": t.Qwen2Config(**TINY, **grouped, rms_norm_eps=1e-5, rope_parameters=dict(rope_theta=64e4)),
        "qwen3": t.Qwen3Config(**TINY, **grouped, head_dim=16, tie_word_embeddings=True),
        "qwen3_moe": t.Qwen3MoeConfig(**TINY | dict(num_hidden_layers=3), **QWEN_EXPERTS, mlp_only_layers=[1]),
        "mixtral": t.MixtralConfig(**TINY, **grouped, num_local_experts=4, sliding_window=5),
        "gpt2": t.GPT2Config(**GPT2),
        "gpt_neox": t.GPTNeoXConfig(**TINY, rope_parameters=dict(rope_theta=1e4, partial_rotary_factor=0.25)),
        "gpt_neox_serial": t.GPTNeoXConfig(
            **TINY,
            use_parallel_residual=False,
            attention_bias=False,
            tie_word_embeddings=True,
            rope_parameters=dict(rope_theta=1e4, partial_rotary_factor=1.0),
            hidden_act="gelu_new",
        ),
        "gemma2": t.Gemma2Config(**GEMMA, attn_logit_softcapping=2.0, final_logit_softcapping=3.0),
        "gemma3": t.Gemma3TextConfig(
            **GEMMA | dict(num_hidden_layers=3),
            layer_types=["sliding_attention", "sliding_attention", "full_attention"],
            rope_parameters=dict(
                sliding_attention=dict(rope_type="default", rope_theta=1e2),
                full_attention=dict(rope_type="linear", rope_theta=1e4, factor=8.0),
            ),
        ),
        "arcee": t.ArceeConfig(**TINY, num_key_value_heads=1, hidden_act="gelu_pytorch_tanh", tie_word_embeddings=True),
    }


def make(config: transformers.PreTrainedConfig) -> golden.Golden:
    """Returns the golden file's content of a model."""
    with tempfile.TemporaryDirectory() as folder:
        folder = pathlib.Path(folder)
        transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder)
        with golden.safetensors.safe_open(folder / "model.safetensors", framework="numpy") as file:
            shapes = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}
        shown = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        tokens_BT = np.random.default_rng(0).integers(0, 96, size=(ROWS, LENGTH), dtype=np.int64)
        content = dict(config=shown, shapes=shapes, tokens_BT=tokens_BT.astype(np.int32))
        golden.Golden(**content, logits_BTV=None, greedy_BT=None).write_checkpoint(folder)
        model = transformers.AutoModelForCausalLM.from_pretrained(
            folder, attn_implementation="eager", dtype=torch.float32
        ).eval()
    with torch.inference_mode():
        tokens = torch.tensor(tokens_BT)
        logits_BTV = model(tokens).logits.numpy()
        prompts = tokens[:, : golden.PROMPT]
        text_BT = model.generate(
            prompts,
            attention_mask=torch.ones_like(prompts),
            do_sample=False,
            use_cache=True,
            pad_token_id=0,
            max_new_tokens=LENGTH - golden.PROMPT,
            min_new_tokens=LENGTH - golden.PROMPT,
        )
        best = torch.topk(model(text_BT).logits[:, golden.PROMPT - 1 : -1], 2).values
    closest = float((best[..., 0] - best[..., 1]).min())
    if closest < 1e-3:
        raise ValueError(f"greedy text hangs on a difference of {closest}: take another seed of its tokens")
    greedy_BT = text_BT[:, golden.PROMPT :].numpy().astype(np.int32)
    return golden.Golden(**content, logits_BTV=logits_BTV, greedy_BT=greedy_BT)


def with_module(made: golden.Golden) -> golden.Golden:
    """Turns a Qwen 2, which a MiMo is, into a MiMo with the tensors of its module; see test_mimo.py for what it computes."""
    config = made.config | dict(architectures=["MiMoForCausalLM"], model_type="mimo", num_nextn_predict_layers=1)
    prefix, width = "model.mtp_layers.0", config["hidden_size"]
    shapes = {
        key.replace("model.layers.0", prefix): shape for key, shape in made.shapes.items() if "model.layers.0" in key
    }
    norms = ("token_layernorm", "hidden_layernorm", "final_layernorm")
    shapes |= {f"{prefix}.{norm}.weight": (width,) for norm in norms}
    shapes[f"{prefix}.input_proj.weight"] = (width, 2 * width)
    return dataclasses.replace(made, config=config, shapes=made.shapes | shapes)


def write(name: str, made: golden.Golden) -> None:
    arrays = dict(tokens_BT=made.tokens_BT, logits_BTV=made.logits_BTV, greedy_BT=made.greedy_BT)
    described = dict(config=json.dumps(made.config), shapes=json.dumps(made.shapes))
    golden.FOLDER.mkdir(exist_ok=True)
    save_file(arrays, golden.FOLDER / f"{name}.safetensors", metadata=described)


if __name__ == "__main__":
    for name, config in configs().items():
        made = make(config)
        write(name, with_module(made) if name == "mimo" else made)
        print(f"{name:16} logits of size {made.logits_BTV.std():.2f}, greedy {made.greedy_BT[0][:8]}")

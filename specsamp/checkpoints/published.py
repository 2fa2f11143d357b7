"""The ``config.json`` of public models, as their authors published them.

Plans and compile reports of these models need no download. A checkpoint that is read has a file of its own. Tests
compare the numbers of parameters with the published ones.
"""

from __future__ import annotations

from specsamp.checkpoints.architectures import parse_config
from specsamp.models.config import TransformerConfig


def published_config(name: str, dtype: str = "bfloat16") -> TransformerConfig:
    """Returns the shape of one of `CONFIGS`; raises KeyError for another name."""
    return parse_config(name, CONFIGS[name], dtype)[1]


def _llama(**shape) -> dict:
    scaling = dict(
        factor=shape.pop("factor"),
        high_freq_factor=4.0,
        low_freq_factor=1.0,
        original_max_position_embeddings=8192,
        rope_type="llama3",
    )
    return dict(
        architectures=["LlamaForCausalLM"],
        vocab_size=128256,
        max_position_embeddings=131072,
        rope_theta=500000.0,
        rms_norm_eps=1e-5,
        hidden_act="silu",
        rope_scaling=scaling,
        **shape,
    )


def _qwen(architecture: str, **shape) -> dict:
    return dict(
        architectures=[architecture],
        rope_theta=1e6,
        rms_norm_eps=1e-6,
        hidden_act="silu",
        use_sliding_window=False,
        **shape,
    )


def _gemma2(**shape) -> dict:
    return dict(
        architectures=["Gemma2ForCausalLM"],
        vocab_size=256000,
        head_dim=256,
        max_position_embeddings=8192,
        rope_theta=10000.0,
        rms_norm_eps=1e-6,
        hidden_activation="gelu_pytorch_tanh",
        query_pre_attn_scalar=256,
        sliding_window=4096,
        attn_logit_softcapping=50.0,
        final_logit_softcapping=30.0,
        **shape,
    )


def _pythia(**shape) -> dict:
    return dict(
        architectures=["GPTNeoXForCausalLM"],
        max_position_embeddings=2048,
        rotary_pct=0.25,
        rotary_emb_base=10000,
        hidden_act="gelu",
        use_parallel_residual=True,
        layer_norm_eps=1e-5,
        tie_word_embeddings=False,
        **shape,
    )


def _gpt2(**shape) -> dict:
    return dict(
        architectures=["GPT2LMHeadModel"],
        vocab_size=50257,
        n_positions=1024,
        activation_function="gelu_new",
        layer_norm_epsilon=1e-5,
        **shape,
    )


CONFIGS = {
    "meta-llama/Llama-3.1-70B": _llama(
        hidden_size=8192,
        intermediate_size=28672,
        num_hidden_layers=80,
        num_attention_heads=64,
        num_key_value_heads=8,
        tie_word_embeddings=False,
        factor=8.0,
    ),
    "meta-llama/Llama-3.1-8B": _llama(
        hidden_size=4096,
        intermediate_size=14336,
        num_hidden_layers=32,
        num_attention_heads=32,
        num_key_value_heads=8,
        tie_word_embeddings=False,
        factor=8.0,
    ),
    "meta-llama/Llama-3.2-1B": _llama(
        hidden_size=2048,
        intermediate_size=8192,
        num_hidden_layers=16,
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=64,
        tie_word_embeddings=True,
        factor=32.0,
    ),
    "Qwen/Qwen2.5-7B": _qwen(
        "Qwen2ForCausalLM",
        hidden_size=3584,
        intermediate_size=18944,
        num_hidden_layers=28,
        num_attention_heads=28,
        num_key_value_heads=4,
        vocab_size=152064,
        max_position_embeddings=131072,
        tie_word_embeddings=False,
    ),
    "Qwen/Qwen2.5-3B": _qwen(
        "Qwen2ForCausalLM",
        hidden_size=2048,
        intermediate_size=11008,
        num_hidden_layers=36,
        num_attention_heads=16,
        num_key_value_heads=2,
        vocab_size=151936,
        max_position_embeddings=32768,
        tie_word_embeddings=True,
    ),
    "Qwen/Qwen2.5-0.5B": _qwen(
        "Qwen2ForCausalLM",
        hidden_size=896,
        intermediate_size=4864,
        num_hidden_layers=24,
        num_attention_heads=14,
        num_key_value_heads=2,
        vocab_size=151936,
        max_position_embeddings=32768,
        tie_word_embeddings=True,
    ),
    "Qwen/Qwen3-32B": _qwen(
        "Qwen3ForCausalLM",
        hidden_size=5120,
        intermediate_size=25600,
        num_hidden_layers=64,
        num_attention_heads=64,
        num_key_value_heads=8,
        head_dim=128,
        vocab_size=151936,
        max_position_embeddings=40960,
        tie_word_embeddings=False,
    ),
    "Qwen/Qwen3-30B-A3B": _qwen(
        "Qwen3MoeForCausalLM",
        hidden_size=2048,
        intermediate_size=6144,
        num_hidden_layers=48,
        num_attention_heads=32,
        num_key_value_heads=4,
        head_dim=128,
        num_experts=128,
        num_experts_per_tok=8,
        moe_intermediate_size=768,
        norm_topk_prob=True,
        decoder_sparse_step=1,
        mlp_only_layers=[],
        vocab_size=151936,
        max_position_embeddings=40960,
        tie_word_embeddings=False,
    ),
    "Qwen/Qwen3-8B": _qwen(
        "Qwen3ForCausalLM",
        hidden_size=4096,
        intermediate_size=12288,
        num_hidden_layers=36,
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=128,
        vocab_size=151936,
        max_position_embeddings=40960,
        tie_word_embeddings=False,
    ),
    "Qwen/Qwen3-0.6B": _qwen(
        "Qwen3ForCausalLM",
        hidden_size=1024,
        intermediate_size=3072,
        num_hidden_layers=28,
        num_attention_heads=16,
        num_key_value_heads=8,
        head_dim=128,
        vocab_size=151936,
        max_position_embeddings=40960,
        tie_word_embeddings=True,
    ),
    "XiaomiMiMo/MiMo-7B-RL": dict(  # its module for multi-token prediction lies in the same checkpoint
        architectures=["MiMoForCausalLM"],
        hidden_size=4096,
        intermediate_size=11008,
        num_hidden_layers=36,
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=128,
        vocab_size=151680,
        max_position_embeddings=32768,
        rope_theta=640000.0,
        rms_norm_eps=1e-5,
        hidden_act="silu",
        attention_bias=True,
        use_sliding_window=False,
        tie_word_embeddings=False,
        num_nextn_predict_layers=1,
    ),
    "google/gemma-2-9b": _gemma2(
        hidden_size=3584, intermediate_size=14336, num_hidden_layers=42, num_attention_heads=16, num_key_value_heads=8
    ),
    "google/gemma-2-2b": _gemma2(
        hidden_size=2304, intermediate_size=9216, num_hidden_layers=26, num_attention_heads=8, num_key_value_heads=4
    ),
    "EleutherAI/pythia-12b": _pythia(
        hidden_size=5120, intermediate_size=20480, num_hidden_layers=36, num_attention_heads=40, vocab_size=50688
    ),
    "EleutherAI/pythia-160m": _pythia(
        hidden_size=768, intermediate_size=3072, num_hidden_layers=12, num_attention_heads=12, vocab_size=50304
    ),
    "openai-community/gpt2-large": _gpt2(n_embd=1280, n_layer=36, n_head=20),
    "distilbert/distilgpt2": _gpt2(n_embd=768, n_layer=6, n_head=12),
}
# Tuned on the same shapes.
CONFIGS["meta-llama/Llama-3.1-8B-Instruct"] = CONFIGS["meta-llama/Llama-3.1-8B"]
CONFIGS["meta-llama/Llama-3.3-70B-Instruct"] = CONFIGS["meta-llama/Llama-3.1-70B"]

"""Describes a target and a draft with random weights: what speculative decoding costs before
anything is trained.

    python launch/benchmark.py --config=configs/random_pair.py:38m
    python launch/benchmark.py --config=configs/random_pair.py:38m --config.sampling.temperature=0.0
    python launch/benchmark.py --config=configs/random_pair.py:tiny --config.draft_length=2
    python launch/benchmark.py --config=configs/random_pair.py:7b \\
        --config.synthetic_acceptance=0.8 --grid=draft_length=0,1,4,8
    JAX_DISABLE_JIT=1 python launch/demo.py --config=configs/random_pair.py:tiny

Sizes after the colon: "38m", a target for one laptop with a draft of one layer; "small", the same
with four of its twelve layers, for the demo; "tiny", which also runs without compiling anything;
"kernels", tiny models with heads that TPU kernels take; "7b", a target of 7B and a draft of 0.5B
parameters in bfloat16, for one GPU; "3b", a target of 3B and a draft of 0.2B parameters in
bfloat16, for one TPU of 16 GiB. The time of a round is that of a trained pair of the same shape,
because no shape depends on what is accepted. Acceptance is not: both distributions are flat (logits
of standard deviation one), so one sampled draft in three is accepted and hardly any greedy one,
unlike in a trained pair.
"""

from ml_collections import ConfigDict

from configs import common

KERNELS = {"width": 128, "num_heads": 1, "num_layers": 1, "positions": "rotary"}
LARGE = {"vocab_size": 32_000, "max_positions": 2048, "dtype": "bfloat16"}
# Changes of the presets of target and draft.
SHAPES = {
    "38m": ({}, {}),
    "small": ({"num_layers": 4}, {}),
    "tiny": ({}, {"num_layers": 1}),
    "kernels": (KERNELS, KERNELS),
    "7b": (
        LARGE | {"width": 4096, "num_layers": 32, "num_heads": 32},
        LARGE | {"width": 1536, "num_layers": 16, "num_heads": 12},
    ),
    "3b": (
        LARGE | {"width": 3072, "num_layers": 29, "num_heads": 24, "num_kv_heads": 8},
        LARGE | {"width": 1024, "num_layers": 12, "num_heads": 8},
    ),
}


def get_config(size: str = "38m") -> ConfigDict:
    if size not in SHAPES:
        raise ValueError(
            f"no size {size!r} in configs/random_pair.py: choose one of {', '.join(SHAPES)}"
        )
    tiny = size in ("tiny", "kernels")
    target, draft = SHAPES[size]
    config = ConfigDict()
    config.target = common.preset("tiny" if tiny else "target_38m", **target)
    config.draft = common.preset("tiny" if tiny else "draft_1m", **draft)
    return common.add_decoding(
        config,
        draft_length=2 if size == "kernels" else 4,
        prompt_length=8 if tiny else {"7b": 512, "3b": 512}.get(size, 64),
        max_new_tokens=8 if tiny else 128,
        repeats={"38m": 15, "small": 5, "tiny": 3, "kernels": 1, "7b": 9, "3b": 5}[size],
    )

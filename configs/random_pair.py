"""A target and a draft with random weights: what speculative decoding costs, before anything is trained.

    python launch/benchmark.py --config=configs/random_pair.py:38m
    python launch/benchmark.py --config=configs/random_pair.py:38m --config.sampling.temperature=0.0
    python launch/benchmark.py --config=configs/random_pair.py:tiny --config.draft_length=2
    python launch/benchmark.py --config=configs/random_pair.py:7b \\
        --config.synthetic_acceptance=0.8 --grid=draft_length=0,1,4,8
    python launch/benchmark.py --config=configs/random_pair.py:38m --memory
    JAX_DISABLE_JIT=1 python launch/demo.py --config=configs/random_pair.py:tiny

Sizes after the colon: "38m", a target for one laptop with a draft of one layer; "small", the same with
four of its twelve layers, for the demo; "tiny", which also runs without compiling anything; "7b", a target of
7B and a draft of 0.5B parameters in bfloat16, for one GPU. The time of a round is that of a trained pair
of the same shape, because no shape depends on what is accepted. Acceptance is not: both distributions are flat
(logits of standard deviation one), so one sampled draft in three is accepted and hardly any greedy one,
which says nothing about a pair that was trained.
"""

from ml_collections import ConfigDict, config_dict

SIZES = ("38m", "small", "tiny", "7b")


def get_config(size: str = "38m") -> ConfigDict:
    if size not in SIZES:
        raise ValueError(f"no size {size!r} in configs/random_pair.py: choose one of {', '.join(SIZES)}")
    tiny = size == "tiny"
    config = ConfigDict()
    config.target = model("tiny" if tiny else "target_38m")
    config.draft = model("tiny" if tiny else "draft_1m")
    if tiny:
        config.draft.num_layers = 1
    if size == "small":
        config.target.num_layers = 4
    if size == "7b":
        common = {"vocab_size": 32_000, "max_positions": 2048, "dtype": "bfloat16"}
        config.target.update(common | {"width": 4096, "num_layers": 32, "num_heads": 32})
        config.draft.update(common | {"width": 1536, "num_layers": 16, "num_heads": 12})
    config.draft_length = 4  # K; 0 decodes autoregressively
    config.drafter = "model"  # or "ngram", or "none": both sides autoregressive, a test of the benchmark itself
    config.rule = "token"  # or "block", or "coupled"
    config.sampling = ConfigDict()
    config.sampling.temperature = 0.8  # 0.0 is greedy
    config.sampling.top_k = 0  # 0 is off
    config.sampling.top_p = 0.95  # 1.0 is off
    config.sampling.min_p = 0.0  # 0.0 is off
    config.batch = 1
    config.prompt_length = {"tiny": 8, "7b": 512}.get(size, 64)
    config.max_new_tokens = 8 if tiny else 128
    config.repeats = {"38m": 15, "small": 5, "tiny": 3, "7b": 9}[size]
    config.seed = 0
    config.draft_temperature = config_dict.placeholder(float)  # of the draft alone; default: the target's
    config.synthetic_acceptance = config_dict.placeholder(float)  # made-up acceptance, for the benchmark alone
    config.mesh = ConfigDict()
    config.mesh.data = 1  # shares of the batch
    config.mesh.model = 1  # devices that hold one copy of the target together; 1 x 1 is one device
    config.mesh.draft_model_parallelism = (
        0  # devices that hold one copy of the draft together; 0: as many as the target's
    )
    return config


def model(preset: str) -> ConfigDict:
    """A preset of specsamp/models/config.py; what is None here is as the preset has it."""
    integers = ("vocab_size", "width", "num_layers", "num_heads", "num_kv_heads", "feedforward_width", "max_positions")
    return ConfigDict(
        {"preset": preset}
        | {name: config_dict.placeholder(int) for name in integers}
        | {name: config_dict.placeholder(str) for name in ("positions", "activation", "dtype")}
    )

"""Autoregressive decoding beside Hugging Face transformers: a model of the same shape, in turn, in one process.

    pip install torch transformers
    python launch/studies/compare_transformers.py --output=runs/python_pair_transformers.json

Their model has random weights: the time of a token does not depend on which one it is. Both are greedy,
in float32, with a cache, and write the same number of tokens after the same prompts.
"""

import time
from typing import Any

import numpy as np

from launch.lib import entry
from launch.lib.config import ConfigFlag
from launch.lib.experiment import build, headline
from specsamp import NoDrafter, TokenRule, greedy
from specsamp.analysis.timing import Quartiles, take_turns
from specsamp.analysis.workload import decoders
from specsamp.models.config import TransformerConfig

_CONFIG = ConfigFlag("configs/trained_pair.py")
_OUTPUT = entry.define_output()


def main() -> None:
    console = entry.make_console()
    try:
        import torch
        import transformers
    except ModuleNotFoundError as error:
        raise ValueError(f"{error}: pip install torch transformers") from error
    entry.check_output(_OUTPUT.value)
    experiment = build(_CONFIG.value)
    console.print(headline(experiment))
    work = experiment.workload
    if not work.prompts or work.batch != 1:
        raise ValueError("--config: compare a pair with prompts, at batch 1")
    ours = decoders(experiment.pair, {"ours": (NoDrafter(), TokenRule())}, greedy(), work)["ours"]
    theirs = same_shape(experiment.pair.target.config)
    parameters, own = sum(p.numel() for p in theirs.parameters()), experiment.pair.target.config.num_parameters
    if abs(parameters - own) > own / 100:  # their norms have biases
        raise ValueError(f"--config: {own} parameters, but theirs of this shape has {parameters}: nothing to compare")
    runs = {
        "ours": lambda repeat: ours.decode(repeat).loop_seconds,
        "transformers": lambda repeat: complete(theirs, work.prompts[repeat % len(work.prompts)], work.max_new_tokens),
    }
    for run in runs.values():
        run(0)  # warms up
    seconds = take_turns(runs, work.repeats)
    ms = {name: np.array(samples) / work.max_new_tokens * 1e3 for name, samples in seconds.items()}
    ratio = Quartiles.of(ms["transformers"] / ms["ours"])
    for name, values in ms.items():
        console.print(f"{name:13} {Quartiles.of(values).median:6.2f} ms per token")
    console.print(f"ratio         {ratio.median:6.2f}x")
    document = {
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "torch_threads": torch.get_num_threads(),
        "config": _CONFIG.value.to_dict(),
        "transformers_parameters": parameters,
        "ms_per_token": {name: Quartiles.of(values) for name, values in ms.items()},
        "ratio": ratio,
    }
    entry.write_result(_OUTPUT.value, document, console)


def same_shape(config: TransformerConfig) -> Any:
    """Returns their model with the config's shape: ungated, shared kv heads, rotary on whole heads, tied."""
    import transformers

    return transformers.Starcoder2ForCausalLM(
        transformers.Starcoder2Config(
            vocab_size=config.vocab_size,
            hidden_size=config.width,
            num_hidden_layers=config.num_layers,
            num_attention_heads=config.num_heads,
            num_key_value_heads=config.num_kv_heads,
            use_bias=False,
            intermediate_size=config.feedforward_width,
            max_position_embeddings=config.max_positions,
            tie_word_embeddings=True,
            eos_token_id=None,
            bos_token_id=None,
        )
    ).eval()


def complete(model: Any, prompt: tuple[int, ...], new_tokens: int) -> float:
    """Returns the seconds of all tokens but the first, which comes with the prompt's own pass."""
    import torch

    inputs = torch.tensor([prompt])
    settings = dict(do_sample=False, use_cache=True, pad_token_id=0, attention_mask=torch.ones_like(inputs))
    times = []
    for count in (1, new_tokens + 1):
        start = time.perf_counter()
        with torch.inference_mode():
            model.generate(inputs, min_new_tokens=count, max_new_tokens=count, **settings)
        times.append(time.perf_counter() - start)
    return times[1] - times[0]


if __name__ == "__main__":
    entry.run(main, _CONFIG)

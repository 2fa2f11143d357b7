"""Compares autoregressive decoding with Hugging Face transformers: a model of the same shape, in turn, in one process.

    pip install torch transformers
    python launch/study.py transformers --output=runs/python_pair_transformers.json

Their model has random weights: the time of a token does not depend on its value. Both are greedy,
in float32, with a cache, and write the same number of tokens after the same prompts.
"""

import time
from typing import Any

import numpy as np

from launch.lib.study import Document, Published, Study
from specsamp import NoDrafter
from specsamp.analysis.report import Table
from specsamp.analysis.tables import band, ratio
from specsamp.analysis.workload import Quartiles, decoders, take_turns
from specsamp.decoding.method import Method
from specsamp.models.config import TransformerConfig


def prepare(options) -> None:
    """Refuses a machine without their package, before anything is written or read."""
    try:
        import torch  # noqa: F401
        import transformers  # noqa: F401
    except ModuleNotFoundError as error:
        raise ValueError(f"{error}: pip install torch transformers") from error


def measure(options, key, say) -> dict[str, Any]:
    """Decodes the prompts of the pair with both in turn."""
    import torch
    import transformers

    experiment, work = options.experiment, options.experiment.workload
    config = experiment.pair.target.config
    if not work.prompts or work.batch != 1:
        raise ValueError("--config: compare a pair with prompts, at batch 1")
    ours = decoders(experiment.pair, {"ours": Method(drafter=NoDrafter())}, work)["ours"]
    theirs = same_shape(config)
    parameters, own = sum(p.numel() for p in theirs.parameters()), config.num_parameters
    if abs(parameters - own) > own / 100:  # their norms have biases
        raise ValueError(f"--config: {own} parameters, but theirs of this shape has {parameters}: nothing to compare")
    runs = {
        "ours": lambda repeat: ours.decode(repeat).loop_seconds,
        "transformers": lambda repeat: complete(theirs, work.prompts[repeat % len(work.prompts)], work.max_new_tokens),
    }
    for run in runs.values():
        run(0)  # warms up
    seconds = take_turns(runs, work.repeats, say)
    ms = {name: np.array(samples) / work.max_new_tokens * 1e3 for name, samples in seconds.items()}
    return {
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "torch_threads": torch.get_num_threads(),
        "transformers_parameters": parameters,
        "ms_per_token": {name: Quartiles.of(values) for name, values in ms.items()},
        "ratio": Quartiles.of(ms["transformers"] / ms["ours"]),
    }


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


def table(document: Document) -> Table:
    """Returns the milliseconds per token of both."""
    sides = {"ours": "specsamp", "transformers": f"transformers {document['transformers']}"}
    ms = {name: document["ms_per_token"][side] for side, name in sides.items()}
    return Table(
        title="Plain decoding beside Hugging Face transformers",
        header=("plain decoding, greedy, float32, batch 1", "ms per token (quartiles)"),
        rows=[(name, band(one["median"], (one["lower"], one["upper"]), 2)) for name, one in ms.items()],
        note=f"specsamp is {ratio(document['ratio'])} as fast, turn by turn.",
    )


STUDY = Study(
    question="How fast is plain decoding beside Hugging Face transformers?",
    config="configs/trained_pair.py",
    prepare=prepare,
    measure=measure,
    tables={"transformers": Published(["python_pair_transformers"], table)},
)

"""Measures what int8 weights and caches change: logits, held-out loss and acceptance.

    python launch/study.py int8 --output=runs/int8_error.json

Each held-out prompt of a pair is read in one call. The shipped pair is stored in int8, so int8 weights change nothing
more; random weights of the shape of configs/random_pair.py:38m were never rounded. The table of times is a dated record:
launch/benchmark.py times a pair with and without --config.int8.weights.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from scipy.special import log_softmax, softmax

from launch.lib.study import Document, Published, Say, Study
from specsamp.analysis.report import Table
from specsamp.analysis.tables import ratio
from specsamp.checkpoints.trained_pair import load_pair, load_prompts
from specsamp.models.config import target_38m
from specsamp.models.int8 import SIDES, Int8
from specsamp.models.transformer import TransformerLM

INT8 = {
    "float32": Int8(),
    "int8 weights": Int8(weights=SIDES),
    "int8 caches": Int8(caches=SIDES),
    "int8 weights and caches": Int8(weights=SIDES, caches=SIDES),
}
PAIR, LENGTH = "python", 64  # tokens of each prompt that are read


def measure(options, key, say: Say) -> dict[str, Any]:
    """Reads the same texts in every setting, with the pair and with random weights."""
    tokenizer = load_pair(PAIR).tokenizer
    texts = [tokenizer.encode(text)[:LENGTH] for text in load_prompts(PAIR)]
    tokens_BT = jnp.asarray([text for text in texts if len(text) == LENGTH], jnp.int32)
    random, of_pair, of_random = target_38m(), {}, {}
    random_params = TransformerLM(random).init(jax.random.key(0))
    for name, int8 in INT8.items():
        say(name)
        pair = load_pair(PAIR, int8=int8)
        model = TransformerLM.for_backend(dataclasses.replace(random, **int8.of("target")))
        target_BTV = logits_of(pair.target, pair.target_params, tokens_BT)
        draft_BTV = logits_of(pair.draft, pair.draft_params, tokens_BT)
        random_BTV = logits_of(model, random_params, tokens_BT % random.vocab_size)
        if name == "float32":
            plain = target_BTV, random_BTV
        of_next = np.take_along_axis(log_softmax(target_BTV, -1)[:, :-1], np.asarray(tokens_BT)[:, 1:, None], axis=-1)
        of_pair[name] = {
            "target": against(target_BTV, plain[0]) | {"loss, nats per token": -of_next.mean()},
            "acceptance": np.minimum(softmax(target_BTV, -1), softmax(draft_BTV, -1)).sum(-1).mean(),
        }
        of_random[name] = against(random_BTV, plain[1])
    return {"texts": len(tokens_BT), "tokens": LENGTH, "pair": of_pair, "random weights": of_random}


def logits_of(model: TransformerLM, params: Any, tokens_BT: jax.Array) -> np.ndarray:
    """Returns logits ``[B, T, V]`` of texts that are read into an empty cache in one call."""
    batch, length = tokens_BT.shape
    call = jax.jit(model.__call__, compiler_options=dict(model.compiler_options) or None)
    start_B, cache = jnp.zeros((batch,), jnp.int32), model.init_cache(batch, length)
    return np.asarray(call(model.prepare(params), tokens_BT, start_B, cache).logits_BTV, np.float64)


def against(logits_BTV: np.ndarray, plain_BTV: np.ndarray) -> dict[str, float]:
    """Returns how far logits and their distributions are from those in float."""
    ours, theirs = log_softmax(logits_BTV, -1), log_softmax(plain_BTV, -1)
    return {
        "logits, rms of the difference": np.sqrt(np.mean((logits_BTV - plain_BTV) ** 2)),
        "logits, standard deviation": plain_BTV.std(axis=-1).mean(),
        "divergence, nats": (np.exp(theirs) * (theirs - ours)).sum(-1).mean(),
        "same likeliest token": (ours.argmax(-1) == theirs.argmax(-1)).mean(),
    }


def error_table(document: Document) -> Table:
    """Returns what int8 changes of the pair's target, of the pair's acceptance, and of random weights."""
    rms, deviation, likeliest = "logits, rms of the difference", "logits, standard deviation", "same likeliest token"
    rows = []
    for name, found in document["pair"].items():
        target, random = found["target"], document["random weights"][name]
        row = [name, f"{target[rms] / target[deviation]:.2%}", f"{target['divergence, nats']:.1e}"]
        row += [f"{target[likeliest]:.1%}", f"{target['loss, nats per token']:.4f}", f"{found['acceptance']:.4f}"]
        rows.append([*row, f"{random[rms] / random[deviation]:.2%}", f"{random['divergence, nats']:.1e}"])
    header = ("both sides in", "logits differ", "divergence, nats", likeliest, "loss")
    header += ("acceptance at T = 1", "random weights: logits differ", "divergence, nats")
    return Table(title="What int8 changes", header=header, rows=rows)


def speed_table(document: Document) -> Table:
    """Returns the milliseconds of a call in int8, compared with float32 in the same turns."""
    rows, lengths = [], list(document["models"]["random"]["settings"]["float32"]["calls"])
    for model, found in document["models"].items():
        for setting, of_setting in found["settings"].items():
            calls = [of_setting["calls"][length] for length in lengths]
            temporaries = [f"{call['temporaries, MB']:.1f}" for call in calls]
            times = [cell for call in calls for cell in (f"{call['ms']['median']:.1f}", ratio(call["over float32"]))]
            rows.append((model, setting, f"{of_setting['streamed, MB']:.0f}", *temporaries, *times))
    header = ("model", "in", "streamed, MB", *(f"temporaries, MB, tokens: {length}" for length in lengths))
    header += tuple(name for length in lengths for name in (f"ms, tokens: {length}", "over float32"))
    return Table(title="Calls at batch 1", header=header, rows=rows, left=2)


STUDY = Study(
    question="What do int8 weights and caches change?",
    measure=measure,
    tables={
        "int8_error": Published(["int8_error"], error_table),
        "int8_speed": Published(["int8_speed_cpu"], speed_table),
    },
    shown=lambda options: ["int8_error"],
)

"""Measures what int8 weights and caches change: logits, held-out loss and acceptance; or the time of a call.

    python launch/study.py int8 --output=runs/int8_error.json
    python launch/study.py int8 --ask=speed --output=runs/int8_speed_cpu.json

Error: each held-out prompt of a pair is read in one call. The shipped pair is stored in int8, so int8 weights change nothing
more; random weights of the shape of configs/random_pair.py:38m were never rounded. Speed: all settings of a model take turns;
one widens int8 matrices whole, as XLA does on CPUs, where `specsamp.models.cpu_weights` widens them block by block.
"""

from __future__ import annotations

import dataclasses
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from scipy.special import log_softmax, softmax

from launch.lib.study import Document, Option, Published, Say, Study
from specsamp.analysis.report import Table
from specsamp.analysis.tables import ratio
from specsamp.analysis.workload import Quartiles, take_turns
from specsamp.checkpoints.pair import load_pair, load_prompts
from specsamp.models.config import TransformerConfig, target_38m
from specsamp.models.int8 import SIDES, Int8, Int8Weight, is_int8
from specsamp.models.transformer import TransformerLM

INT8 = {
    "float32": Int8(),
    "int8 weights": Int8(weights=SIDES),
    "int8 caches": Int8(caches=SIDES),
    "int8 weights and caches": Int8(weights=SIDES, caches=SIDES),
}
PAIR, LENGTH = "python", 64  # tokens of each prompt that are read
TOKENS, SLOTS, CALLS = (1, 5), 2048, 4  # of a timed program; a call reads all slots
WHOLE = "int8 weights, widened whole"
TIMED = {name: int8.of("target") for name, int8 in INT8.items()}
TIMED |= {"bfloat16": {"dtype": "bfloat16"}, WHOLE: TIMED["int8 weights"]}
LARGE = dict(width=1024, num_layers=9, num_heads=16, num_kv_heads=4, feedforward_width=4096, vocab_size=8192)
LARGE |= dict(positions="rotary", gated=True, activation="silu", tied=False)


def errors(options, say: Say) -> dict[str, Any]:
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
        target_BTV = read(pair.target, pair.target_params, tokens_BT)
        draft_BTV = read(pair.draft, pair.draft_params, tokens_BT)
        random_BTV = read(model, random_params, tokens_BT % random.vocab_size)
        if name == "float32":
            plain = target_BTV, random_BTV
        of_next = np.take_along_axis(log_softmax(target_BTV, -1)[:, :-1], np.asarray(tokens_BT)[:, 1:, None], axis=-1)
        of_pair[name] = {
            "target": against(target_BTV, plain[0]) | {"loss, nats per token": -of_next.mean()},
            "acceptance": np.minimum(softmax(target_BTV, -1), softmax(draft_BTV, -1)).sum(-1).mean(),
        }
        of_random[name] = against(random_BTV, plain[1])
    return {"texts": len(tokens_BT), "tokens": LENGTH, "pair": of_pair, "random weights": of_random}


def read(model: TransformerLM, params: Any, tokens_BT: jax.Array) -> np.ndarray:
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


def speeds(options, say: Say) -> dict[str, Any]:
    """Times calls in every setting, and compares them with those in float32 of the same turn."""
    pair, large, found = load_pair(PAIR), TransformerConfig(**LARGE), {}
    random = large, TransformerLM(large).init(jax.random.key(0))
    models = {f"target of {PAIR}": (pair.target.config, pair.target_params), "random": random}
    for model_name, (config, params) in models.items():
        runs, settings = {}, {}
        for name, changes in TIMED.items():
            say(f"compiling: {model_name}, {name}")
            model = TransformerLM.for_backend(dataclasses.replace(config, **changes))
            weights = model.fit_slots(model.prepare(params), SLOTS)
            if name == WHOLE:
                weights = jax.tree.map(in_one_block, weights, is_leaf=is_int8)
            settings[name] = {
                "streamed, MB": sum(x.nbytes for x, _ in model.matrices_read(weights, 1)) / 1e6,
                "calls": {},
            }
            for tokens in TOKENS:
                runs[name, tokens] = Timed(model, weights, tokens)
        samples = take_turns(runs, options.turns, say)
        for (name, tokens), ms in samples.items():
            settings[name]["calls"][str(tokens)] = {
                "temporaries, MB": runs[name, tokens].temporaries / 1e6,
                "ms": Quartiles.of(ms),
                "over float32": Quartiles.of(np.divide(ms, samples["float32", tokens])),
            }
        found[model_name] = {"config": config, "settings": settings}
    return {"slots": SLOTS, "calls": CALLS, "turns": options.turns, "models": found}


def in_one_block(weight: Any) -> Any:
    """Returns an int8 matrix that a CPU widens whole; other weights as they are."""
    return Int8Weight(weight.values, weight.scale) if is_int8(weight) else weight


class Timed:
    """A program of several calls; called, it returns the milliseconds of one of them."""

    def __init__(self, model: TransformerLM, weights: Any, tokens: int):
        self.fixed = weights, jnp.full((1,), SLOTS // 2)
        self.carry = jnp.zeros((1, tokens), jnp.int32), model.init_cache(1, SLOTS)
        lowered = jax.jit(call_often, static_argnums=0, donate_argnums=3).lower(model, *self.fixed, self.carry)
        self.program = lowered.compile(compiler_options=dict(model.compiler_options) or None)
        self.temporaries = self.program.memory_analysis().temp_size_in_bytes
        self(0)  # warms up

    def __call__(self, turn: int) -> float:
        start = time.perf_counter()
        self.carry = jax.block_until_ready(self.program(*self.fixed, self.carry))
        return (time.perf_counter() - start) * 1e3 / CALLS


def call_often(model: TransformerLM, weights: Any, start_B: jax.Array, carry: Any) -> Any:
    """Calls the model one time after the other, each on the likeliest tokens of the one before."""

    def step(_: Any, carry: Any) -> Any:
        tokens_BT, cache = jax.lax.optimization_barrier(carry)
        output = model(weights, tokens_BT, start_B, cache)
        return output.logits_BTV.argmax(-1).astype(jnp.int32), output.cache

    return jax.lax.fori_loop(0, CALLS, step, carry)


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
    """Returns the milliseconds of a call by what is in int8, beside float32 in the same turns."""
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
    question="What do int8 weights and caches change, and how long does a call take with them?",
    options={
        "ask": Option("error", "Measure what int8 changes, or the time of a call.", choices=("error", "speed")),
        "turns": Option(15, "Speed: how often every setting is timed.", least=2),
    },
    measure=lambda options, key, say: {"error": errors, "speed": speeds}[options.ask](options, say),
    tables={
        "int8_error": Published(["int8_error"], error_table),
        "int8_speed": Published(["int8_speed_cpu"], speed_table),
    },
    shown=lambda options: [f"int8_{options.ask}"],
)

"""Times calls of models on this machine with int8 weights and caches, beside float32 and bfloat16.

    python launch/studies/int8_speed.py --output=runs/int8_speed_cpu.json

Measured are the target of a pair and a random model of 0.6 GB. All settings of a model and a length take turns; a sample is
several calls in one program, as the decoding loop has them. What is widened whole is how a compiler for CPUs treats an
int8 matrix in a product; `specsamp.models.cpu_layout` has it widen one block after the other.
"""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from absl import flags

from launch.lib import entry
from specsamp import load_pair
from specsamp.analysis.timing import Quartiles, take_turns
from specsamp.models import compiling
from specsamp.models.config import TransformerConfig
from specsamp.models.int8 import Int8Weight, is_int8
from specsamp.models.transformer import TransformerLM

_PAIR = flags.DEFINE_string("pair", "python", "The pair whose target is timed, by its name or folder.")
_TOKENS = flags.DEFINE_multi_integer("tokens", [1, 5], "Tokens of a call; may be repeated.", lower_bound=1)
_SLOTS = flags.DEFINE_integer("slots", 2048, "Slots of the caches; a call reads all of them.", lower_bound=16)
_CALLS = flags.DEFINE_integer("calls", 4, "Calls of one sample.", lower_bound=1)
_TURNS = flags.DEFINE_integer("turns", 15, "How often every setting is timed.", lower_bound=2)
_NOTE = flags.DEFINE_string("note", None, "What should be known of the machine while it was measured.")
_OUTPUT = entry.define_output()

LARGE = dict(width=1024, num_layers=9, num_heads=16, num_kv_heads=4, feedforward_width=4096, vocab_size=8192)
WHOLE = "int8 weights, widened whole"
SETTINGS = {
    "float32": {},
    "bfloat16": {"dtype": "bfloat16"},
    "int8 weights": {"weight_dtype": "int8"},
    WHOLE: {"weight_dtype": "int8"},
    "int8 caches": {"cache_dtype": "int8"},
    "int8 weights and caches": {"weight_dtype": "int8", "cache_dtype": "int8"},
}


def main() -> None:
    console = entry.make_console()
    entry.check_output(_OUTPUT.value)
    if _SLOTS.value < max(_TOKENS.value):
        raise ValueError(f"--slots={_SLOTS.value} hold no call of {max(_TOKENS.value)} tokens: give more slots")
    pair = load_pair(_PAIR.value)
    large = TransformerLM(TransformerConfig(**LARGE, positions="rotary", gated=True, activation="silu", tied=False))
    result = {"slots": _SLOTS.value, "calls": _CALLS.value, "turns": _TURNS.value, "note": _NOTE.value, "models": {}}
    with entry.progress(console, "starting") as say:
        result["models"][f"target of {_PAIR.value}"] = measure(pair.target.config, pair.target_params, say)
        result["models"]["random"] = measure(large.config, large.init(jax.random.key(0)), say)
    for name, found in result["models"].items():
        console.print(name, found)
    entry.write_result(_OUTPUT.value, result, console)


def measure(config: TransformerConfig, params: Any, say: Callable[[str], None]) -> dict[str, Any]:
    """Returns the milliseconds of a call by setting and number of tokens, and their ratio to those in float32."""
    runs, settings = {}, {}
    for name, changes in SETTINGS.items():
        say(f"compiling: {name}")
        model = TransformerLM.for_backend(dataclasses.replace(config, **changes))
        weights = model.fit_slots(model.prepare(params), _SLOTS.value)
        if name == WHOLE:
            weights = jax.tree.map(
                lambda x: Int8Weight(x.values, x.scale) if is_int8(x) else x, weights, is_leaf=is_int8
            )
        settings[name] = {"streamed, MB": sum(x.nbytes for x in model.streamed(weights)) / 1e6, "calls": {}}
        for tokens in _TOKENS.value:
            runs[name, tokens], temporaries = timed(model, weights, tokens)
            settings[name]["calls"][str(tokens)] = {"temporaries, MB": temporaries / 1e6}
    samples = take_turns(runs, _TURNS.value, say)
    for (name, tokens), ours in samples.items():
        ratios = [one / plain for one, plain in zip(ours, samples["float32", tokens], strict=True)]
        settings[name]["calls"][str(tokens)] |= {
            "ms": dataclasses.asdict(Quartiles.of(ours)),
            "over float32": dataclasses.asdict(Quartiles.of(ratios)),
        }
    return {"config": dataclasses.asdict(config), "settings": settings}


def timed(model: TransformerLM, weights: Any, tokens: int) -> tuple[Callable[[int], float], int]:
    """Returns what gives the milliseconds of a call, and the bytes that the program takes beside its arguments."""
    tokens_BT, start_B = jnp.zeros((1, tokens), jnp.int32), jnp.full((1,), _SLOTS.value // 2)
    carry = tokens_BT, model.init_cache(1, _SLOTS.value)
    program = call_often.lower(model, weights, start_B, carry, _CALLS.value).compile()
    temporaries = program.memory_analysis().temp_size_in_bytes
    carry = program(weights, start_B, carry, _CALLS.value)

    def run(_: int) -> float:
        nonlocal carry
        start = time.perf_counter()
        carry = jax.block_until_ready(program(weights, start_B, carry, _CALLS.value))
        return (time.perf_counter() - start) * 1e3 / _CALLS.value

    return run, temporaries


@functools.partial(
    compiling.jit,
    options_of=lambda model, *_: model.compiler_options,
    static_argnames="model",
    donate_argnames="carry",
)
def call_often(model: TransformerLM, weights: Any, start_B: jax.Array, carry: Any, calls: int) -> Any:
    """Calls the model one time after the other, each on the likeliest tokens of the one before."""

    def step(_: Any, carry: Any) -> Any:
        tokens_BT, cache = jax.lax.optimization_barrier(carry)
        output = model(weights, tokens_BT, start_B, cache)
        return output.logits_BTV.argmax(-1).astype(jnp.int32), output.cache

    return jax.lax.fori_loop(0, calls, step, carry)


if __name__ == "__main__":
    entry.run(main)

"""Compiles the loop for abstract arguments over batch, K and vocabulary; nothing is allocated or run.

    python launch/study.py memory --config=configs/random_pair.py:38m --output=runs/random_38m_memory.json

All that `Loop.run` needs beyond its arguments is counted; of these the state is donated and becomes the result.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from launch.lib.rules import make_rule
from launch.lib.shapes import known_models
from launch.lib.study import Document, Published, Study
from specsamp.analysis.report import Table
from specsamp.decoding.drafters import ModelDrafter, NoDrafter
from specsamp.decoding.loop import Loop, decode_window
from specsamp.decoding.state import RequestBatch, Weights
from specsamp.models.transformer import TransformerLM
from specsamp.sampling.warp import Warp

# One of B, K and V varies at a time, around 4, 4 and 8192; K = 0 is the autoregressive loop.
GRID = ((1, 4, 8192), (4, 4, 8192), (8, 4, 8192), (4, 0, 8192), (4, 8, 8192), (4, 4, 4096), (4, 4, 32768))
FIELDS = ("target", "draft", "rule", "sampling", "prompt_length", "max_new_tokens")


def measure(options, key, say) -> dict:
    """Compiles every point of the grid; the models differ in V alone."""
    config = options.config.value
    if config.target is None or config.draft is None:
        raise ValueError("--config has no field target, draft: this study needs a configuration that has")
    for field in options.config.fields_set:
        if field.partition(".")[0] not in FIELDS:
            raise ValueError(f"--config.{field} would not be heeded: this study reads {', '.join(FIELDS)}")
    models = {side: model.config for side, model in known_models(config).items()}
    slots, points = config.prompt_length + config.max_new_tokens, []
    for batch, K, vocab_size in GRID:
        say(f"compiling: B = {batch}, K = {K}, V = {vocab_size}")
        sized = {
            side: TransformerLM.for_backend(dataclasses.replace(model, vocab_size=vocab_size))
            for side, model in models.items()
        }
        drafter = ModelDrafter(sized["draft"], K, decode_window()) if K else NoDrafter()
        loop = Loop(target=sized["target"], drafter=drafter, rule=make_rule(config.rule), window=decode_window())
        points.append(loop_memory(loop, config.sampling.warp(), batch, slots, sized["draft"] if K else None))
    heeded = {name: value for name, value in config.recorded.items() if name in FIELDS}
    return {"config": heeded, "models": models, "result": points}


def loop_memory(loop: Loop, sampling: Warp, batch: int, slots: int, draft: TransformerLM | None) -> dict[str, int]:
    """Compiles ``loop.run`` for ``batch`` rows and ``slots`` slots, and returns bytes of temporaries, logits and caches."""

    def prepare() -> Weights:
        key = jax.random.key(0)
        target = loop.target.prepare(loop.target.init(key))
        draft_weights = loop.drafter.prepare(None if draft is None else draft.init(key))
        return Weights(target=loop.target.fit_slots(target, slots), draft=loop.drafter.fit_slots(draft_weights, slots))

    weights = jax.eval_shape(prepare)
    request = jax.eval_shape(lambda: RequestBatch.create(sampling=sampling, limits=[slots] * batch))
    prompt = jax.ShapeDtypeStruct((batch, min(16, slots)), jnp.int32), jax.ShapeDtypeStruct((batch,), jnp.int32)
    state = jax.eval_shape(lambda *arguments: loop.prefill(*arguments, slots=slots), weights, request, *prompt)
    state = dataclasses.replace(state, request=None)
    rounds = jax.ShapeDtypeStruct((), jnp.int32)
    compiled = loop.program.lower(weights, request, state, rounds).compile()
    caches = jax.tree.leaves((state.cache, state.drafter_state))
    return {
        "batch": batch,
        "draft_length": loop.drafter.K,
        "vocab_size": loop.target.vocab_size,
        "slots": slots,
        "temp_bytes": compiled.memory_analysis().temp_size_in_bytes,  # beyond the arguments
        "logits_bytes": 4 * batch * (loop.drafter.K + 1) * loop.target.vocab_size,
        "cache_bytes": sum(leaf.size * leaf.dtype.itemsize for leaf in caches),  # what copies would add
    }


def table(document: Document) -> Table:
    """Returns a row for each point of the grid."""
    names = ("batch", "draft_length", "vocab_size")
    rows = [
        (*(str(point[name]) for name in names), f"{point['temp_bytes'] / 1e6:.2f}", f"{ratio(point):.1f}")
        for point in document["result"]
    ]
    header = ("batch", "K", "vocabulary", "temporaries, MB", "over the logits' B x (K+1) x V floats")
    return Table(title="Memory of the loop beside weights and caches, as compiled", header=header, rows=rows)


def ratio(point: Document) -> float:
    return point["temp_bytes"] / point["logits_bytes"]


STUDY = Study(
    question="How much memory does the decoding loop take beside weights and caches?",
    config="configs/random_pair.py:38m",
    measure=measure,
    tables={"memory": Published(["random_38m_memory"], table)},
)

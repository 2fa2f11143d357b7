"""Times single calls on this machine, from which the costs of rounds with any draft length follow.

    costs = time_calls(pair, {"model": Method(drafter=ModelDrafter(pair.draft, LENGTH))}, Workload())
    make_plan(Profile.of_positions((0.8, 0.85)), costs["model"]).best.draft_length

Whole loops would take a compilation for each draft length. Calls take one for each number of scored positions, and one
for each drafter.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import functools
import math
import time
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from specsamp.analysis.costs import Costs
from specsamp.analysis.workload import Workload, decoders, take_turns
from specsamp.decoding.loop import Loop
from specsamp.decoding.method import Method
from specsamp.decoding.pair import Pair
from specsamp.decoding.state import DecodeState, RequestBatch, Weights

Array = jax.Array

POSITIONS = (1, 2, 4, 6, 8)  # that the target scores in the calls that are timed
LENGTH = max(POSITIONS) - 1  # the draft length of the drafts that are timed
SECONDS = 4.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class CallCosts(Costs):
    """A round scores K + 1 positions, interpolated between timed numbers of positions, and drafts K tokens at equal cost.

    Attributes:
      target_ms: milliseconds of the target's call, by scored positions.
      draft_ms: milliseconds of a drafted token.
    """

    target_ms: Mapping[int, float]
    draft_ms: float

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> CallCosts:
        """Reads costs from a file."""
        return cls(target_ms={int(T): ms for T, ms in fields["target_ms"].items()}, draft_ms=fields["draft_ms"])

    def round_ms(self, draft_length: int, batch: int = 1, context: int | None = None) -> float:
        """Returns the milliseconds of a round of the batch that was timed; raises ValueError beyond the timed positions."""
        if draft_length > LENGTH:
            raise ValueError(f"draft_length {draft_length} lies beyond {LENGTH}, the longest that was timed")
        scored_ms = np.interp(draft_length + 1, [*self.target_ms], [*self.target_ms.values()])
        return float(scored_ms) + draft_length * self.draft_ms


def time_calls(
    pair: Pair, methods: Mapping[str, Method], workload: Workload, seconds: float = SECONDS
) -> dict[str, CallCosts]:
    """Times the target's calls and the drafts of each method, in turn, in the middle of a text of the workload.

    Args:
      methods: ways to decode whose drafters have K = `LENGTH`, by a name.
      seconds: for all calls together, without compiling.

    Returns:
      The costs of rounds with each drafter, from medians.
    """
    states, calls = {}, {}
    for name, decoder in decoders(pair, methods, workload).items():
        engine, requests = decoder.engine, decoder.requests(0)
        shapes = jax.eval_shape(lambda decoder=decoder, requests=requests: decoder.prefill(requests))
        state = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), dataclasses.replace(shapes, request=None))
        states[name] = dataclasses.replace(state, lengths_B=jnp.full_like(state.lengths_B, workload.longest // 2))
        given = engine.weights, engine.arrays(requests)
        calls[name] = name, functools.partial(_draft, engine.loop), given
        for T in POSITIONS if len(states) == 1 else ():
            calls[T] = name, functools.partial(_score, engine.loop, T), given

    def compiled(call: tuple) -> Callable:
        name, function, given = call
        lowered = jax.jit(function, donate_argnums=2).lower(*given, states[name])
        return lowered.compile(compiler_options=dict(pair.target.compiler_options))

    with concurrent.futures.ThreadPoolExecutor() as threads:
        programs = dict(zip(calls, threads.map(compiled, calls.values())))

    def timed(key: str | int, turn: int) -> float:
        name, _, given = calls[key]
        start = time.perf_counter()
        states[name], _ = jax.block_until_ready(programs[key](*given, states[name]))
        return (time.perf_counter() - start) * 1e3

    runs = {key: functools.partial(timed, key) for key in calls}
    once = sum(min(times) for times in take_turns(runs, 3).values())  # the first run of a program is slower
    times = take_turns(runs, max(math.ceil(seconds * 1e3 / once), 3))
    ms = {key: float(np.median(of_key)) for key, of_key in times.items()}
    target_ms = dict(zip(POSITIONS, np.maximum.accumulate([ms[T] for T in POSITIONS]).tolist()))
    return {name: CallCosts(target_ms=target_ms, draft_ms=ms[name] / LENGTH) for name in methods}


def _score(
    loop: Loop, positions: int, weights: Weights, request: RequestBatch, state: DecodeState
) -> tuple[DecodeState, Array]:
    """Calls the target; returns the state with its cache, and the logits."""
    tokens_BT = state.tokens_BS[:, :positions]
    layers = loop.drafter.hidden_layers
    output = loop.target(weights.target, tokens_BT, state.lengths_B, state.cache, hidden_layers=layers)
    return dataclasses.replace(state, cache=output.cache), output.logits_BTV


def _draft(loop: Loop, weights: Weights, request: RequestBatch, state: DecodeState) -> tuple[DecodeState, Array]:
    """Drafts once; returns the state after it, and the tokens."""
    draft, drafter_state, cache = loop.draft(weights, request, state)
    return dataclasses.replace(state, drafter_state=drafter_state, cache=cache), draft.tokens_BK

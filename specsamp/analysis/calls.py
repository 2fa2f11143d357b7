"""Times the calls of a round by themselves: a draft, and the target's call for several numbers of
positions.

    methods = {"model": Method(drafter=ModelDrafter(pair.draft, TIMED_LENGTH))}
    costs = time_calls(pair, methods, Workload())
    make_plan(Profile.of_positions((0.8, 0.85)), costs["model"]).best.draft_length

Calls take turns. One that was timed alone in a loop would be too fast: its weights would stay in a
CPU's cache. Each time holds the launch of a program: compare calls with each other, not with a
round of the loop.
"""

import concurrent.futures
import dataclasses
import functools
import itertools
import math
import time
from collections.abc import Callable, Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from specsamp.analysis.costs import PerCall
from specsamp.analysis.workload import TimedDecoder, Workload, decoders, take_turns
from specsamp.decoding.data_shards import BY_ROWS, REPLICATED
from specsamp.decoding.loop import Loop
from specsamp.decoding.method import Method
from specsamp.decoding.pair import Pair
from specsamp.decoding.state import DecodeState, RequestBatch, Weights

Array = jax.Array

TIMED_POSITIONS = (1, 2, 4, 6, 8)  # that the target scores in the calls that are timed
TIMED_LENGTH = max(TIMED_POSITIONS) - 1  # the draft length of the drafts that are timed
CALL_SECONDS = 2.0


def time_calls(
    pair: Pair, methods: Mapping[str, Method], workload: Workload, seconds: float = CALL_SECONDS
) -> dict[str, PerCall]:
    """Times the target's calls and the drafts of each method, in turn, in the middle of a text of
    the workload.

    Args:
      methods: ways to decode whose drafters have K = `TIMED_LENGTH`, by a name.
      seconds: for all calls together, without compiling.

    Returns:
      The costs of rounds with each drafter, from medians.
    """
    if jax.config.jax_disable_jit:
        raise ValueError(
            "calls are timed as compiled programs: choose the draft length yourself under "
            "JAX_DISABLE_JIT"
        )
    sides = decoders(pair, methods, workload)
    runs = call_runs(sides, TIMED_POSITIONS)
    # The first run of a program is slower.
    once = sum(min(times) for times in take_turns(runs, 3).values())
    times = take_turns(runs, max(math.ceil(seconds * 1e3 / once), 3))
    ms = {key: float(np.median(of_key)) for key, of_key in times.items()}
    rising = itertools.accumulate((ms[T] for T in TIMED_POSITIONS), max)
    target_ms = dict(zip(TIMED_POSITIONS, rising))
    return {
        name: PerCall(target_ms=target_ms, draft_ms=ms[name] / TIMED_LENGTH) for name in methods
    }


def call_runs(
    sides: Mapping[str, TimedDecoder], positions: Sequence[int]
) -> dict[str | int, Callable[[int], float]]:
    """Compiles the draft of each decoder, and the target's call of the first one for each number of
    positions.

    The calls are as in the middle of a text; no prompt is read, since times do not depend on
    tokens.

    Returns:
      A function for each name and each number: it runs the call once, and returns its milliseconds.
    """
    held = {}
    calls = {}
    for name, decoder in sides.items():
        engine = decoder.engine
        state = engine.blank(decoder.workload.batch)
        middle_B = jnp.full_like(state.lengths_B, decoder.workload.longest // 2)
        held[name] = dataclasses.replace(state, request=None, lengths_B=middle_B)
        given = engine.weights, engine.arrays(decoder.requests(0))
        calls[name] = name, functools.partial(_draft, engine.loop), given
        for T in positions if len(held) == 1 else ():
            calls[T] = name, functools.partial(_score, engine.loop, T), given

    def compiled(call: tuple) -> Callable:
        name, function, given = call
        loop = sides[name].engine.loop
        split = loop.shards.map(function, (REPLICATED, BY_ROWS, BY_ROWS))
        # The state goes into the next call.
        same = jax.tree.map(lambda x: x.sharding, held[name]), None
        lowered = jax.jit(split, donate_argnums=2, out_shardings=same).lower(*given, held[name])
        return lowered.compile(compiler_options=dict(loop.target.compiler_options))

    # A GPU's compiler times kernels on the device: programs that are compiled side by side would
    # disturb it.
    with concurrent.futures.ThreadPoolExecutor(
        1 if jax.default_backend() == "gpu" else None
    ) as threads:
        programs = dict(zip(calls, threads.map(compiled, calls.values())))

    def timed(key: str | int, turn: int) -> float:
        name, _, given = calls[key]
        start = time.perf_counter()
        held[name], _ = jax.block_until_ready(programs[key](*given, held[name]))
        return (time.perf_counter() - start) * 1e3

    return {key: functools.partial(timed, key) for key in calls}


def _score(
    loop: Loop, positions: int, weights: Weights, request: RequestBatch, state: DecodeState
) -> tuple[DecodeState, Array]:
    """Calls the target; returns the state with its cache, and the logits."""
    tokens_BT = state.tokens_BS[:, :positions]
    layers = loop.drafter.hidden_layers
    output = loop.target(
        weights.target, tokens_BT, state.lengths_B, state.cache, hidden_layers=layers
    )
    return dataclasses.replace(state, cache=output.cache), output.logits_BTV


def _draft(
    loop: Loop, weights: Weights, request: RequestBatch, state: DecodeState
) -> tuple[DecodeState, Array]:
    """Drafts once; returns the state after it, and the tokens."""
    draft, drafter_state, cache = loop.draft(weights, request, state)
    if jax.tree.structure(drafter_state) != jax.tree.structure(state.drafter_state):
        # Only `Drafter.commit` takes such a state. Drafts are timed without a commit.
        drafter_state = state.drafter_state
    return dataclasses.replace(state, drafter_state=drafter_state, cache=cache), draft.tokens_BK

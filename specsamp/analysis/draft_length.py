"""Measures the draft length K that is fastest on this device, and the costs from which
`specsamp.Adaptive` chooses its own.

    adaptive = calibrate(pair, prompts, lengths=(0, 1, 2, 4, 8), sampling=chain(temperature(0.8)))
    completions = generate(pair, prompts, draft_length=adaptive)        # by sequence and round
    completions = generate(pair, prompts, draft_length=adaptive.usual)  # the best constant

A clock decides, so another machine may get another K, and with it other tokens from the same seed.
Write the K down to reproduce a run. From the costs of calls, `specsamp.analysis.costs`
forecasts the costs of rounds.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from specsamp import validate
from specsamp.analysis.workload import Timing, Workload, decoders, take_turns
from specsamp.decoding.adaptive import LENGTHS, Adaptive, Stop
from specsamp.decoding.drafter import Drafter
from specsamp.decoding.method import Method, make_method
from specsamp.decoding.pair import Pair
from specsamp.decoding.request import Prompt, check_budgets, encode
from specsamp.mesh.distributed import gather_objects

LONGEST_TEXT = 64  # new tokens of a measurement, in caches of the full size
# The measured texts must not share their noise with the completions: K would depend on the random
# numbers that decide the text, and the completions would no longer follow the target's
# distribution.
SEED = 0x9E3779B9


def calibrate(
    pair: Pair,
    prompts: Sequence[Prompt],
    max_new_tokens: int = 128,
    *,
    lengths: Sequence[int] = LENGTHS,
    stop: Stop | None = None,
    make_drafter: Callable[[int], Drafter] | None = None,
    repeats: int = 5,
    **how: Any,
) -> Adaptive:
    """Returns an adaptive draft length, measured by decoding some prompts with each length, in
    turn.

    It has the milliseconds of a round with each length, the best length for all, and the acceptance
    of the longest. The noise of the clock is taken out: a round never costs less than a shorter
    one.

    Args:
      prompts: texts or lists of token ids, as many as are decoded together later; one that is given
        twice is two rows.
      max_new_tokens: the budget of each row; no more than `LONGEST_TEXT` of them are decoded.
      lengths, stop: see `Adaptive`.
      make_drafter: makes the drafter of a K >= 1; default the pair's draft model.
      repeats: measurements of each length.
      how: ``sampling``, ``draft_sampling`` and ``rule``, as `generate` takes them; it raises the
        same errors.
    """
    if len(lengths) < 2:
        raise ValueError(
            f"lengths must be at least two to choose between, such as {LENGTHS}; got "
            f"{tuple(lengths)!r}"
        )
    # Refuses lengths before measuring.
    Adaptive(lengths=tuple(lengths), costs_ms=[1.0] * len(lengths), stop=stop)
    if jax.config.jax_disable_jit:
        raise ValueError(
            "draft lengths are chosen by timing compiled programs: choose K yourself under "
            "JAX_DISABLE_JIT"
        )
    token_lists = tuple(map(tuple, encode(pair, prompts)))
    budget = validate.integer("max_new_tokens", max_new_tokens, 1)
    workload = Workload(
        # `generate` adds idle rows on a mesh, too.
        batch=-(-len(token_lists) // pair.shards.count) * pair.shards.count,
        prompt_length=max(map(len, token_lists)),
        max_new_tokens=min(budget, LONGEST_TEXT),
        repeats=validate.integer("repeats", repeats, 1),
        seed=SEED,
        prompts=token_lists,
    )
    methods: dict[int, Method] = {}
    for K in lengths:
        drafter = make_drafter(K) if make_drafter and K else None
        methods[K] = make_method(pair, draft_length=K, drafter=drafter, **how)
        check_budgets(pair, methods[K].drafter, [*map(len, token_lists)], budget)
    sides = decoders(pair, methods, workload, least_length=workload.prompt_length + budget)
    runs = {K: side.decode for K, side in sides.items()}
    take_turns(runs, 1)  # compiles
    found = adapted_to(take_turns(runs, workload.repeats), stop)
    return gather_objects(found)[0]  # all processes choose the same


def adapted_to(timings: Mapping[int, Sequence[Timing]], stop: Stop | None = None) -> Adaptive:
    """Returns the result of `calibrate` from measurements of each length."""
    # A fifth of a second, which kept costs do not need.
    from scipy.optimize import isotonic_regression

    lengths = tuple(timings)
    medians_ms = [
        np.median([one.loop_seconds / one.rounds * 1e3 for one in timings[K]]) for K in lengths
    ]
    costs_ms = tuple(isotonic_regression(medians_ms).x.tolist())
    # Rounds of all texts, each at the milliseconds of its length: texts differ more than a median
    # shows, clocks less.
    total_ms = [cost * sum(one.rounds for one in timings[K]) for K, cost in zip(lengths, costs_ms)]
    longest = sum(one.stats for one in timings[lengths[-1]])
    return Adaptive(
        lengths=lengths,
        costs_ms=costs_ms,
        stop=stop,
        usual=lengths[int(np.argmin(total_ms))],
        # Nothing was ever drafted.
        acceptance=round(longest.acceptance_rate, 3) if sum(longest.reached) else 0.0,
    )

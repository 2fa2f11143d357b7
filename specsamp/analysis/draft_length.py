"""Chooses the draft length K that is fastest on this device, for given prompts, rule and batch.

    K = choose_draft_length(pair, prompts, max_new_tokens=128, sampling=chain(temperature(0.8)))
    completions = generate(pair, prompts, 128, sampling=chain(temperature(0.8)), draft_length=K)

It measures and compares; nothing is modelled. The choice is a step of its own because a clock decides it: another machine
may get another K, and with it other tokens from the same seed. Write the K down to reproduce a run.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import jax
import numpy as np

from specsamp.analysis.timing import take_turns
from specsamp.analysis.workload import Timing, Workload, decoders
from specsamp.decoding.checks import Prompt, choose_drafter, encode, integer, limits
from specsamp.decoding.drafter import Drafter
from specsamp.decoding.pair import Pair
from specsamp.mesh.distributed import gather_objects
from specsamp.sampling.rejection import TokenRule
from specsamp.sampling.rules import Rule
from specsamp.sampling.warp import Warp, greedy

DRAFT_LENGTHS = (0, 1, 2, 3, 4, 6, 8)
LONGEST_TEXT = 64  # new tokens of a measurement, in caches of the full size
# The measured texts must not share their noise with the completions: K would depend on the random numbers that decide
# the text, and the completions would no longer follow the target's distribution.
SEED = 0x9E3779B9


def choose_draft_length(
    pair: Pair,
    prompts: Sequence[Prompt],
    max_new_tokens: int = 128,
    *,
    sampling: Warp | None = None,
    draft_sampling: Warp | None = None,
    rule: Rule = TokenRule(),
    make_drafter: Callable[[int], Drafter] | None = None,
    draft_lengths: Sequence[int] = DRAFT_LENGTHS,
    num_samples: int = 1,
    repeats: int = 5,
    seed: int = SEED,
    say: Callable[[str], None] = print,
) -> int:
    """Decodes the prompts with each draft length, in turn, and returns the one with the fewest milliseconds per token.

    Args:
      pair: target, draft, tokenizer.
      prompts: texts or lists of token ids, all decoded together, as `generate` does.
      max_new_tokens: the budget of each row; no more than `LONGEST_TEXT` of them are decoded.
      sampling: the target's warp, scalar numbers; default greedy.
      draft_sampling: the draft's own warp; default the target's.
      rule: decides what is accepted.
      make_drafter: makes the drafter of a K >= 1; default the pair's draft model.
      draft_lengths: the K to compare; 0 (plain decoding) is always among them.
      num_samples: completions per prompt.
      repeats: measurements of each K; the median counts.
      seed: of the measured texts; do not use it for the completions.
      say: is told the choice and the numbers behind it, in two lines.

    Raises:
      ValueError: as `generate` does, before anything is compiled; or nothing is compiled (``JAX_DISABLE_JIT``).
    """
    if jax.config.jax_disable_jit:
        raise ValueError("choose_draft_length times compiled programs: choose K yourself under JAX_DISABLE_JIT")
    token_lists = tuple(map(tuple, encode(pair, prompts)))
    lengths = sorted({0, *(integer("a draft length", K, 0) for K in draft_lengths)})
    budget = integer("max_new_tokens", max_new_tokens, 1)
    rows = len(token_lists) * integer("num_samples", num_samples, 1)
    workload = Workload(
        batch=-(-rows // pair.shards.count) * pair.shards.count,  # `generate` adds idle rows on a mesh, too
        prompt_length=max(map(len, token_lists)),
        max_new_tokens=min(budget, LONGEST_TEXT),
        repeats=integer("repeats", repeats, 1),
        seed=seed,
        prompts=token_lists,
    )
    contenders: dict[int, tuple[Drafter, Rule]] = {}
    for K in lengths:
        own = None if make_drafter is None or K == 0 else make_drafter(K)
        drafter = choose_drafter(pair, K if own is None else None, own)
        limits(pair, drafter, [*map(len, token_lists)], budget)
        contenders[K] = (drafter, rule)
    sides = decoders(
        pair,
        contenders,
        greedy() if sampling is None else sampling,
        workload,
        draft_sampling,
        least_length=workload.prompt_length + budget,
    )
    for side in sides.values():
        side.decode(0)  # compiles
    timings = take_turns({K: side.decode for K, side in sides.items()}, workload.repeats)
    ms = {K: gather_objects(_ms_per_token(timings[K], workload))[0] for K in sides}  # all processes choose the same
    best = min(ms, key=lambda K: ms[K])
    if jax.process_index() == 0:
        say(
            f"draft_length {best} for {rows} rows: {ms[best]:.3g} ms per token, {ms[0] / ms[best]:.2f}x plain decoding\n"
            "ms per token (tokens per round) by draft length: "
            + ", ".join(f"{K}: {ms[K]:.3g} ({_per_round(timings[K]):.2f})" for K in sides)
        )
    return best


def _ms_per_token(timings: Sequence[Timing], workload: Workload) -> float:
    tokens = workload.batch * workload.max_new_tokens
    return float(np.median([timing.loop_seconds for timing in timings]) / tokens * 1e3)


def _per_round(timings: Sequence[Timing]) -> float:
    counts = [timing.stats for timing in timings]
    return sum(one.emitted for one in counts) / sum(one.rounds for one in counts)

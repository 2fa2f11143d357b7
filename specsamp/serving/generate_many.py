"""Many prompts over a fixed number of rows: a row that ends hands over its text and takes the next prompt.

for completion in generate_many(pair, prompts, rows=8):
    print(completion.prompt_index, completion.text)
"""

from __future__ import annotations

import math
import os
from collections.abc import Sequence

from specsamp import validate
from specsamp.decoding import checks
from specsamp.decoding.adaptive import Adaptive
from specsamp.decoding.checks import Prompt
from specsamp.decoding.drafter import Drafter
from specsamp.decoding.generate import use_compilation_cache
from specsamp.decoding.job import Job
from specsamp.decoding.pair import Pair
from specsamp.sampling.rejection import TokenRule
from specsamp.sampling.rules import Rule
from specsamp.sampling.warp import Warp
from specsamp.serving.log import CompletionLog
from specsamp.serving.queue import TOGETHER, Clock, Queue
from specsamp.serving.schedule import FirstCome, Schedule

DEFAULT_ROWS = 8


def generate_many(
    pair: Pair,
    prompts: Sequence[Prompt],
    max_new_tokens: int | Sequence[int] = 128,
    *,
    rows: int = DEFAULT_ROWS,
    refill: int = 1,
    rounds_per_slice: int | None = None,
    log: CompletionLog | str | os.PathLike | None = None,
    schedule: Schedule = FirstCome(),
    arrivals: Sequence[float] | None = None,
    clock: Clock = Clock(),
    sampling: Warp | None = None,
    draft_sampling: Warp | None = None,
    draft_length: int | Adaptive | None = None,
    rule: Rule = TokenRule(),
    drafter: Drafter | None = None,
    seed: int = 0,
    stop: Sequence[int | str] | None = None,
    num_samples: int = 1,
    return_log_probs: bool = False,
    prompt_ids: Sequence[int] | None = None,
    require_exact: bool = False,
) -> Queue:
    """Does what `generate` does, ``rows`` texts at a time: the same completions, in the order in which they end.

    A completion is the one that its prompt has alone, whatever the number of rows, the order of the prompts and their
    lengths, unless the drafter looks at several rows at once (`Completion.row_independent`). Arguments that are not
    named here are those of `generate`.

    Args:
      rows: texts that are decoded together; rounded up to a multiple of the data shards.
      refill: rows of a data shard whose prompts are read in one call. The loop returns once so many have ended: more
        than 1 leaves rows idle for longer. Four rows that are free at once are read in one call anyway.
      rounds_per_slice: the loop returns at the latest after so many rounds; default never, or every few rounds where
        prompts have arrivals or strings end texts (the shorter these are, the fewer).
      log: a file of completions, or its path: what ends is added to it, and what it holds is not decoded again. With a
        path, all parameters are read once to tell them from others.
      schedule: who goes first, and who is put aside for others; for this call alone, as it may learn.
      arrivals: for each prompt, when it is there to be decoded, in seconds from the first `next` on; default at once.
      clock: of arrivals and `Queue.served`.

    Returns:
      An iterator of completions, whose `Queue.usage` says how busy the rows were.

    Raises:
      ValueError: before compilation, naming the value and the fix; or the log is of another call.
    """
    use_compilation_cache()
    rows, refill = validate.integer("rows", rows, 1), validate.integer("refill", refill, 1)
    if rounds_per_slice is not None:
        rounds_per_slice = validate.integer("rounds_per_slice", rounds_per_slice, 1)
    method = checks.make_method(
        pair,
        draft_length=draft_length,
        drafter=drafter,
        rule=rule,
        sampling=sampling,
        draft_sampling=draft_sampling,
        require_exact=require_exact,
    )
    job = Job.create(
        pair,
        prompts,
        max_new_tokens,
        method,
        seed=seed,
        stop=stop,
        num_samples=num_samples,
        return_log_probs=return_log_probs,
        prompt_ids=prompt_ids,
        batch=min(rows, _rows_asked(prompts, num_samples)),
        spare=max(refill, TOGETHER) * pair.shards.count,
    )
    if arrivals is not None:
        arrivals = _checked_arrivals(arrivals, len(prompts))
    if log is not None:
        log = log if isinstance(log, CompletionLog) else CompletionLog(log)
        log.open(job, seed)
    times = {"arrivals": arrivals, "clock": clock}
    return Queue(job, rows=rows, refill=refill, rounds=rounds_per_slice, log=log, schedule=schedule, **times)


def _checked_arrivals(arrivals: Sequence[float], count: int) -> list[float]:
    if len(arrivals) != count:
        raise ValueError(f"{len(arrivals)} arrivals for {count} prompts: give each prompt one")
    for index, seconds in enumerate(arrivals):
        if not 0 <= seconds < math.inf:
            raise ValueError(f"arrivals[{index}] must be seconds from 0 on; got {seconds!r}")
    return [float(seconds) for seconds in arrivals]


def _rows_asked(prompts: Sequence[Prompt], num_samples: int) -> int:
    """Returns how many texts there are; what is no list of prompts is refused later."""
    is_list = hasattr(prompts, "__len__") and isinstance(num_samples, int)
    return len(prompts) * num_samples if is_list else 1

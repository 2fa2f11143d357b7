"""``draft_length="auto"``: the K that pays on this device, for these prompts, this rule and this batch.

A few rounds of the caller's own prompts are decoded with K = 0, 1 and 8, in turn. Rounds are timed, acceptance is
counted at K = 8 (of as many rounds at K = 1 much less of a text would be seen), and the planner picks among K = 0 .. 8:
from one scored row to two costs may jump, from there on they grow nearly in a line, but for the products with the
target's matrices, which are timed for every K. Programs of rounds are those that decoding needs, so the one that is
picked is often compiled already. The answer is kept as long as the pair is.

The noise of these rounds is no noise of the completions. Were it the same, K would depend on the very numbers
that decide what is emitted, and the completions would no longer follow the target's distribution.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import operator
import sys
import time
import weakref
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import jax
import numpy as np

from specsamp.analysis.acceptance import Profile
from specsamp.analysis.costs import CostTable, Round
from specsamp.analysis.planner import Plan, make_plan
from specsamp.analysis.split import ProductClock, of_first_process
from specsamp.analysis.spread import Spread
from specsamp.decoding.drafter import Drafter
from specsamp.decoding.job import to_host
from specsamp.decoding.loop import Loop
from specsamp.decoding.pair import Pair
from specsamp.decoding.results import RowStats
from specsamp.decoding.state import DecodeState, Request, Weights

LONGEST = 8
ROUNDS, REPEATS = 16, 4  # rounds of a timing, timings of a draft length
PRODUCT_SECONDS = 0.02  # of a sample of products
OWN_NOISE = 2**32 - 1  # an address that no round has: rounds are addressed by lengths, below 2**31
LONGEST_TEXT = 256  # beyond, a longer budget does not change the best K

_plans: weakref.WeakKeyDictionary[Pair, dict[Any, Plan]] = weakref.WeakKeyDictionary()


class Job(Protocol):
    """A call of `generate` that is ready to run."""

    loop: Loop
    weights: Weights
    request: Request
    rows: int
    num_samples: int  # of a prompt, one after another
    slots: int
    lengths_B: np.ndarray

    def prefill(self) -> DecodeState:
        """The state before the first round."""


def choose(make_job: Callable[..., Job], arguments: Mapping[str, Any]) -> dict[str, Any]:
    """What replaces ``draft_length`` and ``drafter`` in the arguments of `generate`.

    Args:
      make_job: makes a job of the arguments.
      arguments: of `generate`; a drafter of theirs is taken with every K up to its own.

    Raises:
      ValueError: as `generate` does, or the drafter has no K that could be turned, or nothing is compiled.
    """
    if jax.config.jax_disable_jit:
        raise ValueError('draft_length="auto" times compiled programs: give a number under JAX_DISABLE_JIT')
    drafter = arguments["drafter"]
    longest = LONGEST if drafter is None else min(drafter.K, LONGEST)

    def with_length(K: int) -> dict[str, Any]:
        if K == 0 or drafter is None:
            return {"draft_length": K, "drafter": None}
        return {"draft_length": None, "drafter": _turned(drafter, K)}

    job_of = functools.lru_cache(lambda K: make_job(**{**arguments, **with_length(K)}))
    plans = _plans.setdefault(arguments["pair"], {})
    key = _key(job_of(longest))
    if key not in plans:
        plans[key] = calibrate(job_of, longest)
        if jax.process_index() == 0:
            print(f"specsamp: {_verdict(plans[key])}", file=sys.stderr)
    return with_length(plans[key].best.draft_length)


def calibrate(job_of: Callable[[int], Job], longest: int) -> Plan:
    """Times rounds of plain decoding, of the shortest and of the longest draft; forecasts all up to it."""
    jobs = {K: job_of(K) for K in sorted({0, 1, longest})}
    job, lengths = jobs[longest], range(longest + 1)
    batch = len(job.request.limits_B)  # with rows that fill it up on a mesh
    calls = [(batch, K + 1) for K in lengths] if set(lengths) - jobs.keys() else []
    products = ProductClock(job.loop, job.weights, calls, seconds=PRODUCT_SECONDS)
    seconds: dict[int, list[float]] = {K: [] for K in jobs}
    counts: list[list[RowStats]] = []
    for repeat in range(-1, REPEATS):  # the first one compiles
        products.measure()
        for K, one in jobs.items():
            spent, stats = _some_rounds(one, max(repeat, 0))
            if repeat < 0:
                continue
            seconds[K].append(spent / max(max(row.rounds for row in stats), 1))
            if K == longest:
                counts.append(stats)
    if counts == counts[:1] * REPEATS:  # greedy: every repeat is the same
        del counts[1:]
    texts = [functools.reduce(operator.add, repeats) for repeats in zip(*counts, strict=True)]
    if not any(text.rounds for text in texts):  # the target's logits are no distribution: it ends at once, with any K
        return make_plan(Profile.of_rate(0), _costs(seconds, job.rows, {}), draft_lengths=[0], batch=job.rows)
    products_ms = {rows // batch * job.rows: ms for rows, ms in products.samples_ms().items()}
    acceptance = Profile.of_texts(texts, [row // job.num_samples for row in range(job.rows)])
    return make_plan(
        acceptance,
        _costs(seconds, job.rows, products_ms),
        draft_lengths=lengths,
        batch=job.rows,
        new_tokens=int(np.clip(_budget(job), 1, LONGEST_TEXT)),
    )


def _costs(seconds: Mapping[int, list[float]], batch: int, products_ms: Mapping[int, np.ndarray]) -> CostTable:
    """Medians. Products that take longer than rounds that hold them were disturbed, or are not the model's."""
    rounds = {K: Spread.of(np.maximum(spent, 1e-9) * 1e3) for K, spent in seconds.items()}
    products = {rows: Spread.of(np.maximum(samples, 1e-6)) for rows, samples in products_ms.items()}

    def within(K):
        return (K + 1) * batch not in products or products[(K + 1) * batch].median < rounds[K].median

    if not all(map(within, rounds)):
        products = {}

    def error_of(spreads):
        return float(np.median([one.relative_error(REPEATS) for one in spreads])) if spreads else 0.0

    return CostTable(
        rounds=tuple(Round(draft_length=K, ms=one.median, batch=batch) for K, one in rounds.items()),
        error=math.hypot(error_of(rounds.values()), error_of(products.values())),
        products_ms=tuple((rows, one.median) for rows, one in products.items()),
    )


def _some_rounds(job: Job, repeat: int) -> tuple[float, list[RowStats]]:
    """Seconds of a few rounds from the prompts on, and what each row did in them."""
    fold = jax.vmap(jax.random.fold_in, (0, None))
    request = dataclasses.replace(job.request, row_keys_B=fold(job.request.row_keys_B, np.uint32(OWN_NOISE - repeat)))
    state = jax.block_until_ready(dataclasses.replace(job, request=request).prefill())
    start = time.perf_counter()
    state = jax.block_until_ready(job.loop.run(job.weights, state, ROUNDS))
    spent = of_first_process(time.perf_counter() - start)  # all must choose the same
    stats = to_host(state.stats)
    return spent, [RowStats.of(stats, row) for row in range(job.rows)]


def _budget(job: Job) -> float:
    """New tokens of a row, the median."""
    limits_B = np.asarray(to_host(job.request.limits_B))
    lengths_B = np.repeat(job.lengths_B, len(limits_B) // len(job.lengths_B))
    return float(np.median((limits_B - lengths_B)[: job.rows]))


def _turned(drafter: Drafter, K: int) -> Drafter:
    if K == drafter.K:
        return drafter
    fields = dataclasses.fields(drafter) if dataclasses.is_dataclass(drafter) else ()
    if "K" not in {field.name for field in fields}:
        raise ValueError(f'draft_length="auto" needs a drafter whose K is a field of a dataclass; got {drafter!r}')
    return dataclasses.replace(drafter, K=K)


def _key(job: Job) -> Any:
    """Device, models, rule, drafter, the distribution and its numbers, the batch, and what its caches hold; not the texts."""
    laws = (job.request.sampling, job.request.draft_sampling)
    numbers = tuple(np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(laws))
    device = jax.devices()[0]
    size = math.ceil(math.log2(max(_budget(job), 1)))
    return device.platform, device.device_kind, job.loop, jax.tree.structure(laws), numbers, job.rows, job.slots, size


def _verdict(plan: Plan) -> str:
    best, drafted = plan.best, plan.best_speculative

    def told(one):
        return f"{one.speedup.value:.2f}x forecast ({one.speedup.lower:.2f} to {one.speedup.upper:.2f})"

    if best.draft_length:
        return f'draft_length="auto" is {best.draft_length} for {plan.batch} rows: {told(best)}'
    why = "" if drafted is None else f", the best draft, K = {drafted.draft_length}, is {told(drafted)}"
    return f'draft_length="auto" decodes plainly, K = 0, for {plan.batch} rows: speculation does not pay here{why}'

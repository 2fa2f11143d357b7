"""Workloads of measurements, decoders of them, and how both are timed: in turn, without what
surrounds the loop.

A machine may be slow for minutes. So everything that is compared runs once before anything runs
again, ratios are taken within a turn, and medians over turns are reported. `take_turns` is the only
loop of this kind; it never looks at a clock.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import math
import time
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import TypeVar

import jax
import numpy as np

from specsamp import validate
from specsamp.analysis.report import Say, silent
from specsamp.decoding.drafter import Drafter
from specsamp.decoding.engine import Engine, round_slots
from specsamp.decoding.method import Method, make_method
from specsamp.decoding.pair import Pair
from specsamp.decoding.request import Request, make_requests
from specsamp.decoding.results import RowStats
from specsamp.decoding.state import DecodeState, Finish

Array = jax.Array
Name = TypeVar("Name", bound=Hashable)
Answer = TypeVar("Answer")
# Of normal samples: the standard error of the median of N samples is this times the interquartile
# range over sqrt(N).
MEDIAN_ERROR = math.sqrt(math.pi / 2) / 1.349


@dataclasses.dataclass(frozen=True, kw_only=True)
class Quartiles:
    """The median and the quartiles of samples."""

    median: float
    lower: float  # first quartile
    upper: float  # third quartile

    @classmethod
    def of(cls, samples: Sequence[float] | np.ndarray) -> Quartiles:
        lower, median, upper = np.quantile(np.asarray(samples, np.float64), (0.25, 0.5, 0.75))
        return cls(median=float(median), lower=float(lower), upper=float(upper))

    def relative_error(self, samples: int) -> float:
        """Returns the standard error of the median over the median, as for so many normal
        samples.
        """
        return MEDIAN_ERROR * (self.upper - self.lower) / self.median / math.sqrt(samples)


def take_turns(
    runs: Mapping[Name, Callable[[int], Answer]],
    turns: int,
    progress: Say = silent,
) -> dict[Name, list[Answer]]:
    """Calls every run with 0, then every run with 1, and so on; returns the answers of all turns by
    name.

    ``progress`` gets a text on each turn.
    """
    answers: dict[Name, list[Answer]] = {name: [] for name in runs}
    for turn in range(turns):
        progress(f"{turn + 1} of {turns}")
        for name, run in runs.items():
            answers[name].append(run(turn))
    return answers


@dataclasses.dataclass(frozen=True, kw_only=True)
class Workload:
    """Prompts, budgets and repeats of a measurement.

    In repeat r row b decodes prompt ``r * batch + b``; after the last prompt the first follows
    again. Without prompts, random tokens are decoded.
    """

    batch: int = 1
    prompt_length: int = 64  # tokens of a random prompt; at most so many of a given one
    max_new_tokens: int = 128
    repeats: int = 15
    seed: int = 0
    prompts: tuple[tuple[int, ...], ...] = ()

    def __post_init__(self):
        for name in ("batch", "prompt_length", "max_new_tokens", "repeats"):
            validate.integer(name, getattr(self, name), 1)
        validate.integer("seed", self.seed, limit=2**32)
        lengths = [len(prompt) for prompt in self.prompts]
        if lengths and not 1 <= min(lengths) <= max(lengths) <= self.prompt_length:
            raise ValueError(
                f"prompts must have 1 to prompt_length = {self.prompt_length} tokens; "
                f"the shortest has {min(lengths)}, the longest {max(lengths)}"
            )

    @property
    def longest(self) -> int:
        """Tokens of the longest row at its end."""
        return self.prompt_length + self.max_new_tokens

    def rows(self, repeat: int, vocab_size: int) -> tuple[list[list[int]], list[int]]:
        """Returns the prompts of a repeat, and their ids."""
        ids = [repeat * self.batch + row for row in range(self.batch)]
        if self.prompts:
            return [list(self.prompts[index % len(self.prompts)]) for index in ids], ids
        random = np.random.default_rng([self.seed, repeat])
        shape = (self.batch, self.prompt_length)
        return random.integers(0, vocab_size, shape).tolist(), ids


@dataclasses.dataclass(frozen=True, kw_only=True)
class Timing:
    """The times and the output of one decoded batch."""

    prefill_seconds: float
    loop_seconds: float
    rounds: int  # rounds of the slowest row
    rows: tuple[RowStats, ...]
    texts: tuple[tuple[int, ...], ...]  # the tokens of each row, prompt excluded
    from_draft: tuple[tuple[bool, ...], ...]  # whether each of them had been drafted

    @property
    def stats(self) -> RowStats:
        """Returns the counts of all rows together."""
        return sum(self.rows)


@dataclasses.dataclass(frozen=True, kw_only=True)
class TimedDecoder:
    """One way to decode a workload, ready to run."""

    engine: Engine
    workload: Workload

    @property
    def method(self) -> Method:
        """Returns how it decodes."""
        return self.engine.method

    def requests(self, repeat: int) -> list[Request]:
        """Returns the requests of one repeat; no token stops a row."""
        work = self.workload
        pair = self.engine.pair
        prompts, ids = work.rows(repeat, pair.target.vocab_size)
        return make_requests(
            pair, self.method, prompts, work.max_new_tokens, seed=work.seed, stop=(), prompt_ids=ids
        )

    def prefill(self, requests: Sequence[Request]) -> DecodeState:
        """Returns the state before the first round."""
        return self.engine.prefill(requests, width=self.workload.prompt_length)

    def compile(self) -> None:
        """Compiles prefill and loop at the same time; nothing on a mesh. An error of the loop comes
        again in `decode`.
        """
        if self.engine.pair.shards.mesh is None and not jax.config.jax_disable_jit:
            with concurrent.futures.ThreadPoolExecutor(1) as thread:
                # Rows that have ended.
                thread.submit(self.engine.run, self.engine.blank(self.workload.batch))
                self.prefill(self.requests(0))

    def decode(self, repeat: int) -> Timing:
        """Decodes the prompts of one repeat to the end; ``loop_seconds`` holds nothing but the
        loop.

        Raises:
          ValueError: a row ended early, because the target's logits were no distribution.
        """
        requests = self.requests(repeat)
        start = time.perf_counter()
        state = jax.block_until_ready(self.prefill(requests))
        middle = time.perf_counter()
        state = jax.block_until_ready(self.engine.run(state))
        end = time.perf_counter()
        rows = self.engine.take(state, requests)
        if any(row.finish is Finish.INVALID for row in rows):
            raise ValueError(
                "the target's logits hold NaN, or nothing finite: a row ended before its last token"
            )
        return Timing(
            prefill_seconds=middle - start,
            loop_seconds=end - middle,
            rounds=max(row.stats.rounds for row in rows),
            rows=tuple(row.stats for row in rows),
            texts=tuple(tuple(row.tokens) for row in rows),
            from_draft=tuple(tuple(row.from_draft) for row in rows),
        )


def decoders(
    pair: Pair, methods: Mapping[Name, Method], workload: Workload, *, least_length: int = 0
) -> dict[Name, TimedDecoder]:
    """Makes a decoder for each method, all with caches of the same size: attention reads all slots.

    Caches have room for rows of ``least_length`` tokens. ValueError is raised where workload or
    caches do not fit.
    """
    check_fits(pair, [method.drafter for method in methods.values()], workload)
    headroom = max(method.loop(pair).headroom for method in methods.values())
    slots = round_slots(max(workload.longest, least_length) + headroom)
    prompts, _ = workload.rows(0, pair.target.vocab_size)
    made = {}
    for name, method in methods.items():
        make_method(pair, method=method)
        requests = make_requests(pair, method, prompts, workload.max_new_tokens, stop=())
        made[name] = TimedDecoder(
            engine=Engine.create(pair, method, requests, slots=slots), workload=workload
        )
    return made


def check_fits(pair: Pair, drafters: Iterable[Drafter], workload: Workload) -> None:
    """Raises ValueError if a workload or a K has too many positions for a model, or rows do not
    divide over data shards.
    """
    if workload.batch % pair.shards.count:
        raise ValueError(
            f"batch {workload.batch} does not divide over the {pair.shards.count} shards of the "
            "data axis"
        )
    for drafter in drafters:
        check_positions("target", pair.target.max_positions, workload, drafter.K)
        check_positions("draft", drafter.max_positions, workload, drafter.K)


def check_positions(
    name: str, positions: int | None, workload: Workload, draft_length: int
) -> None:
    """Raises ValueError if the model of this name has too few positions for a workload or for K
    drafted tokens.
    """
    if positions is None:
        return
    if workload.longest > positions:
        raise ValueError(
            f"prompt_length {workload.prompt_length} and max_new_tokens {workload.max_new_tokens} "
            f"need {workload.longest} positions, but the {name} has {positions}"
        )
    if draft_length >= positions:
        raise ValueError(
            f"draft_length {draft_length} must be below the {name}'s {positions} positions, such "
            "as 4"
        )

"""Workloads of measurements, decoders of them, and how both are timed: in turn, without what surrounds the loop.

A machine may be slow for minutes. So everything that is compared runs once before anything runs again, ratios are taken
within a turn, and medians over turns are reported. `take_turns` is the only loop of this kind; it never looks at a clock.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import operator
import time
import types
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from specsamp import validate
from specsamp.decoding.adaptive import Adaptive
from specsamp.decoding.drafter import Drafter
from specsamp.decoding.engine import check_memory, round_slots, to_host
from specsamp.decoding.loop import Loop, decode_window
from specsamp.decoding.pair import Pair
from specsamp.decoding.results import RowStats
from specsamp.decoding.state import DecodeState, RequestBatch, Weights
from specsamp.sampling.rules import Rule
from specsamp.sampling.warp import Warp

Array = jax.Array
Name = TypeVar("Name", bound=Hashable)
Answer = TypeVar("Answer")
# Of normal samples: the standard error of the median of N samples is this times the interquartile range over sqrt(N).
MEDIAN_ERROR = math.sqrt(math.pi / 2) / 1.349
UNLIMITED = np.iinfo(np.int32).max


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
        """Returns the standard error of the median over the median, as for so many normal samples."""
        return MEDIAN_ERROR * (self.upper - self.lower) / self.median / math.sqrt(samples)


def take_turns(
    runs: Mapping[Name, Callable[[int], Answer]],
    turns: int,
    progress: Callable[[str], None] = lambda text: None,
) -> dict[Name, list[Answer]]:
    """Calls every run with 0, then every run with 1, and so on.

    Args:
      runs: functions that take turns, in this order; each gets the number of the turn.
      turns: how many.
      progress: gets the number of the turn.

    Returns:
      By name, the answers of all turns.
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

    In repeat r row b decodes prompt ``r * batch + b``; after the last prompt the first follows again. Without prompts,
    random tokens are decoded.
    """

    batch: int = 1
    prompt_length: int = 64  # tokens of a random prompt; at most so many of a given one
    max_new_tokens: int = 128
    repeats: int = 15
    seed: int = 0
    prompts: tuple[tuple[int, ...], ...] = ()

    def __post_init__(self):
        for name in ("batch", "prompt_length", "max_new_tokens", "repeats", "seed"):
            validate.integer(name, getattr(self, name), *((0, 2**32) if name == "seed" else (1,)))
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

    def rows(self, repeat: int, vocab_size: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Returns tokens ``[B, prompt_length]``, lengths ``[B]`` and ids ``[B]`` of the prompts of a repeat."""
        ids_B = repeat * self.batch + np.arange(self.batch)
        if not self.prompts:
            shape = (self.batch, self.prompt_length)
            tokens_BP = np.random.default_rng([self.seed, repeat]).integers(0, vocab_size, shape)
            return tokens_BP.astype(np.int32), np.full(self.batch, self.prompt_length, np.int32), ids_B
        tokens_BP = np.zeros((self.batch, self.prompt_length), np.int32)
        chosen = [self.prompts[index % len(self.prompts)] for index in ids_B]
        for row, prompt in zip(tokens_BP, chosen, strict=True):
            row[: len(prompt)] = prompt
        return tokens_BP, np.array([len(prompt) for prompt in chosen], np.int32), ids_B


@dataclasses.dataclass(frozen=True, kw_only=True)
class Timing:
    """The times and the output of one decoded batch."""

    prefill_seconds: float
    loop_seconds: float
    rounds: int  # of the loop: those of its slowest row
    rows: tuple[RowStats, ...]
    texts: tuple[tuple[int, ...], ...]  # the tokens of each row, prompt excluded
    from_draft: tuple[tuple[bool, ...], ...]  # whether each of them had been drafted

    @property
    def stats(self) -> RowStats:
        """Returns the counts of all rows together."""
        return functools.reduce(operator.add, self.rows)


@dataclasses.dataclass(frozen=True, kw_only=True)
class TimedDecoder:
    """One way to decode a workload, ready to run."""

    loop: Loop
    weights: Weights
    sampling: Warp
    draft_sampling: Warp | None  # None: the target's
    num_tokens: int | None  # ids from here on are padding of the vocabulary; None: there are none
    workload: Workload
    slots: int
    adaptive: Adaptive | None = None  # the draft length, where it is not always the drafter's K

    def request(self, repeat: int) -> RequestBatch:
        """Returns the request of one repeat; no token stops a row."""
        work = self.workload
        _, lengths_B, ids_B = work.rows(repeat, self.loop.target.vocab_size)
        return RequestBatch.create(
            sampling=self.sampling,
            draft_sampling=self.draft_sampling,
            limits=lengths_B + work.max_new_tokens,
            prompt_ids=ids_B,
            seed=work.seed,
            num_tokens=self.num_tokens,
            adaptive=None if self.adaptive is None else self.adaptive.for_rows(work.batch),
        )

    def prefill(self, repeat: int) -> DecodeState:
        """Returns the state before the first round of one repeat."""
        tokens_BP, lengths_B, _ = self.workload.rows(repeat, self.loop.target.vocab_size)
        return self.loop.prefill(
            self.weights, self.request(repeat), jnp.asarray(tokens_BP), jnp.asarray(lengths_B), slots=self.slots
        )

    def decode(self, repeat: int) -> Timing:
        """Decodes the prompts of one repeat to the end; ``loop_seconds`` holds nothing but the loop.

        Raises:
          ValueError: a row ended early, because the target's logits were no distribution.
        """
        start = time.perf_counter()
        state = jax.block_until_ready(self.prefill(repeat))
        middle = time.perf_counter()
        state = jax.block_until_ready(self.loop.run(self.weights, state, UNLIMITED))
        end = time.perf_counter()
        state = to_host(dataclasses.replace(state, cache=None, drafter_state=None, request=None))
        _, lengths_B, _ = self.workload.rows(repeat, self.loop.target.vocab_size)
        emitted = [slice(*ends) for ends in zip(lengths_B, state.lengths_B)]
        if (state.lengths_B - lengths_B < self.workload.max_new_tokens).any():
            raise ValueError("the target's logits hold NaN, or nothing finite: a row ended before its last token")

        def of_rows(x_BS):
            return tuple(tuple(row[new].tolist()) for row, new in zip(x_BS, emitted, strict=True))

        def of_row(row):
            meter = state.meter and jax.tree.map(lambda x_BS: x_BS[row, emitted[row]], state.meter)
            return RowStats.of(state.stats, row, meter)

        return Timing(
            prefill_seconds=middle - start,
            loop_seconds=end - middle,
            rounds=int(state.stats.rounds_B.max()),
            rows=tuple(of_row(row) for row in range(self.workload.batch)),
            texts=of_rows(state.tokens_BS),
            from_draft=of_rows(state.from_draft_BS),
        )


def decoders(
    pair: Pair,
    contenders: Mapping[Name, tuple[Drafter, Rule]],
    sampling: Warp,
    workload: Workload,
    draft_sampling: Warp | None = None,
    *,
    least_length: int = 0,
    adaptive: Mapping[Name, Adaptive | None] = types.MappingProxyType({}),
) -> dict[Name, TimedDecoder]:
    """Makes a decoder for each contender, all with caches of the same size: attention reads all slots.

    Args:
      contenders: drafter and rule by name.
      draft_sampling: the draft's own warp; default the target's.
      adaptive: the draft lengths of those contenders whose K is only the most.
      least_length: caches have room for rows of this length, even if the workload's are shorter.

    Raises:
      ValueError: the workload does not fit, see `check_fits`, or its caches do not fit into memory.
    """
    check_fits(pair, [drafter for drafter, _ in contenders.values()], workload)
    loops = {
        name: Loop(target=pair.target, drafter=drafter, rule=rule, window=decode_window(), shards=pair.shards)
        for name, (drafter, rule) in contenders.items()
    }
    longest = max(workload.longest, least_length) + max(loop.headroom for loop in loops.values())
    slots = round_slots(longest)
    for loop in loops.values():
        check_memory(loop, rows=workload.batch, slots=slots)
    return {
        name: TimedDecoder(
            loop=loop,
            weights=pair.weights(loop.drafter, slots),
            sampling=sampling,
            draft_sampling=draft_sampling,
            num_tokens=pair.num_tokens,
            workload=workload,
            slots=slots,
            adaptive=adaptive.get(name),
        )
        for name, loop in loops.items()
    }


def check_fits(pair: Pair, drafters: Iterable[Drafter], workload: Workload) -> None:
    """Checks a workload before anything is compiled.

    Raises:
      ValueError: it needs more positions than a model has, K is as long as these, or its rows do not divide over the
        data shards.
    """
    if workload.batch % pair.shards.count:
        raise ValueError(f"batch {workload.batch} does not divide over the {pair.shards.count} shards of the data axis")
    for drafter in drafters:
        check_positions("target", pair.target.max_positions, workload, drafter.K)
        check_positions("draft", drafter.max_positions, workload, drafter.K)


def check_positions(name: str, positions: int | None, workload: Workload, draft_length: int) -> None:
    """Raises ValueError if the model of this name has too few positions for a workload or for K drafted tokens."""
    if positions is not None and workload.longest > positions:
        raise ValueError(
            f"prompt_length {workload.prompt_length} and max_new_tokens {workload.max_new_tokens} need "
            f"{workload.longest} positions, but the {name} has {positions}"
        )
    if positions is not None and draft_length >= positions:
        raise ValueError(f"draft_length {draft_length} must be below the {name}'s {positions} positions, such as 4")

"""Prompts in, completions out.

    completions = generate(pair, ["def fib(n):"], sampling=chain(temperature(0.8), top_p(0.95)))

Everything is checked before anything is compiled (`specsamp.decoding.checks`). Prompt lengths and
budgets are rounded up to buckets; within them they are data, as are sampling parameters, seeds and stop
tokens. A program is compiled once per pair of buckets, number of prompts and samples, drafter, rule,
chain of warps (not their numbers) and ``return_log_probs``, and kept on disk between processes
(`use_compilation_cache`).
"""

from __future__ import annotations

import dataclasses
import os
import pathlib
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils

from specsamp.decoding import checks
from specsamp.decoding.checks import Prompt
from specsamp.decoding.loop import Loop
from specsamp.decoding.pair import Pair
from specsamp.decoding.text import TextStream
from specsamp.decoding.types import DecodeState, Drafter, Finish, Request, Rule, Stats, Weights
from specsamp.sampling.rng import row_keys
from specsamp.sampling.rules import TokenRule
from specsamp.sampling.warp import Warp, chain, first_tokens, for_rows, greedy

SMALLEST_BUCKET = 16
SLOTS_MULTIPLE = 128
STOPS_MULTIPLE = 8


@dataclasses.dataclass(frozen=True, kw_only=True)
class RowStats:
    """What one row (or the sum of several) did; only emitted tokens count."""

    rounds: int
    emitted: int
    drafted: int
    reached: tuple[int, ...]  # per drafted position, rounds in which it was judged
    accepted_counts: tuple[int, ...]  # rounds by number of accepted tokens, 0 .. K

    @property
    def accepted(self) -> int:
        return sum(n * rounds for n, rounds in enumerate(self.accepted_counts))

    @property
    def acceptance_rate(self) -> float:
        """Accepted per judged drafted token (the alpha of the theory); nan if nothing was drafted."""
        return self.accepted / sum(self.reached) if sum(self.reached) else float("nan")

    @property
    def acceptance_by_position(self) -> tuple[float, ...]:
        """The share of drafted tokens accepted at each position, given that the position was reached."""
        accepted = [sum(self.accepted_counts[i + 1 :]) for i in range(len(self.reached))]
        return tuple(a / r if r else float("nan") for a, r in zip(accepted, self.reached))

    @property
    def emitted_per_round(self) -> float:
        return self.emitted / self.rounds if self.rounds else float("nan")

    @classmethod
    def of(cls, stats: Stats, row: int) -> RowStats:
        """One row of what the loop counted, on the host."""
        return cls(
            rounds=int(stats.rounds_B[row]), emitted=int(stats.emitted_B[row]), drafted=int(stats.drafted_B[row]),
            reached=tuple(stats.reached_BK[row].tolist()), accepted_counts=tuple(stats.accepted_BT[row].tolist()),
        )  # fmt: skip

    def __add__(self, other: RowStats) -> RowStats:
        add = lambda a, b: tuple(x + y for x, y in zip(a, b, strict=True))
        return RowStats(
            rounds=self.rounds + other.rounds, emitted=self.emitted + other.emitted,
            drafted=self.drafted + other.drafted, reached=add(self.reached, other.reached),
            accepted_counts=add(self.accepted_counts, other.accepted_counts),
        )  # fmt: skip


@dataclasses.dataclass(frozen=True, kw_only=True)
class Completion:
    """One row of a result."""

    prompt_index: int
    sample_index: int
    text: str | None  # without the stop token; None if the pair has no tokenizer
    tokens: list[int]  # the stop token included
    from_draft: list[bool]  # whether each token had been drafted
    log_probs: list[float] | None  # under the target at temperature 1, unfiltered
    finish: str  # "stop", "length", or "invalid" where the target's logits are no law (NaN, inf)
    exact: bool  # whether rule and drafter are lossless
    stats: RowStats


@dataclasses.dataclass(frozen=True, kw_only=True)
class Chunk:
    """What a row gained in one slice of a stream."""

    prompt_index: int
    sample_index: int
    text: str | None
    tokens: list[int]
    from_draft: list[bool]
    finish: str | None  # None while the row is running


def generate(
    pair: Pair,
    prompts: Sequence[Prompt],
    max_new_tokens: int | Sequence[int] = 128,
    *,
    sampling: Warp | None = None,
    draft_sampling: Warp | None = None,
    draft_length: int | str | None = None,
    rule: Rule = TokenRule(),
    drafter: Drafter | None = None,
    seed: int = 0,
    stop: Sequence[int | str] | None = None,
    num_samples: int = 1,
    return_log_probs: bool = False,
    prompt_ids: Sequence[int] | None = None,
) -> list[Completion]:
    """Completes prompts; the tokens follow the target's warped law exactly.

    Args:
      pair: target, draft, tokenizer.
      prompts: texts or lists of token ids, of any lengths from 1.
      max_new_tokens: budget, one for all or one per prompt.
      sampling: a warp (see `specsamp.sampling.warp`), its numbers scalar or one per prompt; default greedy.
        Ids that the tokenizer does not have (a padded vocabulary) are always excluded.
      draft_sampling: the draft's own warp; default the target's. Any choice is exact, the more alike
        the two the more is accepted.
      draft_length: K, tokens drafted per round; 0 decodes autoregressively. Default: 4, or the drafter's.
        "auto" measures a few rounds of these prompts, once for a pair, batch, law and size of caches, and takes the K
        that pays, from 0 to 8 (or the drafter's K); it says on stderr which (see `specsamp.analysis.auto_length`).
        Clocks decide, so another process may take another K, and with it draw other tokens from the same seed.
      rule: `TokenRule`, `BlockRule` or `CoupledRule`.
      drafter: your own, or `NgramDrafter`; default the pair's draft model.
      seed: in [0, 2**32); same seed and prompt id, same noise, whatever the batch around a prompt. Calls that
        share both share their noise: give each its own seed or ``prompt_ids``.
      stop: token ids or texts that are one token each; default the pair's, or the tokenizer's end of text.
      num_samples: completions per prompt, from one prefill.
      return_log_probs: also return the target's log-probability of each token.
      prompt_ids: the prompts' indices in your data set, if this call handles a part of it: a completion
        depends on its id, not on its place in the call. Default 0, 1, 2, ...

    Returns:
      ``num_samples`` completions for each prompt, in order.

    Raises:
      ValueError: before compilation, naming the value and the fix.
    """
    job = _make_job(_arguments(locals()))
    return job.completions(job.loop.run(job.weights, job.request, job.prefill(), np.iinfo(np.int32).max))


def stream(
    pair: Pair,
    prompts: Sequence[Prompt],
    max_new_tokens: int | Sequence[int] = 128,
    *,
    rounds_per_chunk: int = 8,
    sampling: Warp | None = None,
    draft_sampling: Warp | None = None,
    draft_length: int | str | None = None,
    rule: Rule = TokenRule(),
    drafter: Drafter | None = None,
    seed: int = 0,
    stop: Sequence[int | str] | None = None,
    num_samples: int = 1,
    prompt_ids: Sequence[int] | None = None,
) -> Iterator[Chunk]:
    """`generate`, a few rounds at a time: the same tokens, as they come.

    The loop stays on the device for ``rounds_per_chunk`` rounds; a row's last chunk says how it ended.
    Text that is not yet complete (half of a multi-byte character) is held back.
    """
    rounds_per_chunk = checks.integer("rounds_per_chunk", rounds_per_chunk, 1)
    job = _make_job(_arguments({**locals(), "return_log_probs": False}))
    return _chunks(job, rounds_per_chunk)


def use_compilation_cache() -> str | None:
    """Keeps compiled programs on disk between processes, unless JAX was told where (or not) to.

    Returns:
      The folder: that of ``JAX_COMPILATION_CACHE_DIR`` or ``jax_compilation_cache_dir`` if set, else
      ``~/.cache/specsamp/xla``; None if ``JAX_ENABLE_COMPILATION_CACHE`` is off.
    """
    if not jax.config.jax_enable_compilation_cache:
        return None
    if not jax.config.jax_compilation_cache_dir:
        home = pathlib.Path(os.environ.get("XDG_CACHE_HOME") or pathlib.Path.home() / ".cache")
        jax.config.update("jax_compilation_cache_dir", str(home / "specsamp" / "xla"))
        if not pathlib.Path(jax.config.jax_compilation_cache_dir).exists():  # say it once
            print(f"specsamp keeps compiled programs in {jax.config.jax_compilation_cache_dir}", file=sys.stderr)
    return jax.config.jax_compilation_cache_dir


def to_host(tree: Any) -> Any:
    """The whole of every array as numpy, also of what lies on devices of other processes (which must call it too)."""
    elsewhere = lambda x: isinstance(x, jax.Array) and not x.is_fully_addressable
    gather = lambda x: multihost_utils.process_allgather(x, tiled=True) if elsewhere(x) else x
    return jax.device_get(jax.tree.map(gather, tree))


def decode_window() -> int:
    """The fewest tokens per call that this platform likes: see `Loop.window`."""
    return 2 if jax.default_backend() == "tpu" else 1


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Job:
    """A checked call: static loop, arrays, and the way back to completions."""

    pair: Pair
    loop: Loop
    weights: Weights
    request: Request
    tokens_BP: jax.Array
    lengths_B: np.ndarray
    rows: int  # that were asked for; any beyond are idle
    slots: int
    num_samples: int
    stop_ids: frozenset[int]

    @classmethod
    def make(
        cls, *, pair, prompts, max_new_tokens, sampling, draft_sampling, draft_length, rule, drafter, seed, stop,
        num_samples, return_log_probs, prompt_ids,
    ) -> _Job:  # fmt: skip
        use_compilation_cache()
        window = decode_window()
        drafter = checks.choose_drafter(pair, draft_length, drafter, window)
        loop = Loop(
            target=pair.target, drafter=drafter, rule=checks.choose_rule(rule), window=window,
            keep_log_probs=return_log_probs, shares=pair.shares,
        )  # fmt: skip
        token_lists = checks.encode(pair, prompts)
        lengths = [len(tokens) for tokens in token_lists]
        limits = checks.limits(pair, drafter, lengths, max_new_tokens)
        num_samples = checks.integer("num_samples", num_samples, 1)
        seed = checks.integer("seed", seed, 0, 2**32)
        ids = range(len(lengths)) if prompt_ids is None else checks.integers("prompt_ids", prompt_ids, 0)
        if len(ids) != len(lengths):
            raise ValueError(f"{len(ids)} prompt_ids for {len(lengths)} prompts")
        stop_ids = checks.stop_ids(pair, stop)

        def rows(values: Sequence[int]) -> jax.Array:
            return jnp.asarray(np.repeat(np.asarray(values, np.int32), num_samples))

        def warp(given: Warp) -> Warp:
            per_row = for_rows(given, len(lengths), num_samples)
            if pair.tokenizer is None or pair.tokenizer.vocab_size == pair.target.vocab_size:
                return per_row
            return chain(for_rows(first_tokens(pair.tokenizer.vocab_size), len(lengths), num_samples), per_row)

        sampling = warp(greedy() if sampling is None else sampling)
        request = Request(
            sampling=sampling,
            draft_sampling=sampling if draft_sampling is None else warp(draft_sampling),
            row_keys_B=row_keys(seed, rows(ids), jnp.asarray(np.tile(np.arange(num_samples), len(lengths)), jnp.int32)),
            limits_B=rows(limits),
            stop_ids=_padded(sorted(stop_ids), STOPS_MULTIPLE, -1),
        )
        padded_length = _bucket(max(lengths))
        if pair.target.max_positions is not None:
            padded_length = min(padded_length, pair.target.max_positions)
        slots = _slots(pair, loop, padded_length, max(limit - length for limit, length in zip(limits, lengths)))
        tokens_BP = jnp.stack([_padded(tokens, padded_length, 0) for tokens in token_lists])
        lengths_B = np.asarray(lengths, np.int32)
        idle = -len(lengths) % pair.shares.ways  # prompts, so that all shares are equal
        if idle:
            request = _with_idle_rows(request, idle * num_samples, lengths[-1])
            tokens_BP, lengths_B = (_last_again(x, idle) for x in (tokens_BP, lengths_B))
        return cls(
            pair=pair, loop=loop, weights=pair.weights(drafter, slots), request=request, tokens_BP=tokens_BP,
            lengths_B=lengths_B, rows=len(lengths) * num_samples, slots=slots, num_samples=num_samples, stop_ids=stop_ids,
        )  # fmt: skip

    def prefill(self) -> DecodeState:
        return self.loop.prefill(
            self.weights, self.request, self.tokens_BP, jnp.asarray(self.lengths_B),
            slots=self.slots, num_samples=self.num_samples,
        )  # fmt: skip

    def row_index(self, row: int) -> dict[str, int]:
        return {"prompt_index": row // self.num_samples, "sample_index": row % self.num_samples}

    def before_stop(self, tokens: list[int]) -> list[int]:
        return tokens[:-1] if tokens and tokens[-1] in self.stop_ids else tokens

    def completions(self, state: DecodeState) -> list[Completion]:
        state = to_host(dataclasses.replace(state, cache=None, drafter_state=None))
        return [self._completion(state, row) for row in range(self.rows)]

    def _completion(self, state: DecodeState, row: int) -> Completion:
        emitted = slice(self.lengths_B[row // self.num_samples], state.lengths_B[row])
        tokens = state.tokens_BS[row, emitted].tolist()
        return Completion(
            **self.row_index(row),
            text=None if self.pair.tokenizer is None else self.pair.tokenizer.decode(self.before_stop(tokens)),
            tokens=tokens,
            from_draft=state.from_draft_BS[row, emitted].tolist(),
            log_probs=None if state.log_probs_BS is None else state.log_probs_BS[row, emitted].tolist(),
            finish=Finish(int(state.finish_B[row])).name.lower(),
            exact=self.loop.rule.exact and self.loop.drafter.exact,
            stats=RowStats.of(state.stats, row),
        )  # fmt: skip


def _make_job(arguments: dict[str, Any]) -> _Job:
    if arguments["draft_length"] == "auto":
        from specsamp.analysis.auto_length import choose  # it measures what is above it, hence not at the top

        arguments = {**arguments, **choose(_Job.make, arguments)}
    return _Job.make(**arguments)


def _chunks(job: _Job, rounds_per_chunk: int) -> Iterator[Chunk]:
    state = job.prefill()
    rows = job.rows
    starts = np.repeat(job.lengths_B, job.num_samples)[:rows]
    shown, ended = starts.copy(), [False] * rows
    texts = [None if job.pair.tokenizer is None else TextStream(job.pair.tokenizer) for _ in range(rows)]
    while not all(ended):
        state = job.loop.run(job.weights, job.request, state, rounds_per_chunk)
        shown_parts = (state.tokens_BS, state.from_draft_BS, state.lengths_B, state.finish_B)
        tokens_BS, from_draft_BS, lengths_B, finish_B = map(np.array, to_host(shown_parts))  # copies: it is donated
        for row in range(rows):
            finish = None if finish_B[row] == Finish.RUNNING else Finish(int(finish_B[row])).name.lower()
            if ended[row] or (finish is None and lengths_B[row] == shown[row]):
                continue
            new = slice(shown[row], lengths_B[row])
            whole = job.before_stop(tokens_BS[row, starts[row] : lengths_B[row]].tolist())
            yield Chunk(
                **job.row_index(row),
                text=None if texts[row] is None else texts[row].push(whole, finish is not None),
                tokens=tokens_BS[row, new].tolist(), from_draft=from_draft_BS[row, new].tolist(), finish=finish,
            )  # fmt: skip
            shown[row], ended[row] = lengths_B[row], finish is not None


def _with_idle_rows(request: Request, rows: int, length: int) -> Request:
    """With ``rows`` more like the last, but without a budget: they have ended before they begin."""
    last = lambda tree: jax.tree.map(lambda x: _last_again(x, rows), tree)
    return Request(
        sampling=last(request.sampling), draft_sampling=last(request.draft_sampling),
        row_keys_B=last(request.row_keys_B), stop_ids=request.stop_ids,
        limits_B=last(request.limits_B).at[-rows:].set(length),
    )  # fmt: skip


def _last_again(x: Any, times: int) -> Any:
    return x[np.minimum(np.arange(len(x) + times), len(x) - 1)]


def _arguments(given: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in given.items() if name != "rounds_per_chunk"}


def _bucket(size: int) -> int:
    """16, 24, 32, 48, 64, 96, ...: from 16 on at most half as much again as asked for."""
    power = max(SMALLEST_BUCKET, 1 << (size - 1).bit_length())
    return power * 3 // 4 if size <= power * 3 // 4 and power > SMALLEST_BUCKET else power


def _slots(pair: Pair, loop: Loop, padded_length: int, budget: int) -> int:
    """Slots for any prompt and budget of the same buckets; never many more than the model has positions."""
    longest = padded_length + _bucket(budget)
    if pair.target.max_positions is not None:
        longest = max(min(longest, pair.target.max_positions), padded_length)
    return -(-max(longest + loop.headroom, loop.window) // SLOTS_MULTIPLE) * SLOTS_MULTIPLE


def _padded(values: Sequence[int], multiple: int, filler: int) -> jax.Array:
    """``values`` as int32, filled up to a multiple of ``multiple``, at least once that."""
    size = max(-(-len(values) // multiple), 1) * multiple
    return jnp.asarray(list(values) + [filler] * (size - len(values)), jnp.int32)

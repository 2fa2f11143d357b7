"""Prompts in, completions out.

    completions = generate(pair, ["def fib(n):"], sampling=chain(temperature(0.8), top_p(0.95)))

Everything is checked before anything is compiled. Prompt lengths and slots are rounded up to buckets;
budgets, sampling parameters, seeds and stop tokens are data. So a program is compiled once per bucket,
number of rows, K and rule, and kept on disk between processes (`use_compilation_cache`).
"""

from __future__ import annotations

import dataclasses
import os
import pathlib
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from absl import logging

from specsamp.decoding.drafters import ModelDrafter, NoDrafter
from specsamp.decoding.loop import Loop
from specsamp.decoding.pair import Pair
from specsamp.decoding.types import DecodeState, Drafter, Finish, Request, Rule, Weights
from specsamp.sampling.rng import row_keys
from specsamp.sampling.rules import TokenRule
from specsamp.sampling.warp import Warp, for_rows, greedy

DEFAULT_DRAFT_LENGTH = 4
SMALLEST_PROMPT_BUCKET = 16
SLOTS_MULTIPLE = 128

Prompt = str | Sequence[int]


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
    finish: str  # "stop" or "length"
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
    draft_length: int | None = None,
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
      draft_sampling: the draft's own warp; default the target's. Any choice is exact, the more alike
        the two the more is accepted.
      draft_length: K, tokens drafted per round; 0 decodes autoregressively. Default: 4, or the drafter's.
      rule: `TokenRule`, `BlockRule` or `CoupledRule`.
      drafter: your own, or `NgramDrafter`; default the pair's draft model.
      seed: same seed, same completions, whatever the batch around a prompt.
      stop: token ids or texts that are one token each; default the tokenizer's end-of-text token.
      num_samples: completions per prompt, from one prefill.
      return_log_probs: also return the target's log-probability of each token.
      prompt_ids: the prompts' indices in your data set, if this call handles a part of it: a completion
        depends on its id, not on its place in the call. Default 0, 1, 2, ...

    Returns:
      ``num_samples`` completions for each prompt, in order.

    Raises:
      ValueError: before compilation, naming the value and the fix.
    """
    job = _Job.make(**_arguments(locals()))
    return job.completions(job.loop.run(job.weights, job.request, job.prefill(), np.iinfo(np.int32).max))


def stream(
    pair: Pair,
    prompts: Sequence[Prompt],
    max_new_tokens: int | Sequence[int] = 128,
    *,
    rounds_per_chunk: int = 8,
    sampling: Warp | None = None,
    draft_sampling: Warp | None = None,
    draft_length: int | None = None,
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
    if not _is_integer(rounds_per_chunk, 1):
        raise ValueError(f"rounds_per_chunk must be an integer >= 1; got {rounds_per_chunk!r}")
    job = _Job.make(**_arguments({**locals(), "return_log_probs": False}))
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
        logging.info("compiled programs are kept in %s", jax.config.jax_compilation_cache_dir)
    return jax.config.jax_compilation_cache_dir


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
    tokens_BP: np.ndarray
    lengths_B: np.ndarray
    slots: int
    num_samples: int
    stop_ids: frozenset[int]

    @classmethod
    def make(
        cls, *, pair, prompts, max_new_tokens, sampling, draft_sampling, draft_length, rule, drafter, seed, stop,
        num_samples, return_log_probs, prompt_ids,
    ) -> _Job:  # fmt: skip
        use_compilation_cache()
        if not hasattr(rule, "verify"):
            raise ValueError(f"rule must be a rule such as TokenRule() or BlockRule(); got {rule!r}")
        drafter = _choose_drafter(pair, draft_length, drafter)
        token_lists = _encode(pair, prompts)
        lengths_B = np.array([len(tokens) for tokens in token_lists], np.int32)
        limits_B = lengths_B + _budgets(max_new_tokens, len(token_lists))
        _check_positions(pair, drafter, lengths_B, limits_B)
        if not _is_integer(num_samples, 1):
            raise ValueError(f"num_samples must be a positive integer; got {num_samples!r}")
        if prompt_ids is None:
            prompt_ids = range(len(token_lists))
        if len(prompt_ids) != len(token_lists):
            raise ValueError(f"{len(prompt_ids)} prompt_ids for {len(token_lists)} prompts")
        stop_ids = _stop_ids(pair, stop)

        sampling = greedy() if sampling is None else sampling
        draft_sampling = sampling if draft_sampling is None else draft_sampling
        rows = lambda values: np.repeat(np.asarray(values, np.int32), num_samples)
        sample_ids = np.tile(np.arange(num_samples, dtype=np.int32), len(token_lists))
        padded_stops = np.full(_bucket(len(stop_ids), 4), -1, np.int32)
        padded_stops[: len(stop_ids)] = sorted(stop_ids)
        request = Request(
            sampling=for_rows(sampling, len(token_lists), num_samples),
            draft_sampling=for_rows(draft_sampling, len(token_lists), num_samples),
            row_keys_B=row_keys(seed, jnp.asarray(rows(prompt_ids)), jnp.asarray(sample_ids)),
            limits_B=jnp.asarray(rows(limits_B)),
            stop_ids=jnp.asarray(padded_stops),
        )
        loop = Loop(
            target=pair.target, drafter=drafter, rule=rule, window=decode_window(), keep_log_probs=return_log_probs
        )
        padded_length = _bucket(int(lengths_B.max()), SMALLEST_PROMPT_BUCKET)
        slots = max(int(limits_B.max()) + loop.headroom, padded_length, loop.window)
        slots = -(-slots // SLOTS_MULTIPLE) * SLOTS_MULTIPLE
        tokens_BP = np.zeros((len(token_lists), padded_length), np.int32)
        for row, tokens in zip(tokens_BP, token_lists):
            row[: len(tokens)] = tokens
        return cls(
            pair=pair, loop=loop, weights=pair.weights(slots), request=request, tokens_BP=tokens_BP,
            lengths_B=lengths_B, slots=slots, num_samples=num_samples, stop_ids=stop_ids,
        )  # fmt: skip

    def prefill(self) -> DecodeState:
        return self.loop.prefill(
            self.weights, self.request, jnp.asarray(self.tokens_BP), jnp.asarray(self.lengths_B),
            slots=self.slots, num_samples=self.num_samples,
        )  # fmt: skip

    def row_index(self, row: int) -> dict[str, int]:
        return {"prompt_index": row // self.num_samples, "sample_index": row % self.num_samples}

    def text(self, tokens: list[int]) -> str | None:
        if self.pair.tokenizer is None:
            return None
        if tokens and tokens[-1] in self.stop_ids:
            tokens = tokens[:-1]
        return self.pair.tokenizer.decode(tokens)

    def completions(self, state: DecodeState) -> list[Completion]:
        state = jax.device_get(dataclasses.replace(state, cache=None, drafter_state=None))
        return [self._completion(state, row) for row in range(len(state.lengths_B))]

    def _completion(self, state: DecodeState, row: int) -> Completion:
        emitted = slice(self.lengths_B[row // self.num_samples], state.lengths_B[row])
        tokens = state.tokens_BS[row, emitted].tolist()
        stats = state.stats
        return Completion(
            **self.row_index(row),
            text=self.text(tokens),
            tokens=tokens,
            from_draft=state.from_draft_BS[row, emitted].tolist(),
            log_probs=None if state.log_probs_BS is None else state.log_probs_BS[row, emitted].tolist(),
            finish=Finish(int(state.finish_B[row])).name.lower(),
            stats=RowStats(
                rounds=int(stats.rounds_B[row]), emitted=int(stats.emitted_B[row]),
                drafted=int(stats.drafted_B[row]), reached=tuple(stats.reached_BK[row].tolist()),
                accepted_counts=tuple(stats.accepted_BT[row].tolist()),
            ),
        )  # fmt: skip


def _chunks(job: _Job, rounds_per_chunk: int) -> Iterator[Chunk]:
    state = job.prefill()
    rows = state.lengths_B.shape[0]
    starts = np.repeat(job.lengths_B, job.num_samples)
    shown_tokens, shown_text, ended = starts.copy(), [""] * rows, [False] * rows
    while not all(ended):
        state = job.loop.run(job.weights, job.request, state, rounds_per_chunk)
        tokens_BS, from_draft_BS, lengths_B, finish_B = (
            np.array(x) for x in (state.tokens_BS, state.from_draft_BS, state.lengths_B, state.finish_B)
        )  # copies: the state is donated to the next slice
        for row in range(rows):
            finish = None if finish_B[row] == Finish.RUNNING else Finish(int(finish_B[row])).name.lower()
            if ended[row] or (finish is None and lengths_B[row] == shown_tokens[row]):
                continue
            new = slice(shown_tokens[row], lengths_B[row])
            text = job.text(tokens_BS[row, starts[row] : lengths_B[row]].tolist())
            if text is not None:
                if finish is None:
                    text = text.rstrip("\N{REPLACEMENT CHARACTER}")
                text, shown_text[row] = text[len(shown_text[row]) :], text
            yield Chunk(
                **job.row_index(row), text=text, tokens=tokens_BS[row, new].tolist(),
                from_draft=from_draft_BS[row, new].tolist(), finish=finish,
            )  # fmt: skip
            shown_tokens[row], ended[row] = lengths_B[row], finish is not None


def _arguments(given: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in given.items() if name != "rounds_per_chunk"}


def _is_integer(value: Any, least: int) -> bool:
    return isinstance(value, (int, np.integer)) and not isinstance(value, bool) and value >= least


def _bucket(size: int, smallest: int) -> int:
    return max(smallest, 1 << (size - 1).bit_length()) if size else smallest


def _choose_drafter(pair: Pair, draft_length: int | None, drafter: Drafter | None) -> Drafter:
    if draft_length is not None and not _is_integer(draft_length, 0):
        raise ValueError(f"draft_length must be an integer >= 0 (0 decodes autoregressively); got {draft_length!r}")
    if drafter is not None:
        if draft_length is not None and draft_length > drafter.K:
            raise ValueError(
                f"draft_length {draft_length} exceeds the drafter's K = {drafter.K}: make the drafter with a larger K"
            )
        if draft_length not in (None, drafter.K):
            raise ValueError(
                f"draft_length {draft_length} differs from the drafter's K = {drafter.K}: leave draft_length out, "
                "or make the drafter with that K"
            )
        if drafter.K < 0:
            raise ValueError(f"the drafter's K must be >= 0; got {drafter.K}")
        return drafter
    if draft_length == 0:
        return NoDrafter()
    if pair.draft is None:
        raise ValueError(
            "the pair has no draft model: give one, or drafter=NgramDrafter(K=4), or draft_length=0 to decode "
            "autoregressively"
        )
    return ModelDrafter(pair.draft, int(draft_length or DEFAULT_DRAFT_LENGTH), decode_window())


def _encode(pair: Pair, prompts: Sequence[Prompt]) -> list[list[int]]:
    if isinstance(prompts, str):
        raise ValueError("prompts must be a list of prompts, not one text: write [prompt]")
    if len(prompts) == 0:
        raise ValueError("no prompts were given")
    if pair.tokenizer is None and any(isinstance(prompt, str) for prompt in prompts):
        raise ValueError("a text prompt needs a tokenizer in the pair; otherwise give lists of token ids")
    token_lists = [pair.tokenizer.encode(p) if isinstance(p, str) else [int(t) for t in p] for p in prompts]
    for index, tokens in enumerate(token_lists):
        if not tokens:
            raise ValueError(f"prompt {index} is empty: give at least one token, such as a beginning-of-text token")
        worst = max(tokens) if max(tokens) >= pair.target.vocab_size else min(tokens)
        if not 0 <= worst < pair.target.vocab_size:
            raise ValueError(f"prompt {index} has token {worst}, outside the vocabulary of {pair.target.vocab_size}")
    return token_lists


def _budgets(max_new_tokens: int | Sequence[int], prompts: int) -> np.ndarray:
    budgets = np.asarray(max_new_tokens)
    if budgets.dtype.kind not in "iu" or np.any(budgets < 1):
        raise ValueError(f"max_new_tokens must be positive integers; got {max_new_tokens!r}")
    if budgets.shape not in ((), (prompts,)):
        raise ValueError(f"max_new_tokens of shape {budgets.shape} for {prompts} prompts: give one, or one per prompt")
    return np.broadcast_to(budgets, (prompts,)).astype(np.int32)


def _check_positions(pair: Pair, drafter: Drafter, lengths_B: np.ndarray, limits_B: np.ndarray) -> None:
    models = {"target": pair.target}
    if isinstance(drafter, ModelDrafter):
        models["draft"] = drafter.model
        if drafter.model.vocab_size != pair.target.vocab_size:
            raise ValueError(f"draft vocabulary {drafter.model.vocab_size} != target vocabulary {pair.target.vocab_size}")
    for name, model in models.items():
        longest = int(np.argmax(limits_B))
        if model.max_positions is not None and limits_B[longest] > model.max_positions:
            prompt, budget = lengths_B[longest], limits_B[longest] - lengths_B[longest]
            raise ValueError(
                f"prompt {longest} has {prompt} tokens and a budget of {budget}, together {prompt + budget}, more than "
                f"the {name}'s {model.max_positions} positions: shorten the prompt or lower max_new_tokens"
            )


def _stop_ids(pair: Pair, stop: Sequence[int | str] | None) -> frozenset[int]:
    if stop is None:
        eos = None if pair.tokenizer is None else pair.tokenizer.eos_id
        return frozenset() if eos is None else frozenset([eos])
    if isinstance(stop, str):
        raise ValueError("stop must be a list: write [stop]")
    ids = []
    for entry in stop:
        if isinstance(entry, str):
            if pair.tokenizer is None:
                raise ValueError(f"the stop text {entry!r} needs a tokenizer in the pair; give token ids")
            encoded = pair.tokenizer.encode(entry)
            if len(encoded) != 1:
                raise ValueError(f"the stop text {entry!r} is {len(encoded)} tokens; stop on a single token instead")
            entry = encoded[0]
        if not _is_integer(entry, 0) or entry >= pair.target.vocab_size:
            raise ValueError(f"stop id {entry} is outside the vocabulary of {pair.target.vocab_size}")
        ids.append(int(entry))
    return frozenset(ids)

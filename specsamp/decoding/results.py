"""Results: completions, parts of them, and the counts of rows."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Self

import jax

from specsamp.decoding.state import DecodeState, Finish, Stats
from specsamp.sampling.rules import Meter

if TYPE_CHECKING:
    from specsamp.decoding.method import Method
    from specsamp.decoding.request import Request


@dataclasses.dataclass(frozen=True, kw_only=True)
class RowStats:
    """Counts of one row, or the sum over rows; tokens beyond a stop or a budget do not count."""

    rounds: int
    emitted: int
    drafted: int
    reached: tuple[int, ...]  # by drafted position, rounds in which it was verified
    accepted_counts: tuple[int, ...]  # rounds by number of accepted tokens, 0 .. K
    # Rounds by number of drafted tokens, 0 .. K; () where the length does not adapt.
    lengths: tuple[int, ...] = ()
    # The sums of a lossy rule's `specsamp.sampling.rules.Meter`; None: not metered.
    variation: float | None = None
    extra_accepted: float | None = None

    @property
    def variation_per_token(self) -> float:
        """Returns the mean total variation per emitted token; nan without a meter."""
        return (
            float("nan")
            if self.variation is None or not self.emitted
            else self.variation / self.emitted
        )

    @property
    def accepted(self) -> int:
        return sum(n * rounds for n, rounds in enumerate(self.accepted_counts))

    @property
    def acceptance_rate(self) -> float:
        """Returns accepted / verified drafted tokens (alpha of Leviathan et al.); nan if nothing
        was drafted.
        """
        return self.accepted / sum(self.reached) if sum(self.reached) else float("nan")

    @property
    def acceptance_by_position(self) -> tuple[float, ...]:
        """Returns accepted / verified drafted tokens for each position of a draft."""
        accepted = [sum(self.accepted_counts[i + 1 :]) for i in range(len(self.reached))]
        return tuple(a / r if r else float("nan") for a, r in zip(accepted, self.reached))

    @property
    def emitted_per_round(self) -> float:
        return self.emitted / self.rounds if self.rounds else float("nan")

    @classmethod
    def of(cls, stats: Stats, row: int, meter: Meter | None = None) -> RowStats:
        """Returns the loop's counts of one row, and the sums of its meter, from arrays on
        the host.
        """
        return cls(
            rounds=int(stats.rounds_B[row]),
            emitted=int(stats.emitted_B[row]),
            drafted=int(stats.drafted_B[row]),
            reached=tuple(stats.reached_BK[row].tolist()),
            accepted_counts=tuple(stats.accepted_BT[row].tolist()),
            lengths=() if stats.lengths_BT is None else tuple(stats.lengths_BT[row].tolist()),
            **_sums(meter),
        )

    @classmethod
    def of_rounds(
        cls,
        rounds: Sequence[int],
        from_draft: Sequence[bool],
        depth: int,
        adapts: bool = False,
        meter: Meter | None = None,
    ) -> RowStats:
        """Returns the counts of a sequence that was cut at any token, as if the loop had ended it
        there.

        Args:
          rounds: for the first token of each round, 1 + the number of drafted tokens; for other
            tokens 0.
          from_draft: for each token, whether it had been drafted.
          depth: `Loop.depth`.
          adapts: whether the draft length adapts.
          meter: of these tokens.
        """
        begins = [at for at, begin in enumerate(rounds) if begin] + [len(rounds)]
        reached, accepted_counts, lengths = ([0] * (depth + more) for more in (0, 1, 1))
        for begin, end in zip(begins, begins[1:]):
            is_whole = not from_draft[end - 1]  # the last token of a whole round is the target's
            num_reached = min(rounds[begin] - 1, end - begin)
            lengths[rounds[begin] - 1 if is_whole else num_reached] += 1
            reached = [n + (at < num_reached) for at, n in enumerate(reached)]
            accepted_counts[end - begin - is_whole] += 1
        return cls(
            rounds=len(begins) - 1,
            emitted=len(rounds),
            drafted=sum(n * rounds for n, rounds in enumerate(lengths)),
            reached=tuple(reached),
            accepted_counts=tuple(accepted_counts),
            lengths=tuple(lengths) if adapts else (),
            **_sums(meter),
        )

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> RowStats:
        """Reads counts from JSON; other fields are ignored."""
        names = {field.name for field in dataclasses.fields(cls)} & fields.keys()
        read = {name: fields[name] for name in names}
        return cls(**{name: tuple(x) if isinstance(x, list) else x for name, x in read.items()})

    def __add__(self, other: RowStats) -> RowStats:
        def add(a, b):
            if isinstance(a, tuple):
                return tuple(x + y for x, y in zip(a, b, strict=True))
            return None if a is None or b is None else a + b

        names = [field.name for field in dataclasses.fields(self)]
        return RowStats(**{name: add(getattr(self, name), getattr(other, name)) for name in names})

    def __radd__(self, start: int) -> RowStats:  # `sum` begins with 0
        return self if start == 0 else NotImplemented


def _sums(meter: Meter | None) -> dict[str, float]:
    """Returns the fields of `RowStats` that come from a meter."""
    if meter is None:
        return {}
    return {"variation": float(meter.variation.sum()), "extra_accepted": float(meter.extra.sum())}


@dataclasses.dataclass(frozen=True, kw_only=True)
class RowText:
    """The text of a row so far, on the host."""

    tokens: list[int]
    from_draft: list[bool]
    log_probs: list[float] | None
    finish: Finish
    stats: RowStats
    dropped: int = 0

    @classmethod
    def of(cls, state: DecodeState, place: int, begin: int, count: int | None = None) -> RowText:
        """Returns the text from slot ``begin`` on in row ``place`` of a state on the host.

        Args:
          count: the number of tokens of a text that a stop string ends; None: all.
        """
        end = int(state.lengths_B[place])
        slots = slice(begin, end if count is None else begin + count)

        def read(x_BS):
            return None if x_BS is None else x_BS[place, slots].tolist()

        from_draft, counts = read(state.from_draft_BS), state.stats
        meter = jax.tree.map(lambda x_BS: x_BS[place, slots], state.meter)
        if count is None:
            finish, stats = Finish(int(state.finish_B[place])), RowStats.of(counts, place, meter)
        else:
            depth, adapts = counts.reached_BK.shape[1], counts.lengths_BT is not None
            stats = RowStats.of_rounds(read(state.rounds_BS), from_draft, depth, adapts, meter)
            finish = Finish.STOP
        return cls(
            tokens=read(state.tokens_BS),
            from_draft=from_draft,
            log_probs=read(state.log_probs_BS),
            finish=finish,
            stats=stats,
            dropped=end - slots.stop,
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Chunk:
    """The tokens of a sequence since its previous chunk, and the text that they complete."""

    prompt_index: int
    sample_index: int
    text: str | None  # None: the caller makes it, or the pair has no tokenizer
    tokens: list[int]
    from_draft: list[bool]  # whether each token had been drafted
    log_probs: list[float] | None  # see ``return_log_probs`` of `generate`
    # None while the sequence is running; then "stop", "length", or "invalid" (the target's logits
    # are no distribution)
    finish: str | None
    exact: bool  # whether rule and drafter are lossless; stats have the cost of a lossy rule
    stats: RowStats | None  # of the whole sequence; None while it is running

    @classmethod
    def of(
        cls, request: Request, row: RowText, method: Method, *, shown: int = 0, **more: Any
    ) -> Self | None:
        """Returns the tokens of ``row`` after the first ``shown``; None if there are none and the
        request is still running.
        """
        is_running, new = row.finish == Finish.RUNNING, slice(shown, None)
        if is_running and len(row.tokens) == shown:
            return None
        return cls(
            prompt_index=request.prompt_index,
            sample_index=request.sample_index,
            tokens=row.tokens[new],
            from_draft=row.from_draft[new],
            log_probs=None if row.log_probs is None else row.log_probs[new],
            finish=None if is_running else row.finish.name.lower(),
            exact=method.exact,
            stats=None if is_running else row.stats,
            **{"text": None, **more},
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Completion(Chunk):
    """A finished sequence: its tokens, including stop tokens, and its text, without the stop
    string.
    """

    row_independent: bool  # whether the prompt has the same text in every batch
    dropped: int = 0  # tokens that were decoded beyond a stop string; no other field counts them

    @classmethod
    def of(cls, request: Request, row: RowText, method: Method) -> Completion:
        """Returns the result of a request that has ended."""
        decoder = request.continuation
        return super().of(
            request,
            row,
            method,
            text=None if decoder is None else request.stops.text(decoder, row.tokens),
            row_independent=method.row_independent,
            dropped=row.dropped,
        )

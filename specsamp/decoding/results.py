"""Results: completions, parts of them, and the counts of rows."""

from __future__ import annotations

import dataclasses

from specsamp.decoding.state import Stats


@dataclasses.dataclass(frozen=True, kw_only=True)
class RowStats:
    """Counts of one row, or the sum of several; only emitted tokens count."""

    rounds: int
    emitted: int
    drafted: int
    reached: tuple[int, ...]  # per drafted position, rounds in which it was verified
    accepted_counts: tuple[int, ...]  # rounds by number of accepted tokens, 0 .. K

    @property
    def accepted(self) -> int:
        return sum(n * rounds for n, rounds in enumerate(self.accepted_counts))

    @property
    def acceptance_rate(self) -> float:
        """Returns the accepted share of verified drafted tokens (alpha in the theory); nan if nothing was drafted."""
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
        """Returns one row of what the loop counted; ``stats`` are on the host."""
        return cls(
            rounds=int(stats.rounds_B[row]),
            emitted=int(stats.emitted_B[row]),
            drafted=int(stats.drafted_B[row]),
            reached=tuple(stats.num_verified_BK[row].tolist()),
            accepted_counts=tuple(stats.accepted_BT[row].tolist()),
        )

    def __add__(self, other: RowStats) -> RowStats:
        def add(a, b):
            return tuple(x + y for x, y in zip(a, b, strict=True))

        return RowStats(
            rounds=self.rounds + other.rounds,
            emitted=self.emitted + other.emitted,
            drafted=self.drafted + other.drafted,
            reached=add(self.reached, other.reached),
            accepted_counts=add(self.accepted_counts, other.accepted_counts),
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Completion:
    """One row of a result."""

    prompt_index: int
    sample_index: int
    text: str | None  # without the stop token; None if the pair has no tokenizer
    tokens: list[int]  # the stop token included
    from_draft: list[bool]  # whether each token had been drafted
    log_probs: list[float] | None  # under the target at temperature 1, unfiltered
    finish: str  # "stop", "length", or "invalid" where the target's logits are no distribution (NaN, inf)
    exact: bool  # whether rule and drafter are lossless
    stats: RowStats


@dataclasses.dataclass(frozen=True, kw_only=True)
class Chunk:
    """Tokens and text that a row gained in one slice of a stream."""

    prompt_index: int
    sample_index: int
    text: str | None
    tokens: list[int]
    from_draft: list[bool]
    finish: str | None  # None while the row is running

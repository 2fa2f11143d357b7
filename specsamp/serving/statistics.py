"""Counts the work of a server since its start, and writes the counts in the text format of Prometheus."""

from __future__ import annotations

import bisect
import collections
import threading
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from specsamp.decoding.results import RowStats

SECONDS = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0)
SECONDS_PER_TOKEN = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0)
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


class Histogram:
    """Counts numbers up to each bound."""

    def __init__(self, bounds: Sequence[float]):
        self._bounds, self._counts, self._sum = bounds, [0] * (len(bounds) + 1), 0.0

    def add(self, value: float) -> None:
        self._counts[bisect.bisect_left(self._bounds, value)] += 1
        self._sum += value

    def lines(self, name: str) -> Iterator[str]:
        total = 0
        for bound, count in zip((*map("{:g}".format, self._bounds), "+Inf"), self._counts, strict=True):
            total += count
            yield f'{name}_bucket{{le="{bound}"}} {total}'
        yield f"{name}_sum {self._sum:.6f}"
        yield f"{name}_count {total}"


class Statistics:
    """Counts requests and what became of their texts; any thread may call it."""

    def __init__(self):
        self._lock = threading.Lock()
        self._answers: collections.Counter[tuple[str, int]] = collections.Counter()  # by path and status
        self._tokens: collections.Counter[str] = collections.Counter()
        self._stats: RowStats | None = None
        self._first, self._each = Histogram(SECONDS), Histogram(SECONDS_PER_TOKEN)

    def count_answer(self, path: str, status: int) -> None:
        """Counts a request that was answered or refused."""
        with self._lock:
            self._answers[path, status] += 1

    def count_texts(self, prompt_tokens: int, stats: RowStats, first: float, last: float) -> None:
        """Counts the texts of a request.

        Args:
          stats: of all texts together.
          first, last: seconds from the request to its first token and to its end.
        """
        with self._lock:
            self._tokens["prompt"] += prompt_tokens
            self._tokens["generation"] += stats.emitted
            self._stats = stats if self._stats is None else self._stats + stats
            self._first.add(first)
            if stats.emitted > 1:
                self._each.add((last - first) / (stats.emitted - 1))

    def text(self, gauges: Mapping[str, tuple[str, float]]) -> str:
        """Returns all counts, and gauges: what they mean, and their values, by name."""
        with self._lock:
            return "\n".join([*self._lines(gauges), ""])

    def _lines(self, gauges: Mapping[str, tuple[str, Any]]) -> Iterator[str]:
        def head(name: str, kind: str, meaning: str) -> Iterator[str]:
            yield f"# HELP specsamp_{name} {meaning}"
            yield f"# TYPE specsamp_{name} {kind}"

        yield from head("requests_total", "counter", "Requests by path and status.")
        for (path, status), count in sorted(self._answers.items()):
            yield f'specsamp_requests_total{{path="{path}",status="{status}"}} {count}'
        for kind in ("prompt", "generation"):
            yield from head(f"{kind}_tokens_total", "counter", f"Tokens of each {kind}.")
            yield f"specsamp_{kind}_tokens_total {self._tokens[kind]}"
        stats = self._stats
        yield from head("rounds_total", "counter", "Rounds of all texts.")
        yield f"specsamp_rounds_total {stats.rounds if stats else 0}"
        yield from head("draft_tokens_total", "counter", "Drafted tokens.")
        yield f"specsamp_draft_tokens_total {stats.drafted if stats else 0}"
        for name, counts in (
            ("verified_tokens_total", stats.reached if stats else ()),
            (
                "accepted_tokens_total",
                [sum(stats.accepted_counts[at + 1 :]) for at in range(len(stats.reached))] if stats else (),
            ),
        ):
            yield from head(name, "counter", "Drafted tokens by their position in the draft, from 0.")
            for position, count in enumerate(counts):
                yield f'specsamp_{name}{{position="{position}"}} {count}'
        for name, (meaning, value) in gauges.items():
            yield from head(name, "gauge", meaning)
            yield f"specsamp_{name} {value:g}"
        yield from head("time_to_first_token_seconds", "histogram", "From a request to its first token.")
        yield from self._first.lines("specsamp_time_to_first_token_seconds")
        yield from head(
            "time_per_output_token_seconds", "histogram", "Between tokens after the first, a mean of each request."
        )
        yield from self._each.lines("specsamp_time_per_output_token_seconds")

"""Counts the work of a server since its start, for Prometheus, whose library must be installed."""

from collections.abc import Mapping, Sequence

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from specsamp.decoding.results import RowStats

SECONDS = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0)
SECONDS_PER_TOKEN = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0)
BY_POSITION = "Drafted tokens by their position in the draft, from 0."


class Statistics:
    """Counts requests, texts and tokens; any thread may call it."""

    def __init__(self):
        self._registry = CollectorRegistry()

        def counter(name: str, meaning: str, labels: Sequence[str] = ()) -> Counter:
            return Counter(f"specsamp_{name}", meaning, labels, registry=self._registry)

        def histogram(name: str, meaning: str, bounds: Sequence[float]) -> Histogram:
            return Histogram(f"specsamp_{name}", meaning, buckets=bounds, registry=self._registry)

        self._requests = counter(
            "requests_total", "Requests by path and status.", ["path", "status"]
        )
        self._prompts = counter("prompt_tokens_total", "Tokens of each prompt.")
        self._texts = counter("generation_tokens_total", "Tokens of each generation.")
        self._rounds = counter("rounds_total", "Rounds of all texts.")
        self._drafted = counter("draft_tokens_total", "Drafted tokens.")
        self._verified = counter("verified_tokens_total", BY_POSITION, ["position"])
        self._accepted = counter("accepted_tokens_total", BY_POSITION, ["position"])
        self._first = histogram(
            "time_to_first_token_seconds", "From a request to its first token.", SECONDS
        )
        of_rest = "Between tokens after the first, a mean of each request."
        self._each = histogram("time_per_output_token_seconds", of_rest, SECONDS_PER_TOKEN)

    def count_answer(self, path: str, status: int) -> None:
        """Counts a request that was answered or refused."""
        self._requests.labels(path, status).inc()

    def count_texts(self, prompt_tokens: int, stats: RowStats, first: float, last: float) -> None:
        """Counts the texts of a request.

        Args:
          stats: of all texts together.
          first, last: seconds from the request to its first token and to its end.
        """
        self._prompts.inc(prompt_tokens)
        self._texts.inc(stats.emitted)
        self._rounds.inc(stats.rounds)
        self._drafted.inc(stats.drafted)
        for position, verified in enumerate(stats.reached):
            self._verified.labels(position).inc(verified)
            self._accepted.labels(position).inc(sum(stats.accepted_counts[position + 1 :]))
        self._first.observe(first)
        if stats.emitted > 1:
            self._each.observe((last - first) / (stats.emitted - 1))

    def text(self, gauges: Mapping[str, tuple[str, float]]) -> bytes:
        """Returns all counts and gauges with their meanings, in the format of Prometheus."""
        now = CollectorRegistry()
        for name, (meaning, value) in gauges.items():
            Gauge(f"specsamp_{name}", meaning, registry=now).set(value)
        return generate_latest(self._registry) + generate_latest(now)

"""Agreement with clocks that are known: a planner that is right is told from one that is wrong."""

import json
import types

import numpy as np
import pytest

from launch.studies import agreement as module
from specsamp.analysis.report import as_json
from specsamp.analysis.workload import Timing, Workload
from specsamp.decoding.results import RowStats
from support.run_script import call, save_tiny_pair

FITTED, CHECKED = (1, 2), (3, 4)
TOKENS, TEXTS = 96, 40
CHANCES = (0.85, 0.75, 0.7, 0.6)
TINY = "--config=configs/random_pair.py:tiny"


class Side:
    """A decoder whose acceptance is drawn, on a clock of ``round_ms(K, batch)``."""

    def __init__(self, K, batch, prompt, chances, round_ms, noise, number):
        self.K, self.chances, self.round_ms, self.noise, self.number = K, chances, round_ms, noise, number
        self.clock, repeats, prompts = np.random.default_rng(number), -(-TEXTS // batch), (prompt,) * TEXTS
        self.workload = Workload(batch=batch, prompt_length=2, max_new_tokens=TOKENS, repeats=repeats, prompts=prompts)

    def decode(self, repeat):
        random = np.random.default_rng([self.number, repeat])  # another pass decodes the same
        rows = [self.row(random) for _ in range(self.workload.batch)]
        rounds = max(row.rounds for row in rows)
        seconds = rounds * self.round_ms(self.K, self.workload.batch) / 1e3 * (1 + self.noise * self.clock.normal())
        return Timing(
            prefill_seconds=1.0, loop_seconds=seconds, rounds=rounds, rows=tuple(rows), texts=(), from_draft=()
        )

    def row(self, random):
        later = self.chances[-1:] * max(self.K - len(self.chances), 0)
        here = np.array([*self.chances[: self.K], *later])
        counts, reached, emitted, rounds = np.zeros(self.K + 1, int), np.zeros(self.K, int), 0, 0
        while emitted < TOKENS:
            n = int(np.cumprod(random.random(self.K) < here).sum())
            given = min(n + 1, TOKENS - emitted)
            counts[min(n, given)] += 1
            reached[: min(n + 1, self.K, given)] += 1
            emitted, rounds = emitted + given, rounds + 1
        counted = {"reached": tuple(reached.tolist()), "accepted_counts": tuple(counts.tolist())}
        return RowStats(rounds=rounds, emitted=emitted, drafted=0, **counted)


def found_with(round_ms, *, lengths=range(13), batch=1, slower=1.0, checked=CHANCES, noise=0.0):
    """The prompts of the second half have chances of their own, and a clock that may be slower."""
    fit, check = (
        {K: Side(K, batch, prompt, chances, clock, noise, number + K) for K in lengths}
        for prompt, chances, clock, number in (
            (FITTED, CHANCES, round_ms, 100),
            (CHECKED, checked, lambda K, batch: slower * round_ms(K, batch), 0),
        )
    )
    found = module.agreement(fit, check, lambda text: None)
    json.dumps(as_json(found), allow_nan=False)
    return types.SimpleNamespace(**found | {"checks": [types.SimpleNamespace(**one) for one in found["checks"]]})


def linear(K, batch):
    """0.9 ms for a call of the draft; 10 ms for the weights, 0.4 for every cache and 0.1 for every row."""
    return 10.0 + 0.5 * batch + K * (0.9 + 0.1 * batch)


@pytest.mark.parametrize("batch", [1, 4])
def test_a_planner_that_is_right_is_told_from_one_that_is_wrong(batch):
    """The controls: a clock that is half as slow again, and texts of which less is accepted."""
    found = found_with(linear, batch=batch)
    assert [check.draft_length for check in found.checks] == list(range(13))
    assert found.worst_error < 0.06 and found.worst_noise == 0  # acceptance is drawn anew on the other prompts
    assert abs(found.checks[0].error) < 1e-9 and found.lost < 0.05
    assert all(abs(1.5 * (1 + check.error) - 1) < 0.06 for check in found_with(linear, batch=batch, slower=1.5).checks)
    assert max(check.error for check in found_with(linear, batch=batch, checked=(0.5,)).checks[1:]) < -0.15


def test_noise_is_two_passes_over_the_same_texts():
    assert 0.005 < found_with(linear, checked=(1.0,), noise=0.2, lengths=(0, 2)).worst_noise < 0.2


def test_each_text_is_counted_once(monkeypatch):
    """In batches of 16 the last one begins again with the first texts."""
    told, of_texts = [], module.Profile.of_texts
    monkeypatch.setattr(module.Profile, "of_texts", lambda rows: told.append(rows) or of_texts(rows))
    found_with(linear, lengths=(0, 4), batch=16)
    assert [len(rows) for rows in told] == [TEXTS]


@pytest.mark.slow
def test_a_tiny_pair_end_to_end(tmp_path):
    """The halves share no prompt; the tables show every K."""
    folder, output = tmp_path / "pair", tmp_path / "agreement.json"
    save_tiny_pair(folder, prompts=["a b", "c", "d e f", "b"])
    asked = [f"--config=configs/trained_pair.py:{folder}", "--config.max_new_tokens=4", "--plain"]
    asked += ["--longest=1", "--config.prompt_length=8", f"--output={output}"]
    done = call("study", "agreement", *asked)
    assert done.returncode == 0, done.stderr
    document = json.loads(output.read_text(encoding="utf-8"))
    keys = [tuple(cell["key"].values()) for cell in document["cells"]]
    assert keys == [(law, batch) for law in ("greedy", "T = 0.8, top_p 0.95") for batch in (1, 4)]
    assert [check["draft_length"] for check in document["cells"][0]["result"]["checks"]] == [0, 1]
    assert document["cells"][0]["result"]["prompts"] == 2
    assert done.stdout.count(" of 2 ") == 4, done.stdout

"""Agreement with clocks that are known: a planner that is right is told from one that is wrong."""

import functools
import json
import math
import types

import numpy as np
import pytest

from launch.lib import study
from launch.studies import agreement as module
from specsamp.analysis.acceptance import NORMAL_95
from specsamp.analysis.costs import CLOCK_DRIFT
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

    loop = weights = None

    def __init__(self, K, batch, prompt, chances, round_ms, noise, number, decoded):
        self.K, self.chances, self.round_ms, self.noise, self.number = K, chances, round_ms, noise, number
        self.clock, self.decoded = np.random.default_rng(number), decoded
        repeats = TEXTS if batch == 1 else max(-(-TEXTS // batch), module.FEWEST_BATCHES)
        prompts = (prompt,) * TEXTS
        self.workload = Workload(batch=batch, prompt_length=2, max_new_tokens=TOKENS, repeats=repeats, prompts=prompts)

    def decode(self, repeat):
        self.decoded.append((self.K, self.workload.batch, self.workload.prompts[0]))
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
        return RowStats(
            rounds=rounds,
            emitted=emitted,
            drafted=0,
            reached=tuple(reached.tolist()),
            accepted_counts=tuple(counts.tolist()),
        )


def found_with(
    monkeypatch,
    round_ms,
    *,
    lengths=range(13),
    fit=(1, 4, 8),
    batches=(1,),
    batch=1,
    fitted=CHANCES,
    checked=CHANCES,
    noise=0.0,
    products_ms=lambda rows: 0.0,
    decoded=None,
):
    """The prompts of the two halves have chances of their own. By default products take no time."""
    monkeypatch.setattr(
        module, "product_timer", lambda loop, weights, *call: functools.partial(products_ms, math.prod(call))
    )
    decoded = [] if decoded is None else decoded
    check = {
        K: Side(K, batch, CHECKED, checked, round_ms, noise, number, decoded) for number, K in enumerate({0, *lengths})
    }
    places = [(size, K) for size in batches for K in (0, *fit)]
    sides = {
        place: Side(place[1], place[0], FITTED, fitted, round_ms, noise, 100 + number, decoded)
        for number, place in enumerate(places)
    }
    found = module.agreement(check, sides, lambda text: None)
    json.dumps(as_json(found), allow_nan=False)
    return types.SimpleNamespace(**found | {"checks": [types.SimpleNamespace(**one) for one in found["checks"]]})


def linear(K, batch):
    """0.9 ms for a call of the draft; 10 ms for the weights, 0.4 for every cache and 0.1 for every row."""
    return 10.0 + 0.5 * batch + K * (0.9 + 0.1 * batch)


def test_costs_that_are_lines_are_foreseen(monkeypatch):
    found = found_with(monkeypatch, linear)
    assert [check.draft_length for check in found.checks] == list(range(13))
    assert [check.draft_length for check in found.checks if check.cost_was_fitted] == [0, 1, 4, 8]
    assert found.worst_error < 0.05 and found.worst_noise == 0  # acceptance is drawn anew on the other prompts
    assert all(abs(check.round_ms_error) < 1e-9 for check in found.checks)
    assert abs(found.checks[0].error) < 1e-9
    for check in found.checks:
        assert math.isclose(1 + check.error, (1 + check.rounds_error) * (1 + check.round_ms_error))
    assert found.lost < 0.05


def test_costs_that_bend_where_nothing_was_fitted_are_not(monkeypatch):
    """The control: the same acceptance, but rounds of more than nine tokens cost half as much again."""
    found = found_with(monkeypatch, lambda K, batch: linear(K, batch) * (1.5 if K > 9 else 1))
    assert found.worst_error > 0.25
    assert all(abs(check.round_ms_error) > 0.3 for check in found.checks if check.draft_length > 9)


def test_what_is_accepted_of_the_other_half_stays_unknown(monkeypatch):
    """Texts of the other half are drafted worse: a forecast that knew it would be right."""
    found = found_with(monkeypatch, linear, checked=(0.5,))
    worse = [check.rounds_error for check in found.checks if check.draft_length]
    assert max(worse) < -0.15  # too few rounds for all of them
    assert all(abs(check.round_ms_error) < 1e-9 for check in found.checks)


def stepped(rows):
    """Makes products take twice as long from eight rows on, as some kernels do."""
    return (1.0 + 0.02 * rows) * (2 if rows >= 8 else 1)


def test_steps_between_fitted_rounds_are_foreseen_from_the_products(monkeypatch):
    def round_ms(K, batch):
        return 4 * stepped(K + 1) + 0.9 * K

    found = found_with(monkeypatch, round_ms, products_ms=lambda rows: 4 * stepped(rows))
    assert max(abs(check.round_ms_error) for check in found.checks) < 1e-9
    assert found.worst_error < 0.05 and found.worst_error_of_lines > 0.2
    assert found_with(monkeypatch, round_ms).worst_error > 0.2  # the control: products that do not tell


def test_a_batch_between_two_that_were_fitted(monkeypatch):
    """Caches cost by the batch, rows as products do."""

    def round_ms(K, batch):
        return 4 * stepped(batch * (K + 1)) + 0.5 * batch + 0.9 * K

    products = dict(products_ms=lambda rows: 4 * stepped(rows))
    found = found_with(monkeypatch, round_ms, batches=(1, 8), batch=4, lengths=(0, 2, 6), **products)
    assert not any(check.cost_was_fitted for check in found.checks)
    assert max(abs(check.round_ms_error) for check in found.checks) < 1e-9 and found.worst_error < 0.08
    assert found.worst_error_of_lines > 0.2
    # The slowest row: a round of the batch emits less than one of a row does.
    assert round_ms(2, 4) / (found.checks[1].measured * 4) < 0.97 * (1 + 0.85 + 0.85 * 0.75)


def test_sides_with_fewer_texts_take_them_spread_over_a_pass(monkeypatch):
    decoded = []
    found_with(monkeypatch, linear, batches=(1, 8), batch=4, lengths=(0,), decoded=decoded)
    compiled, first = 9, decoded[9 : 9 + (len(decoded) - 9) // 2]
    assert len(decoded[:compiled]) == len(set(decoded[:compiled]))
    turns = [place for place, (K, batch, _) in enumerate(first) if batch == 8 and K == 0]
    assert len(turns) == 6 and turns[0] < len(first) / 5 and turns[-1] > 0.75 * len(first)


def test_noise_is_two_passes_over_the_same_texts(monkeypatch):
    found = found_with(monkeypatch, linear, checked=(1.0,), noise=0.2, lengths=(0, 2), fit=(1, 2))
    assert 0.005 < found.worst_noise < 0.2


def test_each_text_of_each_length_is_counted_once(monkeypatch):
    """In batches of 16 the last one begins again with the first texts."""
    told, of_texts = [], module.Profile.of_texts
    monkeypatch.setattr(module.Profile, "of_texts", lambda rows: told.append(rows) or of_texts(rows))
    for batch in (1, 16):
        found_with(monkeypatch, linear, lengths=(0,), fit=(1, 4), batches=(batch,), batch=batch)
        for K, rows in zip((1, 4), told, strict=True):
            assert len(rows) == TEXTS and all(len(row.reached) == K for row in rows)
        told.clear()


@pytest.mark.parametrize(
    "arguments, message",
    [
        ([TINY, "--config.drafter=none"], "without a drafter there is nothing to forecast"),
        ([TINY, "--check_batch=9"], "--check_batch=9 must be at most 8"),
        ([TINY, "--config.synthetic_acceptance=0.8"], "--config.synthetic_acceptance=0.8 has no effect here"),
        ([TINY], "two halves of prompts need four, this pair has 0"),
        ([TINY, "--fit=0,4"], "--fit=0,4 must be at least 1; got 0"),
    ],
)
def test_what_is_refused_before_anything_is_decoded(arguments, message):
    done = call("study", "agreement", *arguments)
    assert done.returncode == 2 and message in done.stderr, done.stderr


@pytest.mark.slow
def test_a_tiny_pair_end_to_end(tmp_path):
    """The halves share no prompt; the tables show every K."""
    folder, output = tmp_path / "pair", tmp_path / "agreement.json"
    save_tiny_pair(folder, prompts=["a b", "c", "d e f", "b"])
    asked = [f"--config=configs/trained_pair.py:{folder}", "--config.max_new_tokens=4", "--check_batch=0", "--plain"]
    asked += ["--fit=1", "--longest=1", "--config.prompt_length=8", f"--output={output}"]
    done = call("study", "agreement", *asked)
    assert done.returncode == 0, done.stderr
    document = json.loads(output.read_text(encoding="utf-8"))
    assert [cell["key"]["law"] for cell in document["cells"]] == ["greedy", "T = 0.8, top_p 0.95"]
    assert [check["draft_length"] for check in document["cells"][0]["result"]["checks"]] == [0, 1]
    assert document["cells"][0]["result"]["prompts"] == [2, 2]
    assert "2 of 2" in done.stdout or "1 of 2" in done.stdout


def committed_checks():
    return [cell["result"]["checks"] for cell in study.read("python_pair_agreement")["cells"]]


def share_covered(checks, drift=CLOCK_DRIFT, width=1.0):
    """The share of measurements within bands whose drift is another one, or that are narrower."""

    def covered(check):
        band = check["forecast"]
        error = math.log(band["upper"] / band["value"]) / NORMAL_95
        known = math.sqrt(max(error**2 - CLOCK_DRIFT**2, 0))
        half = width * NORMAL_95 * math.hypot(known, drift)
        return abs(math.log(check["measured"] / band["value"])) <= half * (1 + 1e-9)

    return np.mean([covered(check) for check in checks])


def test_bands_of_95_percent_hold_95_percent_of_what_was_measured_on_other_prompts():
    """Has two controls: bands without the drift of clocks cover too little, and so do bands half as wide."""
    curves = committed_checks()
    checks = [check for curve in curves for check in curve]
    assert len(checks) == 52 and share_covered(checks) >= 0.95
    assert share_covered(checks, drift=0.0) < 0.9 and share_covered(checks, width=0.5) < 0.8


def test_the_drift_that_three_curves_ask_for_holds_most_of_the_fourth():
    curves = committed_checks()

    def least(checks):
        return next(i / 1000 for i in range(100) if share_covered(checks, i / 1000) >= 0.95)

    held = []
    for left in range(4):
        rest = [check for number, curve in enumerate(curves) if number != left for check in curve]
        held.append(share_covered(curves[left], least(rest)) * len(curves[left]))
    assert round(sum(held)) == 50
    assert least([check for curve in curves for check in curve]) == CLOCK_DRIFT

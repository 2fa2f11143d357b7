"""Agreement with clocks that are known: a planner that is right is told from one that is wrong."""

import dataclasses
import functools
import json
import math
import pathlib

import numpy as np
import pytest

from launch.lib.rules import RULES
from launch.studies import forecasting as module
from launch.studies.forecasting import agreement
from specsamp.analysis.acceptance import NORMAL_95
from specsamp.analysis.costs import CLOCK_DRIFT
from specsamp.analysis.workload import Timing
from specsamp.decoding.results import RowStats

FITTED, CHECKED = (1, 2), (3, 4)
PROMPTS = [FITTED, CHECKED] * 40
TOKENS = 96
CHANCES = (0.85, 0.75, 0.7, 0.6)


def emulate(monkeypatch, round_ms, fitted=CHANCES, checked=CHANCES, noise=0.0, products_ms=lambda rows: 0.0):
    """Replaces decoding by rounds whose acceptance is drawn, on a clock of ``round_ms(K, batch)``.

    The prompts of the two halves have chances of their own. By default products take no time.
    """
    clock, decoded, sides = np.random.default_rng(0), [], []

    class Side:
        loop = weights = None

        def __init__(self, K, workload):
            self.K, self.workload, self.number = K, workload, len(sides)
            self.chances = fitted if workload.prompts[0] == FITTED else checked
            sides.append(self)

        def decode(self, repeat):
            decoded.append((self.K, self.workload.batch, self.workload.prompts[0]))
            random = np.random.default_rng([self.number, repeat])  # another pass decodes the same
            rows = [self.row(random) for _ in range(self.workload.batch)]
            rounds = max(row.rounds for row in rows)
            seconds = rounds * round_ms(self.K, self.workload.batch) / 1e3 * (1 + noise * clock.normal())
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

    monkeypatch.setattr(
        module,
        "product_timers",
        lambda loop, weights, calls, progress: {
            batch * tokens: functools.partial(products_ms, batch * tokens) for batch, tokens in calls
        },
    )
    monkeypatch.setattr(
        module, "decoders", lambda pair, contenders, sampling, work: {K: Side(K, work) for K in contenders}
    )
    return decoded


def linear(K, batch):
    """0.9 ms for a call of the draft; 10 ms for the weights, 0.4 for every cache and 0.1 for every row."""
    return 10.0 + 0.5 * batch + K * (0.9 + 0.1 * batch)


def found_with(**options):
    return agreement(None, lambda K: K, RULES["token"](), None, PROMPTS, max_new_tokens=TOKENS, **options)


def test_costs_that_are_lines_are_foreseen(monkeypatch):
    emulate(monkeypatch, linear)
    found = found_with(passes=2)
    assert [check.draft_length for check in found.checks] == list(range(13))
    assert [check.draft_length for check in found.checks if check.cost_was_fitted] == [0, 1, 4, 8]
    assert found.worst_error < 0.05 and found.worst_noise == 0  # acceptance is drawn anew on the other prompts
    assert all(abs(check.round_ms_error) < 1e-9 for check in found.checks)
    assert abs(found.checks[0].error) < 1e-9
    for check in found.checks:
        assert math.isclose(1 + check.error, (1 + check.rounds_error) * (1 + check.round_ms_error))
    assert found.lost < 0.05
    json.dumps(dataclasses.asdict(found), allow_nan=False)


def test_costs_that_bend_where_nothing_was_fitted_are_not(monkeypatch):
    """The control: the same acceptance, but rounds of more than nine tokens cost half as much again."""
    emulate(monkeypatch, lambda K, batch: linear(K, batch) * (1.5 if K > 9 else 1))
    found = found_with(passes=2)
    assert found.worst_error > 0.25
    assert all(abs(check.round_ms_error) > 0.3 for check in found.checks if check.draft_length > 9)


def test_what_is_accepted_of_the_other_half_stays_unknown(monkeypatch):
    """Texts of the other half are drafted worse: a forecast that knew it would be right."""
    emulate(monkeypatch, linear, checked=(0.5,))
    found = found_with()
    worse = [check.rounds_error for check in found.checks if check.draft_length]
    assert max(worse) < -0.15  # too few rounds for all of them
    assert all(abs(check.round_ms_error) < 1e-9 for check in found.checks)


def stepped(rows):
    """From eight rows on products take twice as long, as some kernels do."""
    return (1.0 + 0.02 * rows) * (2 if rows >= 8 else 1)


def test_steps_between_fitted_rounds_are_foreseen_from_the_products(monkeypatch):
    emulate(monkeypatch, lambda K, batch: 4 * stepped(K + 1) + 0.9 * K, products_ms=lambda rows: 4 * stepped(rows))
    found = found_with()
    assert max(abs(check.round_ms_error) for check in found.checks) < 1e-9
    assert found.worst_error < 0.05 and found.worst_error_of_lines > 0.2
    emulate(monkeypatch, lambda K, batch: 4 * stepped(K + 1) + 0.9 * K)  # the control: products that do not tell
    assert found_with().worst_error > 0.2


def test_a_batch_between_two_that_were_fitted(monkeypatch):
    """Caches cost by the batch, rows as products do."""

    def round_ms(K, batch):
        return 4 * stepped(batch * (K + 1)) + 0.5 * batch + 0.9 * K

    decoded = emulate(monkeypatch, round_ms, products_ms=lambda rows: 4 * stepped(rows))
    found = found_with(fit_batches=(1, 8), check_batch=4, check_lengths=(0, 2, 6))
    assert {(K, batch) for K, batch, _ in decoded} == {(K, b) for K in (0, 1, 4, 8) for b in (1, 8)} | {
        (K, 4) for K in (0, 2, 6)
    }
    assert not any(check.cost_was_fitted for check in found.checks)
    assert max(abs(check.round_ms_error) for check in found.checks) < 1e-9 and found.worst_error < 0.08
    assert found.worst_error_of_lines > 0.2
    # The slowest row: a round of the batch emits less than one of a row does.
    assert round_ms(2, 4) / (found.checks[1].measured * 4) < 0.97 * (1 + 0.85 + 0.85 * 0.75)


def test_sides_with_fewer_texts_take_them_spread_over_a_pass(monkeypatch):
    decoded = emulate(monkeypatch, linear)
    found_with(fit_batches=(1, 8), check_batch=4, check_lengths=(0,))
    compiled, first = 9, decoded[9 : 9 + (len(decoded) - 9) // 2]
    assert len(decoded[:compiled]) == len(set(decoded[:compiled]))
    turns = [place for place, (K, batch, _) in enumerate(first) if batch == 8 and K == 0]
    assert len(turns) == 6 and turns[0] < len(first) / 5 and turns[-1] > 0.75 * len(first)


def test_noise_is_two_passes_over_the_same_texts(monkeypatch):
    emulate(monkeypatch, linear, checked=(1.0,), noise=0.2)
    assert 0.005 < found_with(check_lengths=(0, 2), fit_lengths=(1, 2)).worst_noise < 0.2


def test_prompts_are_not_shared_by_the_halves(monkeypatch):
    decoded = emulate(monkeypatch, linear)
    agreement(
        None,
        lambda K: K,
        RULES["token"](),
        None,
        [(n % 2,) for n in range(8)],
        max_new_tokens=TOKENS,
        check_lengths=(0, 3),
        fit_lengths=(1, 2),
    )
    assert {K for K, _, prompt in decoded if prompt == (0,)} == {0, 1, 2}
    assert {K for K, _, prompt in decoded if prompt == (1,)} == {0, 3}


def test_each_text_of_each_length_is_counted_once(monkeypatch):
    """Nine prompts alone; in six batches of two, the least, the last ones begin again with the first."""
    told, of_texts = [], module.Profile.of_texts
    monkeypatch.setattr(module.Profile, "of_texts", lambda *texts: told.append(texts) or of_texts(*texts))
    emulate(monkeypatch, linear)
    for batch in (1, 2):
        agreement(
            None,
            lambda K: K,
            RULES["token"](),
            None,
            [FITTED, CHECKED] * 9,
            max_new_tokens=TOKENS,
            fit_lengths=(1, 4),
            check_lengths=(0,),
            fit_batches=(batch,),
            check_batch=batch,
        )
        for K, (rows,) in zip((1, 4), told, strict=True):
            assert len(rows) == 9 and all(len(row.reached) == K for row in rows)
        told.clear()


@pytest.mark.parametrize(
    "options, message",
    [
        ({"passes": 1}, "two passes or more and four prompts or more are needed; got 1 and 80"),
        ({"fit_batches": (1, 2), "check_batch": 4}, "batch to check, 4, must lie within those that are fitted, 1, 2"),
        ({"fit_lengths": (0, 4)}, r"fitted K must be >= 1 and checked ones >= 0; got \[0, 4\]"),
        ({"check_lengths": (-1, 4)}, r"checked ones >= 0; got .* and \[-1, 4\]"),
    ],
)
def test_what_is_refused_before_anything_is_decoded(monkeypatch, options, message):
    decoded = emulate(monkeypatch, linear)
    with pytest.raises(ValueError, match=message):
        found_with(**options)
    assert not decoded


def test_the_table(monkeypatch):
    emulate(monkeypatch, linear)
    table = module.agreement_table("greedy, batch 1", found_with(check_lengths=(0, 3)), 0.1)
    assert len(table.rows) == 2 and all(len(row) == len(table.header) for row in table.rows)
    assert table.rows[0][0] == "K = 0 (fitted)" and "allowed 10%" in table.note
    assert "forecast from K = 0, 1, 4, 8 at batch 1 on other prompts" in table.title


def committed_checks():
    path = pathlib.Path(__file__).parents[2] / "notebooks/results/python_pair_agreement.json"
    return [cell["result"]["checks"] for cell in json.loads(path.read_text(encoding="utf-8"))["cells"]]


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
    """With the controls: without the drift of clocks they did not, and bands half as wide do not."""
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

"""Agreement with clocks that are known: a planner that is right is told from one that is wrong."""

import dataclasses
import json
import math
import types

import numpy as np
import pytest

from launch.experiment import RULES
from specsamp.analysis import agreement as module
from specsamp.analysis import tables
from specsamp.analysis.agreement import agreement
from specsamp.analysis.decoder import Timing
from specsamp.decoding.results import RowStats

PROMPTS = [(1, 2)] * 80
TOKENS = 96


def emulate(monkeypatch, round_ms, chances=(0.85, 0.75, 0.7, 0.6), noise=0.0, draft_ms=0.9, prefill_ms=1e9):
    """Replaces decoding by rounds whose acceptance is drawn, on a clock of ``round_ms(K, batch)``.

    A call of the draft takes ``draft_ms``; by default the prefill takes so long that tokens get no cheaper towards it.
    """
    clock, decoded, sides = np.random.default_rng(0), [], []

    class Side:
        def __init__(self, K, workload):
            self.K, self.workload, self.number = K, workload, len(sides)
            self.running = lambda: (self, None, None, None)
            sides.append(self)

        def decode(self, repeat):
            decoded.append((self.K, self.workload.batch, self.workload.prompts[0]))
            random = np.random.default_rng([self.number, repeat])  # another pass decodes the same
            rows = [self.row(random) for _ in range(self.workload.batch)]
            rounds = max(row.rounds for row in rows)
            seconds = rounds * round_ms(self.K, self.workload.batch) / 1e3 * (1 + noise * clock.normal())
            return Timing(
                prefill_seconds=prefill_ms / 1e3, loop_seconds=seconds, rounds=rounds, rows=tuple(rows), texts=(),
                from_draft=(),
            )  # fmt: skip

        def row(self, random):
            later = chances[-1:] * max(self.K - len(chances), 0)
            here = np.array([*chances[: self.K], *later])
            counts, reached, emitted, rounds = np.zeros(self.K + 1, int), np.zeros(self.K, int), 0, 0
            while emitted < TOKENS:
                n = int(np.cumprod(random.random(self.K) < here).sum())
                given = min(n + 1, TOKENS - emitted)
                counts[min(n, given)] += 1
                reached[: min(n + 1, self.K, given)] += 1
                emitted, rounds = emitted + given, rounds + 1
            return RowStats(
                rounds=rounds, emitted=emitted, drafted=0, reached=tuple(reached.tolist()),
                accepted_counts=tuple(counts.tolist()),
            )  # fmt: skip

    def parts(speculative, *_):
        side, ms = speculative[0], lambda value: types.SimpleNamespace(ms=types.SimpleNamespace(median=value))
        whole, draft = round_ms(side.K, side.workload.batch), side.K * draft_ms
        return types.SimpleNamespace(draft=ms(draft), score=ms(whole - draft), step=ms(round_ms(0, 1)))

    monkeypatch.setattr(module, "split_round", parts)
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


def test_tokens_that_get_cheaper_are_foreseen_from_the_prefill(monkeypatch):
    """Beyond nine tokens one more costs 0.6 ms: between the 1 ms of the last two known and 0.3 towards the prefill."""
    flatter = lambda K, batch: linear(min(K, 8), batch) + 0.6 * max(K - 8, 0)
    emulate(monkeypatch, flatter, draft_ms=0.2, prefill_ms=flatter(8, 1) - 8 * 0.2 + 0.1 * (109 - 9))
    options = {"prompts": [(1,) * 109] * 80, "max_new_tokens": TOKENS}
    found = agreement(None, lambda K: K, RULES["token"](), None, **options)
    assert [one.batch for one in found.costs.parts] == [1]
    np.testing.assert_allclose(found.costs.parts[0].further_ms, (1.0 + 0.3) / 2)
    assert max(abs(check.round_ms_error) for check in found.checks) < 0.02
    emulate(monkeypatch, flatter, draft_ms=0.2)  # the control: a prefill as slow as if they did not
    found = agreement(None, lambda K: K, RULES["token"](), None, **options)
    assert max(abs(check.round_ms_error) for check in found.checks) > 0.07


def test_a_batch_between_two_that_were_fitted(monkeypatch):
    decoded = emulate(monkeypatch, linear)
    found = found_with(fit_batches=(1, 8), check_batch=4, check_lengths=(0, 2, 6))
    assert {(K, batch) for K, batch, _ in decoded} == {(K, b) for K in (0, 1, 4, 8) for b in (1, 8)} | {
        (K, 4) for K in (0, 2, 6)
    }
    assert not any(check.cost_was_fitted for check in found.checks)
    assert found.worst_error < 0.05 and abs(found.checks[0].error) < 1e-9
    # The control: without the slowest row the forecast would be well below.
    emitted = 96 / (found.checks[1].measured * 4 / linear(2, 4) * 96)
    assert emitted < 0.97 * (1 + 0.85 + 0.85 * 0.75)


def test_noise_is_two_passes_over_the_same_texts(monkeypatch):
    emulate(monkeypatch, linear, chances=(1.0,), noise=0.2)
    assert 0.005 < found_with(check_lengths=(0, 2), fit_lengths=(1, 2)).worst_noise < 0.2


def test_prompts_are_not_shared_by_the_halves(monkeypatch):
    decoded = emulate(monkeypatch, linear)
    agreement(
        None, lambda K: K, RULES["token"](), None, [(n % 2,) for n in range(8)], max_new_tokens=TOKENS,
        check_lengths=(0, 3), fit_lengths=(1, 2),
    )  # fmt: skip
    assert {K for K, _, prompt in decoded if prompt == (0,)} == {0, 1, 2}
    assert {K for K, _, prompt in decoded if prompt == (1,)} == {0, 3}


def test_a_text_that_fills_up_the_last_batch_counts_once():
    row = RowStats(rounds=2, emitted=3, drafted=2, reached=(2,), accepted_counts=(1, 1))
    texts = module._by_text([[row] * 3, [row] * 4], longest=2, count=3)  # alone; two batches of two
    assert [text.rounds for text in texts] == [6, 4, 4]
    assert texts[0].reached == (6, 0) and texts[0].accepted_counts == (3, 3, 0)


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
    table = tables.agreement_table("greedy, batch 1", found_with(check_lengths=(0, 3)), 0.1)
    assert len(table.rows) == 2 and all(len(row) == len(table.header) for row in table.rows)
    assert table.rows[0][0] == "K = 0 (fitted)" and "allowed 10%" in table.note
    assert "forecast from K = 0, 1, 4, 8 at batch 1 on other prompts" in table.title

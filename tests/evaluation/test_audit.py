"""The audit passes sound pairs, and every injected mistake fails its check.

Mistakes are injected as rules, drafters, models, and loops that replace the loop of `generate`.
"""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specsamp import (
    EARS,
    Adaptive,
    BlockRule,
    Bounded,
    CoupledRule,
    EarlyExitDrafter,
    ModelDrafter,
    NgramDrafter,
    NoDrafter,
    Pair,
    TokenRule,
    TransformerLM,
    chain,
    greedy,
    temperature,
    top_p,
)
from specsamp.analysis import report
from specsamp.decoding import method
from specsamp.evaluation.audit import Settings, Status, audit, audit_table, distribution, streams
from specsamp.evaluation.audit.checks import UNREADABLE
from specsamp.evaluation.audit.teacher import Text, judge, next_logits
from specsamp.models.config import tiny
from specsamp.sampling.rng import RoundKeys
from specsamp.sampling.synthetic import SyntheticAcceptance
from specsamp.sampling.warp import Warp, log_probs, register_warp
from support import mutants
from support.audits import FAR, NEAR, PROMPTS, RARE, TARGET, K, V, subject_of, table_subject
from support.fakes import LayeredTableLM, TableLM
from support.refusals import refused_arguments, refused_calls
from support.weights import drawn_params

NUCLEUS = chain(temperature(0.8), top_p(0.9))
COARSE = Settings(detect=0.1, rows=512)


def counted(audited):
    cells = distribution.read_cells(audited, [0, 1, 3, 4])
    return distribution.count_pairs(
        audited, cells, detect=COARSE.detect, level=RARE, rows=COARSE.rows
    )


def failed(check):
    return check.verdict is Status.FAILED


@pytest.fixture
def with_loop(monkeypatch):
    return lambda loop: monkeypatch.setattr(method, "Loop", loop)


# Sound pairs.


@pytest.mark.slow
def test_sound_pair_passes_all_applicable_checks():
    found = audit(table_subject(), COARSE)
    assert found.passed and found.named(Status.NOT_APPLICABLE) == ["bfloat16"]
    assert found.summary.startswith("6 of 6 checks passed (bfloat16 not applicable)")
    # Tables have no rounding: nothing is excused.
    numbers = {check.name: check.numbers for check in found.checks}
    assert numbers["greedy"]["texts_that_differ"] == numbers["coupled"]["near_ties"] == 0
    assert (
        numbers["neighbours"]["texts_that_differ"] == numbers["padding"]["texts_that_differ"] == 0
    )
    assert numbers["acceptance"]["accepted"] == numbers["acceptance"]["verified"] > 80


@pytest.mark.parametrize(
    "changes", [{"rule": BlockRule(), "draft": FAR}, {"drafter": NgramDrafter(K)}]
)
def test_sound_distributions_pass(changes):
    assert not failed(counted(table_subject(**changes)))


@pytest.fixture(scope="module")
def transformers():
    target = TransformerLM(tiny(vocab_size=61, num_layers=1, positions="rotary"))
    draft = TransformerLM(tiny(vocab_size=61, num_layers=1, num_heads=2, positions="rotary"))
    params = drawn_params(target)
    draft_params = drawn_params(draft, 1) | {"embedding": params["embedding"]}
    return subject_of(
        pair=Pair(target=target, target_params=params, draft=draft, draft_params=draft_params),
        prompts=PROMPTS,
        drafter=ModelDrafter(draft, K),
        sampling=NUCLEUS,
        max_new_tokens=12,
    )


@pytest.mark.slow
def test_bfloat16_is_audited_in_bfloat16(transformers, with_loop):
    in_bfloat16 = transformers.cast("bfloat16")
    assert (
        in_bfloat16.pair.target.config.dtype
        == in_bfloat16.method.drafter.model.config.dtype
        == "bfloat16"
    )
    narrow = jax.tree.map(lambda x: x.astype(jnp.bfloat16), transformers.pair.target_params)
    stored = dataclasses.replace(
        in_bfloat16, pair=dataclasses.replace(in_bfloat16.pair, target_params=narrow)
    )
    exact = stored.cast("float32")
    assert exact.pair.target.config == transformers.pair.target.config
    # Widened once, not for every number of slots.
    assert {leaf.dtype for leaf in jax.tree.leaves(exact.pair.target_params)} == {
        jnp.dtype("float32")
    }
    check = streams.bfloat16_text(transformers, in_bfloat16)
    assert check.verdict is Status.PASSED and check.numbers["tokens"] == 6 * 12
    assert 1e-3 < check.numbers["tolerance"] < 0.2
    assert check.numbers["share_that_could_be_excused"] < 0.3
    with_loop(mutants.ScoresWithANeighboursLength)
    looked_up = dataclasses.replace(
        in_bfloat16, method=in_bfloat16.method.with_drafter(NgramDrafter(K))
    )  # one model less to compile
    assert failed(streams.bfloat16_text(transformers, looked_up))


def early_exit(drafter=EarlyExitDrafter, draft=NEAR):
    """Returns the subject of a target that drafts with the first of its two layers."""
    model = LayeredTableLM(V)
    pair = Pair(target=model, target_params=jnp.stack([draft, TARGET - draft]))
    settings = {"sampling": NUCLEUS, "max_new_tokens": 24}
    return subject_of(pair=pair, prompts=PROMPTS, drafter=drafter(model, 1, K), **settings)


@pytest.mark.slow
def test_early_exit_passes_checks_of_its_draft():
    settings = dataclasses.replace(COARSE, checks=("distribution", "acceptance"))
    found = audit(early_exit(), settings)
    assert found.summary.startswith("2 of 2 checks passed"), found.summary
    numbers = {check.name: check.numbers for check in found.checks}
    assert numbers["acceptance"]["accepted"] == numbers["acceptance"]["verified"] > 80
    assert UNREADABLE not in found.summary  # its distribution is read like a draft model's


def test_a_draft_that_writes_over_its_target_fails():
    wrong = early_exit(mutants.WritesOverWhatWasScored, FAR)
    check = streams.greedy_text(wrong)
    assert failed(check)
    assert "behind the target's choice" in check.sentence
    assert failed(counted(wrong))


@pytest.mark.slow
@pytest.mark.parametrize(
    "changes",
    [
        {"drafter": mutants.DistributionBeforeWarping(TableLM(V), K)},
        {"rule": SyntheticAcceptance(TokenRule(), 0.7)},
    ],
    ids=lambda changes: type(next(iter(changes.values()))).__name__,
)
def test_the_distribution_of_a_broken_rule_or_drafter(changes):
    check = counted(table_subject(draft=FAR, **changes))
    assert failed(check)
    assert "times, not" in check.sentence


# Mistakes.


@pytest.mark.slow
def test_a_hole_in_the_cache_of_the_draft():
    """The hole costs acceptance, and nothing else."""
    audited = table_subject(drafter=mutants.HoleInTheCache(TableLM(V), K))
    found = audit(audited, dataclasses.replace(COARSE, checks=("greedy", "acceptance")))
    assert found.summary == "1 of 2 checks failed: acceptance"


@pytest.mark.slow
def test_a_length_of_a_neighbour(with_loop):
    with_loop(mutants.ScoresWithANeighboursLength)
    assert failed(streams.neighbours(table_subject(), RARE))


@dataclasses.dataclass(frozen=True)
class PaddedLM(TableLM):
    """A model whose logits depend on the width of the first call, padding included."""

    def init_cache(self, batch, slots):
        return super().init_cache(batch, slots), jnp.zeros((batch,), jnp.int32)

    def __call__(self, weights, tokens_BT, start_B, cache, *, hidden_layers=()):
        tokens, width_B = cache
        width_B = jnp.where(start_B == 0, tokens_BT.shape[1], width_B)
        output = super().__call__(weights, tokens_BT, start_B, tokens)
        leak_BV = jax.nn.one_hot(width_B // 8 % V, V)
        logits_BTV = output.logits_BTV + leak_BV[:, None]
        return dataclasses.replace(output, logits_BTV=logits_BTV, cache=(output.cache, width_B))


def test_a_leak_of_padding():
    check = streams.padding(table_subject(PaddedLM(V)), RARE)
    assert failed(check)
    assert check.numbers["texts_that_differ"] > check.numbers["differences_allowed"]


def test_noise_of_the_round_under_the_coupled_rule():
    class ByRound(CoupledRule):
        def verify(self, draft, target, keys):
            apart = RoundKeys(rows_B=keys.rows_B, starts_B=1000 * keys.starts_B)
            return super().verify(draft, target, apart)

    check = streams.coupled_text(table_subject(rule=ByRound()))
    assert failed(check) and not failed(streams.coupled_text(table_subject()))


def test_failed_check_does_not_end_the_audit():
    """Logits that are NaN end sampled texts before their second token."""
    broken = table_subject(target=TARGET.at[3].set(jnp.nan))
    found = audit(
        broken, dataclasses.replace(COARSE, checks=("greedy", "distribution", "acceptance"))
    )
    assert found.summary == "2 of 3 checks failed: greedy, distribution"
    greedily, sampled, _ = (check.sentence for check in found.checks)
    assert "NaN or infinite" in greedily
    assert sampled.startswith("the check ended early: texts ended before")


# Budgets of lossy rules.

BUDGET = 0.02


def within_budget(rule, *more):
    settings = dataclasses.replace(COARSE, checks=("distribution", *more))
    return audit(table_subject(draft=FAR, rule=rule, sampling=chain(temperature(1.0))), settings)


def test_rule_within_its_budget_passes():
    found = within_budget(Bounded(EARS(1.0), BUDGET), "acceptance")
    check, acceptance = found.checks
    assert found.passed and acceptance.numbers["accepted"] == acceptance.numbers["verified"]
    assert check.numbers["allowed"] == 2 * BUDGET and abs(check.numbers["measured"] - BUDGET) < 0.04
    assert "LOSSY: no more than its budget of 0.02 per token" in found.summary
    assert "seen with 99%" in found.summary
    checks = report.as_json([dataclasses.asdict(check) for check in found.checks])
    assert "up to the budget" in audit_table(checks, claims=True).rows[0][2]


def test_rule_above_its_budget_fails():
    found = within_budget(mutants.IgnoresItsBudget(EARS(1.0), BUDGET))
    assert not found.passed and found.checks[0].numbers["measured"] > 0.1


# Teacher forcing.


def test_only_near_ties_are_explained():
    """Rounding decides near ties of greedy texts, and puts tokens inside or outside a nucleus."""
    audited = table_subject()
    logits_V = next_logits(audited.pair, [[1, 2, 3]])[0]
    first, second = np.argsort(-logits_V)[:2].tolist()
    gap = float(logits_V[first] - logits_V[second])

    def judged(token, tolerance, warp=chain()):
        return judge(
            audited.pair, [Text(prompt_id=0, prompt=(1, 2, 3), tokens=(token,))], warp, tolerance
        )[0]

    assert judged(first, 0.0).chosen_N.all() and not judged(first, 0.49 * gap).excusable_N.any()
    assert judged(second, 0.51 * gap).explained_N.all()
    assert judged(first, 0.51 * gap).excusable_N.all()
    assert not judged(second, 0.49 * gap).explained_N.any()
    np.testing.assert_allclose(judged(second, 0.0).behind_N, [gap], rtol=1e-5)
    # The coupled rule: a token chosen by the noise, and a nucleus that ends just before it.
    texts = [Text(prompt_id=i, prompt=(1, 2, 3), tokens=(second,)) for i in range(32)]

    def judged(texts, warp):
        return judge(audited.pair, texts, warp, 1e-4, noise_seed=5)

    chosen = [text for text, one in zip(texts, judged(texts, chain())) if one.chosen_N.all()]
    before = float(np.exp(log_probs(chain(), logits_V[None])[0, first]))
    assert 0 < len(chosen) < 32
    for above, explained in ((1e-5, True), (1e-2, False)):
        for one in judged(chosen, chain(top_p(before - above))):
            assert one.explained_N.all() == explained
            assert not one.chosen_N.any()
            assert np.isinf(one.behind_N).all()


# The statistics.


@pytest.mark.parametrize("allowed", [0.0, 0.04])
@pytest.mark.parametrize("num_cells", [5, 41])
def test_false_alarm_and_detection_rates_hold(allowed, num_cells):
    """Of 1,500 tests, few fail at the allowed error, and nearly all at ``detect`` more."""
    level, detect, rng = 0.04, 0.1, np.random.default_rng(0)
    probs_C = np.linspace(1, 3, num_cells) / (2 * num_cells)
    cells = [distribution.Cells(prompt_id=i, index={}, probs_C=probs_C) for i in range(3)]
    samples = distribution.samples_for(cells, detect, level)

    def share_that_fails(error):
        is_raised_C = np.arange(num_cells) % 2 == 0
        shift_C = (
            np.where(is_raised_C, 1 / probs_C[is_raised_C].sum(), -1 / probs_C[~is_raised_C].sum())
            * probs_C
        )
        halves = rng.multinomial(samples // 2, probs_C + error * shift_C, size=(1500, 2, 3))
        return np.mean(
            [distribution.excess(cells, *counts, allowed)[1] < level for counts in halves]
        )

    assert share_that_fails(allowed) <= 0.05
    assert share_that_fails(allowed + detect) > 0.98
    assert share_that_fails(allowed + detect / 3) < 0.9  # the control


# Settings that cannot be audited.


@register_warp
class Remembers(Warp):
    def init(self, tokens_BP, lengths_B, vocab_size):
        return lengths_B

    def __call__(self, logits, state=()):
        return logits


@pytest.mark.slow
def test_inapplicable_checks_are_reported():
    assert "no model" in streams.equal_draft(table_subject(drafter=NgramDrafter(K)), RARE).sentence
    alone = dataclasses.replace(table_subject(), prompts=PROMPTS[1:2])
    assert streams.neighbours(alone, RARE).verdict is Status.NOT_APPLICABLE
    paced = Adaptive(lengths=(0, 1, K), costs_ms=(1, 1.2, 1.9), usual=K, acceptance=0.6)
    assert streams.neighbours(table_subject(adaptive=paced), RARE).verdict is Status.PASSED
    flat = table_subject()
    flat = dataclasses.replace(flat, pair=dataclasses.replace(flat.pair, target_params=0 * TARGET))
    assert "agreement means nothing" in streams.greedy_text(flat).sentence
    json.dumps([dataclasses.asdict(streams.greedy_text(flat))], allow_nan=False)


test_refused_audits = refused_calls(
    {
        r"temperature 0\?": lambda: audit(table_subject(sampling=greedy()), COARSE),
        "nothing is drafted": lambda: table_subject(drafter=NoDrafter()),
        "draft_sampling.*Remembers": lambda: table_subject(draft_sampling=Remembers()),
        "is lossy.*budget": lambda: within_budget(EARS(0.3)),
        "together 22, more than the target's 20 positions": lambda: table_subject(
            TableLM(V, max_positions=20), max_new_tokens=15
        ),
    }
)

test_refused_audit_settings = refused_arguments(
    Settings,
    {
        "checks must be one of greedy, bfloat16, .*got 'luck'": dict(checks=("luck",)),
        r"checks must .*got \(\)": dict(checks=()),
        "checks must .*got 'greedy'": dict(checks="greedy"),
        "false_alarm must": dict(false_alarm=1.0),
        "rows must": dict(rows=0),
    },
)

"""Every two values of drafter, rule, warp, warp of the draft, cache, prompts, draft lengths, stop,
entry point and mesh share a case whose texts have the target's joint distribution.

A correct case fails once in 100,000 runs, by chance. Kernels are not among the values: as programs
they equal their plain forms (models/test_kernels.py).
"""

import random

import jax
import jax.numpy as jnp
import pytest

from specsamp import BlockRule, KSeqRule, RecursiveRule, TokenRule
from specsamp.sampling.penalties import Bias, Penalties
from support import pairs
from support.fakes import FALSE_ALARM

pytestmark = pytest.mark.slow
PARTS, FIRST = 30, 5  # parts of the cases; `.ci/run` has time for the first ones only
SAMPLES = 3000


def smallest_p_value(case):
    """Returns the p-value of the worst prompt, corrected for the number of prompts."""
    found = zip(case.texts(SAMPLES, seed=0), case.expected(), strict=True)
    values = [pairs.p_value(texts_ST, distribution) for texts_ST, distribution in found]
    return min(values) * len(values)


def test_every_pair_is_covered_or_refused(capsys):
    cases, refused = pairs.covering(), pairs.refused()
    covered = set().union(*(case.pairs for case in cases))
    wanted = set(pairs.all_pairs()) - refused.keys()
    with capsys.disabled():
        print(f"\n{len(covered & wanted)} of {len(wanted)} pairs in {len(cases)} cases")
    assert wanted <= covered
    assert len(cases) < 80


def test_refused_pairs_are_those_of_chains_and_trees():
    """Every refusal states a reason, and no further pair is refused."""
    expected = {(chain, rule) for chain in pairs.CHAINS for rule in pairs.OF_TREES}
    expected -= {("none", rule) for rule in pairs.OF_TREES}
    expected |= {(tree, rule) for tree in pairs.TREES for rule in ("token", "block")}
    expected |= {(name, "stopped") for name in (*pairs.TREES, *pairs.OF_TREES, "none")}
    expected |= {("none", "adaptive")}
    found = {(one[1], other[1]): reason for (one, other), reason in pairs.refused().items()}
    assert set(found) == expected
    assert all(reason.count(": ") or ";" in reason for reason in found.values())


def check_part(part):
    for case in pairs.covering()[part::PARTS]:
        assert smallest_p_value(case) > FALSE_ALARM, str(case)


@pytest.mark.parametrize("part", range(FIRST))
def test_texts_have_the_distribution_of_the_target(part):
    check_part(part)


@pytest.mark.parametrize("part", range(FIRST, PARTS))
def test_further_cases_have_the_target_distribution(part):
    check_part(part)


# Drafters with rejected tokens. A window over so short a text is nearly the target, so that hardly
# any residual is drawn.
DRAWN = ("model", "parallel", "EAGLE-3", "modules", "DSpark", "tokenizer")


def is_drafted(case):
    return case.drafter in DRAWN and case.lengths == "fixed"


MISTAKES = {
    # Draws from the target's distribution instead of the residual.
    "no residual": (
        lambda case: case.rule == "token" and is_drafted(case),
        (TokenRule, "residual", lambda self, draft, target, n: jnp.exp(target_at(target, n))),
    ),
    "tokens that are accepted one by one": (
        lambda case: case.rule == "block" and case.draft != "greedy" and case.drafter in DRAWN,
        (BlockRule, "acceptance", TokenRule.acceptance),
    ),
    "penalties of the prompt alone": (
        lambda case: case.warp == "penalties",
        (Penalties, "advance", lambda self, state, tokens_B: state),
    ),
    "a minimum that counts no tokens": (
        lambda case: case.warp == "min_tokens",
        (Bias, "advance", lambda self, state, tokens_B: state),
    ),
    "siblings judged as if drawn independently": (
        lambda case: (
            case.rule == "recursive"
            and case.drafter in ("model tree", "three siblings")
            and case.draft != "greedy"
        ),
        (RecursiveRule, "judge", KSeqRule.judge),
    ),
}


def target_at(target_log_probs, num_accepted_B):
    return jnp.take_along_axis(target_log_probs, num_accepted_B[:, None, None], axis=1)[:, 0]


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_planted_mistake_is_found(mistake, monkeypatch):
    """One case, drawn from all cases that call the mistaken function, detects the mistake."""
    applies, (place, name, wrong) = MISTAKES[mistake]
    case = random.Random(1).choice([case for case in pairs.covering() if applies(case)])
    case.expected()
    jax.clear_caches()
    monkeypatch.setattr(place, name, wrong)
    try:
        assert smallest_p_value(case) < FALSE_ALARM, str(case)
    finally:
        jax.clear_caches()  # drops the mistaken programs

"""Synthetic acceptance: to measure rounds at real sizes without trained weights.

With random weights hardly any drafted token is accepted, so the time per *token* means nothing.
`SyntheticAcceptance` does all the work of a rule and then accepts every drafted token with a fixed
probability. The emitted tokens follow no model's distribution: ``exact`` is false, and every result
has this `LABEL`.
"""

import dataclasses

import jax

from specsamp import validate
from specsamp.sampling.rng import RoundKeys
from specsamp.sampling.rules import (
    Draft,
    Rule,
    TargetDistributions,
    Verdict,
    count_leading,
    make_verdict,
    take_row,
)

Array = jax.Array
LABEL = "SYNTHETIC ACCEPTANCE {rate:g}: made up, not the pair's"


@dataclasses.dataclass(frozen=True)
class SyntheticAcceptance(Rule):
    """A rule that takes as long as ``rule`` and accepts every drafted token with probability
    ``rate``.
    """

    rule: Rule
    rate: float

    exact = False

    def __post_init__(self):
        validate.number("synthetic_acceptance", self.rate, 0, 1)

    def sample(self, log_probs_BV: Array, keys: RoundKeys, offset: Array | int) -> Array:
        """Draws a token with ``rule``."""
        return self.rule.sample(log_probs_BV, keys, offset)

    def verify(self, draft: Draft, target: TargetDistributions, keys: RoundKeys) -> Verdict:
        """Computes the verdict of ``rule``, of which only the appended token is used."""
        verdict = self.rule.verify(draft, target, keys)
        last_B = take_row(verdict.tokens_BT, verdict.num_accepted_B)
        passed_BK = (keys.accept_uniforms(*draft.tokens_BK.shape) < self.rate) & draft.is_drafted_BK
        return make_verdict(draft, count_leading(passed_BK), last_B)

"""Tests the acceptance and replacement of drafted tokens, on long sampled texts that both models
score again.

After any prefix the next token must follow the target's distribution q for every distribution p of
the draft. Mistakes in acceptance or residual move probability from tokens with q > p to tokens with
q < p, or back. If q is flat, counts of single tokens cannot show this, but the ratio q(x) / p(x) of
every token of long texts can.

**Tests.** (1) One for each of `EDGES`: q(x) / p(x) lies above it as often as q says. (2) Under the
token rule, one for all drafted tokens and one for each position of a draft: a token is accepted
with probability ``sum_x min(q(x), p(x))``, if all drafted tokens before it were accepted.

**Which tokens.** Under the token rule ratios are tested at all positions of a draft. Under other
rules they are tested at the first position of each round: there the next token follows q under
every lossless rule. The same holds for heads, whose later tokens depend on where their round began.

**The statistic.** Let d be the number of times that an event happened at N tokens, minus the sum of
its probabilities. If tokens follow these probabilities,

    E = sqrt(r / (r + v)) exp(d^2 / (2 (r + v))),        v = N / 4

is at most a martingale of mean one, for any constant r (Robbins 1970: a mixture over t of
Hoeffding's exp(t d - t^2 v / 2)). So it ever exceeds 1 / level with a probability of at most
``level`` (Ville's inequality): 1 / E is a p-value. This needs no normal approximation and no number
of tokens fixed in advance. Several tests share a level by Bonferroni's inequality.

If the event's frequency is off by e per token, d stays below ``N e - sqrt(N log(1 / (1 - POWER)) /
2)`` with a probability of at most 1 - POWER (Azuma's inequality), which gives the smallest
detectable error: `Evidence.error_seen`.
"""

import functools
import operator
from collections.abc import Sequence
from typing import Self

import jax
import jax.numpy as jnp
import numpy as np

from specsamp.analysis.report import Say, silent
from specsamp.decoding.data_shards import BY_ROWS, DataShards
from specsamp.evaluation.audit.readers import reader
from specsamp.evaluation.audit.subject import POWER, Check, Subject
from specsamp.evaluation.audit.teacher import Text, read_tokens
from specsamp.pytrees import pytree
from specsamp.sampling.rejection import TokenRule
from specsamp.sampling.warp import Warp, for_rows, log_probs

Array = jax.Array

# Edges of log2(q / p). No edge is 0: where draft and target are equal, rounding would decide on
# which side a token lies, and a compiler may compute the ratio twice.
EDGES = (-2.0, -1.0, -0.5, 1e-3, 0.5, 1.0, 2.0)
MOST_BATCHES = 64  # calls of `generate`
MIXED = 100  # r: tests of about 4 r tokens and more are sharp


@pytree
class Evidence:
    """Counts of the events of T tests; counts of two sets of tokens can be added.

    Attributes:
      tokens_T: number of tokens that were tested.
      happened_T, expected_T: the numbers of events, and the sums of their probabilities.
    """

    tokens_T: np.ndarray
    happened_T: np.ndarray
    expected_T: np.ndarray

    @classmethod
    def of(cls, probs_NT: np.ndarray, happened_NT: np.ndarray, tested_NT: np.ndarray) -> Self:
        """Counts events at the tokens that are tested; all arguments are broadcast to
        ``[N, T]``.
        """
        probs_NT, happened_NT, tested_NT = np.broadcast_arrays(
            probs_NT.astype(np.float64), happened_NT, tested_NT
        )
        return cls(
            tokens_T=tested_NT.sum(0),
            happened_T=(happened_NT & tested_NT).sum(0),
            expected_T=(probs_NT * tested_NT).sum(0),
        )

    @property
    def p_values(self) -> np.ndarray:
        """Returns ``min(1, 1 / E)`` for each test, float64 [T]."""
        spread_T = MIXED + self.tokens_T / 4
        log_evidence_T = (
            np.log(MIXED / spread_T) + (self.happened_T - self.expected_T) ** 2 / spread_T
        ) / 2
        return np.exp(-np.maximum(log_evidence_T, 0))

    def error_seen(self, level: float) -> np.ndarray:
        """Returns the smallest error of an event's frequency that a test at ``level`` sees with
        `POWER`, [T].
        """
        tokens_T = np.maximum(self.tokens_T, 1)
        spread_T = MIXED + tokens_T / 4
        threshold_T = np.sqrt(spread_T * (2 * np.log(1 / level) + np.log(spread_T / MIXED)))
        return (threshold_T + np.sqrt(tokens_T * np.log(1 / (1 - POWER)) / 2)) / tokens_T


@pytree
class Rounds:
    """The evidence of sampled texts; sums are the evidence of several sets of texts.

    Attributes:
      texts: number of texts.
      ratios: tests (1) of the module's docstring.
      positions: tests (2), of all positions together first; meaningful under the token rule.
    """

    texts: int
    ratios: Evidence
    positions: Evidence


def can_read(subject: Subject) -> bool:
    """Returns whether drafted tokens are sampled from a model that `reader` returns."""
    draft = reader(subject.method.drafter)
    return draft is not None and any(map(draft.reads, subject.prompts))


def collect(
    subject: Subject,
    *,
    detect: float,
    false_alarm: float,
    rows: int,
    progress: Say = silent,
) -> Rounds:
    """Samples texts of all prompts, about ``rows`` at a time, until an error of ``detect`` would be
    detected.

    It gives up after `MOST_BATCHES` calls of `generate`.

    Raises:
      ValueError: no text has a token.
    """
    samples = max(rows // len(subject.prompts), 1)
    found = None
    draft = reader(subject.method.drafter)
    method = subject.method.with_drafter(subject.method.drafter)
    for call in range(MOST_BATCHES):
        progress(f"rounds: {call * samples * len(subject.prompts)} texts read")
        seed = (subject.seed + 2**31 + call) % 2**32  # apart from the seeds of the other checks
        texts = [
            (
                Text(prompt=tuple(subject.prompts[one.prompt_index]), tokens=tuple(one.tokens)),
                one.from_draft,
            )
            for one in subject.decode(method=method, num_samples=samples, seed=seed)
            if one.tokens and draft.reads(subject.prompts[one.prompt_index])
        ]
        if not texts:
            raise ValueError(
                "texts ended before their first token: the target's logits were NaN or infinite"
            )
        batch = read_rounds(subject, *zip(*texts))
        found = batch if found is None else jax.tree.map(operator.add, found, batch)
        if error_seen(found.ratios, false_alarm) <= detect:
            break
    return found


def error_seen(tests: Evidence, false_alarm: float) -> float:
    """Returns the error that the first test detects with probability `POWER`, if all tests share
    ``false_alarm``.
    """
    return float(tests.error_seen(false_alarm / len(tests.tokens_T))[0])


def read_rounds(
    subject: Subject, texts: Sequence[Text], from_draft: Sequence[Sequence[bool]]
) -> Rounds:
    """Reads texts with both models.

    Args:
      subject: the pair with its settings.
      texts: prompts with sampled tokens.
      from_draft: for each text, whether each of its tokens was drafted.
    """
    pair = subject.pair
    method = subject.method
    draft = reader(method.drafter)
    warps = (method.sampling, method.draft_sampling or method.sampling)

    def read(rows, tokens_BN, *logits):
        warps_B = tuple(for_rows(pair.full_warp(warp), len(rows)) for warp in warps)
        return _read_tokens(pair.shards, *logits, warps_B, tokens_BN)

    K = draft.depth or method.drafter.K
    verified = []
    results = read_tokens(pair, texts, read, drafter=method.drafter, reader=draft)
    for found, drafted_N in zip(results, map(np.array, from_draft)):
        offsets_N = _offsets(drafted_N)
        verified.append([values_N[offsets_N < K] for values_N in (offsets_N, drafted_N, *found)])
    offsets_N, drafted_N, acceptance_N, above_NE, above_probs_NE = map(
        np.concatenate, zip(*verified)
    )
    is_counted_NT = np.concatenate(
        [offsets_N[:, None] >= 0, offsets_N[:, None] == np.arange(K)], axis=1
    )
    is_tested_N = (offsets_N == 0) | isinstance(method.rule, TokenRule)
    return Rounds(
        texts=len(texts),
        ratios=Evidence.of(above_probs_NE, above_NE, is_tested_N[:, None]),
        positions=Evidence.of(acceptance_N[:, None], drafted_N[:, None], is_counted_NT),
    )


def _offsets(drafted_N: np.ndarray) -> np.ndarray:
    """Returns each token's position within its round, which ends with a token that was
    not drafted.
    """
    index_N = np.arange(len(drafted_N))
    next_begins_N = np.maximum.accumulate(np.where(drafted_N, 0, index_N + 1))
    return index_N - np.concatenate([[0], next_begins_N[:-1]])


@functools.partial(jax.jit, static_argnames=("shards",))
def _read_tokens(
    shards: DataShards,
    target_BNV: Array,
    draft_BNV: Array,
    warps: tuple[Warp, Warp],
    tokens_BN: Array,
) -> tuple[Array, Array, Array]:
    """Returns each token's probability of acceptance, and whether and how probably its ratio is
    above each edge.
    """

    def read(row):
        q_NV, p_NV, tokens_N = row
        log_ratio_NV = jnp.where(q_NV > 0, jnp.log2(q_NV) - jnp.log2(p_NV), -jnp.inf)
        log_ratio_N = jnp.take_along_axis(log_ratio_NV, tokens_N[:, None], axis=-1)[:, 0]
        above_probs = [q_NV.sum(-1, where=log_ratio_NV >= edge) for edge in EDGES]
        is_above_NE = log_ratio_N[:, None] >= jnp.array(EDGES)[None]
        return jnp.minimum(p_NV, q_NV).sum(-1), is_above_NE, jnp.stack(above_probs, axis=-1)

    probs = [
        jnp.exp(log_probs(warp, x_BNV))
        for warp, x_BNV in zip(warps, (target_BNV, draft_BNV), strict=True)
    ]
    return shards.map(functools.partial(jax.lax.map, read), (BY_ROWS,))((*probs, tokens_BN))


def expected_ratios(found: Rounds, *, detect: float, false_alarm: float) -> Check:
    """Checks that ratios q / p of the emitted tokens are as frequent as under the target.

    Args:
      found: the evidence.
      detect: smallest total variation to detect.
      false_alarm: largest probability that this check fails a correct pair.
    """
    worst, p_value, level = _worst(found.ratios, false_alarm)
    is_sure = error_seen(found.ratios, false_alarm) <= detect
    return Check.tested(
        "distribution",
        p_value < level,
        f"of {len(EDGES)} ratios of target and draft in {found.texts} texts the farthest off is "
        f"{2 ** EDGES[worst]:.2g}, p = {p_value:.2g}",
        numbers={
            "texts": found.texts,
            "tested_tokens": int(found.ratios.tokens_T[0]),
            "p_value_of_the_ratios": p_value,
            "level_of_a_ratio": level,
        },
        seen=f"an error of {detect:g} per token between tokens that the target and that the draft "
        f"prefers {f'seen with {POWER:.0%}' if is_sure else 'NOT SURELY SEEN'}",
    )


def expected_acceptance(found: Rounds, *, false_alarm: float) -> Check:
    """Checks that each position of a draft is accepted as often as both models predict; see
    `expected_ratios`.
    """
    tests = found.positions
    worst, p_value, level = _worst(tests, false_alarm)
    numbers: dict[str, float] = {"p_value_of_the_worst_position": p_value}
    for i, tokens in enumerate(tests.tokens_T):
        position = f"position_{i}" if i else "all_positions"
        numbers[f"verified_at_{position}"] = int(tokens)
        numbers[f"accepted_at_{position}"] = int(tests.happened_T[i])
        numbers[f"expected_at_{position}"] = float(tests.expected_T[i])
    return Check.tested(
        "acceptance",
        p_value < level,
        f"with the draft {tests.happened_T[0]} of {tests.tokens_T[0]} were, "
        f"{tests.expected_T[0]:.0f} expected; the farthest off is "
        f"{f'position {worst}' if worst else 'their total'}, p = {p_value:.2g}",
        numbers=numbers,
        seen=f"a rate of acceptance that is off by {error_seen(tests, false_alarm):.2g} seen with "
        f"{POWER:.0%}",
    )


def _worst(tests: Evidence, false_alarm: float) -> tuple[int, float, float]:
    """Returns the test with the smallest p-value, this p-value, and each test's share of
    ``false_alarm``.
    """
    worst = int(np.argmin(tests.p_values))
    return worst, float(tests.p_values[worst]), false_alarm / len(tests.tokens_T)

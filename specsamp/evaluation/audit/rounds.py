"""Tests how drafted tokens are accepted and replaced, on long sampled texts that both models read once more.

After any prefix the next token must follow the target's distribution q, whatever the draft's distribution p is. A
mistake in the rule or the drafter makes it follow another distribution a, which is known from q and p
(`specsamp.evaluation.audit.mistakes`). Where q is flat, counts of single tokens cannot see that. Likelihood ratios
a(x) / q(x) can: their product over all tokens of all texts (`specsamp.evaluation.audit.evidence`).

**Tests.** (1) One for each of `MISTAKES`, made at 95% or at 25% of the positions. (2) One for each bin of the ratio
q(x) / p(x): every error that depends on this ratio alone moves probability between bins. (3) One for all drafted tokens
and one for each position of a draft: they are accepted as often as p and q say.

**Which tokens.** Under the token rule mistakes are tested at all positions of a draft. Under other rules only at the
first position of each round: there the next token follows q under every lossless rule. The same holds of heads, whose
later tokens depend on where their round began.

**Expected acceptance.** If all drafted tokens before it were accepted, a drafted token is accepted with probability
``sum_x min(q(x), p(x) / c)``. Under the token rule c = 1. Under the block rule c is the probability ``c_i`` of
`specsamp.sampling.rules` that the accepted prefix is kept: given that it was, the next token is x and drafted with
probability ``min(q(x), p(x) / c)``, and x and not drafted with probability ``(q(x) - p(x) / c)+``.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from specsamp.decoding.data_shards import BY_ROWS, REPLICATED, DataShards
from specsamp.decoding.job import to_host
from specsamp.decoding.whole_texts import padded_batches, read_logits
from specsamp.evaluation.audit.evidence import POWER, Evidence, tilted
from specsamp.evaluation.audit.mistakes import (
    MISTAKES,
    evidence_sums,
    wrong_distributions,
)
from specsamp.evaluation.audit.readers import reader
from specsamp.evaluation.audit.subject import Subject
from specsamp.models.interface import LanguageModel
from specsamp.sampling.rejection import BlockRule, TokenRule
from specsamp.sampling.warp import Warp, chain, for_rows, log_probs

Array = jax.Array

# Edges of log2(q / p). None is 0: where draft and target are equal, rounding would say on which side a token lies, and a
# compiler may compute the ratio twice.
BIN_EDGES = (-2.0, -1.0, -0.5, 1e-3, 0.5, 1.0, 2.0)
MOST_BATCHES = 64  # calls of `generate`


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rounds:
    """The evidence of sampled texts.

    Attributes:
      texts: number of texts.
      mistakes, bins: tests (1) and (2) of the module's docstring.
      positions: tests (3); of no use unless `knows_acceptance`.
      accepted_T, expected_T: drafted tokens accepted in each of those tests, and how many were expected.
    """

    texts: int
    mistakes: Evidence
    bins: Evidence
    positions: Evidence
    accepted_T: np.ndarray
    expected_T: np.ndarray

    def __add__(self, other: Rounds) -> Rounds:
        return Rounds(
            texts=self.texts + other.texts,
            mistakes=self.mistakes + other.mistakes,
            bins=self.bins + other.bins,
            positions=self.positions + other.positions,
            accepted_T=self.accepted_T + other.accepted_T,
            expected_T=self.expected_T + other.expected_T,
        )


def can_read(subject: Subject) -> bool:
    """Returns whether the draft's distribution can be read: it is that of a model after the text so far."""
    draft = reader(subject.drafter)
    return draft is not None and any(map(draft.reads, subject.prompts))


def knows_acceptance(subject: Subject) -> bool:
    """Returns whether the expected acceptance of the rule is known here."""
    return isinstance(subject.rule, TokenRule | BlockRule)


def collect(
    subject: Subject,
    *,
    detect: float,
    level: float,
    rows: int,
    progress: Callable[[str], None] = lambda text: None,
) -> Rounds:
    """Draws texts of all prompts, about ``rows`` at a time, until every mistake that matters would be seen.

    Those are the mistakes that move a total variation of at least ``detect`` per token. Each must be seen by its test
    at ``level`` with probability `POWER`. It gives up after `MOST_BATCHES` calls of `generate`.
    """
    samples = max(rows // len(subject.prompts), 1)
    found, draft = None, reader(subject.drafter)
    for call in range(MOST_BATCHES):
        progress(f"rounds: {call * samples * len(subject.prompts)} texts read")
        seed = (subject.seed + 2**31 + call) % 2**32  # apart from the seeds of the other checks
        texts = [
            ((*subject.prompts[one.prompt_index], *one.tokens), one.from_draft)
            for one in subject.decode(num_samples=samples, seed=seed, draft_length=None)
            if one.tokens and draft.reads(subject.prompts[one.prompt_index])
        ]
        if not texts:
            break
        batch = read(subject, *zip(*texts))
        found = batch if found is None else found + batch
        if not unseen(found.mistakes, detect, level):
            break
    return found


def unseen(mistakes: Evidence, detect: float, level: float) -> list[str]:
    """Returns the names of mistakes that move at least ``detect`` but are seen with less than `POWER`."""
    missed_T = (mistakes.total_variation[:, 0] >= detect) & (mistakes.power(level)[:, 0] < POWER)
    return [name for name, is_missed in zip(mistakes.names, missed_T, strict=True) if is_missed]


def read(
    subject: Subject,
    texts: Sequence[Sequence[int]],
    from_draft: Sequence[Sequence[bool]],
) -> Rounds:
    """Reads texts with both models.

    Args:
      texts: token ids, prompts included.
      from_draft: for each text, whether each of its tokens behind the prompt had been drafted.
    """
    pair, rule, draft = subject.pair, subject.rule, reader(subject.drafter)
    slots, batches = padded_batches(pair, texts)
    weights = pair.weights(subject.drafter, slots)
    longest, K = -(-max(map(len, from_draft)) // 8) * 8, draft.depth or subject.drafter.K
    warps = (subject.sampling, subject.draft_sampling or subject.sampling, chain())
    total = None
    for number, (tokens_BT, lengths_B, indices) in enumerate(batches):
        rows = len(indices)
        drafted_BN, counts_B = np.zeros((rows, longest), bool), np.zeros(rows, np.int32)
        for row, i in enumerate(indices):
            drafted_BN[row, : len(from_draft[i])] = from_draft[i]
            # The last batch is filled up with copies of the last text, which do not count.
            counts_B[row] = len(from_draft[i]) if number * rows + row == i else 0
        starts_B = np.array([len(texts[i]) - len(from_draft[i]) for i in indices], np.int32)
        found = _read(
            pair.target,
            draft.model,
            pair.shards,
            weights.target,
            draft.weights_of(weights),
            tokens_BT,
            starts_B,
            counts_B,
            drafted_BN,
            tuple(for_rows(subject.full_warp(warp), rows) for warp in warps),
            K=K,
            slots=slots,
            is_block=isinstance(rule, BlockRule),
            everywhere=isinstance(rule, TokenRule),
        )
        batch = _sums(to_host(found), texts=int((counts_B > 0).sum()), K=K)
        total = batch if total is None else total + batch
    return total


@functools.partial(jax.jit, static_argnames=("target", "draft", "shards", "K", "slots", "is_block", "everywhere"))
def _read(
    target: LanguageModel,
    draft: LanguageModel,
    shards: DataShards,
    target_weights: Any,
    draft_weights: Any,
    tokens_BT: Array,
    starts_B: Array,
    counts_B: Array,
    drafted_BN: Array,
    warps: tuple[Warp, Warp, Warp],
    *,
    K: int,
    slots: int,
    is_block: bool,
    everywhere: bool,
) -> dict[str, Array]:
    def read(target_weights, draft_weights, tokens_BT, starts_B, counts_B, drafted_BN, warps):
        at_BN = starts_B[:, None] - 1 + jnp.arange(drafted_BN.shape[1])[None, :]
        at_BN = jnp.minimum(at_BN, tokens_BT.shape[1] - 2)  # positions beyond a text are not used
        probs = []
        for model, params, warps_read in (
            (target, target_weights, warps[:1]),
            (draft, draft_weights, warps[1:]),
        ):
            logits_BTV = read_logits(model, params, tokens_BT, slots)
            logits_BNV = jnp.take_along_axis(logits_BTV, at_BN[..., None], axis=1)
            probs += [jnp.exp(log_probs(warp, logits_BNV)) for warp in warps_read]
        emitted_BN = jnp.take_along_axis(tokens_BT, at_BN + 1, axis=1)
        row = functools.partial(_read_row, K=K, is_block=is_block, everywhere=everywhere)
        return jax.lax.map(
            lambda arguments: row(*arguments),
            (*probs, emitted_BN, drafted_BN, counts_B),
        )

    specs = (REPLICATED, REPLICATED, BY_ROWS, BY_ROWS, BY_ROWS, BY_ROWS, BY_ROWS)
    return shards.map(read, specs)(target_weights, draft_weights, tokens_BT, starts_B, counts_B, drafted_BN, warps)


def _read_row(
    q_NV: Array,
    p_NV: Array,
    unwarped_NV: Array,
    tokens_N: Array,
    drafted_N: Array,
    count: Array,
    *,
    K: int,
    is_block: bool,
    everywhere: bool,
) -> dict[str, Array]:
    """Returns, for one text, the sums for `MISTAKES` and the events of every token."""
    index_N = jnp.arange(len(tokens_N))
    # A token that was not drafted ends a round; after K accepted ones it is the bonus.
    begins_N = jnp.roll(jax.lax.cummax(jnp.where(drafted_N, 0, index_N + 1)), 1).at[0].set(0)
    offsets_N = index_N - begins_N
    verified_N = (index_N < count) & (offsets_N < K)
    tested_N = verified_N & (everywhere | (offsets_N == 0))

    def at_token(x_NV):
        return jnp.take_along_axis(x_NV, tokens_N[:, None], axis=-1)[:, 0]

    def step(c, x):
        return (jnp.where(x[0], jnp.minimum(c * x[1], 1), 1), c)

    p_token_N = at_token(p_NV)
    ratio_N = jnp.where(p_token_N > 0, at_token(q_NV) / jnp.where(p_token_N > 0, p_token_N, 1), 1)
    _, c_N = jax.lax.scan(step, jnp.ones_like(ratio_N[0]), (drafted_N, ratio_N))
    c_N1 = jnp.where(is_block & (c_N > 0), c_N, 1)[:, None]

    log_ratio_NV = jnp.where(q_NV > 0, jnp.log2(q_NV) - jnp.log2(p_NV), -jnp.inf)
    bin_NV = sum((log_ratio_NV >= edge).astype(jnp.int32) for edge in BIN_EDGES)
    bins = range(len(BIN_EDGES) + 1)
    return {
        **evidence_sums(
            wrong_distributions(q_NV, p_NV, unwarped_NV, offsets_N),
            q_NV,
            tokens_N,
            tested_N,
        ),
        "offsets_N": offsets_N,
        "verified_N": verified_N,
        "tested_N": tested_N,
        "drafted_N": drafted_N,
        "acceptance_N": jnp.minimum(p_NV / c_N1, q_NV).sum(-1),
        "bin_probs_NR": jnp.stack([jnp.sum(q_NV, axis=-1, where=bin_NV == number) for number in bins], axis=-1),
        "bin_N": at_token(bin_NV),
    }


def _sums(found: dict[str, Any], *, texts: int, K: int) -> Rounds:
    """Adds up what was read of a batch of texts, in float64."""
    flat = {name: values.reshape(-1, *values.shape[2:]) for name, values in found.items() if "N" in name}
    flat = {name: values[flat["verified_N"]] for name, values in flat.items()}
    tested_N, bins = flat["tested_N"], np.arange(len(BIN_EDGES) + 1)
    is_position_NK = flat["offsets_N"][:, None] == np.arange(K)
    counted_NT = np.concatenate([np.ones_like(is_position_NK[:, :1]), is_position_NK], axis=1)
    acceptance_NT = np.broadcast_to(flat["acceptance_N"][:, None], counted_NT.shape).astype(np.float64)
    accepted_NT = np.broadcast_to(flat["drafted_N"][:, None], counted_NT.shape)
    sums = {
        f"{name}_TS": found[f"{name}_MS"].sum(0, dtype=np.float64) for name in ("evidence", "mean", "variance", "moved")
    }
    return Rounds(
        texts=texts,
        mistakes=Evidence(
            names=tuple(MISTAKES),
            tokens_T=np.full(len(MISTAKES), tested_N.sum()),
            **sums,
        ),
        bins=tilted(
            tuple(f"ratio bin {number}" for number in bins),
            flat["bin_probs_NR"].astype(np.float64),
            flat["bin_N"][:, None] == bins,
            np.broadcast_to(tested_N[:, None], flat["bin_probs_NR"].shape),
        ),
        positions=tilted(
            ("all positions", *(f"position {number + 1}" for number in range(K))),
            acceptance_NT,
            accepted_NT,
            counted_NT,
        ),
        accepted_T=(accepted_NT & counted_NT).sum(0),
        expected_T=(acceptance_NT * counted_NT).sum(0),
    )

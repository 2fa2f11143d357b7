"""Tests how drafted tokens are accepted and replaced, on long sampled texts that both models read once more.

After any prefix the next token must follow the target's distribution q, whatever the draft's distribution p is. Mistakes
in acceptance or residual move probability from tokens with q > p to tokens with q < p, or back. Where q is flat, counts
of single tokens cannot see that. The ratio q(x) / p(x) of every token of long texts can.

**Tests**, all of the kind in `specsamp.evaluation.audit.evidence`. (1) One for each of `EDGES`: q(x) / p(x) lies above it
as often as q says. (2) Under the token rule, one for all drafted tokens and one for each position of a draft: a token is
accepted with probability ``sum_x min(q(x), p(x))``, if all drafted tokens before it were.

**Which tokens.** Under the token rule ratios are tested at all positions of a draft. Under other rules only at the first
position of each round: there the next token follows q under every lossless rule. The same holds of heads, whose later
tokens depend on where their round began.
"""

from __future__ import annotations

import dataclasses
import functools
import operator
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from specsamp.decoding.data_shards import BY_ROWS, DataShards
from specsamp.decoding.engine import to_host
from specsamp.decoding.whole_texts import padded_batches
from specsamp.evaluation.audit.evidence import TILTS, Evidence, tilted
from specsamp.evaluation.audit.readers import reader
from specsamp.evaluation.audit.subject import POWER, Check, Status, Subject
from specsamp.evaluation.audit.teacher import logits_from, round_up
from specsamp.sampling.rejection import TokenRule
from specsamp.sampling.warp import Warp, for_rows, log_probs

Array = jax.Array

# Edges of log2(q / p). None is 0: where draft and target are equal, rounding would say on which side a token lies, and a
# compiler may compute the ratio twice.
EDGES = (-2.0, -1.0, -0.5, 1e-3, 0.5, 1.0, 2.0)
MOST_BATCHES = 64  # calls of `generate`
NOTHING_EMITTED = "texts ended before their first token: the target's logits were NaN or infinite"


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Rounds:
    """The evidence of sampled texts; that of two sets of texts adds up.

    Attributes:
      texts: number of texts.
      ratios: tests (1) of the module's docstring.
      positions: tests (2); meaningful under the token rule.
      accepted_T, expected_T: drafted tokens accepted in each of those tests, and how many were expected.
    """

    texts: int
    ratios: Evidence
    positions: Evidence
    accepted_T: np.ndarray
    expected_T: np.ndarray


def can_read(subject: Subject) -> bool:
    """Returns whether the draft's distribution can be read: it is that of a model after the text so far."""
    draft = reader(subject.method.drafter)
    return draft is not None and any(map(draft.reads, subject.prompts))


def collect(
    subject: Subject,
    *,
    detect: float,
    false_alarm: float,
    rows: int,
    progress: Callable[[str], None] = lambda text: None,
) -> Rounds | None:
    """Draws texts of all prompts, about ``rows`` at a time, until `are_seen` holds for their ratios.

    It gives up after `MOST_BATCHES` calls of `generate`.

    Returns:
      The evidence of the texts; None if no text has a token.
    """
    samples = max(rows // len(subject.prompts), 1)
    found, draft, method = None, reader(subject.method.drafter), subject.method.with_drafter(subject.method.drafter)
    for call in range(MOST_BATCHES):
        progress(f"rounds: {call * samples * len(subject.prompts)} texts read")
        seed = (subject.seed + 2**31 + call) % 2**32  # apart from the seeds of the other checks
        texts = [
            ((*subject.prompts[completion.prompt_index], *completion.tokens), completion.from_draft)
            for completion in subject.decode(method=method, num_samples=samples, seed=seed)
            if completion.tokens and draft.reads(subject.prompts[completion.prompt_index])
        ]
        if not texts:
            break
        batch = read_rounds(subject, *zip(*texts))
        found = batch if found is None else jax.tree.map(operator.add, found, batch)
        if are_seen(found.ratios, detect, false_alarm):
            break
    return found


def are_seen(ratios: Evidence, detect: float, false_alarm: float) -> bool:
    """Returns whether every alternative that moves at least ``detect`` per token is seen with probability `POWER`."""
    return bool(np.all(ratios.is_seen(false_alarm / len(EDGES)) | (ratios.total_variation < detect)))


def read_rounds(subject: Subject, texts: Sequence[Sequence[int]], from_draft: Sequence[Sequence[bool]]) -> Rounds:
    """Reads texts with both models.

    Args:
      subject: the pair with its settings.
      texts: token ids, prompts included.
      from_draft: for each text, whether each of its tokens behind the prompt had been drafted.
    """
    pair, draft = subject.pair, reader(subject.method.drafter)
    slots, batches = padded_batches(pair, texts)
    weights = pair.weights(subject.method.drafter, slots)
    count, K = round_up(max(map(len, from_draft))), draft.depth or subject.method.drafter.K
    warps = (subject.method.sampling, subject.method.draft_sampling or subject.method.sampling)
    sums = []
    for number, (tokens_BT, _, indices) in enumerate(batches):
        tokens_BN, drafted_BN = (np.zeros((len(indices), count), kind) for kind in (np.int32, bool))
        counts_B = np.zeros(len(indices), np.int32)
        for row, i in enumerate(indices):
            size = len(from_draft[i])
            tokens_BN[row, :size], drafted_BN[row, :size] = texts[i][-size:], from_draft[i]
            # The last batch is filled up with copies of the last text, which do not count.
            counts_B[row] = size if number * len(indices) + row == i else 0
        starts_B = jnp.asarray([len(texts[i]) - len(from_draft[i]) for i in indices], jnp.int32)
        logits = [
            logits_from(model, pair.shards, params, tokens_BT, starts_B, slots=slots, count=count)
            for model, params in ((pair.target, weights.target), (draft.model, draft.weights_of(weights)))
        ]
        warps_B = tuple(for_rows(subject.full_warp(warp), len(indices)) for warp in warps)
        everywhere = isinstance(subject.method.rule, TokenRule)
        found = _read_rows(pair.shards, *logits, warps_B, tokens_BN, drafted_BN, counts_B, K=K, everywhere=everywhere)
        sums.append(_sums(to_host(found), texts=int((counts_B > 0).sum()), K=K))
    return jax.tree.map(lambda *parts: sum(parts), *sums)


@functools.partial(jax.jit, static_argnames=("shards", "K", "everywhere"))
def _read_rows(
    shards: DataShards,
    target_BNV: Array,
    draft_BNV: Array,
    warps: tuple[Warp, Warp],
    tokens_BN: Array,
    drafted_BN: Array,
    counts_B: Array,
    *,
    K: int,
    everywhere: bool,
) -> dict[str, Array]:
    """Returns the events of every token of every text."""

    def read(row: tuple[Array, ...]) -> dict[str, Array]:
        q_NV, p_NV, tokens_N, drafted_N, count = row
        index_N = jnp.arange(len(tokens_N))
        # A token that was not drafted ends a round; after K accepted ones it is the bonus.
        begins_N = jnp.roll(jax.lax.cummax(jnp.where(drafted_N, 0, index_N + 1)), 1).at[0].set(0)
        offsets_N = index_N - begins_N
        verified_N = (index_N < count) & (offsets_N < K)
        log_ratio_NV = jnp.where(q_NV > 0, jnp.log2(q_NV) - jnp.log2(p_NV), -jnp.inf)
        log_ratio_N = jnp.take_along_axis(log_ratio_NV, tokens_N[:, None], axis=-1)[:, 0]
        return {
            "offset": offsets_N,
            "verified": verified_N,
            "tested": verified_N & (everywhere | (offsets_N == 0)),
            "drafted": drafted_N,
            "acceptance": jnp.minimum(p_NV, q_NV).sum(-1),
            "above": jnp.stack([log_ratio_N >= edge for edge in EDGES], axis=-1),
            "above_probs": jnp.stack([q_NV.sum(-1, where=log_ratio_NV >= edge) for edge in EDGES], axis=-1),
        }

    probs = [jnp.exp(log_probs(warp, x_BNV)) for warp, x_BNV in zip(warps, (target_BNV, draft_BNV), strict=True)]
    read_shard = functools.partial(jax.lax.map, read)
    return shards.map(read_shard, (BY_ROWS,))((*probs, tokens_BN, drafted_BN, counts_B))


def _sums(events: dict[str, np.ndarray], *, texts: int, K: int) -> Rounds:
    """Adds up what was read of a batch of texts, in float64."""
    is_verified = events["verified"]
    events = {name: values[is_verified] for name, values in events.items()}  # [N, ...], of all texts
    is_position_NK = events["offset"][:, None] == np.arange(K)
    counted_NT = np.concatenate([np.ones_like(is_position_NK[:, :1]), is_position_NK], axis=1)
    acceptance_NT = np.broadcast_to(events["acceptance"][:, None], counted_NT.shape).astype(np.float64)
    accepted_NT = np.broadcast_to(events["drafted"][:, None], counted_NT.shape)
    tested_NT = np.broadcast_to(events["tested"][:, None], events["above"].shape)
    return Rounds(
        texts=texts,
        ratios=tilted(events["above_probs"].astype(np.float64), events["above"], tested_NT),
        positions=tilted(acceptance_NT, accepted_NT, counted_NT),
        accepted_T=(accepted_NT & counted_NT).sum(0),
        expected_T=(acceptance_NT * counted_NT).sum(0),
    )


def expected_ratios(found: Rounds | None, *, detect: float, false_alarm: float) -> Check:
    """Checks that ratios q / p of the emitted tokens are as frequent as the target says.

    Args:
      found: the evidence; None if no text has a token.
      detect: smallest total variation that is to be seen.
      false_alarm: probability, at most, that this check fails a sound pair.
    """
    if found is None:
        return Check(name="distribution", verdict=Status.FAILED, sentence=NOTHING_EMITTED)
    worst = int(np.argmin(found.ratios.p_values))
    p_value, level = float(found.ratios.p_values[worst]), false_alarm / len(EDGES)
    numbers = {"texts": found.texts, "tested_tokens": int(found.ratios.tokens_T[0])}
    numbers |= {"p_value_of_the_ratios": p_value, "level_of_a_ratio": level}
    sentence = f"of {len(EDGES)} ratios of target and draft in {found.texts} texts the farthest off is "
    sentence += f"{2 ** EDGES[worst]:.2g}, p = {p_value:.2g}"
    is_seen = are_seen(found.ratios, detect, false_alarm)
    seen = f"an error of {detect:g} per token between tokens that the target and that the draft prefers "
    seen += f"seen with {POWER:.0%}" if is_seen else "NOT SURELY SEEN"
    verdict = Status.FAILED if p_value < level else Status.PASSED
    return Check(name="distribution", verdict=verdict, sentence=sentence, numbers=numbers, seen=seen)


def expected_acceptance(found: Rounds | None, *, false_alarm: float) -> Check:
    """Checks that each position of a draft is accepted as often as the two models say; arguments as above."""
    if found is None:
        return Check(name="acceptance", verdict=Status.FAILED, sentence=NOTHING_EMITTED)
    tests, level = found.positions, false_alarm / len(found.accepted_T)
    worst = int(np.argmin(tests.p_values))
    p_value = float(tests.p_values[worst])
    is_upward_S = np.array(TILTS) > 0
    numbers = {"p_value_of_the_worst_position": p_value}
    for i in range(len(found.accepted_T)):
        position = f"position_{i}" if i else "all_positions"
        numbers[f"verified_at_{position}"] = int(tests.tokens_T[i])
        numbers[f"accepted_at_{position}"] = int(found.accepted_T[i])
        numbers[f"expected_at_{position}"] = float(found.expected_T[i])
        is_seen_S = tests.is_seen(level)[i] & is_upward_S
        numbers[f"change_seen_at_{position}"] = float(tests.total_variation[i][is_seen_S].min(initial=1.0))
    sentence = f"with the draft {found.accepted_T[0]} of {tests.tokens_T[0]} were, {found.expected_T[0]:.0f} expected; "
    sentence += f"the farthest off is {f'position {worst}' if worst else 'their total'}, p = {p_value:.2g}"
    verdict = Status.FAILED if p_value < level else Status.PASSED
    seen = f"a rate of acceptance that is off by {numbers['change_seen_at_all_positions']:.2g} seen with {POWER:.0%}"
    return Check(name="acceptance", verdict=verdict, sentence=sentence, numbers=numbers, seen=seen)

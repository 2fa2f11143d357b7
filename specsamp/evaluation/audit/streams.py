"""Checks that compare texts token by token: each difference is explained by rounding, or
a fault.
"""

import dataclasses
from collections.abc import Mapping, Sequence

import numpy as np

from specsamp.decoding.drafter import positions_of
from specsamp.decoding.drafters import NgramDrafter, NoDrafter
from specsamp.decoding.engine import SMALLEST_BUCKET
from specsamp.decoding.results import Completion
from specsamp.evaluation.audit.readers import reader
from specsamp.evaluation.audit.subject import FARTHEST, Check, Status, Subject
from specsamp.evaluation.audit.teacher import Text, judge
from specsamp.sampling.coupled import CoupledRule
from specsamp.sampling.warp import Warp, chain, greedy

ALONE = 4  # prompts that are also decoded alone
SHOWN = 3  # faults in a sentence
MOST_EXCUSABLE = 0.5  # share of tokens; where rounding could decide more, agreement means nothing


def greedy_text(subject: Subject) -> Check:
    """Checks that greedy text is the same with and without the draft, and that each token is the
    target's choice.
    """
    greedily = dataclasses.replace(subject.method, sampling=greedy(), draft_sampling=None)
    alone = greedily.with_drafter(NoDrafter())
    runs = {
        "with the draft": subject.decode(method=greedily),
        "alone": subject.decode(method=alone),
    }
    return _agreement("greedy", subject, runs, chain(), FARTHEST * subject.rounding)


def bfloat16_text(subject: Subject, in_bfloat16: Subject | None) -> Check:
    """Checks that each token of greedy text in bfloat16 is the choice of the target in bfloat16, or
    nearly.

    The tolerance is measured: twice the largest difference of bfloat16 from float32 after the
    prompts, since both computations of a logit may be off.
    """
    if in_bfloat16 is None:
        return _not_applicable("bfloat16", "the target has no dtype to choose")
    off = np.abs(in_bfloat16.prompt_logits - subject.prompt_logits)
    off = float(off[np.isfinite(off)].max(initial=0))
    greedily = dataclasses.replace(in_bfloat16.method, sampling=greedy(), draft_sampling=None)
    runs = {"with the draft": in_bfloat16.decode(method=greedily)}
    return _agreement("bfloat16", in_bfloat16, runs, chain(), 2 * off)


def coupled_text(subject: Subject) -> Check:
    """Checks that text of the coupled rule is the same with this draft, with prompt lookup, and
    without a draft.
    """
    method = subject.method
    rule = method.rule if isinstance(method.rule, CoupledRule) else CoupledRule()
    drafters = {
        "without a draft": NoDrafter(),
        "with the draft": method.drafter,
        "looked up": NgramDrafter(K=method.drafter.K),
    }
    coupled = dataclasses.replace(method, rule=rule)
    runs = {
        name: subject.decode(method=coupled.with_drafter(drafter))
        for name, drafter in drafters.items()
    }
    return _agreement(
        "coupled",
        subject,
        runs,
        method.sampling,
        FARTHEST * subject.rounding,
        noise_seed=subject.seed,
    )


def equal_draft(subject: Subject, false_alarm: float) -> Check:
    """Checks that a target that is its own draft accepts all drafted tokens, except for
    rounding.
    """
    pair = subject.pair
    draft = reader(subject.method.drafter)
    if draft is None or draft.with_target is None:
        return _not_applicable("acceptance", "the drafter has no model that could be the target")
    drafter = draft.with_target(pair.target)
    same = dataclasses.replace(
        subject,
        method=dataclasses.replace(subject.method, drafter=drafter, draft_sampling=None),
        pair=dataclasses.replace(pair, draft=pair.target, draft_params=pair.target_params),
    )
    counts = sum(completion.stats for completion in same.texts)
    verified = sum(counts.reached)
    accepted = counts.accepted
    allowed = subject.flips_allowed(verified, false_alarm)
    return Check.tested(
        "acceptance",
        not verified or verified - accepted > allowed,
        f"with the target as its own draft {accepted} of {verified} drafted tokens were accepted; "
        f"rounding may reject {allowed}",
        numbers={"verified": verified, "accepted": accepted, "rejections_allowed": allowed},
    )


def neighbours(subject: Subject, false_alarm: float) -> Check:
    """Checks that a prompt's text is the same alone, in a batch, and in a batch of
    another order.
    """
    prompts = subject.prompts
    if len(prompts) == 1:
        return _not_applicable("neighbours", "a single prompt has no neighbours: give more")
    together = subject.texts
    backwards = range(len(prompts))[::-1]
    reverse = subject.decode([prompts[i] for i in backwards], prompt_ids=backwards)[::-1]
    # The longest prompts have the same padding alone as in the batch: the effect of padding is
    # another check.
    longest = sorted(range(len(prompts)), key=lambda i: len(prompts[i]))[-ALONE:]
    # Adaptive lengths depend on the batch size: then a prompt is "alone" in a batch of its copies.
    copies = 1 if together[0].row_independent else len(prompts)
    alone = [subject.decode([prompts[i]] * copies, prompt_ids=[i] * copies)[0] for i in longest]
    pairs = [*zip(together, reverse, strict=True)]
    pairs += [(together[i], row) for i, row in zip(longest, alone)]
    what = f"{len(prompts)} texts in two orders, {len(alone)} also alone"
    return _unchanged("neighbours", subject, pairs, what, false_alarm)


def padding(subject: Subject, false_alarm: float) -> Check:
    """Checks that a prompt's text is the same with more padding and slots, which a longer prompt in
    its batch needs.
    """
    prompts = list(subject.prompts)
    longest = max(prompts, key=len)
    room = positions_of(subject.pair.target, subject.method.drafter) - subject.max_new_tokens
    length = max(2 * len(longest), SMALLEST_BUCKET + 1)  # falls into a larger bucket
    if length > room:
        return _not_applicable(
            "padding", f"{length} tokens and the budget are more than the models' positions"
        )
    kept = prompts[:-1] or prompts
    plain = subject.texts
    if len(prompts) == 1 and not plain[0].row_independent:
        return _not_applicable(
            "padding", "with one prompt a longer neighbour changes the draft length: give more"
        )
    padded = subject.decode([*kept, np.resize(longest, length).tolist()])
    pairs = list(zip(plain, padded))[: len(kept)]
    what = f"{len(kept)} texts in a batch with a prompt of {length} tokens"
    return _unchanged("padding", subject, pairs, what, false_alarm)


def _agreement(
    name: str,
    subject: Subject,
    runs: Mapping[str, Sequence[Completion]],
    warp: Warp,
    tolerance: float,
    *,
    noise_seed: int | None = None,
) -> Check:
    """Checks that each token of each run is the target's choice, or explained by rounding."""
    texts: dict[Text, str] = {}
    faults = []
    compared = list(zip(*runs.values(), strict=True))
    for i, rows in enumerate(compared):
        for run, row in zip(runs, rows, strict=True):
            if row.finish == "invalid":
                faults.append(f"prompt {i} {run}: the target's logits are NaN or infinite")
            elif row.tokens:
                texts.setdefault(
                    Text(prompt_id=i, prompt=tuple(subject.prompts[i]), tokens=tuple(row.tokens)),
                    run,
                )
        for row in rows[1:]:
            shorter, longer = sorted((rows[0].tokens, row.tokens), key=len)
            if len(shorter) < len(longer) and longer[: len(shorter)] == shorter:
                faults.append(
                    f"prompt {i}: one text ends after {len(shorter)} tokens, the other goes on"
                )
    warp = subject.pair.full_warp(warp)
    judgements = (
        judge(subject.pair, list(texts), warp, tolerance, noise_seed=noise_seed) if texts else []
    )
    for (text, run), judgement in zip(texts.items(), judgements, strict=True):
        for at in np.flatnonzero(~judgement.explained_N)[:1]:
            behind = judgement.behind_N[at]
            apart = "excluded by the warp"
            if np.isfinite(behind):
                apart = f"{behind:.2g} behind the target's choice"
            faults.append(
                f"prompt {text.prompt_id} {run}, token {at}: {text.tokens[at]} is {apart}"
            )
    tokens = sum(len(text.tokens) for text in texts)
    near_ties = sum(int((j.explained_N & ~j.chosen_N).sum()) for j in judgements)
    excusable = sum(int(j.excusable_N.sum()) for j in judgements) / max(tokens, 1)
    differing = sum(any(row.tokens != rows[0].tokens for row in rows[1:]) for rows in compared)
    numbers = {
        "texts": len(compared),
        "tokens": tokens,
        "texts_that_differ": differing,
        "near_ties": near_ties,
        "faults": len(faults),
        "tolerance": tolerance,
        "share_that_could_be_excused": excusable,
    }
    if faults or not tokens:
        verdict = Status.FAILED
        more = f", and {len(faults) - SHOWN} more" if len(faults) > SHOWN else ""
        sentence = "; ".join(faults[:SHOWN]) + more if faults else "nothing was emitted"
    elif excusable > MOST_EXCUSABLE:
        verdict = Status.NOT_APPLICABLE
        sentence = (
            f"rounding could decide {excusable:.0%} of {tokens} tokens, so agreement means nothing"
        )
    else:
        verdict = Status.PASSED
        equal = f"{len(compared) - differing} of {len(compared)} texts are equal"
        same = equal if len(runs) > 1 else f"{len(compared)} texts"
        sentence = (
            f"{same}; of {tokens} tokens {tokens - near_ties} are the target's choice, {near_ties} "
            f"near-ties within {2 * tolerance:.1g} ({excusable:.1%} of positions would excuse one)"
        )
    return Check(name=name, verdict=verdict, sentence=sentence, numbers=numbers)


def _unchanged(
    name: str,
    subject: Subject,
    pairs: Sequence[tuple[Completion, Completion]],
    what: str,
    false_alarm: float,
) -> Check:
    """Checks that at most as many pairs of texts differ as rounding may change."""
    tokens = sum(len(row.tokens) for row, _ in pairs)
    differing = sum(row.tokens != other.tokens for row, other in pairs)
    allowed = min(subject.flips_allowed(tokens, false_alarm), len(pairs) - 1)
    return Check.tested(
        name,
        not tokens or differing > allowed,
        f"{what}: {differing} of {len(pairs)} pairs of texts differ; rounding may change {allowed}",
        numbers={
            "texts": len(pairs),
            "tokens": tokens,
            "texts_that_differ": differing,
            "differences_allowed": allowed,
        },
    )


def _not_applicable(name: str, why: str) -> Check:
    return Check(name=name, verdict=Status.NOT_APPLICABLE, sentence=why)

"""A way to decode as one value: drafter, rule, sampling and draft length, checked against
a pair.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, TypedDict, Unpack

from specsamp import validate
from specsamp.decoding.adaptive import Adaptive
from specsamp.decoding.drafter import (
    Drafter,
    NoDrafter,
    depth_of,
    hooks_of,
    positions_of,
    with_length,
)
from specsamp.decoding.loop import Loop
from specsamp.decoding.pair import Pair
from specsamp.sampling.rejection import TokenRule
from specsamp.sampling.rules import Rule
from specsamp.sampling.warp import Warp, greedy

if TYPE_CHECKING:
    from specsamp.models.heads import Head
    from specsamp.models.interface import LanguageModel

EXAMPLE = "Method(drafter=NgramDrafter(K=4))"
DEFAULT_DRAFT_LENGTH = 4
# Every step of a draft is traced or looped over, and scoring holds its logits.
MAX_DRAFT_LENGTH = 1024


@dataclasses.dataclass(frozen=True, kw_only=True)
class Method:
    """A way to decode with a pair.

    Attributes:
      drafter: proposes tokens.
      rule: verifies them.
      sampling: the target's warp; its numbers are scalars, or have one value per prompt.
      draft_sampling: the draft's own warp; None: the target's.
      adaptive: the adaptive draft length; None: the drafter's K in every round.
    """

    drafter: Drafter
    rule: Rule = TokenRule()
    sampling: Warp = greedy()
    draft_sampling: Warp | None = None
    adaptive: Adaptive | None = None

    @property
    def exact(self) -> bool:
        """Returns whether rule and drafter are lossless."""
        return self.rule.exact and self.drafter.exact

    @property
    def row_independent(self) -> bool:
        """Returns whether the tokens of a sequence are the same in every batch.

        With adaptive lengths, the tokens for a seed also depend on the batch size.
        """
        adapts = self.adaptive is not None and self.adaptive.costs_ms is not None
        return hooks_of(self.drafter).row_independent and not adapts or self.rule.draft_independent

    def with_drafter(self, drafter: Drafter) -> Method:
        """Returns this method with ``drafter``, which drafts its K tokens in every round."""
        return dataclasses.replace(self, drafter=drafter, adaptive=None)

    def loop(
        self,
        pair: Pair,
        *,
        batch: int = 1,
        keep_log_probs: bool | str = False,
        keep_rounds: bool = False,
    ) -> Loop:
        """Returns the loop that decodes ``batch`` sequences at a time with this method, on the
        current platform.
        """
        adaptive = self.adaptive
        if adaptive is not None:
            depths = tuple(depth_of(with_length(self.drafter, K)) for K in adaptive.lengths)
            adaptive = adaptive.for_batch(batch, depths)
        return Loop(
            target=pair.target,
            drafter=self.drafter,
            rule=self.rule,
            keep_log_probs=keep_log_probs,
            keep_rounds=keep_rounds,
            adaptive=adaptive,
            shards=pair.shards,
        )


class Decoding(TypedDict, total=False):
    """The decoding keywords of `generate`, `stream`, `generate_many` and `Conversation`.

    Attributes:
      method: drafter, rule and sampling as one value, instead of the five keywords that follow.
      sampling: a warp (see `specsamp.sampling.warp`), its numbers scalar or one per prompt; default
        greedy. Ids that the tokenizer does not have (a padded vocabulary) are always excluded.
      draft_sampling: the draft's warp; default the target's. Any choice is exact; similar warps
        accept more tokens.
      draft_length: K, tokens drafted per round; 0 decodes autoregressively. Default: 4, or the
        drafter's. `specsamp.analysis.draft_length.calibrate` measures which K pays on a device.
        With `Adaptive`, every round has its own length for each sequence.
      rule: `TokenRule`, `BlockRule` or `CoupledRule`; or a lossy rule (`specsamp.sampling.lossy`),
        whose cost is in `Completion.stats`.
      drafter: your own, or `EarlyExitDrafter` or `NgramDrafter`; default the pair's draft model.
      require_exact: refuse a lossy rule or drafter, before any prompt is read.
    """

    method: Method | None
    sampling: Warp | None
    draft_sampling: Warp | None
    draft_length: int | Adaptive | None
    rule: Rule | None
    drafter: Drafter | None
    require_exact: bool


def make_method(pair: Pair, **decoding: Unpack[Decoding]) -> Method:
    """Returns the method for the keywords of `generate`, checked against a pair.

    Raises:
      TypeError: a keyword is unknown.
      ValueError: a method and its parts were given, a part has the wrong type or does not fit the
        pair, or ``require_exact`` is True and a part is lossy.
    """
    for name in decoding.keys() - Decoding.__annotations__.keys():
        known = ", ".join(Decoding.__annotations__)
        raise TypeError(f"unexpected keyword {name!r}: the decoding keywords are {known}")
    validate.instance("pair", pair, Pair, "load_pair('python')")
    require_exact = validate.switch("require_exact", decoding.pop("require_exact", False))
    parts = {name: part for name, part in decoding.items() if part is not None}
    method = parts.pop("method", None)
    if method is None:
        length, drafter = parts.pop("draft_length", None), parts.pop("drafter", None)
        adaptive = length if isinstance(length, Adaptive) else None
        drafter = _choose_drafter(pair, length if adaptive is None else adaptive.K, drafter)
        method = Method(drafter=drafter, adaptive=adaptive, **parts)
    elif parts:
        raise ValueError(
            f"method and {', '.join(parts)} were given: make {next(iter(parts))} a field of the "
            "method"
        )
    validate.instance("method", method, Method, EXAMPLE)
    validate.instance("rule", method.rule, Rule, "TokenRule() or BlockRule()")
    _check_drafter(pair, method.drafter)
    _check_tree(method.rule, method.drafter)
    if method.adaptive is not None:
        _check_adaptive(method.adaptive, method.drafter)
    if require_exact:
        check_exact(method.rule, method.drafter)
    return method


def _choose_drafter(pair: Pair, draft_length: int | None, drafter: Drafter | None) -> Drafter:
    """Returns the given drafter, or that of the pair's draft model or head; a ``draft_length`` of 0
    drafts nothing.
    """
    if draft_length is not None:
        draft_length = validate.integer(
            "draft_length (0 decodes autoregressively)", draft_length, 0
        )
    if drafter is None and draft_length == 0:
        return NoDrafter()
    if drafter is None:
        most = None if pair.head is None else pair.head.config.max_tokens
        return default_drafter(
            pair, draft_length or min(DEFAULT_DRAFT_LENGTH, most or DEFAULT_DRAFT_LENGTH)
        )
    if isinstance(drafter, Drafter) and draft_length not in (None, drafter.K):
        raise ValueError(
            f"draft_length {draft_length} differs from the drafter's K = {drafter.K}: leave "
            "draft_length out, or make the drafter with that K"
        )
    return drafter


def _check_drafter(pair: Pair, drafter: Drafter) -> None:
    validate.instance("drafter", drafter, Drafter, "NgramDrafter(K=4)")
    validate.hashable("the drafter", drafter)
    K = validate.integer("the drafter's K", drafter.K, 0, MAX_DRAFT_LENGTH + 1)
    for name, part in (("target", pair.target), ("draft", drafter)):
        if K >= positions_of(part):
            raise ValueError(
                f"K = {K} does not fit the {name}'s {part.max_positions} positions: draft fewer "
                "tokens per round"
            )
    if pair.vocabulary is not None and _reads_draft_ids(drafter):
        raise ValueError(
            f"the pair's draft has another tokenizer, but {drafter!r:.100} proposes draft ids as "
            "target ids: leave drafter out, or give a TranslatingDrafter"
        )
    for name, model in (("target", pair.target), ("draft", hooks_of(drafter).draft_model)):
        if model is not None and model.rewind is not None and K > model.rewind:
            raise ValueError(
                f"K = {K}, but the recurrent layers of the {name} take back at most "
                f"{model.rewind} tokens: draft fewer per round"
            )
    drafter.check(pair.target, pair.draft, pair.draft_params)


def _check_tree(rule: Rule, drafter: Drafter) -> None:
    """Raises ValueError for a rule of chains with a drafter of token trees, and vice versa."""
    is_tree, name = hooks_of(drafter).depth is not None, type(drafter).__name__
    if is_tree and not rule.trees:
        raise ValueError(
            f"{rule!r} verifies chains, but {name} drafts token trees: take RecursiveRule(), "
            "TraversalRule() or CoupledRule()"
        )
    if not is_tree and drafter.K and not rule.chains:
        raise ValueError(
            f"{rule!r} verifies token trees, but {name} drafts chains: take {rule.of_chains!r}, "
            "its equal on chains"
        )


def _check_adaptive(adaptive: Adaptive, drafter: Drafter) -> None:
    validate.instance(
        "the method's adaptive", adaptive, Adaptive, "Adaptive(stop=Confidence(), lengths=(4,))"
    )
    validate.hashable("the method's adaptive, with its stop,", adaptive)
    if adaptive.stop is not None and hooks_of(drafter).depth is not None:
        raise ValueError(
            f"stop={adaptive.stop!r} ends chains, but {type(drafter).__name__} drafts token trees: "
            "leave it out"
        )
    if adaptive.K != drafter.K:
        raise ValueError(
            f"the method's adaptive drafts up to {adaptive.K} tokens, its drafter K = {drafter.K}"
        )
    check_lengths(drafter, adaptive.lengths)


def check_exact(rule: Rule, drafter: Drafter | None = None) -> None:
    """Raises ValueError if a rule or a drafter is lossy; for callers that require exactness."""
    for part in (rule, drafter):
        if part is not None and not part.exact:
            raise ValueError(
                f"exactness is required, but {part!r} is lossy: take TokenRule() or BlockRule() "
                "and a lossless drafter, or leave require_exact out"
            )


def check_lengths(drafter: Drafter, lengths: Sequence[int]) -> None:
    """Raises ValueError unless a drafter can draft each of these numbers of tokens."""
    for K in lengths:
        try:
            is_able = with_length(drafter, K).K == K
        except (TypeError, ValueError):
            is_able = False
        if not is_able:
            raise ValueError(
                f"{type(drafter).__name__} cannot draft {K} tokens: make K a field of a frozen "
                "dataclass, override DrafterHooks.of_length, or give one draft length"
            )


def _reads_draft_ids(drafter: Drafter) -> bool:
    from specsamp.decoding.drafters import ModelDrafter

    parts = getattr(drafter, "parts", (drafter,))
    return any(isinstance(part, ModelDrafter) for part in parts)


def default_drafter(pair: Pair, K: int) -> Drafter:
    """Returns the drafter of the pair's draft model, or of its head, for the current platform."""
    # Not needed if a drafter was given.
    from specsamp.decoding.drafters import ModelDrafter, TranslatingDrafter

    if pair.head is not None:
        return head_drafter(pair.target, pair.head, K)
    if pair.draft is None:
        raise ValueError(
            "the pair has no draft model: give one, or drafter=NgramDrafter(K=4), or "
            "draft_length=0 to decode autoregressively"
        )
    if pair.vocabulary is not None:
        return TranslatingDrafter(pair.draft, pair.vocabulary, K)
    return ModelDrafter(pair.draft, K)


def head_drafter(target: LanguageModel, head: Head, K: int) -> Drafter:
    """Returns the drafter of a head that was made for this target."""
    from specsamp.decoding.drafters import (
        AssistantDrafter,
        BlockDrafter,
        FeatureDrafter,
        ModuleDrafter,
    )
    from specsamp.models.assistant import AssistantHead
    from specsamp.models.mtp import ModuleChain

    if head.config.drafts_blocks:
        return BlockDrafter(target, head, K)
    if isinstance(head, AssistantHead):
        return AssistantDrafter(target, head, K)
    if isinstance(head, ModuleChain):
        return ModuleDrafter(target, head, K)
    return FeatureDrafter(target, head, K)

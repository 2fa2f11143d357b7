"""Drafters by the word that a configuration names them with."""

import dataclasses
from collections.abc import Callable
from typing import Any

from specsamp import validate
from specsamp.decoding.adaptive import Adaptive, Confidence, Entropy
from specsamp.decoding.drafter import Drafter
from specsamp.decoding.drafters import (
    BlockDrafter,
    BlockTree,
    EarlyExitDrafter,
    EarlyExitTree,
    FeatureTree,
    ModelDrafter,
    ModelTree,
    NgramDrafter,
    NgramTree,
    NoDrafter,
)
from specsamp.decoding.drafters.block_head import LAWS
from specsamp.decoding.loop import decode_window
from specsamp.decoding.method import check_lengths, head_drafter
from specsamp.decoding.trees import TreeShape
from specsamp.models.heads import Head
from specsamp.models.interface import LanguageModel


@dataclasses.dataclass(frozen=True, kw_only=True)
class Word:
    """The meaning of a drafter's word.

    Attributes:
      make: returns the drafter, given the target, the pair's draft model or head, K, and the number that ``takes`` names.
      draft: "model", "head" or "block", which the pair then must hold; None: only the target is needed.
      takes: the field with a number of the drafter, which stands behind the word in results.
      tree: returns the drafter of token trees, given a shape instead of K; None: there is none.
      drafts: False for plain decoding at any K.
      compiled: True if compile reports have the drafter; forecasts from shapes have it, too, unless it is a head.
    """

    make: Callable[[LanguageModel, LanguageModel | Head | None, int, int | None], Drafter]
    draft: str | None = None
    takes: str | None = None
    tree: Callable[[LanguageModel, LanguageModel | Head | None, TreeShape, int | None], Drafter] | None = None
    drafts: bool = True
    compiled: bool = False

    @property
    def inside(self) -> bool:
        """Returns whether the target's own layers draft."""
        return self.takes == "exit_layer"


def _head(target: LanguageModel, draft: LanguageModel | Head | None, size: int | TreeShape, number: None) -> Drafter:
    if not isinstance(draft, Head):
        raise ValueError(
            "this pair was read without a head: set --config.drafter=head, or name a head by --config=configs/hf.py:TARGET,HEAD"
        )
    if isinstance(size, TreeShape):
        if draft.config.drafts_blocks:
            return BlockTree(target, draft, tree=size)
        return FeatureTree(target, draft, decode_window(), tree=size)
    return head_drafter(target, draft, size)


def _block(law: str) -> Word:
    """Returns the word of a head that drafts blocks under a law."""

    def make(target: LanguageModel, draft: Any, K: int, number: None) -> Drafter:
        drafter = _head(target, draft, K, number)
        if not isinstance(drafter, BlockDrafter):
            raise ValueError(
                f"law {law!r} is of heads that draft blocks; {draft.config.kind} heads draft token by token"
            )
        return dataclasses.replace(drafter, law=law)

    return Word(make=make, draft="block")


DRAFTERS = {
    "model": Word(
        make=lambda target, draft, K, number: ModelDrafter(draft, K, decode_window()),
        tree=lambda target, draft, shape, number: ModelTree(draft, decode_window(), tree=shape),
        draft="model",
        compiled=True,
    ),
    "head": Word(make=_head, tree=_head, draft="head", compiled=True),
    "block": Word(make=_head, tree=_head, draft="block"),
    **{f"block_{law}": _block(law) for law in LAWS},
    "early_exit": Word(
        make=lambda target, draft, K, exit_layer: EarlyExitDrafter(target, exit_layer, K, decode_window()),
        tree=lambda target, draft, shape, exit_layer: EarlyExitTree(target, exit_layer, decode_window(), tree=shape),
        takes="exit_layer",
        compiled=True,
    ),
    "ngram": Word(
        make=lambda target, draft, K, number: NgramDrafter(K=K),
        tree=lambda target, draft, shape, number: NgramTree(tree=shape),
    ),
    "none": Word(make=lambda target, draft, K, number: NoDrafter(), drafts=False),
}

STOPS = {"none": lambda least: None, "entropy": Entropy, "confidence": Confidence}


@dataclasses.dataclass(frozen=True, kw_only=True)
class AdaptiveFields:
    """Holds the fields of draft lengths that adapt; configs/common.py explains them."""

    lengths: tuple[int, ...] = ()
    costs_ms: tuple[float, ...] = ()
    usual: int | None = None
    acceptance: float = 0.7
    stop: str = "none"
    least: float = 0.3

    def __post_init__(self):
        validate.choice("stop", self.stop, STOPS)
        for name in ("acceptance", "least"):
            validate.number(name, getattr(self, name), 0, 1)
        for name in () if self.lengths else ("costs_ms", "usual"):
            if getattr(self, name) not in ((), None):
                raise ValueError(f"{name} has no effect without adaptive.lengths; got {getattr(self, name)!r}")

    @property
    def is_off(self) -> bool:
        """Returns whether the draft length never adapts."""
        return self.stop == "none" and not self.lengths

    def make(self, drafter: Drafter) -> Adaptive | None:
        """Returns the adaptive draft length for a drafter, or None if it never adapts."""
        if self.is_off or drafter.K == 0:
            return None
        adaptive = Adaptive(
            lengths=self.lengths or (drafter.K,),
            costs_ms=self.costs_ms or None,
            stop=STOPS[self.stop](self.least),
            usual=self.usual,
            acceptance=self.acceptance,
        )
        if adaptive.K != drafter.K:
            raise ValueError(
                f"adaptive.lengths end with {adaptive.K}, but draft_length is {drafter.K}: make them equal"
            )
        check_lengths(drafter, adaptive.lengths)
        return adaptive

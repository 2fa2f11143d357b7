"""Makes drafters from the words of configurations."""

import dataclasses
import functools
import io
from collections.abc import Callable, Sequence
from typing import Annotated, Any

import numpy as np

from launch.lib.own_code import evaluate, file_of, is_own
from specsamp import (
    Adaptive,
    BeamDrafter,
    BlockDrafter,
    BlockTree,
    ChoosingDrafter,
    Confidence,
    Drafter,
    EarlyExitDrafter,
    EarlyExitTree,
    Entropy,
    FeatureTree,
    LanguageModel,
    ModelDrafter,
    ModelTree,
    NgramDrafter,
    NgramTree,
    NoDrafter,
    ParallelDrafter,
    TreeShape,
    VotingDrafter,
    WindowDrafter,
    storage,
    validate,
)
from specsamp.decoding.drafters.block_head import LAWS
from specsamp.decoding.drafters.tree import sized
from specsamp.decoding.method import check_lengths, head_drafter
from specsamp.decoding.pair import Tokenizer
from specsamp.models.heads import Head


@dataclasses.dataclass(frozen=True, kw_only=True)
class Word:
    """The meaning of a drafter's word.

    Attributes:
      make: returns the drafter, given the target, the pair's draft model or head, K or the shape of
        token trees, and the configuration.
      draft: "model", "head" or "block", which the pair then must hold; None: only the target is
        needed.
      inside: whether the target's own layers draft, up to the exit layer.
      trees: whether token trees can be drafted.
      drafts: False for plain decoding at any K.
      reads: fields of the configuration that no other word reads, and that must be set.
      compiled: True if compile reports support the drafter; forecasts from shapes then do, too,
        except for heads and windows.
    """

    make: Callable[[LanguageModel, LanguageModel | Head | None, int | TreeShape, Any], Drafter]
    draft: str | None = None
    inside: bool = False
    trees: bool = True
    drafts: bool = True
    reads: tuple[str, ...] = ()
    compiled: bool = False


def _head(
    target: LanguageModel, draft: Any, size: int | TreeShape, config: Any, law: str | None = None
) -> Drafter:
    """Returns the drafter of a head; with a law, of one that drafts blocks under it."""
    if not isinstance(draft, Head):
        raise ValueError(
            "this pair was read without a head: set --config.drafter=head, or name a head by "
            "--config=configs/hf.py:TARGET,HEAD"
        )
    if isinstance(size, TreeShape):
        if draft.config.drafts_blocks:
            return BlockTree(target, draft, tree=size)
        return FeatureTree(target, draft, tree=size)
    drafter = head_drafter(target, draft, size)
    if law is None:
        return drafter
    if not isinstance(drafter, BlockDrafter):
        raise ValueError(
            f"law {law!r} is for heads that draft blocks; {draft.config.kind} heads draft token by "
            "token"
        )
    return dataclasses.replace(drafter, law=law)


DRAFTERS = {
    "model": Word(
        make=lambda target, draft, size, config: sized(ModelDrafter, ModelTree, size, draft),
        draft="model",
        compiled=True,
    ),
    "pard": Word(
        make=lambda target, draft, size, config: ParallelDrafter(
            draft, size, mask_id=config.mask_id
        ),
        draft="model",
        trees=False,
        reads=("mask_id",),
    ),
    "beam": Word(
        make=lambda target, draft, size, config: BeamDrafter(draft, size),
        draft="model",
        trees=False,
    ),
    "head": Word(make=_head, draft="head", compiled=True),
    "block": Word(make=_head, draft="block"),
    **{
        f"block_{law}": Word(make=functools.partial(_head, law=law), draft="block", trees=False)
        for law in LAWS
    },
    "early_exit": Word(
        make=lambda target, draft, size, config: sized(
            EarlyExitDrafter, EarlyExitTree, size, target, config.exit_layer
        ),
        inside=True,
        reads=("exit_layer",),
        compiled=True,
    ),
    "window": Word(
        make=lambda target, draft, size, config: WindowDrafter(
            target, size, config.window, config.sinks
        ),
        trees=False,
        reads=("window", "sinks"),
        compiled=True,
    ),
    "ngram": Word(
        make=lambda target, draft, size, config: sized(NgramDrafter, NgramTree, size),
        reads=("corpus",),
    ),
    "none": Word(make=lambda target, draft, size, config: NoDrafter(), trees=False, drafts=False),
}


COLLECTIVES = {"voting": VotingDrafter, "choosing": ChoosingDrafter}


def read_corpus(path: str, tokenizer: Tokenizer | None) -> Sequence[Any]:
    """Returns the texts of a file as token ids: rows of ids, or a text that ``tokenizer`` reads."""
    if path.endswith(".npy"):
        try:
            return np.atleast_2d(np.load(io.BytesIO(storage.place(path).read_bytes())))
        except EOFError as error:
            raise ValueError(f"--config.corpus={path} is empty") from error
    if tokenizer is None:
        raise ValueError(
            f"--config.corpus={path} is a text, and the pair has no tokenizer: give ids as .npy"
        )
    return [tokenizer.encode(storage.read_text(path))]


def check_word(name: str, value: Any) -> str:
    """Returns ``value``, a word of `DRAFTERS`, one of `COLLECTIVES` with such words after colons,
    or ``FILE.py:EXPRESSION``; raises ValueError for anything else, or if there is no such file.
    """
    if isinstance(value, str) and is_own(value):
        file_of(name, value)
        return value
    kind, *parts = str(value).split(":")
    if kind not in COLLECTIVES:
        return validate.choice(name, value, [*DRAFTERS, *COLLECTIVES])
    drafts = {DRAFTERS[validate.choice(name, part, DRAFTERS)].draft for part in parts}
    if len(parts) < 2 or len(drafts - {None}) > 1:
        raise ValueError(
            f"{name}={value} must name two drafters or more that read at most one draft, such as "
            f"{kind}:ngram:model"
        )
    return value


def meaning(word: str) -> Word:
    """Returns the meaning of a word that `check_word` knows."""
    kind, *words = word.split(":")
    if is_own(word):
        return Word(make=functools.partial(_own, word))
    if kind not in COLLECTIVES:
        return DRAFTERS[word]
    parts = [DRAFTERS[part] for part in words]
    return Word(
        make=lambda *given: COLLECTIVES[kind](tuple(part.make(*given) for part in parts)),
        draft=next((part.draft for part in parts if part.draft), None),
        inside=any(part.inside for part in parts),
        trees=False,
        # The parts of a collective look at the text alone.
        reads=tuple(name for part in parts for name in part.reads if name != "corpus"),
    )


def _own(
    word: str, target: LanguageModel, draft: Any, size: int | TreeShape, config: Any
) -> Drafter:
    """Returns the drafter of a file; its expression may use ``target``, ``draft``, ``K`` and
    ``tree``.
    """
    tree = size if isinstance(size, TreeShape) else None
    K = size if tree is None else tree.K
    drafter = evaluate(
        "--config.drafter", word, Drafter, target=target, draft=draft, K=K, tree=tree
    )
    if drafter.K != K:
        raise ValueError(
            f"--config.drafter={word} drafts K = {drafter.K} tokens, and --config.draft_length is "
            f"{K}: set it to {drafter.K}, or write K in the expression"
        )
    return drafter


STOPS = {"none": lambda least: None, "entropy": Entropy, "confidence": Confidence}


@dataclasses.dataclass(frozen=True, kw_only=True)
class AdaptiveFields:
    """The fields of adaptive draft lengths; configs/common.py explains them."""

    lengths: tuple[int, ...] = ()
    costs_ms: tuple[float, ...] = ()
    usual: int | None = None
    acceptance: Annotated[float, (validate.number, 0, 1)] = 0.7
    stop: Annotated[str, (validate.choice, STOPS)] = "none"
    least: Annotated[float, (validate.number, 0, 1)] = 0.3

    def __post_init__(self):
        readers = {"costs_ms": "lengths", "usual": "lengths", "acceptance": "lengths"}
        for name, reader in (readers | {"least": "stop"}).items():
            value, off = getattr(self, name), getattr(self, reader) in ((), "none")
            if off and value != getattr(type(self), name):
                raise ValueError(f"{name} has no effect without adaptive.{reader}; got {value!r}")

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
                f"adaptive.lengths end with {adaptive.K}, but draft_length is {drafter.K}: make "
                "them equal"
            )
        check_lengths(drafter, adaptive.lengths)
        return adaptive

"""A target and its draft: two models, their parameters, and the tokenizer."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from specsamp import validate
from specsamp.decoding.data_shards import DataShards
from specsamp.decoding.drafter import Drafter
from specsamp.decoding.state import Weights
from specsamp.models.interface import LanguageModel
from specsamp.sampling.warp import Warp, chain, first_tokens

if TYPE_CHECKING:
    from specsamp.decoding.drafters.translating import SharedVocabulary
    from specsamp.models.heads import Head

# Sets of weights kept per drafter and number of slots; most models' sets share all their memory.
MAX_FITTED = 4


@runtime_checkable
class Tokenizer(Protocol):
    """Maps text to token ids and back."""

    @property
    def vocab_size(self) -> int: ...

    @property
    def eos_id(self) -> int | None: ...

    def encode(self, text: str) -> list[int]: ...

    def encode_chat(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        """Returns the ids of a conversation, up to the start of the answer; ValueError without a
        chat template.
        """

    def decode(self, tokens: Sequence[int]) -> str:
        """Returns the text of tokens: their `token_bytes`, with U+FFFD for what is not UTF-8."""

    def token_bytes(self, token: int, before: int | None = None) -> bytes | None:
        """Returns the bytes that a token adds to a text.

        None is for a token without text, such as the end of text.

        Args:
          before: the last token before it that has bytes; None: the token begins the text.
        """

    def token_id(self, text: str) -> int | None:
        """Returns the id of the token with this name or text, special or not, else None."""

    def token(self, index: int) -> str:
        """Returns the text of a token id, or the vocabulary's escaped form of it."""


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class Pair:
    """Target and draft with their parameters, and the target's tokenizer.

    Attributes:
      target, target_params: the model whose distribution is sampled.
      draft, draft_params: the model that proposes; leave both out to decode without a draft.
        Parameters without a model go to the ``prepare`` of your own drafter.
      head: drafts from the target's hidden states instead of a draft model, with the parameters
        ``draft_params``.
      tokenizer: the target's; None: prompts are token ids, and completions have no text.
      stop: default ids that end a text; None: the tokenizer's end of text.
      shards: the split of rows over devices; see `specsamp.mesh`.
      vocabulary: for a draft model with another tokenizer, from
        `specsamp.checkpoints.vocabulary.match_vocabularies`.

    Raises:
      ValueError: a part has the wrong type, or the parts do not fit together.
    """

    target: LanguageModel
    target_params: Any = dataclasses.field(repr=False)
    draft: LanguageModel | None = None
    draft_params: Any = dataclasses.field(default=None, repr=False)
    head: Head | None = None
    tokenizer: Tokenizer | None = None
    stop: tuple[int, ...] | None = None
    shards: DataShards = DataShards()
    vocabulary: SharedVocabulary | None = None
    _fitted: dict = dataclasses.field(default_factory=dict, init=False, repr=False)
    _prepared: dict = dataclasses.field(default_factory=dict, init=False, repr=False)

    def __post_init__(self):
        for name, model in (("target", self.target), ("draft", self.draft)):
            if model is None and name == "draft":
                continue
            validate.instance(f"the {name}", model, LanguageModel, "TransformerLM(config)")
            if not isinstance(getattr(model, "vocab_size", None), int):
                raise ValueError(f"the {name} has no vocab_size: {model!r}")
            validate.hashable(f"the {name}", model)
        if self.target_params is None:
            raise ValueError(
                "target_params is None: give the target's parameters, () for a model that has none"
            )
        validate.instance("shards", self.shards, DataShards, "DataShards(mesh)")
        if not (self.tokenizer is None or isinstance(self.tokenizer, Tokenizer)):
            raise ValueError(
                "the tokenizer must be an object such as JsonTokenizer(path), with all methods of "
                f"specsamp.decoding.pair.Tokenizer; got {self.tokenizer!r}"
            )
        if self.tokenizer is not None and self.tokenizer.vocab_size > self.target.vocab_size:
            raise ValueError(
                f"the tokenizer has {self.tokenizer.vocab_size} tokens but the target's vocabulary "
                f"only {self.target.vocab_size}: they do not belong together"
            )
        if self.head is not None:
            self._check_head()
        if self.draft is not None and self.draft_params is None:
            raise ValueError("a draft model was given without draft_params")
        if self.draft is None and self.vocabulary is not None:
            raise ValueError(
                "a vocabulary was given without a draft model: give the model that has the other "
                "tokenizer"
            )

    def _check_head(self) -> None:
        if self.draft is not None:
            raise ValueError(
                "a pair has a draft model or a head, whose parameters are draft_params: leave one "
                "out"
            )
        if self.draft_params is None:
            raise ValueError("a head was given without draft_params")
        from specsamp.models.heads import Head  # loads Flax, which a draft model does not need

        validate.instance("the head", self.head, Head, "config.head()").check_target(self.target)

    @property
    def draft_or_head(self) -> LanguageModel | Head | None:
        """Returns the draft model or head that ``draft_params`` belong to."""
        return self.head or self.draft

    def full_warp(self, warp: Warp) -> Warp:
        """Returns ``warp`` as `generate` applies it: with ids that the tokenizer does not have
        excluded.
        """
        if self.tokenizer is None or self.tokenizer.vocab_size == self.target.vocab_size:
            return warp
        return chain(first_tokens(self.tokenizer.vocab_size), warp)

    def weights(self, drafter: Drafter, slots: int) -> Weights:
        """Returns decode-time weights for caches of ``slots`` slots; every model is prepared only
        once.

        Weights that `prepare` does not change share their memory with the parameters.
        """
        if "target" not in self._prepared:
            self._prepared["target"] = _prepared(self.target, "target_params", self.target_params)
        # Classes may prepare different weights under an inherited key.
        drafts = (type(drafter).prepare, type(drafter).fit_slots, drafter.weights_key)
        if drafts not in self._prepared:
            self._prepared[drafts] = _prepared(drafter, "draft_params", self.draft_params)
        key = (drafts, slots)
        if key not in self._fitted:
            target = next((w.target for (_, s), w in self._fitted.items() if s == slots), None)
            while len(self._fitted) >= MAX_FITTED:
                self._fitted.pop(next(iter(self._fitted)))
            if target is None:
                target = self.target.fit_slots(self._prepared["target"], slots)
            draft = drafter.fit_slots(self._prepared[drafts], slots)
            self._fitted[key] = Weights(target=target, draft=draft)
        return self._fitted[key]


def _prepared(model: LanguageModel | Drafter, name: str, params: Any) -> Any:
    try:
        return model.prepare(params)
    except (AttributeError, KeyError, TypeError) as error:
        raise ValueError(
            f"{name} are not those of {model!r:.200}: {type(error).__name__} {error}"
        ) from error

"""A draft model with another tokenizer drafts the tokens that its vocabulary shares with the
target's.

This is token-level intersection (Timor et al. 2025, arXiv 2502.05202). The draft's logits are
mapped to the target's ids, -inf for tokens that the draft does not have, and only then warped. The
sampled distribution is the verified distribution, so a lossless rule stays lossless, and missing
tokens only cost acceptance.

The draft reads the bytes of the target's text as draft ids. Drafted tokens are shared, so in a
round only the correction or bonus may be several draft ids, at most M. Example with K = 2, where
the target emits "Ġmandolin" as the correction of the second drafted token, which the draft's
tokenizer splits into three ids:

    target's text   [.. The] [Ġold] [Ġmandolin]
    draft's text    [.. The] [Ġold] [Ġm] [and] [olin]

The next round's first call feeds M + 1 ids that end with [olin]: all unread ids, and some earlier
ids once more. The length of the draft's text follows from the length of the target's text by a
table in the state.
"""

import dataclasses
import functools
import hashlib
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from specsamp import validate
from specsamp.decoding.drafter import Drafter, DrafterHooks, Weights, positions_of
from specsamp.decoding.drafters.model import ModelDrafter
from specsamp.decoding.state import gather_tokens, write_tokens
from specsamp.models.interface import LanguageModel
from specsamp.pytrees import pytree

Array = jax.Array

READ_WIDTH = 128  # most ids per call while a prompt is read; each row has as many scratch slots
SLOTS_MULTIPLE = 128


@dataclasses.dataclass(frozen=True, eq=False)
class SharedVocabulary:
    """The tokens that two vocabularies share, and every target token as draft ids; compared by
    digest.

    Attributes:
      draft_ids_V: int32, the draft's id of each of the target's tokens; -1: the draft has no such
        token.
      reading_VM: int32, the draft ids with the bytes of each of the target's tokens, padded with
        -1. A shared token has its own id; a token that the draft does not read has none.
      draft_size: vocabulary size of the draft model.
      begin: draft ids before every text.
      num_cut: number of the target's tokens that have more than M draft ids, of which the last M
        are read.
    """

    draft_ids_V: np.ndarray
    reading_VM: np.ndarray
    draft_size: int
    begin: tuple[int, ...] = ()
    num_cut: int = 0

    def __post_init__(self):
        for name in ("draft_ids_V", "reading_VM"):
            ids = np.array(getattr(self, name), np.int32)
            if ids.min() < -1 or ids.max() >= self.draft_size:
                raise ValueError(
                    f"{name} must hold ids below draft_size = {self.draft_size}; got {ids.min()} "
                    f"to {ids.max()}"
                )
            ids.setflags(write=False)
            object.__setattr__(self, name, ids)
        shared = self.draft_ids_V[self.draft_ids_V >= 0]
        if len(np.unique(shared)) < len(shared):
            twice = np.flatnonzero(np.bincount(shared) > 1)[0]
            raise ValueError(
                f"draft_ids_V has draft id {twice} twice: two tokens would share its probability"
            )

    @functools.cached_property
    def digest(self) -> str:
        """Returns a digest of all ids."""
        parts = self.draft_ids_V, self.reading_VM, np.array([self.draft_size, *self.begin])
        return hashlib.sha256(b"/".join(part.tobytes() for part in parts)).hexdigest()[:16]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, SharedVocabulary) and self.digest == other.digest

    def __hash__(self) -> int:
        return hash(self.digest)

    def __repr__(self) -> str:
        return (
            f"SharedVocabulary({self.num_shared} of {len(self.draft_ids_V)} tokens, {self.digest})"
        )

    @property
    def num_shared(self) -> int:
        """Returns the number of tokens that the draft can propose."""
        return int((self.draft_ids_V >= 0).sum())

    def read(self, tokens: Sequence[int]) -> list[int]:
        """Returns the draft ids of the given target tokens."""
        ids = self.reading_VM[list(tokens)].ravel()
        return ids[ids >= 0].tolist()

    @property
    def ids_per_token(self) -> float:
        """Returns the mean number of draft ids per target token, of the tokens that have any."""
        lengths_V = (self.reading_VM >= 0).sum(1)
        return float(lengths_V[lengths_V > 0].mean())


@pytree
class TranslatingWeights:
    """The weights of a draft model with the arrays of a `SharedVocabulary`."""

    model: Any
    draft_ids_V: Array
    reading_VM: Array


@pytree
class TranslatingState:
    """The draft's cache and text for each row."""

    cache: Any
    ids_BD: Array  # int32, the draft's text
    ends_BS: Array  # int32, the draft's length after the token in each slot of the target


@dataclasses.dataclass(frozen=True)
class TranslatingDrafter(DrafterHooks, Drafter):
    """Drafts with ``model``, which has another tokenizer; a row whose draft text is too long drafts
    nothing.

    Attributes:
      model: any `LanguageModel`.
      vocabulary: the tokens that it shares with the target.
      K: as in `ModelDrafter`.
    """

    model: LanguageModel
    vocabulary: SharedVocabulary
    K: int

    falls_behind = True

    def __post_init__(self):
        validate.instance(
            "vocabulary", self.vocabulary, SharedVocabulary, "match_vocabularies(target, draft)"
        )
        validate.integer("K", self.K, 1, READ_WIDTH - 1)

    @property
    def draft_model(self):
        return self.model

    @property
    def weights_key(self):
        return self.model, self.vocabulary

    @property
    def first_window(self) -> int:
        """Returns the number of ids that a round's first call feeds: M + 1."""
        return self.vocabulary.reading_VM.shape[1] + 1

    @property
    def _drafter(self) -> ModelDrafter:
        return ModelDrafter(self.model, self.K)

    def check(self, target, draft, draft_params):
        self._drafter.check(self.model, draft, draft_params)
        if self.model.rewind is not None:
            raise ValueError(
                "a draft with another tokenizer has no recurrent layers: take another draft"
            )
        positions = positions_of(self.model)
        if self.K >= positions:
            raise ValueError(
                f"K = {self.K} does not fit the draft's {positions} positions: draft fewer tokens "
                "per round"
            )
        tokens, ids = len(self.vocabulary.draft_ids_V), self.vocabulary.draft_size
        if (tokens, ids) != (target.vocab_size, self.model.vocab_size):
            raise ValueError(
                f"the shared vocabulary has {tokens} target and {ids} draft tokens, but the models "
                f"{target.vocab_size} and {self.model.vocab_size}: match the tokenizers with these "
                "sizes"
            )

    def prepare(self, params):
        return TranslatingWeights(
            model=self.model.prepare(params),
            draft_ids_V=jnp.asarray(self.vocabulary.draft_ids_V),
            reading_VM=jnp.asarray(self.vocabulary.reading_VM),
        )

    def fit_slots(self, weights, slots):
        return dataclasses.replace(
            weights, model=self.model.fit_slots(weights.model, self._draft_slots(slots))
        )

    def _draft_slots(self, slots: int) -> int:
        """Returns the number of slots of the draft's text for a target's number of slots; at most
        its positions.
        """
        length = int(slots * self.vocabulary.ids_per_token) + len(self.vocabulary.begin)
        length = min(length, positions_of(self.model))
        return -(-length // SLOTS_MULTIPLE) * SLOTS_MULTIPLE + READ_WIDTH

    def _longest(self, state: TranslatingState) -> int:
        """Returns the length of the longest text that leaves room for a draft, or for a call of the
        prompt.
        """
        return min(state.ids_BD.shape[1] - READ_WIDTH, positions_of(self.model) - self.K)

    def init(self, batch, slots):
        draft_slots, begin = self._draft_slots(slots), self.vocabulary.begin
        ids_BD = jnp.zeros((batch, draft_slots), jnp.int32)
        return TranslatingState(
            cache=self.model.init_cache(batch, draft_slots),
            ids_BD=ids_BD.at[:, : len(begin)].set(jnp.array(begin, jnp.int32)),
            ends_BS=jnp.zeros((batch, slots), jnp.int32),
        )

    def _length(self, state: TranslatingState, lengths_B: Array) -> Array:
        """Returns the length of the draft's text for the first ``lengths_B`` tokens of the
        target's.
        """
        end_B1 = gather_tokens(state.ends_BS, jnp.maximum(lengths_B - 1, 0), 1)
        return jnp.where(lengths_B > 0, end_B1[:, 0], len(self.vocabulary.begin))

    def _append(
        self,
        weights: Weights,
        state: TranslatingState,
        tokens_BT: Array,
        start_B: Array,
        count_B: Array,
    ) -> TranslatingState:
        """Writes the draft ids of the target's tokens in slots ``start_B .. start_B + count_B -
        1``.
        """
        batch, width = tokens_BT.shape
        counts_BT = jnp.arange(width)[None] < count_B[:, None]
        ids_BTM = weights.draft.reading_VM[jnp.maximum(tokens_BT, 0)]
        ids_BTM = jnp.where(counts_BT[..., None], ids_BTM, -1)
        sizes_BT = jnp.sum(ids_BTM >= 0, axis=-1)
        ends_BT = self._length(state, start_B)[:, None] + jnp.cumsum(sizes_BT, axis=1)
        begins_BT = ends_BT - sizes_BT
        # Ids without a place, and places beyond the end, are dropped.
        draft_slots, slots = state.ids_BD.shape[1], state.ends_BS.shape[1]
        at_BTM = jnp.where(
            ids_BTM >= 0,
            begins_BT[..., None] + jnp.arange(ids_BTM.shape[-1])[None, None],
            draft_slots,
        )
        slot_BT = jnp.where(counts_BT, start_B[:, None] + jnp.arange(width)[None], slots)
        row_B1 = jnp.arange(batch)[:, None]
        return dataclasses.replace(
            state,
            ids_BD=state.ids_BD.at[row_B1, at_BTM.reshape(batch, -1)].set(
                ids_BTM.reshape(batch, -1), mode="drop"
            ),
            ends_BS=state.ends_BS.at[row_B1, slot_BT].set(ends_BT.astype(jnp.int32), mode="drop"),
        )

    def read(self, weights, state, chunk, cache):
        tokens_BT, start_B, lengths_B = chunk.tokens_BT, chunk.start_B, chunk.lengths_B
        width = tokens_BT.shape[1]
        if chunk.output is None:  # after a pause: `commit` has written the ids of all tokens
            last_B = lengths_B
        else:
            state = self._append(
                weights, state, tokens_BT, start_B, jnp.clip(lengths_B - start_B, 0, width)
            )
            last_B = jnp.minimum(lengths_B, start_B + width)
        longest = self._longest(state)
        step = min(width * self.vocabulary.reading_VM.shape[1], READ_WIDTH)
        begin_B = jnp.where(start_B > 0, self._length(state, start_B), 0)
        begin_B = jnp.minimum(begin_B, longest)
        end_B = jnp.minimum(self._length(state, last_B), longest)

        def feed(index, draft_cache):
            at_B = jnp.minimum(begin_B + index * step, longest)
            ids_BT = gather_tokens(state.ids_BD, at_B, step)
            return self.model(weights.draft.model, ids_BT, at_B, draft_cache).cache

        calls = -(-jnp.max(end_B - begin_B) // step)
        return dataclasses.replace(
            state, cache=jax.lax.fori_loop(0, calls, feed, state.cache)
        ), cache

    def propose(self, weights, state, prefix, cache, sample):
        whole_B, longest = self._length(state, prefix.lengths_B), self._longest(state)
        length_B = jnp.clip(whole_B, 1, longest)
        of_model = dataclasses.replace(weights, draft=weights.draft.model)

        def read(offset, width, carry):
            draft_cache, ids_BD = carry
            logits_BU, draft_cache = self._drafter.last_logits(
                of_model, draft_cache, ids_BD, length_B + offset, width
            )
            return restrict(logits_BU, weights.draft.draft_ids_V), (draft_cache, ids_BD)

        def step(offset, token_B, carry):
            id_B1 = jnp.maximum(weights.draft.draft_ids_V[token_B], 0)[:, None]
            ids_BD = write_tokens(carry[1], id_B1, length_B + offset - 1)
            return read(offset, 1, (carry[0], ids_BD))

        logits_BV, carry = read(0, self.first_window, (state.cache, state.ids_BD))
        draft, (draft_cache, ids_BD) = sample.chain(self.K, logits_BV, step, carry)
        is_able_B = (whole_B >= 1) & (whole_B <= longest)
        state = dataclasses.replace(state, cache=draft_cache, ids_BD=ids_BD)
        return draft.only_in(is_able_B), state, cache

    def commit(self, weights, state, scored, cache):
        verdict = scored.verdict
        return self._append(
            weights, state, verdict.tokens_BT, scored.prefix.lengths_B, verdict.num_emitted_B
        ), cache


def restrict(logits_BU: Array, draft_ids_V: Array) -> Array:
    """Returns the draft's logits ``[B, U]`` as logits ``[B, V]`` of the target's tokens, -inf where
    the draft has none.
    """
    logits_BV = jnp.take(logits_BU, jnp.maximum(draft_ids_V, 0), axis=-1)
    return jnp.where(draft_ids_V[None] >= 0, logits_BV, -jnp.inf)

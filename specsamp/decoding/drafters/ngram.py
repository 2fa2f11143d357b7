"""Prompt lookup: proposes the tokens that followed the last occurrence of the current n-gram, in
the context or in earlier texts.

A retrieved token is a one-hot proposal: it is accepted with the target's probability of it, and the
residual is the target's distribution without it (Leviathan et al., arXiv 2211.17192; the copying is
Saxena's prompt lookup). Copying the input of an editing task is also called aggressive decoding
(Sun et al., arXiv 2106.04970). At the end of the context the copy goes on with the tokens that it
has just copied, so that a repetition of any period continues for all K tokens.

*Earlier texts* (SuffixDecoding, arXiv 2411.04975; rollouts of an earlier epoch, SpecRL) are a fixed
corpus, or logs of the emitted tokens: a ring of tokens for each row of the batch, in which all rows
look. A table of hashes leads from an n-gram to the slot after its last occurrence, whose tokens are
compared: n-grams with the same hash lose older occurrences, and draft nothing wrong.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from specsamp import validate
from specsamp.decoding.drafter import Drafter, DrafterHooks, Prefix
from specsamp.decoding.state import Kept
from specsamp.pytrees import pytree
from specsamp.sampling.rules import Draft, count_leading

Array = jax.Array
_Found = tuple[Array, Array]  # lengths of matches, and the K tokens after them

END = -1  # after each text; no n-gram of a context has it
NO_TOKEN = -2  # before the beginning of a context


@dataclasses.dataclass(frozen=True)
class Corpus:
    """Fixed texts, equal if their tokens are.

    Attributes:
      tokens_R: int32, the texts, each with an `END`.
    """

    tokens_R: np.ndarray = dataclasses.field(repr=False, compare=False)
    sha256: str

    @classmethod
    def of(cls, texts: Sequence[Sequence[int]]) -> Corpus:
        """Returns the corpus of lists of token ids; raises ValueError for anything else, or without
        a token.
        """
        arrays = [array for array in map(np.asarray, texts) if array.size]
        if not arrays:
            raise ValueError("corpus has no tokens: give lists of token ids, or leave it out")
        if any(one.ndim != 1 or one.dtype.kind not in "iu" or one.min() < 0 for one in arrays):
            raise ValueError(f"corpus must be lists of token ids; got {texts!r:.80}")
        ended = [part.astype(np.int32) for array in arrays for part in (array, np.array([END]))]
        tokens_R = np.concatenate(ended)
        return cls(tokens_R, hashlib.sha256(tokens_R.tobytes()).hexdigest())


@pytree
class NgramTable:
    """Texts in a ring, and where their n-grams occurred last.

    Attributes:
      tokens_R: int32, with an `END` after each text.
      slots_NH: int32, by length of the n-gram and hash, the slot after it.
    """

    tokens_R: Array
    slots_NH: Array


@pytree
class Logs:
    """The state of a drafter with logs.

    Attributes:
      seen_B: int32, the tokens of each row's text that its log has passed.
      tables: the table of each row, and the slot after its last token, int32 ``[B]``.
    """

    seen_B: Array
    tables: Kept


@dataclasses.dataclass(frozen=True)
class NgramDrafter(DrafterHooks, Drafter):
    """Looks up the last ``max_ngram`` tokens in the sequence, then shorter n-grams; without a
    match, in logs and corpus.

    The longest match wins, and of these the most recent, or that of a log.

    With logs a text follows the distribution of the target as before, but which text a seed gives
    depends on the texts beside and before it. They must have other random numbers: a draft must
    not depend on the numbers that verify it.

    Attributes:
      K: tokens per round; without a match, nothing is drafted.
      max_ngram: the longest n-gram.
      corpus: texts to look in, as lists of token ids.
      log: the last tokens that are logged in each row, for all rows of its data shard and for later
        texts; 0: none.
    """

    K: int
    max_ngram: int = 3
    corpus: Corpus | Sequence[Sequence[int]] | None = None
    log: int = 0

    def __post_init__(self):
        validate.integer("K", self.K, 1)
        validate.integer("max_ngram", self.max_ngram, 1)
        validate.integer("log", self.log, 0)
        if self.corpus is not None and not isinstance(self.corpus, Corpus):
            object.__setattr__(self, "corpus", Corpus.of(self.corpus))

    @property
    def weights_key(self):
        return None if self.corpus is None else (self.corpus, self.max_ngram)

    @property
    def row_independent(self):
        return not self.log

    def check(self, target, draft, draft_params):
        largest = -1 if self.corpus is None else self.corpus.tokens_R.max()
        if largest >= target.vocab_size:
            raise ValueError(
                f"the corpus has token {largest}, and the target's vocabulary {target.vocab_size} "
                "tokens: encode it with the pair's tokenizer"
            )

    def prepare(self, params):
        """Returns the table of the corpus."""
        if self.corpus is None:
            return None
        with jax.ensure_compile_time_eval():
            tokens_R = jnp.asarray(self.corpus.tokens_R)
            ends_R = jnp.arange(len(tokens_R), dtype=jnp.int32)
            before_RN = jax.vmap(_before, (None, 0, None))(tokens_R, ends_R, self.max_ngram)
            hashes_RN = _hashes(before_RN, 2 * len(tokens_R))
            last_R1 = jnp.where(tokens_R == END, 0, ends_R)[:, None]  # something follows
            slots_NH = jnp.zeros((self.max_ngram, 2 * len(tokens_R)), jnp.int32)
            slots_NH = slots_NH.at[jnp.arange(self.max_ngram), hashes_RN].max(last_R1)
            return NgramTable(tokens_R=tokens_R, slots_NH=slots_NH)

    def init(self, batch, slots):
        if not self.log:
            return ()
        table = NgramTable(
            tokens_R=jnp.full((batch, self.log), END, jnp.int32),
            slots_NH=jnp.zeros((batch, self.max_ngram, 2 * self.log), jnp.int32),
        )
        none_B = jnp.zeros((batch,), jnp.int32)
        return Logs(seen_B=none_B, tables=Kept(value=(table, none_B)))

    def draft_lengths(self, state, prefix):
        if self.corpus is not None or self.log:
            return None
        longest_B = jnp.max(self.lengths_of_matches(prefix), axis=1)
        return jnp.where(longest_B > 0, self.K, 0).astype(jnp.int32)

    def propose(self, weights, state, prefix, cache, sample):
        found_BS = self.lengths_of_matches(prefix)
        longest_B, slots = jnp.max(found_BS, axis=1), jnp.arange(found_BS.shape[1])
        best_B = jnp.max(jnp.where(found_BS == longest_B[:, None], slots[None], 0), axis=1)
        tokens_BK = copied(prefix, best_B, self.K)
        before_BN = jax.vmap(_before, (0, 0, None))(
            prefix.tokens_BS, prefix.lengths_B, self.max_ngram
        )
        # A match of its own wins over longer ones, since it was accepted more often.
        longest_B, others = jnp.where(longest_B > 0, self.max_ngram, 0), []
        if self.log:
            state = self._write(state, prefix)
            in_each = jax.vmap(jax.vmap(self._look, (0, None)), (None, 0))
            others.append(jax.vmap(_longest)(*in_each(state.tables.value[0], before_BN)))
        if self.corpus is not None:
            others.append(jax.vmap(self._look, (None, 0))(weights.draft, before_BN))
        for lengths_B, texts_BK in others:
            tokens_BK = jnp.where((lengths_B > longest_B)[:, None], texts_BK, tokens_BK)
            longest_B = jnp.maximum(lengths_B, longest_B)
        num_drafted_B = jnp.where(longest_B > 0, self.K, 0).astype(jnp.int32)
        return Draft(tokens_BK=tokens_BK, num_drafted_B=num_drafted_B), state, cache

    def _look(self, table: NgramTable, before_N: Array) -> _Found:
        """Returns the longest match in a table, its length and the K tokens after it; an `END` ends
        a draft.
        """
        lengths = jnp.arange(self.max_ngram)
        slots_N = table.slots_NH[lengths, _hashes(before_N, table.slots_NH.shape[1])]
        size = len(table.tokens_R)
        stored_NN = table.tokens_R[(slots_N[:, None] - 1 - lengths[None]) % size]
        agree_N = count_leading(stored_NN == before_N[None])
        after_NK = table.tokens_R[(slots_N[:, None] + jnp.arange(self.K)[None]) % size]
        return _longest(agree_N, after_NK)

    def _write(self, state: Logs, prefix: Prefix) -> Logs:
        """Appends the tokens of the last round to the logs; of a new text, the last K + 1."""

        def write(table, end, seen, tokens_S, length):
            count = jnp.clip(length - seen, 0, self.K + 1)
            (size,), (_, num_hashes) = table.tokens_R.shape, table.slots_NH.shape
            index_T = jnp.arange(self.K + 1, dtype=jnp.int32)
            is_new_T, from_T = index_T < count, length - count + index_T
            slots_T = jnp.where(is_new_T, (end + index_T) % size, size)
            before_TN = jax.vmap(_before, (None, 0, None))(tokens_S, from_T, self.max_ngram)
            hashes_TN = jnp.where(is_new_T[:, None], _hashes(before_TN, num_hashes), num_hashes)
            at = jnp.arange(self.max_ngram), hashes_TN
            written = NgramTable(
                tokens_R=table.tokens_R.at[slots_T].set(tokens_S[from_T], mode="drop"),
                slots_NH=table.slots_NH.at[at].set(slots_T[:, None], mode="drop"),
            )
            return written, (end + count) % size

        written = jax.vmap(write)(
            *state.tables.value, state.seen_B, prefix.tokens_BS, prefix.lengths_B
        )
        return Logs(seen_B=prefix.lengths_B, tables=Kept(value=written))

    def lengths_of_matches(self, prefix: Prefix) -> Array:
        """Returns the length of the longest n-gram that matches before each slot, int32 ``[B, S]``;
        0 for none.
        """
        tokens_BS = prefix.tokens_BS
        ends = jnp.arange(tokens_BS.shape[1])[None, :]
        matches_BS = (ends >= 1) & (ends < prefix.lengths_B[:, None])
        found_BS = jnp.zeros_like(tokens_BS)
        for n in range(1, self.max_ngram + 1):
            # N-grams match where the shorter n-grams match and one more token agrees.
            last_B1 = jnp.take_along_axis(
                tokens_BS, jnp.maximum(prefix.lengths_B - n, 0)[:, None], axis=1
            )
            before_BS = jnp.pad(tokens_BS, ((0, 0), (n, 0)))[:, : tokens_BS.shape[1]]
            matches_BS &= (before_BS == last_B1) & (ends >= n)
            found_BS = jnp.where(matches_BS, n, found_BS)
        return found_BS


def copied(prefix: Prefix, start_B: Array, count: int) -> Array:
    """Returns the tokens from slot ``start_B``, ``[B, count]``; at the end of the text, the copied
    tokens again.
    """
    period_B1 = jnp.maximum(prefix.lengths_B - start_B, 1)[:, None]
    at_BX = start_B[:, None] + jnp.arange(count)[None, :] % period_B1
    return jnp.take_along_axis(prefix.tokens_BS, at_BX, axis=1)


def _longest(lengths_X: Array, texts_XK: Array) -> _Found:
    best = jnp.argmax(lengths_X)
    return lengths_X[best], texts_XK[best]


def _before(tokens_S: Array, end: Array, count: int) -> Array:
    """Returns the last tokens before slot ``end``, the last one first, int32 ``[N]``."""
    at_N = end - 1 - jnp.arange(count)
    return jnp.where(at_N < 0, NO_TOKEN, tokens_S[jnp.maximum(at_N, 0)])


def _hashes(before_XN: Array, size: int) -> Array:
    """Returns hashes of the n-grams of 1 to N last tokens, int32 ``[..., N]`` below ``size``."""
    mixed, hashes = jnp.zeros(before_XN.shape[:-1], jnp.uint32), []
    for n in range(before_XN.shape[-1]):
        mixed = (mixed + before_XN[..., n].astype(jnp.uint32) + 1) * jnp.uint32(0x9E3779B1)
        mixed = mixed ^ (mixed >> 15)
        hashes.append(mixed % jnp.uint32(size))
    return jnp.stack(hashes, axis=-1).astype(jnp.int32)

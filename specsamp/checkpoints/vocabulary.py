"""Matches two tokenizers by the bytes of their tokens, for a draft model whose tokenizer is not the
target's.

Tokens are compared as they decode in the middle of a text: the piece "▁the" of a SentencePiece
tokenizer and "Ġthe" of a byte-level tokenizer are both " the". Special tokens decode to nothing;
the two end-of-text tokens are matched.
"""

import json
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from specsamp.checkpoints.tokenizer import BYTE_OF_LETTER, JsonTokenizer
from specsamp.decoding.drafters.translating import SharedVocabulary
from specsamp.models.interface import LanguageModel

MOST_IDS = 8  # draft ids that are read of one target token; of a longer token the last ones
LEAST_SHARE = 0.1  # of the smaller vocabulary
SPACE = "▁"  # a space in pieces of SentencePiece


class TokenBytes:
    """A tokenizer on bytes: the bytes of its tokens, and the tokens of byte strings."""

    def __init__(self, tokenizer: JsonTokenizer, name: str):
        content = json.loads(tokenizer.to_json())
        kind = content["model"].get("type", "BPE")
        self.is_byte_level = tokenizer.is_byte_level
        if kind not in ("BPE", "Unigram") or not (
            self.is_byte_level or SPACE in json.dumps(content, ensure_ascii=False)
        ):
            raise ValueError(
                f"the {name}'s tokenizer is a {kind}: only byte-level and SentencePiece tokenizers "
                "are matched"
            )
        self.name, self._model = name, tokenizer.model
        indices = sorted(tokenizer.pieces)
        before = next((index for index in indices if tokenizer.token_bytes(index)), None)
        each = {index: tokenizer.token_bytes(index, before) for index in indices}
        self.of_id = {index: written for index, written in each.items() if written}
        # Of several tokens with equal bytes, the token that the tokenizer itself uses; else the
        # first.
        self.ids: dict[bytes, int] = {}
        twice = set()
        for index, written in self.of_id.items():
            if self.ids.setdefault(written, index) != index:
                twice.add(written)
        for written in twice:
            own = self._split(written)
            if len(own) == 1:
                self.ids[written] = own[0]

    def _split(self, written: bytes) -> list[int]:
        """Returns the ids of the tokenizer's model for some bytes; [] if it has none."""
        if self.is_byte_level:
            letter = {byte: c for c, byte in BYTE_OF_LETTER.items()}
            text = "".join(letter[byte] for byte in written)
        else:
            try:
                text = written.decode().replace(" ", SPACE)
            except UnicodeDecodeError:  # a part of a character
                text = None
        ids = [] if text is None else [token.id for token in self._model.tokenize(text)]
        return ids if b"".join(self.of_id.get(i, b"") for i in ids) == written else []

    def read(self, written: bytes) -> list[int]:
        """Returns the ids of some bytes in the middle of a text; raises ValueError if no tokens
        have these bytes.
        """
        if written in self.ids:
            return [self.ids[written]]
        ids = self._split(written) or [self.ids.get(bytes([byte]), -1) for byte in written]
        if -1 in ids:
            raise ValueError(
                f"no token of the {self.name} has the byte {written[ids.index(-1)]:#04x} of "
                f"{written!r}: it has no byte fallback; take another draft"
            )
        return ids


def match_vocabularies(
    target: JsonTokenizer,
    draft: JsonTokenizer,
    *,
    target_size: int | None = None,
    draft_size: int | None = None,
) -> SharedVocabulary:
    """Returns the tokens with equal bytes in two tokenizers, and each of the target's tokens in
    draft ids.

    Args:
      target_size, draft_size: the models' numbers of tokens; by default of the tokenizers.

    Raises:
      ValueError: a tokenizer is of another kind, bytes have no token in the draft, or less than
        `LEAST_SHARE` of the smaller vocabulary is shared.
    """
    ours, theirs = TokenBytes(target, "target"), TokenBytes(draft, "draft")
    shared = {
        index: theirs.ids[written] for written, index in ours.ids.items() if written in theirs.ids
    }
    reading = {index: theirs.read(written) for index, written in ours.of_id.items()}
    if target.eos_id is not None and draft.eos_id is not None:
        taken = {index: i for index, i in shared.items() if i != draft.eos_id}
        shared, reading[target.eos_id] = taken | {target.eos_id: draft.eos_id}, [draft.eos_id]
    smaller = min(len(ours.ids), len(theirs.ids))
    if len(shared) < LEAST_SHARE * smaller:
        raise ValueError(
            f"the tokenizers share {len(shared)} tokens, less than {LEAST_SHARE:.0%} of the "
            f"smaller vocabulary of {smaller}: take a draft for the same kind of text"
        )
    width = min(MOST_IDS, max(map(len, reading.values())))
    draft_ids_V = np.full(target_size or target.vocab_size, -1, np.int32)
    draft_ids_V[list(shared)] = list(shared.values())
    reading_VM = np.full((len(draft_ids_V), width), -1, np.int32)
    for index, ids in reading.items():
        kept = ids[-width:]
        reading_VM[index, : len(kept)] = kept
    return SharedVocabulary(
        draft_ids_V,
        reading_VM,
        draft_size or draft.vocab_size,
        begin=tuple(i for i in draft.encode("") if i != draft.eos_id),
        num_cut=sum(len(ids) > width for ids in reading.values()),
    )


def describe_overlap(vocabulary: SharedVocabulary) -> str:
    """Returns a sentence with the share of the target's vocabulary that the draft has, and the ids
    for the rest.
    """
    tokens, shared, width = (
        len(vocabulary.draft_ids_V),
        vocabulary.num_shared,
        vocabulary.reading_VM.shape[1],
    )
    cut = (
        f", of {vocabulary.num_cut / tokens:.1%} the last {width} alone"
        if vocabulary.num_cut
        else ""
    )
    return (
        f"the draft has another tokenizer: it can propose {shared} of the target's {tokens} tokens "
        f"({shared / tokens:.0%}), and reads each as up to {width} ids{cut}"
    )


def shared_mass(
    draft: LanguageModel,
    draft_params: object,
    vocabulary: SharedVocabulary,
    texts: Sequence[Sequence[int]],
) -> float:
    """Returns the draft's mean probability mass on shared tokens, after each token of some texts.

    Acceptance is about this fraction of the acceptance with a complete vocabulary, or less. (It is
    not a strict bound, since draft distributions are renormalised over shared tokens.)

    Args:
      texts: target tokens.
    """
    weights, total, count = draft.prepare(draft_params), 0.0, 0
    ids_U = vocabulary.draft_ids_V[vocabulary.draft_ids_V >= 0]

    @jax.jit
    def mass(tokens_BT: jax.Array) -> jax.Array:
        cache = draft.init_cache(1, tokens_BT.shape[1])
        output = draft(
            draft.fit_slots(weights, tokens_BT.shape[1]), tokens_BT, jnp.zeros(1, jnp.int32), cache
        )
        return jax.nn.softmax(output.logits_BTV.astype(jnp.float32), axis=-1)[0][:, ids_U].sum(-1)

    for text in texts:
        ids = [*vocabulary.begin, *vocabulary.read(text)]
        padded = (
            jnp.zeros((1, -(-len(ids) // 64) * 64), jnp.int32).at[0, : len(ids)].set(jnp.array(ids))
        )
        total, count = total + float(mass(padded)[: len(ids)].sum()), count + len(ids)
    return total / max(count, 1)

"""Reads the tokenizer of any ``tokenizer.json``."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from typing import Any

import tokenizers

from specsamp import storage
from specsamp.checkpoints.chat import ChatTemplate
from specsamp.decoding.text import Continuation

EOS = "<eos>"  # the end-of-text token of tokenizers that are trained here


def _byte_of_letter() -> dict[str, int]:
    """Returns the byte of each letter in the pieces of byte-level tokenizers (GPT-2's).

    Printable bytes of Latin-1 are their own letters, all other bytes have the letters from U+0100
    on.
    """
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in printable]
    own = {chr(byte): byte for byte in printable}
    return own | {chr(256 + place): byte for place, byte in enumerate(others)}


BYTE_OF_LETTER = _byte_of_letter()


class JsonTokenizer:
    """A Hugging Face ``tokenizer.json``; ``eos`` is the text or id of its end-of-text token, or
    None.

    Added tokens from the id ``rows`` on are left out (`left_out`): some models come with the
    tokenizer of a larger model, which has more added tokens, such as the image placeholder of Gemma
    3.
    """

    left_out: tuple[str, ...] = ()
    chat: ChatTemplate | None = None

    def __init__(
        self,
        path: str | os.PathLike,
        eos: str | int | None = None,
        rows: int | None = None,
        chat: ChatTemplate | None = None,
    ):
        self.chat = chat
        found = storage.place(path)
        if not storage.is_regular_file(found):
            raise FileNotFoundError(f"no tokenizer at {path}")
        try:
            tokenizer = tokenizers.Tokenizer.from_str(found.read_text(encoding="utf-8"))
        except Exception as error:  # the library raises the class Exception itself
            raise ValueError(f"{path} is not a tokenizer.json ({error})") from error
        added = tokenizer.get_added_tokens_decoder()
        ordinary = tokenizer.get_vocab(with_added_tokens=False).values()
        if rows is not None and max(ordinary, default=0) < rows <= max(added, default=0):
            self.left_out = tuple(
                str(token) for index, token in sorted(added.items()) if index >= rows
            )
            content = json.loads(tokenizer.to_str())
            content["added_tokens"] = [
                token for token in content["added_tokens"] if token["id"] < rows
            ]
            tokenizer = tokenizers.Tokenizer.from_str(json.dumps(content))
        self._set(tokenizer, eos, str(path))

    @classmethod
    def from_tokenizer(
        cls, tokenizer: tokenizers.Tokenizer, eos: str | None = None
    ) -> JsonTokenizer:
        """Wraps a tokenizer that is not in a file yet; ``eos`` is the text of its end-of-text
        token.
        """
        made = cls.__new__(cls)
        made._set(tokenizer, eos, "the tokenizer")
        return made

    def _set(self, tokenizer: tokenizers.Tokenizer, eos: str | int | None, name: str) -> None:
        """Sets the tokenizer; raises ValueError with ``name`` if it has no tokens, or no token
        ``eos``.
        """
        if not tokenizer.get_vocab_size():
            raise ValueError(f"{name} has no tokens")
        # Files may hold the lengths to which a training run cut and padded its texts.
        tokenizer.no_truncation()
        tokenizer.no_padding()
        self._tokenizer = tokenizer
        added = tokenizer.get_added_tokens_decoder()
        self._special = {index for index, token in added.items() if token.special}
        decoder = tokenizer.decoder
        shown = "" if decoder is None else decoder.decode(["ĠĠÃ©"])
        self.is_byte_level = shown.endswith("é")
        # Spaces that a decoder takes from the beginning of a text.
        self._stripped = len("  é") - len(shown)
        self._byte_of: dict[int | None, int] = {}  # tokens of single bytes: <0x0A>
        if decoder is not None and decoder.decode(["<0x41>"]) == "A":
            names = (f"<0x{byte:02X}>" for byte in range(256))
            self._byte_of = {tokenizer.token_to_id(name): byte for byte, name in enumerate(names)}
        self.vocab_size = max(tokenizer.get_vocab().values()) + 1  # ids may have gaps
        self.eos_id = tokenizer.token_to_id(eos) if isinstance(eos, str) else eos
        if eos is not None and self.eos_id is None:
            raise ValueError(f"{name} has no token {eos!r} to end texts with")

    @property
    def pieces(self) -> dict[int, str]:
        """Returns the text of each id, including added tokens."""
        return {index: text for text, index in self._tokenizer.get_vocab().items()}

    @property
    def model(self) -> tokenizers.models.Model:
        """Returns the model of the tokenizer, which splits text into tokens without normalisation
        or special tokens.
        """
        return self._tokenizer.model

    def to_json(self) -> str:
        return self._tokenizer.to_str()

    def encode(self, text: str) -> list[int]:
        return self._tokenizer.encode(text).ids

    def knows(self, text: str) -> bool:
        """Returns False if the tokenizer has whole words, and none of the text's."""
        ids = self.encode(text)
        if not ids or not isinstance(self.model, tokenizers.models.WordLevel):
            return True
        return set(ids) != {self._tokenizer.token_to_id(self.model.unk_token)}

    def encode_chat(
        self, messages: Sequence[Mapping[str, Any]], *, complete: bool = False, **variables: Any
    ) -> list[int]:
        """Returns the ids of a conversation; all special tokens come from the template.

        Args:
          complete: without the beginning of an answer at the end, for training.
          variables: of the template, such as ``tools``.

        Raises:
          ValueError: there is no chat template, or it refuses these messages.
        """
        if self.chat is None:
            raise ValueError(
                "the tokenizer has no chat template, which a conversation needs: give a text, or "
                "an instruction-tuned model, whose tokenizer_config.json has a template"
            )
        text = self.chat.render(messages, **variables, add_generation_prompt=not complete)
        text.encode()  # raises ValueError for half a character, which JSON can write
        return self._tokenizer.encode(text, add_special_tokens=False).ids

    def decode(self, tokens: Sequence[int]) -> str:
        return Continuation(self).decode(tokens)

    def token_bytes(self, token: int, before: int | None = None) -> bytes | None:
        """Returns the bytes that a token adds to a text; see `specsamp.decoding.pair.Tokenizer`.

        The library makes a whole run of bytes unknown if one character in it is incomplete, so
        bytes do not come from it.
        """
        piece = self._tokenizer.id_to_token(token)
        if piece is None or token in self._special:
            return None
        if self.is_byte_level:
            if not BYTE_OF_LETTER.keys() >= set(piece):  # an added token, which is its own text
                return piece.encode()
            content = bytes(BYTE_OF_LETTER[letter] for letter in piece)
            spaces = len(content) - len(content.lstrip(b" "))
            return content if before is not None else content[min(spaces, self._stripped) :]
        byte = self._byte_of.get(token)
        if byte is not None and (before is not None or byte > 0x7F):
            return bytes([byte])
        context = [] if before is None else [before]
        start = self._tokenizer.decode(context)
        return self._tokenizer.decode([*context, token])[len(start) :].encode()

    def token_id(self, text: str) -> int | None:
        known = self._tokenizer.token_to_id(text)
        if known is not None:
            return known
        encoded = self._tokenizer.encode(text, add_special_tokens=False).ids
        # A text that the tokenizer cannot write is the unknown token.
        return encoded[0] if len(encoded) == 1 and encoded[0] not in self._special else None

    def token(self, index: int) -> str:
        return self._tokenizer.id_to_token(index) or ""

"""A tokenizer without files, for models of bytes."""

import dataclasses

from specsamp.checkpoints.tokenizer import EOS
from specsamp.decoding.text import Continuation


@dataclasses.dataclass(frozen=True)
class ByteTokenizer:
    """Encodes UTF-8 bytes, and one token for the end of a text, for models without a vocabulary."""

    vocab_size = 257
    eos_id = 256

    def encode(self, text):
        return list(text.encode("utf-8"))

    def encode_chat(self, messages):
        raise ValueError("bytes have no chat template: give texts")

    def decode(self, tokens):
        return Continuation(self).decode(tokens)

    def token_bytes(self, token, before=None):
        return bytes([token]) if token < 256 else None

    def token_id(self, text):
        encoded = [self.eos_id] if text == EOS else self.encode(text)
        return encoded[0] if len(encoded) == 1 else None

    def token(self, index):
        return EOS if index == self.eos_id else repr(bytes([index]))

"""Small tokenizers in the styles of public ones, trained on prompts of the package."""

import functools
import json

import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors, trainers

from specsamp.checkpoints.hub import ASSETS
from specsamp.checkpoints.tokenizer import JsonTokenizer

PROMPTS = ("prompts.json", "acceptance_prompts.json")
TEXTS = [(ASSETS / "python" / name).read_text() for name in PROMPTS]
TEXTS += ["naïve café, 42 Übungen, 数学 – 1234567 \t\n  x"] * 4
STYLES = ("gpt2", "llama2", "llama3", "qwen", "gemma")
# Bytes without a first space; added tokens of spaces; SentencePiece's Unigram without and with
# bytes; words without a decoder.
OTHER_STYLES = ("stripped", "gemma3", "t5", "chatglm", "words")
SPACE = "▁"


@functools.cache
def tokenizer(style, size=900):
    if style in OTHER_STYLES:
        return other_tokenizer(style)
    text = tokenizers.Tokenizer(
        models.BPE(byte_fallback=style in ("llama2", "gemma"), ignore_merges=style == "llama3")
    )
    begin, end = {
        "gpt2": (None, "<|endoftext|>"),
        "qwen": (None, "<|im_end|>"),
        "llama3": ("<|begin_of_text|>", "<|eot_id|>"),
    }.get(style, ("<s>", "</s>"))
    special = [token for token in (begin, end) if token]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    if style in ("llama2", "gemma"):
        steps = [normalizers.Replace(" ", SPACE)]
        text.normalizer = normalizers.Sequence(
            [normalizers.Prepend(SPACE), *steps] if style == "llama2" else steps
        )
        steps = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
        text.decoder = decoders.Sequence(
            [*steps, decoders.Strip(" ", 1, 0)] if style == "llama2" else steps
        )
        special, alphabet = ["<unk>", *special, *byte_pieces()], []
    else:
        digits = {"llama3": r"\p{N}{1,3}", "qwen": r"\p{N}", "gpt2": r" ?\p{N}+"}[style]
        pattern = tokenizers.Regex(rf" ?\p{{L}}+|{digits}|\s+(?!\S)|\s+|[^\s\p{{L}}\p{{N}}]+")
        split = pre_tokenizers.Split(pattern, "isolated")
        text.pre_tokenizer = pre_tokenizers.Sequence(
            [split, pre_tokenizers.ByteLevel(False, use_regex=False)]
        )
        text.decoder = decoders.ByteLevel()
    size += STYLES.index(style) * 100
    text.train_from_iterator(
        TEXTS,
        trainers.BpeTrainer(
            vocab_size=size, special_tokens=special, initial_alphabet=alphabet, show_progress=False
        ),
    )
    text = with_ordinary_bytes(text)
    if begin:
        text.post_processor = processors.TemplateProcessing(
            single=f"{begin} $A", special_tokens=[(begin, text.token_to_id(begin))]
        )
    return JsonTokenizer.from_tokenizer(text, end)


def other_tokenizer(style):
    if style == "stripped":  # of bytes, without the first space
        text = tokenizers.Tokenizer.from_str(tokenizer("gpt2").to_json())
        text.decoder = decoders.Sequence([decoders.ByteLevel(), decoders.Strip(" ", 1, 0)])
        return JsonTokenizer.from_tokenizer(text, "<|endoftext|>")
    # Its added tokens are not special: a decoder turns them into spaces and lines.
    if style == "gemma3":
        text = tokenizers.Tokenizer.from_str(tokenizer("gemma").to_json())
        text.add_tokens(
            [
                tokenizers.AddedToken(piece, normalized=False)
                for piece in ("▁▁", "▁▁▁", "\n\n", "<tool>")
            ]
        )
        return JsonTokenizer.from_tokenizer(text, "</s>")
    if style in ("t5", "chatglm"):  # not trained, since training varies
        pieces = [piece for _, piece in sorted(tokenizer("gemma").pieces.items())]
        pieces = [piece for piece in pieces if style == "chatglm" or piece not in byte_pieces()]
        scores = [(piece, -5 - at / 100) for at, piece in enumerate([*pieces, "▁Human", "▁is"])]
        text = tokenizers.Tokenizer(
            models.Unigram(scores, pieces.index("<unk>"), byte_fallback=style == "chatglm")
        )
        text.add_special_tokens(["</s>", "<unk>"])
        text.pre_tokenizer = pre_tokenizers.Metaspace()
        text.decoder = decoders.Metaspace()
        if style == "chatglm":
            text.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace()])
        return JsonTokenizer.from_tokenizer(text, "</s>")
    text = tokenizers.Tokenizer(models.WordLevel(unk_token="<unk>"))
    text.pre_tokenizer = pre_tokenizers.Whitespace()
    options = dict(special_tokens=["</s>", "<unk>"], vocab_size=600, show_progress=False)
    text.train_from_iterator(TEXTS, trainers.WordLevelTrainer(**options))
    return JsonTokenizer.from_tokenizer(text, "</s>")


def byte_pieces():
    return [f"<0x{byte:02X}>" for byte in range(256)]


def with_ordinary_bytes(text):
    """Returns the tokenizer with bytes that are not added tokens."""
    content = json.loads(text.to_str())
    content["added_tokens"] = [
        token for token in content["added_tokens"] if not token["content"].startswith("<0x")
    ]
    return tokenizers.Tokenizer.from_str(json.dumps(content))

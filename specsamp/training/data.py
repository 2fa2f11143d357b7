"""Reads a folder of files as token windows: texts, conversations (lines of ``.jsonl``), or
sequences of integers (``.npy``).

Everything here is a function of the files, the seed and the step, so a resumed run needs nothing
but its step.
"""

import dataclasses
import fnmatch
import hashlib
import io
import json
import pathlib
import sysconfig
from collections.abc import Iterable, Mapping, Sequence

import numpy as np
import tokenizers

from specsamp import validate
from specsamp.checkpoints.tokenizer import EOS
from specsamp.storage import read_json

WRITTEN_BY = "written_by.json"  # in a folder of conversations that a target wrote
# Of a conversation, for its template; other keys of a line are not read.
LISTS = ("messages", "tools", "documents")


class ChatText(str):
    """A line such as ``{"messages": [{"role": "user", "content": "Hi"}]}``, which a chat template
    writes out.
    """

    @property
    def conversation(self) -> dict[str, list[dict]]:
        """Returns the messages, and the tools and documents of the line if it has any."""
        return {
            key: value
            for key, value in json.loads(self).items()
            if key in LISTS and value is not None
        }


# Text, or int32 tokens that are not text, for example the grey levels of an image.
TrainingText = str | np.ndarray


@dataclasses.dataclass(frozen=True, kw_only=True)
class Corpus:
    """Texts by relative path; the path alone decides whether a file, or a conversation, is trained
    on or held out.
    """

    train: dict[str, TrainingText]
    held_out: dict[str, TrainingText]
    skipped: tuple[str, ...]  # relative paths that are not UTF-8
    digest: str  # SHA-256 of all paths and contents, both sides

    def describe(self) -> dict:
        """Returns the digest, and the number of files and bytes of both sides."""

        def size(texts):
            return sum(
                x.nbytes if isinstance(x, np.ndarray) else len(x.encode()) for x in texts.values()
            )

        return {
            "sha256": self.digest,
            "train_files": len(self.train),
            "train_bytes": size(self.train),
            "held_out_files": len(self.held_out),
            "held_out_bytes": size(self.held_out),
            "skipped_files": len(self.skipped),
        }


def standard_library() -> pathlib.Path:
    """Returns the folder of Python's standard library: source on every machine with Python, under
    the PSF licence.
    """
    return pathlib.Path(sysconfig.get_paths()["stdlib"])


def read_corpus(
    folder: str | pathlib.Path,
    *,
    pattern: str = "*.py",
    exclude: Sequence[str] = (),
    held_out: float = 0.03,
) -> Corpus:
    """Reads every UTF-8 or ``.npy`` file of ``folder`` that matches ``pattern``; files without text
    are left out.

    A ``.npy`` file holds integers: one sequence ``[T]``, or one in each row ``[N, T]``, shorter
    ones padded with -1; or the conversations of `specsamp.training.conversations`, one after
    another.

    Args:
      pattern: of file names, as in `fnmatch`.
      exclude: patterns, as in `fnmatch`, of folders and files that are left out.
      held_out: share of the files kept from training, in [0, 1], by a hash of the relative path.

    Raises:
      FileNotFoundError: the folder does not exist.
      ValueError: a share outside [0, 1], a line that is no conversation, an array of other values
        or of another dtype than the array before it, or no file to train on.
    """
    validate.number("data.held_out", held_out, 0, 1)
    if not pattern or pathlib.PurePath(pattern).is_absolute():
        raise ValueError(f"data.pattern must be of file names, such as '*.py'; got {pattern!r}")
    folder = pathlib.Path(folder).expanduser()
    if not folder.is_dir():
        raise FileNotFoundError(f"no folder of texts at {folder}")
    train = {}
    kept = {}
    skipped = []
    dtypes = {}
    digest = hashlib.sha256()
    for path in sorted(folder.rglob(pattern)):
        relative = path.relative_to(folder)
        if not path.is_file() or any(
            fnmatch.fnmatch(part, glob) for part in relative.parts for glob in exclude
        ):
            continue
        name = relative.as_posix()
        content = path.read_bytes()
        if path.suffix == ".npy":
            rows, dtypes[name] = _integers(name, content)
            if path.with_name(WRITTEN_BY).is_file():
                places = read_json(path.with_suffix(".json"))["conversations"]
                rows = np.split(rows[0], [start for start, _ in places[1:]])
            first = next(iter(dtypes))
            if dtypes[name] != dtypes[first]:
                raise ValueError(
                    f"{name} holds {dtypes[name]}, {first} {dtypes[first]}: write all arrays with "
                    "one dtype"
                )
            parts = [(f"{name}:{number}", row) for number, row in enumerate(rows, 1)]
        else:
            try:
                text = content.decode("utf-8")
            except UnicodeDecodeError:
                skipped.append(name)
                continue
            if not text.strip():
                continue
            parts = _parts(name, text)
        digest.update(name.encode() + b"\0" + hashlib.sha256(content).digest())
        for part_name, part in parts:
            side = kept if _hash_fraction(part_name) < held_out else train
            side[part_name] = part
    if not train:
        raise ValueError(
            f"nothing to train on: {folder} has no UTF-8 file that matches {pattern!r} outside "
            f"{list(exclude)} ({len(skipped)} undecodable, {len(kept)} held out)"
        )
    return Corpus(train=train, held_out=kept, skipped=tuple(skipped), digest=digest.hexdigest())


def _parts(name: str, text: str) -> Iterable[tuple[str, TrainingText]]:
    """Yields name and text of a file, or of each of its conversations, which are counted from 1."""
    if not name.endswith(".jsonl"):
        yield name, text
        return
    for number, line in enumerate(text.split("\n"), 1):
        if not line.strip():
            continue
        try:
            content = json.loads(line)
            is_conversation = isinstance(content["messages"], list)
        except (ValueError, KeyError, TypeError, RecursionError):
            is_conversation = False
        if not is_conversation:
            raise ValueError(
                f"{name}, line {number}: {line[:60]!r} is no conversation: write "
                '{"messages": [...]}'
            )
        for key in LISTS:
            value = content.get(key) or []
            if not isinstance(value, list) or not all(isinstance(each, dict) for each in value):
                raise ValueError(
                    f"{name}, line {number}: {key} must be a list of objects; got {value!r:.100}"
                )
        cures = {"functions": "write them as tools", "chat_template_kwargs": "leave it out"}
        for key, cure in cures.items():
            if content.get(key):
                raise ValueError(
                    f"{name}, line {number}: {key} would change the text, but is not read: {cure}"
                )
        yield f"{name}:{number}", ChatText(line)


def _integers(name: str, content: bytes) -> tuple[list[np.ndarray], np.dtype]:
    """Returns the sequences of a ``.npy`` file and its dtype; raises ValueError, with its name, for
    anything else.
    """
    try:
        array = np.load(io.BytesIO(content), allow_pickle=False)
    except (ValueError, OSError, EOFError) as error:
        raise ValueError(
            f"{name} holds no array of numbers ({error}): write integers [T] or [N, T] by np.save"
        ) from error
    if not np.issubdtype(array.dtype, np.integer) or array.ndim not in (1, 2) or not array.size:
        raise ValueError(
            f"{name} must hold integers [T] or [N, T]; got {array.dtype} {list(array.shape)}"
        )
    rows_NT = np.atleast_2d(array).astype(np.int64)
    lengths_N = (rows_NT >= 0).sum(1)
    is_padding_NT = np.arange(rows_NT.shape[1])[None] >= lengths_N[:, None]
    is_sound_NT = np.where(is_padding_NT, rows_NT == -1, (rows_NT >= 0) & (rows_NT < 2**31))
    if not is_sound_NT.all():
        raise ValueError(
            f"{name}, row {is_sound_NT.all(1).argmin()}: tokens must be >= 0 and below 2**31, with "
            "-1 behind the last of a shorter sequence"
        )
    rows = [row[:length].astype(np.int32) for row, length in zip(rows_NT, lengths_N) if length]
    return rows, array.dtype


def _hash_fraction(relative_path: str) -> float:
    """Maps a path to a number in [0, 1), evenly spread over paths."""
    return int.from_bytes(hashlib.sha256(relative_path.encode()).digest()[:8]) / 2**64


def train_tokenizer(texts: Iterable[str], vocab_size: int, eos: str = EOS) -> tokenizers.Tokenizer:
    """Trains a byte-level BPE tokenizer of at most ``vocab_size`` tokens; the last id
    ends texts.
    """
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=vocab_size - 1,
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.add_special_tokens([eos])
    return tokenizer


def integer_tokenizer(vocab_size: int, eos: str = EOS) -> tokenizers.Tokenizer:
    """Returns the tokenizer of sequences of integers: a text such as "5 16 0" is these ids; the
    last id ends sequences.
    """
    words = {str(i): i for i in range(vocab_size - 1)}
    tokenizer = tokenizers.Tokenizer(
        tokenizers.models.WordLevel(words | {eos: vocab_size - 1}, unk_token=eos)
    )
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens([eos])
    return tokenizer


def token_stream(texts: Mapping[str, TrainingText], tokenizer) -> np.ndarray:
    """Concatenates all texts, with an end-of-text token before each and at the end.

    Args:
      texts: by file and line, as in `Corpus`.
      tokenizer: anything with ``encode(text) -> ids`` and ``eos_id``; for conversations, with a
        chat template. Sequences of integers are tokens already.

    Returns:
      ``[tokens]`` int32.

    Raises:
      ValueError: an integer is outside the vocabulary, or the chat template refuses a conversation.
    """

    def encode(name: str, text: TrainingText) -> Sequence[int]:
        if isinstance(text, np.ndarray):
            validate.integer("a token of the arrays", int(text.max()), 0, tokenizer.vocab_size)
            return text
        if isinstance(text, ChatText):
            with validate.located(name):
                return tokenizer.encode_chat(**text.conversation, complete=True)
        return tokenizer.encode(text)

    pieces = [np.array([tokenizer.eos_id, *encode(*text)], np.int32) for text in texts.items()]
    return np.concatenate([*pieces, np.array([tokenizer.eos_id], np.int32)])


@dataclasses.dataclass(frozen=True)
class Windows:
    """Cuts windows of ``length + 1`` tokens from a stream, in an order that depends on the seed and
    the epoch.

    A window gives ``length`` inputs and as many labels. Inputs do not overlap within an epoch;
    every epoch cuts the stream at another offset.

    Raises:
      ValueError: a length below 1, or a stream too short for one window.
    """

    stream: np.ndarray  # [tokens] int32
    length: int
    seed: int = 0

    def __post_init__(self):
        validate.integer("the length of windows", self.length, 1)
        if self.per_epoch < 1:
            raise ValueError(
                f"{len(self.stream)} tokens are too few for windows of {self.length} + 1: shorten "
                "them"
            )

    @property
    def per_epoch(self) -> int:
        """Returns the number of windows in an epoch."""
        return (len(self.stream) - 1) // self.length - 1

    def batch(self, step: int, size: int) -> np.ndarray:
        """Returns windows ``step * size`` onwards, over as many epochs as it takes, ``[size, length
        + 1]`` int32.
        """
        epochs, places = np.divmod(np.arange(step * size, (step + 1) * size), self.per_epoch)
        rows = np.empty((size, self.length + 1), np.int32)
        for epoch in np.unique(epochs):
            order = np.random.default_rng([self.seed, int(epoch)])
            offset = int(order.integers(self.length))
            starts = offset + self.length * order.permutation(self.per_epoch)
            inside = epochs == epoch
            rows[inside] = self._at(starts[places[inside]])
        return rows

    def in_order(self) -> np.ndarray:
        """Returns all windows from the first token on, ``[windows, length + 1]``, for
        evaluation.
        """
        return self._at(self.length * np.arange((len(self.stream) - 1) // self.length))

    def _at(self, starts_N: np.ndarray) -> np.ndarray:
        """Returns the windows that begin at these tokens, ``[N, length + 1]``."""
        return self.stream[starts_N[:, None] + np.arange(self.length + 1)[None]]


def held_out_windows(corpus: Corpus, tokenizer, length: int, most: int) -> np.ndarray:
    """Returns at most ``most`` windows of the held-out files, spread evenly over them, ``[windows,
    length + 1]``.

    Raises:
      ValueError: no file is held out, the files are too short for a window, or ``most`` is below 1.
    """
    validate.integer("data.held_out_windows", most, 1)
    if not corpus.held_out:
        raise ValueError("no file is held out for evaluation: raise held_out, or give more files")
    stream = token_stream(corpus.held_out, tokenizer)
    if len(stream) <= 2 * length:
        raise ValueError(
            f"the held-out files have {len(stream)} tokens, too few for two windows of data.length "
            f"{length}: raise data.held_out, or shorten data.length"
        )
    windows = Windows(stream, length).in_order()
    return windows[np.unique(np.linspace(0, len(windows) - 1, most).astype(int))]


@dataclasses.dataclass(frozen=True)
class Mixture:
    """Mixes batches: a share comes from ``rows``, in an order drawn per epoch, the remainder
    from ``windows``.
    """

    windows: Windows
    rows: np.ndarray  # [rows, length + 1] int32
    share: float  # in [0, 1]
    seed: int = 0

    def batch(self, step: int, size: int) -> np.ndarray:
        """Returns ``[size, length + 1]`` int32: first rows of windows, then ``round(share * size)``
        of ``rows``.
        """
        drawn = round(self.share * size)
        epochs, places = np.divmod(np.arange(step * drawn, (step + 1) * drawn), len(self.rows))
        chosen = np.empty_like(places)
        for epoch in np.unique(epochs):
            order = np.random.default_rng([self.seed, 1, int(epoch)]).permutation(len(self.rows))
            inside = epochs == epoch
            chosen[inside] = order[places[inside]]
        return np.concatenate([self.windows.batch(step, size - drawn), self.rows[chosen]])

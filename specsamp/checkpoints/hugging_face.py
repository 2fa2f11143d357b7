"""A checkpoint in the format of Hugging Face: opened and checked whole, then read in slices.

    checkpoint = open_checkpoint("meta-llama/Llama-3.2-1B")     # or a folder, or gs://bucket/folder
    model = TransformerLM(checkpoint.config)
    params = read_params(checkpoint, model)

Opening reads config, tokenizer and headers; `read_params` reads tensors, each process only what its devices
hold, and at most one tensor at a time lies in host memory beside what is already in its place.
"""

from __future__ import annotations

import dataclasses
import fnmatch
import functools
import os
import re
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from etils import epath

from specsamp import storage
from specsamp.checkpoints.architectures import Family, config_of
from specsamp.checkpoints.params import MOST_SHOWN, named, nested
from specsamp.checkpoints.safetensors_io import (
    DTYPES,
    INDEX,
    PICKLES,
    SINGLE,
    Tensor,
    are_equal,
    find_tensors,
    read_index,
    refuse_pickles,
)
from specsamp.checkpoints.tensor_names import BUFFERS, Source, sizes, source_of
from specsamp.checkpoints.tokenizer import JsonTokenizer, SentencePieceTokenizer
from specsamp.mesh.sharded import ShardedModel, placed_params
from specsamp.models.config import TransformerConfig
from specsamp.models.transformer import TransformerLM

SMALL_FILES = ("config.json", "generation_config.json", "tokenizer.json", "tokenizer.model", INDEX)
Progress = Callable[[str, int, int], None]  # parameter, bytes so far, bytes in all


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class Checkpoint:
    """What is known of a model before its tensors are read."""

    name: str  # as it was asked for
    folder: epath.Path  # of the small files
    from_hub: bool  # then the tensors are downloaded when they are asked for
    family: Family
    described: TransformerConfig  # what config.json says
    tokenizer: JsonTokenizer | SentencePieceTokenizer | None
    stop_ids: tuple[int, ...]  # tokens that end a text

    @functools.cached_property
    def config(self) -> TransformerConfig:
        """What config.json says, but for one thing: an output embedding of its own counts where the files have one.

        Files may repeat the embedding of a tied model as its output embedding. Where the two differ, config.json is
        wrong (transformers says so, and uses both): the model is not tied.

        Raises:
          FileNotFoundError, ValueError: of a tied model, see `find_tensors`.
        """
        if self.is_converted or not self.described.tied:
            return self.described
        names = (source_of(name, self.family.names).tensor for name in ("embedding", "output_embedding"))
        embedding, output = map(self._found.get, names)
        if embedding is None or output is None or are_equal(embedding, output):
            return self.described
        return dataclasses.replace(self.described, tied=False)

    @property
    def notes(self) -> list[str]:
        """Sentences about what is read otherwise than config.json says."""
        if self.config == self.described:
            return []
        return [
            f"{self.name} says tie_word_embeddings = true, but has an output embedding that differs from its embedding: "
            "both are used"
        ]

    @functools.cached_property
    def tensors(self) -> dict[str, Tensor]:
        """All tensors that the model needs, in the shapes that its config says.

        Raises:
          FileNotFoundError, ValueError: see `find_tensors`; or unread, missing or misshapen tensors, with names
            and both shapes; or an unsupported dtype.
        """
        _check_tensors(self._found, self)
        return self._found

    @functools.cached_property
    def _found(self) -> dict[str, Tensor]:
        """All tensors of the files, downloaded if they are not here, by the names that the family has for them."""
        folder = self.folder
        if self.from_hub:
            index = folder / INDEX
            files = set(read_index(index).values()) if index.exists() else {SINGLE}
            folder = _download(self.name, sorted(files))
            if not index.exists() and not (folder / SINGLE).exists():
                _refuse_what_the_hub_has(self.name)
        found = find_tensors(folder)
        prefix = self.family.prefix
        if not prefix or any(name.startswith(prefix) for name in found):
            return found
        return {name if name.startswith("lm_head.") else prefix + name: tensor for name, tensor in found.items()}

    @property
    def is_converted(self) -> bool:
        """Whether its tensors are in an Orbax folder, see converted.py."""
        return (self.folder / "run.json").exists()

    def sources(self) -> dict[str, Source]:
        """Of every parameter."""
        shapes = jax.eval_shape(TransformerLM(self.config).init, jax.random.key(0))
        return {name: source_of(name, self.family.names) for name in named(shapes)}


def open_checkpoint(name: str | os.PathLike, *, dtype: str = "bfloat16") -> Checkpoint:
    """Config, tokenizer and stop tokens of a checkpoint; its tensors are looked at when they are asked for.

    Args:
      name: a folder, on a disk or in a bucket, or the id of a model of the hub, such as "Qwen/Qwen2.5-0.5B".
      dtype: of decode-time weights, activations and caches.

    Raises:
      FileNotFoundError: no such folder or model, or no config.json in it.
      ValueError: an architecture, value or file that cannot be read; a tokenizer larger than the embedding, but
        for added tokens, which are left out of it (`specsamp.checkpoints.public_pair.differences` says so).
    """
    folder, from_hub = _find_folder(os.fspath(name))
    content = storage.read_json(folder / "config.json")
    family, config = config_of(str(folder / "config.json"), content, dtype)
    beside = folder / "generation_config.json"
    generation = storage.read_json(beside) if beside.exists() else {}
    stops = generation.get("eos_token_id", content.get("eos_token_id"))
    stop_ids = tuple(stops) if isinstance(stops, list) else () if stops is None else (stops,)
    tokenizer = _tokenizer(folder, stop_ids, config.vocab_size)
    if tokenizer is not None and tokenizer.vocab_size > config.vocab_size:
        raise ValueError(
            f"the tokenizer in {folder} has {tokenizer.vocab_size} tokens, but the embedding of config.json only "
            f"{config.vocab_size} rows: they do not belong together"
        )
    beyond = [stop for stop in stop_ids if not isinstance(stop, int) or not 0 <= stop < config.vocab_size]
    if beyond:
        raise ValueError(f"{folder} ends texts with token {beyond[0]!r}, but has {config.vocab_size} tokens")
    return Checkpoint(
        name=os.fspath(name),
        folder=folder,
        from_hub=from_hub,
        family=family,
        described=config,
        tokenizer=tokenizer,
        stop_ids=stop_ids,
    )


def read_params(
    checkpoint: Checkpoint, model: TransformerLM | ShardedModel, progress: Progress = lambda *_: None
) -> Any:
    """The parameters of ``model`` from a checkpoint, in its compute dtype and where they belong.

    Args:
      model: of the checkpoint's config. It may have a larger vocabulary (rows beyond the checkpoint's are zero;
        set ``num_real_tokens``) and another dtype.
      progress: called after every parameter.

    Raises:
      ValueError: the model is another than the checkpoint's, with the fields that differ.
    """
    check_same_model(checkpoint, model.config)
    tensors, sources, config = checkpoint.tensors, checkpoint.sources(), model.config
    places, done, params = named(placed_params(model)), 0, {}

    def size(leaf):
        return leaf.size * leaf.dtype.itemsize

    total = sum(map(size, places.values()))
    for name, leaf in places.items():
        source = sources[name]
        pieces: dict[tuple, np.ndarray] = {}  # devices that hold copies share what was read

        def piece(index: tuple[slice, ...]) -> np.ndarray:
            key = tuple((part.start, part.stop) for part in index)
            if key not in pieces:
                pieces[key] = _read_piece(source, tensors[source.tensor], checkpoint.config, config, index)
            return pieces[key]

        params[name] = jax.make_array_from_callback(leaf.shape, leaf.sharding, piece).block_until_ready()
        done += size(leaf)
        progress(name, done, total)
    return nested(params)


def _read_piece(
    source: Source, tensor: Tensor, theirs: TransformerConfig, ours: TransformerConfig, index: tuple[slice, ...]
) -> np.ndarray:
    """A slice of a parameter in ``ours.compute_dtype``, contiguous and owning its memory."""
    there = sizes(theirs)
    full = [piece.indices(sizes(ours)[letter])[:2] for letter, piece in zip(source.axes, index)]
    inside = [(min(first, there[x]), min(last, there[x])) for x, (first, last) in zip(source.axes, full)]
    values = source.read(tensor.read, there, [slice(*span) for span in inside])
    if full == inside:
        return np.array(values, ours.compute_dtype, order="C")
    padded = np.zeros([last - first for first, last in full], ours.compute_dtype)
    padded[tuple(slice(0, n) for n in values.shape)] = values
    return padded


def check_same_model(checkpoint: Checkpoint, config: TransformerConfig) -> None:
    """Raises ValueError unless ``config`` is the checkpoint's, but for dtype and padding of the vocabulary."""
    free = {"dtype", "num_real_tokens", "vocab_size"}
    values = {
        field.name: (getattr(checkpoint.config, field.name), getattr(config, field.name))
        for field in dataclasses.fields(config)
        if field.name not in free
    }
    different = [
        f"{name} is {there!r} there, {here!r} in the model" for name, (there, here) in values.items() if there != here
    ]
    if config.vocab_size < checkpoint.config.vocab_size:
        different.append(f"vocab_size is {checkpoint.config.vocab_size} there, {config.vocab_size} in the model")
    if different:
        raise ValueError(f"{checkpoint.name} is another model: {'; '.join(different)}")


def _find_folder(name: str) -> tuple[epath.Path, bool]:
    """Where a checkpoint's small files are, downloaded from the hub if they are not here, and whether they were."""
    folder = storage.place(name)
    if (folder / "config.json").exists():
        return folder, False
    if folder.exists() or name.startswith(storage.BUCKETS):
        raise FileNotFoundError(f"{folder} has no config.json: it is no checkpoint in the format of Hugging Face")
    if not re.fullmatch(r"[\w.-]+/[\w.-]+", name):
        raise FileNotFoundError(
            f"no folder {name!r}; give one, or the id of a model of the hub such as Qwen/Qwen2.5-0.5B"
        )
    return _download(name, SMALL_FILES), True


def _download(name: str, files: Sequence[str]) -> epath.Path:
    """From the hub, into the cache of its library; weights only after everything else has been checked."""
    try:
        import huggingface_hub
    except ImportError as error:
        raise ValueError(
            f"there is no folder {name!r}, and to look on the hub for it takes a library: pip install huggingface_hub"
        ) from error
    try:
        # What lies deeper than config.json is the same model in another format.
        found = huggingface_hub.snapshot_download(name, allow_patterns=list(files), ignore_patterns=["*/*"])
    except Exception as error:  # of the network, of the hub, of access rights
        raise FileNotFoundError(
            f"no folder {name!r}, and the hub did not give it ({type(error).__name__}: {error}). A gated model needs "
            "its licence accepted on its page and a token: hf auth login"
        ) from error
    return epath.Path(found)


def _refuse_what_the_hub_has(name: str) -> None:
    """Raises ValueError if a model without safetensors has pickles: they are not downloaded to be refused."""
    import huggingface_hub

    try:
        files = huggingface_hub.list_repo_files(name)
    except Exception:  # without a network, what is here of the model is all that can be verified
        return
    pickles = sorted(file for file in files if any(fnmatch.fnmatch(file, pattern) for pattern in PICKLES))
    if pickles:
        raise refuse_pickles(name, pickles)


def _tokenizer(
    folder: epath.Path, stop_ids: tuple[int, ...], rows: int
) -> JsonTokenizer | SentencePieceTokenizer | None:
    if (folder / "tokenizer.json").exists():
        return JsonTokenizer(folder / "tokenizer.json", eos=stop_ids[0] if stop_ids else None, rows=rows)
    if (folder / "tokenizer.model").exists():
        return SentencePieceTokenizer(folder / "tokenizer.model")
    return None


def _check_tensors(found: dict[str, Tensor], checkpoint: Checkpoint) -> None:
    config, sources = checkpoint.config, checkpoint.sources()
    wanted = {source.tensor: source.shape(sizes(config)) for source in sources.values()}
    unread = {name for name in found.keys() - wanted.keys() if not BUFFERS.search(name)}
    if config.tied:  # some files repeat the embedding
        unread -= {source_of("output_embedding", checkpoint.family.names).tensor}

    def of(name):
        return f"{name} {found[name].shape} in {found[name].file.name}"

    problems = [
        ("missing", [f"{name} {shape}" for name, shape in wanted.items() if name not in found]),
        ("not part of the model", [of(name) for name in sorted(unread)]),
        (
            "of another shape than config.json says",
            [
                f"{of(name)}, {shape} wanted"
                for name, shape in wanted.items()
                if name in found and found[name].shape != shape
            ],
        ),
    ]
    problems.append(
        (
            f"of a dtype that is not supported (quantised?; known are {', '.join(DTYPES)})",
            [f"{of(name)}: {found[name].kind}" for name in wanted if name in found and found[name].kind not in DTYPES],
        )
    )
    if any(names for _, names in problems):

        def shown(names):
            return "; ".join(names[:MOST_SHOWN]) + (" ..." if len(names) > MOST_SHOWN else "")

        described = [f"{len(names)} tensors are {what}: {shown(names)}" for what, names in problems if names]
        raise ValueError(f"{checkpoint.name} does not hold the model of its config.json. {'. '.join(described)}")

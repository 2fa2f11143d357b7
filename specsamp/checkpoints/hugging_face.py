"""A checkpoint in the format of Hugging Face: opened and checked whole, then read in slices.

    checkpoint = open_checkpoint("meta-llama/Llama-3.2-1B")     # or a folder, or gs://bucket/folder
    model = TransformerLM(checkpoint.config)
    params = read_params(checkpoint, model)

Opening reads config, tokenizer and headers; `read_params` reads tensors, each process only what its devices hold, and
at most one tensor at a time lies in host memory beside what is already in its place.

A converted checkpoint (`write_converted`, launch/export.py) has its parameters in Orbax's format, which reads faster
on a mesh:

    config.json, tokenizer.json, ...   as they were
    run.json                           the shape, so that a draft can be distilled from it like from a run
    checkpoints/0/params               what was in the safetensors
"""

from __future__ import annotations

import dataclasses
import functools
import os
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np
from etils import epath
from flax.traverse_util import flatten_dict, unflatten_dict

from specsamp import storage
from specsamp.checkpoints import orbax
from specsamp.checkpoints.architectures import Family, parse_config
from specsamp.checkpoints.chat import read_chat_template
from specsamp.checkpoints.fields import differing_fields
from specsamp.checkpoints.hub import SMALL_FILES, download_weights, find_folder, read_headers
from specsamp.checkpoints.int8_tensors import read_int8
from specsamp.checkpoints.safetensors_io import INDEX, Tensor, are_equal, check_tensors, find_tensors
from specsamp.checkpoints.tensor_names import BUFFERS, TensorSource, find_source, sizes
from specsamp.checkpoints.tokenizer import JsonTokenizer
from specsamp.mesh.sharded import ShardedModel, placed_params
from specsamp.models.config import DECODING, TransformerConfig
from specsamp.models.int8 import Int8Weight, is_int8, summed_axes
from specsamp.models.transformer import TransformerLM

OnProgress = Callable[[str, int, int], None]  # parameter, bytes so far, bytes in all


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class Checkpoint:
    """An opened checkpoint: everything is known except the values of its tensors."""

    name: str  # as the caller gave it
    folder: epath.Path  # of the small files
    from_hub: bool  # then the tensors are downloaded when they are first read
    family: Family
    config: TransformerConfig
    tokenizer: JsonTokenizer | None
    stop_ids: tuple[int, ...]  # tokens that end a text

    def require_tokenizer(self) -> JsonTokenizer:
        """Returns the tokenizer; raises ValueError if there is none."""
        if self.tokenizer is None:
            raise ValueError(
                f"{self.name} has no tokenizer.json: transformers writes one, "
                f"AutoTokenizer.from_pretrained({self.name!r}).save_pretrained(FOLDER)"
            )
        return self.tokenizer

    @functools.cached_property
    def tensors(self) -> dict[str, Tensor]:
        """Returns all tensors of the model, after checking their names, shapes and dtypes.

        Raises:
          FileNotFoundError, ValueError: see `find_tensors`; or unread, missing or misshapen tensors, with names
            and both shapes; or an unsupported dtype; or a tied model whose output embedding is another one.
        """
        self._check(self._found)
        embedding, output = map(self._found.get, self._ends)
        if self.config.tied and output is not None and not are_equal(embedding, output):
            raise ValueError(
                f"{self.name} says tie_word_embeddings = true, but its output embedding differs from its embedding: set "
                "it to false in config.json to use both"
            )
        return self._found

    def check_headers(self) -> None:
        """Makes the checks of `tensors` on headers alone: no tensor is downloaded.

        Raises:
          FileNotFoundError, ValueError: see `tensors`.
        """
        if not self.is_converted:
            self._check(self._named(read_headers(self.name)) if self.from_hub else self._found)

    def _check(self, found: Mapping[str, Tensor]) -> None:
        letters, of_head = sizes(self.config), self.family.head_prefix
        members = [member for source in self.sources().values() for member in source.members(letters)]
        repeated = self._ends[1] if self.config.tied else None

        def is_harmless(name: str) -> bool:
            return name == repeated or bool(BUFFERS.search(name)) or (of_head is not None and name.startswith(of_head))

        check_tensors(self.name, found, {source.tensor: source.shape(letters) for source in members}, is_harmless)

    @property
    def _ends(self) -> tuple[str, ...]:
        """Returns the names of the embedding and of the output embedding, which files of a tied model may repeat."""
        return tuple(find_source(name, self.family.names).tensor for name in ("embedding", "output_embedding"))

    @functools.cached_property
    def _found(self) -> dict[str, Tensor]:
        """Returns all tensors of the files, by the family's names; a model of the hub is downloaded."""
        folder = download_weights(self.name) if self.from_hub else self.folder
        return self._named(find_tensors(folder))

    def _named(self, found: dict[str, Tensor]) -> dict[str, Tensor]:
        """Returns tensors by the family's names."""
        prefix = self.family.prefix
        if not prefix or any(name.startswith(prefix) for name in found):
            return found
        return {name if name.startswith("lm_head.") else prefix + name: tensor for name, tensor in found.items()}

    @property
    def is_converted(self) -> bool:
        """Returns whether its parameters are in Orbax's format."""
        return (self.folder / "run.json").exists()

    def sources(self) -> dict[str, TensorSource]:
        """Returns which tensor holds each parameter, by the parameter's name."""
        shapes = jax.eval_shape(TransformerLM(self.config).init, jax.random.key(0))
        return {name: find_source(name, self.family.names) for name in flatten_dict(shapes, sep="/")}


def open_checkpoint(
    name: str | os.PathLike,
    *,
    dtype: str = "bfloat16",
    weight_dtype: str | None = None,
    cache_dtype: str | None = None,
) -> Checkpoint:
    """Reads config, tokenizer and stop tokens of a checkpoint; its tensors are opened when they are first used.

    Args:
      name: a folder, on a disk or in a bucket, or the id of a model of the hub, such as "Qwen/Qwen2.5-0.5B".
      dtype: of decode-time weights, activations and caches.
      weight_dtype: "int8" quantises matrices while they are read. A checkpoint converted in int8 is always read in int8.
      cache_dtype: "int8", or None for ``dtype``.

    Raises:
      FileNotFoundError: no such folder or model, or no config.json in it.
      ValueError: an architecture, value or file that cannot be read; int8 of a checkpoint that was converted in float; a
        tokenizer larger than the embedding. (Added tokens beyond the embedding are left out; see
        `specsamp.checkpoints.public_pair.differences`.)
    """
    folder, from_hub = find_folder(name)
    content = storage.read_json(folder / "config.json")
    family, config = parse_config(str(folder / "config.json"), content, dtype)
    if (folder / "run.json").exists():
        converted = storage.read_json(folder / "run.json").get("weight_dtype")
        if weight_dtype not in (None, converted):
            raise ValueError(f"{name} was not converted in int8: convert it with --int8, or give the original")
        weight_dtype = converted
    config = dataclasses.replace(config, weight_dtype=weight_dtype, cache_dtype=cache_dtype)
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
        config=config,
        tokenizer=tokenizer,
        stop_ids=stop_ids,
    )


def check_readable(checkpoint: Checkpoint, model: TransformerLM | ShardedModel) -> None:
    """Raises the errors of `read_params`, before any tensor is read: of tensors, and of their division over a mesh."""
    if not checkpoint.is_converted:
        checkpoint.tensors
    if isinstance(model, ShardedModel):
        model.param_shardings(jax.eval_shape(model.model.init, jax.random.key(0)))


def read_params(
    checkpoint: Checkpoint, model: TransformerLM | ShardedModel, progress: OnProgress = lambda *_: None
) -> Any:
    """Reads the parameters of ``model`` from a checkpoint, in its compute dtype and where they belong.

    Args:
      model: of the checkpoint's config. It may have a larger vocabulary (rows beyond the checkpoint's are zero;
        set ``num_real_tokens``) and another dtype.
      progress: called after every parameter of a checkpoint that is not converted.

    Raises:
      ValueError: the model is another than the checkpoint's, with the fields that differ; or a converted checkpoint is
        damaged. FileNotFoundError, ValueError: see `Checkpoint.tensors`.
    """
    check_same_model(checkpoint, model.config)
    if checkpoint.is_converted:
        return orbax.restore_params(checkpoint.folder, placed_params(model))
    tensors, sources = checkpoint.tensors, checkpoint.sources()
    there, here = sizes(checkpoint.config), sizes(model.config)
    places = flatten_dict(placed_params(model), sep="/")

    def read(name: str, index: tuple[slice, ...]) -> np.ndarray:
        dtype = np.float32 if is_int8(places[name]) else places[name].dtype
        return read_piece(sources[name], tensors, there, here, dtype, index)

    return unflatten_dict(read_leaves(places, read, progress), sep="/")


def read_leaves(
    places: Mapping[str, jax.ShapeDtypeStruct | Int8Weight],
    read: Callable[[str, tuple[slice, ...]], np.ndarray],
    progress: OnProgress = lambda *_: None,
) -> dict[str, jax.Array | Int8Weight]:
    """Makes the array of each place, one at a time; reads the pieces that this process's devices hold.

    Args:
      places: shapes, dtypes and shardings.
      read: returns a slice of the array of that name; in float32 if it becomes an int8 weight.
    """
    done, arrays = 0, {}

    def size(place):
        return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(place))

    total = sum(map(size, places.values()))
    for name, place in places.items():
        of_this = functools.partial(read, name)
        arrays[name] = read_int8(place, summed_axes(name), of_this) if is_int8(place) else _read_array(place, of_this)
        done += size(place)
        progress(name, done, total)
    return arrays


def _read_array(place: jax.ShapeDtypeStruct, read: Callable[[tuple[slice, ...]], np.ndarray]) -> jax.Array:
    pieces: dict[tuple, np.ndarray] = {}  # devices that hold copies share what was read

    def piece(index: tuple[slice, ...]) -> np.ndarray:
        key = tuple((part.start, part.stop) for part in index)
        if key not in pieces:
            pieces[key] = read(index)
        return pieces[key]

    return jax.make_array_from_callback(place.shape, place.sharding, piece).block_until_ready()


def write_converted(checkpoint: Checkpoint, params: Any, folder: str | os.PathLike) -> None:
    """Writes a checkpoint in Orbax's format; every process must call it. ``run.json`` comes last.

    Args:
      params: as `read_params` gave them.

    Raises:
      ValueError: there are parameters in the folder, perhaps of a conversion that did not end.
    """
    place = storage.place(folder)
    if jax.process_index() == 0:
        for name in SMALL_FILES:
            if (checkpoint.folder / name).exists() and name != INDEX:
                storage.write(place / name, (checkpoint.folder / name).read_bytes())
    orbax.save_params(place, params)
    if jax.process_index() == 0:
        shape = {name: value for name, value in dataclasses.asdict(checkpoint.config).items() if name not in DECODING}
        told = {"model": shape, "converted_from": checkpoint.name}
        in_int8 = checkpoint.config.weight_dtype == "int8"
        storage.write_json(place / "run.json", told | {"weight_dtype": "int8"} if in_int8 else told)


def read_piece(
    source: TensorSource,
    tensors: Mapping[str, Tensor],
    there: Mapping[str, int],
    here: Mapping[str, int],
    dtype: np.dtype,
    index: tuple[slice, ...],
) -> np.ndarray:
    """Reads a slice of a parameter in ``dtype``, contiguous and owning its memory.

    Rows of the model's vocabulary beyond the checkpoint's, which are padding, are zero.

    Args:
      tensors: of the checkpoint, by name.
      there, here: the size of every letter in the checkpoint and in the model.
    """
    if source.is_stacked:
        members = source.members(here)[index[0]]
        shape = [len(range(*part.indices(here[letter]))) for part, letter in zip(index, source.axes)]
        stacked = np.empty(shape, dtype)
        for place, member in zip(stacked, members, strict=True):
            place[...] = read_piece(member, tensors, there, here, dtype, index[1:])
        return stacked
    full = [piece.indices(here[letter])[:2] for letter, piece in zip(source.axes, index)]
    inside = [(min(first, there[x]), min(last, there[x])) for x, (first, last) in zip(source.axes, full)]
    values = source.read(tensors[source.tensor].read, there, [slice(*span) for span in inside])
    if full == inside:
        return np.array(values, dtype, order="C")
    padded = np.zeros([last - first for first, last in full], dtype)
    padded[tuple(slice(0, n) for n in values.shape)] = values
    return padded


def check_same_model(checkpoint: Checkpoint, config: TransformerConfig) -> None:
    """Raises ValueError unless ``config`` is the checkpoint's; dtype and padding of the vocabulary may differ."""
    different = differing_fields(checkpoint.config, config, but=(*DECODING, "num_real_tokens", "vocab_size"))
    if config.vocab_size < checkpoint.config.vocab_size:
        different["vocab_size"] = checkpoint.config.vocab_size, config.vocab_size
    if different:
        told = "; ".join(
            f"{name} is {there!r} there, {here!r} in the model" for name, (there, here) in different.items()
        )
        raise ValueError(f"{checkpoint.name} is another model: {told}")


def _tokenizer(folder: epath.Path, stop_ids: tuple[int, ...], rows: int) -> JsonTokenizer | None:
    """Reads the tokenizer of a folder, or None; added tokens beyond the ``rows`` of the embedding are left out."""
    if not (folder / "tokenizer.json").exists():
        return None
    eos, chat = stop_ids[0] if stop_ids else None, read_chat_template(folder)
    return JsonTokenizer(folder / "tokenizer.json", eos=eos, rows=rows, chat=chat)

"""Opens checkpoints in the format of Hugging Face, checks them, and reads their tensors in slices.

    checkpoint = open_checkpoint("meta-llama/Llama-3.2-1B")     # or a folder, or gs://bucket/folder
    model = TransformerLM(checkpoint.config)
    params = read_params(checkpoint, model)

`open_checkpoint` reads config and tokenizer. `read_params` reads tensors, one parameter after
another: each process reads the slices of its devices.

A converted checkpoint (`write_converted`, launch/export.py) has its parameters in the format of
Orbax, which a mesh reads faster:

    config.json, tokenizer.json, ...   as they were
    run.json                           the shape, as a training run has it
    checkpoints/0/params               the parameters
"""

import dataclasses
import functools
import os
import re
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np
from etils import epath
from flax.traverse_util import flatten_dict, unflatten_dict

from specsamp import storage, validate
from specsamp.checkpoints import orbax
from specsamp.checkpoints.architectures import Family, parse_config
from specsamp.checkpoints.chat import read_chat_template, read_special_tokens
from specsamp.checkpoints.fields import differing_fields
from specsamp.checkpoints.hub import SMALL_FILES, download_weights, find_folder, read_headers
from specsamp.checkpoints.int8_tensors import read_int8
from specsamp.checkpoints.mxfp4 import join_packed
from specsamp.checkpoints.params import check_finite, init_shapes
from specsamp.checkpoints.safetensors_io import INDEX, Tensor, are_equal, find_tensors
from specsamp.checkpoints.tensor_names import (
    BUFFERS,
    TABLES,
    TensorSource,
    check_tensors,
    find_source,
    sizes,
)
from specsamp.checkpoints.tokenizer import JsonTokenizer
from specsamp.mesh.sharded import ShardedModel
from specsamp.models.config import DECODING, TransformerConfig
from specsamp.models.heads import Head
from specsamp.models.int8 import Int8Weight, decode_weights, is_int8, summed_axes
from specsamp.models.interface import DeviceLayout
from specsamp.models.transformer import TransformerLM

# Tokens that end a turn, where a chat template writes them. (In gpt-oss <|end|> ends a message, and
# <|return|> a turn.)
TURN_ENDS = (
    "<|im_end|>",
    "<|eot_id|>",
    "<|eot|>",
    "<|end|>",
    "<|return|>",
    "<|END_OF_TURN_TOKEN|>",
    "<end_of_turn>",
    "<turn|>",
)

# Tensors of a text model beside an image model, in older files and in files of transformers 5.
OF_TEXT = re.compile(r"^language_model\.|^(model\.)language_model\.")
OF_IMAGES = re.compile(
    r"(model\.)?(vision_tower|multi_modal_projector|visual|audio_tower|embed_vision|embed_audio"
    r"|vision_embedder)\."
)

OnProgress = Callable[[str, int, int], None]  # parameter, bytes read, bytes in all


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class Checkpoint:
    """An opened checkpoint, whose tensors have not been read."""

    name: str  # as the caller gave it
    folder: epath.Path  # of the small files
    from_hub: bool  # its tensors are downloaded when they are first read
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
        """Returns all tensors of the files, after a check that they are the tensors of the model.

        Raises:
          FileNotFoundError, ValueError: see `find_tensors` and `check_tensors`; or the output
            embedding of a tied model differs from its embedding.
        """
        self._check(self._found)
        embedding, output = map(self._found.get, self._ends)
        if self.config.tied and output is not None and not are_equal(embedding, output):
            raise ValueError(
                f"{self.name} says tie_word_embeddings = true, but its output embedding differs "
                "from its embedding: set it to false in config.json to use both"
            )
        return self._found

    def check_headers(self) -> None:
        """Makes the checks of `tensors` that need only headers: no tensor is downloaded."""
        if not self.is_converted:
            self._check(self._named(read_headers(self.name)) if self.from_hub else self._found)

    def _check(self, found: Mapping[str, Tensor]) -> None:
        of_head = self.family.head_prefix
        repeated = self._ends[1] if self.config.tied else None

        def is_harmless(name: str) -> bool:
            return (
                name == repeated
                or bool(BUFFERS.search(name))
                or (of_head is not None and name.startswith(of_head))
            )

        check_tensors(self.name, found, self._sources(found), is_harmless)

    @property
    def _ends(self) -> tuple[str, ...]:
        """Returns the names of the embedding and the output embedding."""
        return tuple(
            find_source(name, self.family.names, {}).tensor
            for name in ("embedding", "output_embedding")
        )

    @functools.cached_property
    def _found(self) -> dict[str, Tensor]:
        """Returns all tensors of the files, by the family's names; a model of the hub is
        downloaded.
        """
        folder = download_weights(self.name) if self.from_hub else self.folder
        return self._named(find_tensors(folder))

    def _named(self, found: dict[str, Tensor]) -> dict[str, Tensor]:
        """Returns tensors by the family's names."""
        prefix, found = self.family.prefix, join_packed(found)
        if self.family.text is not None:
            named = {OF_TEXT.sub(r"\1", name): tensor for name, tensor in found.items()}
            return {name: tensor for name, tensor in named.items() if not OF_IMAGES.match(name)}
        if not prefix or any(name.startswith(prefix) for name in found):
            return found
        return {
            name if name.startswith("lm_head.") else prefix + name: tensor
            for name, tensor in found.items()
        }

    @property
    def is_converted(self) -> bool:
        """Returns whether the parameters are in the format of Orbax."""
        return (self.folder / "run.json").exists()

    def sources(self) -> dict[str, TensorSource]:
        """Returns the source of each parameter by its name."""
        return self._sources(self._found)

    def _sources(self, found: Mapping[str, Tensor]) -> dict[str, TensorSource]:
        names = dict(self.family.names)
        end, table = self.family.other_experts
        if any(name.endswith(end) for name in found):
            names |= TABLES[table]
        shapes = init_shapes(TransformerLM(self.config))
        return {
            name: find_source(name, names, sizes(self.config, name))
            for name in flatten_dict(shapes, sep="/")
        }


def open_checkpoint(
    name: str | os.PathLike,
    *,
    dtype: str = "bfloat16",
    weight_dtype: str | None = None,
    cache_dtype: str | None = None,
) -> Checkpoint:
    """Reads config, tokenizer and stop tokens of a checkpoint.

    Args:
      name: a folder, on a disk or in a bucket, or the id of a model of the hub, such as
        "Qwen/Qwen2.5-0.5B".
      dtype: of decode-time weights, activations and caches.
      weight_dtype: "int8" quantises matrices while they are read. A checkpoint converted in int8 is
        always read in int8.
      cache_dtype: "int8", or None for ``dtype``.

    Raises:
      FileNotFoundError: the folder or the model does not exist, or has no config.json.
      ValueError: an architecture, value or file cannot be read; int8 was requested of a checkpoint
        that was converted in float; or the tokenizer has more tokens, without added tokens, than
        the embedding has rows.
    """
    folder, from_hub = find_folder(name)
    content = storage.read_json(folder / "config.json")
    family, config = parse_config(str(folder / "config.json"), content, dtype)
    if (folder / "run.json").exists():
        converted = storage.read_json(folder / "run.json").get("weight_dtype")
        if weight_dtype not in (None, converted):
            raise ValueError(
                f"{name} was not converted in int8: convert it with --int8, or give the original"
            )
        weight_dtype = converted
    config = dataclasses.replace(config, weight_dtype=weight_dtype, cache_dtype=cache_dtype)
    beside = folder / "generation_config.json"
    generation = storage.read_json(beside) if beside.exists() else {}
    stops = generation.get("eos_token_id", content.get("eos_token_id"))
    stop_ids = tuple(stops) if isinstance(stops, list) else () if stops is None else (stops,)
    tokenizer = None
    if (folder / "tokenizer.json").exists():
        eos, chat = stop_ids[0] if stop_ids else None, read_chat_template(folder)
        tokenizer = JsonTokenizer(
            folder / "tokenizer.json", eos=eos, rows=config.vocab_size, chat=chat
        )
        stop_ids = tuple(
            dict.fromkeys((*stop_ids, *_named_stops(tokenizer, read_special_tokens(folder))))
        )
    if tokenizer is not None and tokenizer.vocab_size > config.vocab_size:
        raise ValueError(
            f"the tokenizer in {folder} has {tokenizer.vocab_size} tokens, but the embedding of "
            f"config.json only {config.vocab_size} rows: they are of different models"
        )
    for stop in stop_ids:
        validate.integer(f"{folder}: eos_token_id", stop, limit=config.vocab_size)
    return Checkpoint(
        name=os.fspath(name),
        folder=folder,
        from_hub=from_hub,
        family=family,
        config=config,
        tokenizer=tokenizer,
        stop_ids=stop_ids,
    )


def _named_stops(tokenizer: JsonTokenizer, special_tokens: Mapping[str, str]) -> list[int]:
    """Returns the tokenizer's own end of text, and the ends of turns that its chat
    template writes.
    """
    names = [special_tokens.get("eos_token")]
    if tokenizer.chat is not None:
        source = tokenizer.chat.source + (tokenizer.chat.tool_source or "")
        ends = [name for name in TURN_ENDS if name in source]
        names += [name for name in ends if name != "<|end|>" or "<|return|>" not in ends]
    ids = {text: index for index, text in tokenizer.pieces.items()}
    return [ids[name] for name in names if name in ids]


def check_readable(checkpoint: Any, model: TransformerLM | ShardedModel | Head) -> None:
    """Raises the errors of `read_params`, or of `read_head`, before any tensor is read."""
    if isinstance(checkpoint, Checkpoint) and not checkpoint.is_converted:
        checkpoint.tensors
    bare = model.model if isinstance(model, ShardedModel) else model
    placed(init_shapes(bare), model)


def read_params(
    checkpoint: Checkpoint,
    model: TransformerLM | ShardedModel,
    progress: OnProgress = lambda *_: None,
) -> Any:
    """Reads the parameters of ``model`` from a checkpoint, in its compute dtype and onto its
    devices.

    Args:
      model: of the checkpoint's config. It may have another dtype and a larger vocabulary, whose
        added rows are zero.
      progress: called after every parameter of a checkpoint that is not converted.

    Raises:
      FileNotFoundError, ValueError: the model is not the checkpoint's, with the differing fields;
        the converted checkpoint is damaged; a number is infinite or NaN, with file and tensor; or
        see `Checkpoint.tensors`.
    """
    different = differing_fields(
        checkpoint.config, model.config, but=(*DECODING, "num_real_tokens", "vocab_size")
    )
    if model.config.vocab_size < checkpoint.config.vocab_size:
        different["vocab_size"] = checkpoint.config.vocab_size, model.config.vocab_size
    if different:
        fields = "; ".join(
            f"{name} is {there!r} there, {here!r} in the model"
            for name, (there, here) in different.items()
        )
        raise ValueError(f"{checkpoint.name} is another model: {fields}")
    if checkpoint.is_converted:
        params = orbax.restore_params(checkpoint.folder, _placed_params(model))
        for name, leaf in flatten_dict(params, sep="/").items():
            check_finite(f"{checkpoint.folder}: {name}", leaf)
        return params
    places = flatten_dict(_placed_params(model), sep="/")
    return unflatten_dict(
        read_leaves(places, checkpoint.sources(), checkpoint.tensors, progress), sep="/"
    )


def _placed_params(model: TransformerLM | ShardedModel) -> Any:
    """Returns the shapes of the parameters in the dtypes of decode-time weights, with their
    shardings.
    """
    bare, config = model.model if isinstance(model, ShardedModel) else model, model.config

    def stored(key):
        cast = jax.tree.map(lambda x: x.astype(config.compute_dtype), bare.init(key))
        return decode_weights(cast, config.compute_dtype, config.weight_dtype)

    return placed(jax.eval_shape(stored, jax.random.key(0)), model)


def placed(shapes: Any, model: TransformerLM | ShardedModel | Head) -> Any:
    """Returns shapes with the shardings of a model or head; without a mesh, on the first device."""
    if isinstance(model, (ShardedModel, Head)):
        shardings = model.param_shardings(shapes)
    else:
        shardings = DeviceLayout().shardings(None, shapes)
    return jax.tree.map(
        lambda x, at: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=at), shapes, shardings
    )


def read_leaves(
    places: Mapping[str, jax.ShapeDtypeStruct | Int8Weight],
    sources: Mapping[str, TensorSource],
    tensors: Mapping[str, Tensor],
    progress: OnProgress,
) -> dict[str, jax.Array | Int8Weight]:
    """Reads the parameter of each place, one after another; only the slices on devices of this
    process.

    Args:
      places: shapes, dtypes and shardings, by the parameter's name.

    Raises:
      ValueError: a number is infinite or NaN; names file and tensor.
    """
    done, arrays = 0, {}

    def size(place):
        return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(place))

    total = sum(map(size, places.values()))
    for name, place in places.items():
        dtype = np.float32 if is_int8(place) else place.dtype
        read = functools.partial(sources[name].read, tensors, shape=place.shape, dtype=dtype)
        arrays[name] = (
            read_int8(place, summed_axes(name), read)
            if is_int8(place)
            else _read_array(place, read)
        )
        first = sources[name].members()[0].tensor
        check_finite(f"{tensors[first].file}: {sources[name].tensor}", arrays[name])
        done += size(place)
        progress(name, done, total)
    return arrays


def _read_array(
    place: jax.ShapeDtypeStruct, read: Callable[[tuple[slice, ...]], np.ndarray]
) -> jax.Array:
    pieces: dict[tuple, np.ndarray] = {}  # devices that hold copies share what was read

    def piece(index: tuple[slice, ...]) -> np.ndarray:
        key = tuple((part.start, part.stop) for part in index)
        if key not in pieces:
            pieces[key] = read(index)
        return pieces[key]

    return jax.make_array_from_callback(place.shape, place.sharding, piece).block_until_ready()


def write_converted(checkpoint: Checkpoint, params: Any, folder: str | os.PathLike) -> None:
    """Writes the parameters from `read_params` in the format of Orbax; every process must call it.

    Raises:
      ValueError: the folder already has parameters, perhaps of a conversion that was interrupted.
    """
    place = storage.place(folder)
    if jax.process_index() == 0:
        for name in SMALL_FILES:
            if (checkpoint.folder / name).exists() and name != INDEX:
                storage.write(place / name, (checkpoint.folder / name).read_bytes())
    orbax.save_params(place, params)
    if jax.process_index() == 0:
        shape = {
            name: value
            for name, value in dataclasses.asdict(checkpoint.config).items()
            if name not in DECODING
        }
        told = {"model": shape, "converted_from": checkpoint.name}
        in_int8 = checkpoint.config.weight_dtype == "int8"
        storage.write_json(place / "run.json", told | {"weight_dtype": "int8"} if in_int8 else told)

"""Loads the initial parameters of a training, and the teacher of a draft or a head.

    open_trained(folder)         the model or the head of a run
        open_target(name)            the target of a pair, or the model of a run
    open_first_head(folder)      the head of a run, or one that was exported or published
    open_public_target(name)     a public checkpoint, by folder, bucket or hub id

A public target of billions of parameters is never whole on one device: each device reads its part
when the parameters are first used.
"""

import contextlib
import dataclasses
import functools
import hashlib
import os
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np
from etils import epath
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from specsamp import storage, validate
from specsamp.checkpoints.hugging_face import (
    Checkpoint,
    OnProgress,
    check_readable,
    open_checkpoint,
    read_params,
)
from specsamp.checkpoints.orbax import Checkpoints
from specsamp.checkpoints.params import digest, init_shapes
from specsamp.checkpoints.public_heads import open_head, read_head
from specsamp.checkpoints.tokenizer import JsonTokenizer
from specsamp.checkpoints.trained_pair import load_pair, pair_folder
from specsamp.decoding.data_shards import DataShards
from specsamp.decoding.pair import Pair
from specsamp.mesh.layout import Layout, make_mesh
from specsamp.mesh.sharded import shard_model
from specsamp.models.block_corrections import DSparkConfig
from specsamp.models.config import TransformerConfig
from specsamp.models.dflash import BlockConfig
from specsamp.models.eagle import Eagle3Config
from specsamp.models.heads import DRAFT_IDS, Head, HeadConfig, check_draft_ids
from specsamp.models.medusa import MedusaConfig
from specsamp.models.mtp import MTPConfig
from specsamp.models.transformer import TransformerLM
from specsamp.training.run_folder import FIX, IDS, read_array, read_config, read_description

# Kinds of heads that are trained.
HEADS = {
    "eagle3": Eagle3Config,
    "medusa": MedusaConfig,
    "mtp": MTPConfig,
    "dflash": BlockConfig,
    "dspark": DSparkConfig,
}

# Fields of a head's decoder layer that come from its target unless the configuration sets them.
# Norms of queries and keys, windows and caps do not: public heads are plain layers for
# any target.
OF_ITS_LAYERS = (
    *("vocab_size", "width", "num_heads", "num_kv_heads", "head_size", "feedforward_width"),
    *("max_positions", "norm_epsilon", "rotary_base", "rotary_scaling"),
)


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class Source:
    """A model or a head, and where its parameters come from.

    Attributes:
      folder: of the run, the pair, the exported head, or the small files of the public checkpoint.
      config: its shape.
      read: reads the parameters.
      step: of the checkpoint in a run.
      provenance: "config", "corpus" and "target" of the run, if its files have them.
      public: the public checkpoint, or None.
      mesh: the mesh whose model axis splits the parameters. None: each process has all parameters.
    """

    folder: epath.Path
    config: TransformerConfig | HeadConfig
    read: Callable[[], Any]
    step: int = 0
    provenance: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    public: Checkpoint | None = None
    mesh: Mesh | None = None

    @functools.cached_property
    def params(self) -> Any:
        """Returns the parameters, each where the training needs it."""
        return self.read()

    @property
    def tokenizer(self) -> JsonTokenizer:
        """Returns the tokenizer of a public checkpoint, with its chat template.

        Raises:
          ValueError: there is no tokenizer.json, or no token ends a text.
        """
        tokenizer = self.public.require_tokenizer()
        if tokenizer.eos_id is None:
            raise ValueError(
                f"{self.public.name} names no eos_token_id, which ends texts: add it to config.json"
            )
        return tokenizer

    def made_from(self, name: str) -> dict[str, Any]:
        """Returns the description of the run's "corpus" or "target"; raises FileNotFoundError if
        there is none.
        """
        if name not in self.provenance:
            raise FileNotFoundError(
                f"{self.folder} does not describe its {name} ({name}.json): {FIX}"
            )
        return self.provenance[name]

    def model_in(self, dtype: str) -> TransformerLM:
        """Builds the model with another compute dtype."""
        return TransformerLM(dataclasses.replace(self.config, dtype=dtype))

    def check_split(self, held_out: float, digest: str) -> None:
        """Raises ValueError if its training read text that a run on the same files holds out, or
        vice versa.

        Args:
          held_out: the share of files that the run holds out.
          digest: of the run's files.
        """
        # None: a converted public checkpoint.
        data = self.provenance.get("config", {}).get("data")
        if data is None or data["held_out"] == held_out:
            return
        if self.made_from("corpus")["sha256"] == digest:
            raise ValueError(
                f"data.held_out {held_out} is not the {data['held_out']} of {self.folder}, on the "
                "same files: held-out text of one model was read by the other. Give "
                f"--config.data.held_out={data['held_out']}"
            )

    def writer(self, dtype: str) -> Pair:
        """Returns the model as a pair that writes text; a public model is split over its mesh and
        writes no padding tokens.
        """
        model = self.model_in(dtype)
        if self.mesh is None:
            return Pair(target=model, target_params=self.params)
        real = min(self.tokenizer.vocab_size, self.config.vocab_size)
        model = TransformerLM(dataclasses.replace(model.config, num_real_tokens=real))
        model = shard_model(model, Layout.tensor_parallel(self.mesh))
        return Pair(target=model, target_params=self.params, shards=DataShards(self.mesh))

    @functools.cached_property
    def identity(self) -> dict[str, Any]:
        """Returns a digest of all parameters, with the step of a run or the name of a public
        checkpoint.
        """
        if self.public is not None:
            name = self.public.name if self.public.from_hub else self.folder.name
            return {"name": name, "sha256": digest(self.params)}
        hashed = hashlib.sha256()
        for leaf in jax.tree.leaves(self.params):
            hashed.update(np.asarray(leaf).tobytes())
        return {"step": self.step, "sha256": hashed.hexdigest()}


def is_trained_here(name: str | os.PathLike) -> bool:
    """Returns True for a pair or a training run, False for a public checkpoint."""
    folder = storage.place(name)
    try:
        return bool(pair_folder(str(name)))
    except FileNotFoundError:
        # Nor a converted checkpoint.
        return (folder / "run.json").exists() and not (folder / "config.json").exists()


def open_target(name: str | os.PathLike) -> Source:
    """Reads the target of a pair, by name or folder, or the model of a run; raises as `load_pair`
    and `open_trained`.
    """
    try:
        folder = pair_folder(str(name))
    except FileNotFoundError:
        return open_trained(name)
    pair = load_pair(folder)
    provenance = storage.read_json(folder / "pair.json").get("provenance", {}).get("target", {})
    return Source(
        folder=storage.place(folder),
        config=pair.target.config,
        read=lambda: pair.target_params,
        step=provenance.get("step", 0),
        provenance=provenance,
    )


def open_trained(folder: str | os.PathLike, *, is_head: bool = False) -> Source:
    """Reads the parameters of the run of a model or a head, without its optimizer.

    Args:
      is_head: whether it must be the run of a head, else of a model; a head comes with the ids of a
        reduced vocabulary.

    Raises:
      FileNotFoundError: no run, or no checkpoint.
      ValueError: another kind of run; or the configuration is damaged, or the checkpoint is, or
        does not fit it.
    """
    folder = storage.place(folder)
    fields = read_config(folder)
    kind, other = ("head", "model") if is_head else ("model", "head")
    if ("head" in fields) != is_head:
        raise ValueError(f"{folder} is the run of a {other}, not of a {kind}")
    files = {name: folder / f"{name}.json" for name in ("corpus", "target")}
    provenance = {name: read_description(path) for name, path in files.items() if path.exists()}
    try:
        if is_head:
            layer = TransformerConfig(**fields["model"] | {"dtype": fields["compute_dtype"]})
            target = read_description(folder / "target.json")
            sizes = {name: target[name] for name in ("target_layers", "target_width")}
            model = make_head(layer, fields["head"], **sizes)
        else:
            model = TransformerLM(TransformerConfig(**fields["model"]))
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(
            f"{folder / 'run.json'} describes no {kind} ({type(error).__name__}: {error}): {FIX}"
        ) from error
    shapes = dict(init_shapes(model))
    ids = shapes.pop(DRAFT_IDS, None)
    params, step = _restore(folder, shapes)
    if ids is not None:
        ids_U = read_array(folder / IDS)
        check_draft_ids(f"{folder / IDS}: ids", ids_U, model.vocab_size)
        params[DRAFT_IDS] = jax.numpy.asarray(ids_U)
    return Source(
        folder=folder,
        config=model.config,
        read=lambda: params,
        step=step,
        provenance=provenance | {"config": fields},
    )


def open_first_head(folder: str | os.PathLike, target: TransformerConfig) -> Source:
    """Reads the head of a run, or an exported or published head; raises as `open_trained` and
    `open_head`.
    """
    folder = storage.place(folder)
    if (folder / "run.json").exists():
        return open_trained(folder, is_head=True)
    checkpoint = open_head(folder, target, dtype="float32")
    params = read_head(checkpoint, checkpoint.config.head())
    training = folder / "training.json"
    # Of a head that was exported here.
    provenance = storage.read_json(training) if training.exists() else {}
    return Source(
        folder=folder,
        config=checkpoint.config,
        read=lambda: params,
        step=provenance.get("step", 0),
        provenance=provenance,
    )


def open_public_target(
    name: str, dtype: str, mesh: Mesh, progress: OnProgress = lambda *_: None
) -> Source:
    """Opens a public checkpoint, and checks everything but the values of its tensors.

    Args:
      name: a folder, ``gs://`` folder or id of the hub.
      dtype: of the parameters and of the target's forward pass.
      mesh: of the training; the devices of its model axis hold a copy together.
      progress: see `read_params`.

    Raises:
      FileNotFoundError, ValueError: see `open_checkpoint` and `Checkpoint.tensors`; or the model
        does not divide over the mesh.
    """
    checkpoint = open_checkpoint(name, dtype=dtype)
    if checkpoint.config.weight_dtype == "int8":
        raise ValueError(
            f"{name} holds weights in int8, which cannot teach: give the float checkpoint"
        )
    config = checkpoint.config
    model = shard_model(TransformerLM(config), Layout.tensor_parallel(mesh))
    source = Source(
        folder=checkpoint.folder,
        config=config,
        read=lambda: read_params(checkpoint, model, progress),
        public=checkpoint,
        mesh=mesh,
    )
    source.tokenizer  # refuses a checkpoint without one
    check_readable(checkpoint, model)
    return source


def make_head(
    layer: TransformerConfig, fields: Mapping[str, Any], *, target_layers: int, target_width: int
) -> Head:
    """Returns the head that ``head`` of a configuration describes.

    Args:
      layer: of its decoder layer.
      fields: ``kind``, one of `HEADS`; and fields of its class. Left out or empty,
        ``hidden_layers`` are the usual ones of the kind, and ``draft_vocab_size`` is 0, the whole
        vocabulary.

    Raises:
      ValueError: an unknown kind, or fields that do not fit.
    """
    fields = dict(fields)
    kind = HEADS[validate.choice("head", fields.pop("kind"), HEADS)]
    size = fields.pop("draft_vocab_size", 0) or None
    if not fields.get("hidden_layers"):
        fields["hidden_layers"] = kind.usual_layers(target_layers)
    return kind(
        layer=dataclasses.replace(layer, tied=False),  # embedding and output are fields of the head
        target_layers=target_layers,
        target_width=target_width,
        draft_vocab_size=size,
        **fields,
    ).head()


def layer_fields(fields: Mapping[str, Any], target: TransformerConfig) -> dict[str, Any]:
    """Returns the fields of a head's decoder layer, with the target's value for each field that is
    None.

    Raises:
      ValueError: a field is None that a head does not take from its target.
    """
    open_fields = {name for name, value in fields.items() if value is None}
    if beyond := open_fields.difference(OF_ITS_LAYERS):
        raise ValueError(
            f"model.{min(beyond)} is None, but is not taken from the target: give a value"
        )
    of_target = dataclasses.asdict(target)
    return {**fields, **{name: of_target[name] for name in open_fields}}


def draft_fields(fields: Mapping[str, Any], target: TransformerConfig) -> dict[str, Any]:
    """Returns the fields of a draft that has the target's first layers; fields that are not None
    take the place of the target's.
    """
    given = {name: value for name, value in fields.items() if value is not None}
    of_target = dataclasses.asdict(TransformerLM(target).first(given["num_layers"]).config)
    for name in ("dtype", "weight_dtype", "cache_dtype"):
        del of_target[name]
    return of_target | given


def _restore(folder: epath.Path, shapes: Any) -> tuple[Any, int]:
    """Reads parameters of these shapes from the last checkpoint of a run; returns them and the
    step.
    """
    # On one device, however many there were where it was saved. (Of many processes, each gets a
    # whole copy.)
    many = jax.process_count() > 1
    sharding = (
        NamedSharding(make_mesh(jax.device_count(), 1), PartitionSpec())
        if many
        else jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
    )
    shapes = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), shapes
    )
    if not (folder / "checkpoints").exists():  # opening it would make it
        raise FileNotFoundError(f"no checkpoint in {folder}: its training has not saved one yet")
    with contextlib.closing(Checkpoints(folder / "checkpoints")) as checkpoints:
        params = checkpoints.restore(params=shapes)["params"]
        step = checkpoints.latest
    if many:
        params = jax.tree.map(lambda x: jax.numpy.asarray(np.asarray(x)), params)
    return params, step

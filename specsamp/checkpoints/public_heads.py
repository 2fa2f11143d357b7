"""Opens public heads, checks them against their target, and reads their tensors in slices.

    checkpoint = open_head("yuhuili/EAGLE3-LLaMA3.1-Instruct-8B", target.config)
    head = checkpoint.config.head()
    params = read_head(checkpoint, head)

A folder holds ``config.json`` and ``model.safetensors``, ``pytorch_model.bin`` (see pickles.py) or
a file with a name that Medusa chose. The tensor ``d2t`` of a reduced vocabulary holds offsets: its
token i is the target's ``i + d2t[i]``. An MTP module is in the checkpoint of its target: give the
target's name.
"""

import dataclasses
import os
import re
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
from etils import epath
from flax.traverse_util import flatten_dict, unflatten_dict

from specsamp import storage
from specsamp.checkpoints.head_config import HeadLayout, parse_head
from specsamp.checkpoints.hub import download_weights, find_folder, read_headers
from specsamp.checkpoints.hugging_face import OnProgress, placed, read_leaves
from specsamp.checkpoints.params import init_shapes
from specsamp.checkpoints.pickles import read_pickle
from specsamp.checkpoints.safetensors_io import (
    INDEX,
    INTEGERS,
    MEDUSA_PICKLE,
    MEDUSA_SINGLE,
    PICKLE,
    SINGLE,
    Tensor,
    are_equal,
    find_tensors,
    read_header,
)
from specsamp.checkpoints.tensor_names import TensorSource, check_tensors, find_source, sizes
from specsamp.models.assistant import CLUSTERS, AssistantConfig
from specsamp.models.config import TransformerConfig
from specsamp.models.heads import DRAFT_IDS, Head, HeadConfig, check_draft_ids

ORDER = "masked_embedding.token_ordering"  # of an assistant
EMBEDDING, OFFSETS, KEPT = "embed_tokens.weight", "d2t", "t2d"
AROUND = "layer_0/attention_around"  # convolutions of DFlash 2
HEAD_FILES = (MEDUSA_SINGLE, PICKLE, MEDUSA_PICKLE)  # that no model has


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class HeadCheckpoint:
    """An opened head, whose files have been checked against its config."""

    name: str
    layout: HeadLayout
    config: HeadConfig
    tensors: Mapping[str, Tensor]
    draft_ids: np.ndarray | None  # int32 [U]; of an assistant the cluster of each token, [V]
    trained_for: str | None  # the name of the target in its files

    def notes(self, target_name: str) -> list[str]:
        """Returns a warning if the files name another target with the same shapes; else []."""
        theirs, ours = (
            os.path.basename((name or target_name).rstrip("/"))
            for name in (self.trained_for, target_name)
        )
        if theirs == ours:
            return []
        return [
            f"{self.name} was trained for {self.trained_for}: if {target_name} is another model, "
            "such as its base model, expect less acceptance"
        ]


def open_head(
    name: str | os.PathLike,
    target: TransformerConfig,
    *,
    target_embedding: Tensor | None = None,
    dtype: str = "bfloat16",
    headers_only: bool = False,
) -> HeadCheckpoint:
    """Reads config and headers of a head, and checks them against its target.

    Args:
      name: a folder, on a disk or in a bucket, or the id of a model of the hub.
      target: the shape in the target's checkpoint, without padding of its vocabulary.
      target_embedding: if the head's embedding is a copy of this one, the head is read without an
        embedding.
      dtype: of decode-time weights, activations and caches.
      headers_only: downloads no tensor, not even the ids of a reduced vocabulary. The head
        can only be checked.

    Raises:
      FileNotFoundError: the head does not exist.
      ValueError: the head is of another kind or target, see `parse_head`; its tensors are wrong,
        see `check_tensors` and `read_pickle`; or the ids of a reduced vocabulary are not increasing
        ids of the target.
    """
    folder, from_hub = find_folder(name)
    name = os.fspath(name)
    if from_hub and headers_only:
        found = _renamed(read_headers(name))
    else:
        found = _find(download_weights(name, *HEAD_FILES) if from_hub else folder)
    content = storage.read_json(folder / "config.json")
    layout, config = parse_head(str(folder / "config.json"), content, target, dtype, found.keys())
    if config.drafts_blocks:
        _check_features(name, found, config)
    check_tensors(name, found, head_sources(config, layout), layout.others.search)
    draft_ids = None
    if config.draft_vocab_size is not None and not headers_only:
        draft_ids = _read_ids(name, found, config)
    has_clusters = isinstance(config, AssistantConfig) and config.num_centroids is not None
    if has_clusters and not headers_only:
        draft_ids = _read_clusters(name, found, config)
    if (
        config.own_embedding
        and target_embedding is not None
        and are_equal(found[EMBEDDING], target_embedding)
    ):
        config = dataclasses.replace(config, own_embedding=False)
    check_embedding(target, config, name)
    verifier = (content.get("speculators_config") or {}).get("verifier") or {}
    beside = name if layout.in_target else None
    return HeadCheckpoint(
        name=name,
        layout=layout,
        config=config,
        tensors=found,
        draft_ids=draft_ids,
        trained_for=verifier.get("name_or_path")
        or content.get("base_model_name_or_path")
        or beside,
    )


def _check_features(name: str, found: Mapping[str, Tensor], config: HeadConfig) -> None:
    """Raises ValueError if a head reads one more layer than its config.json names."""
    fc, read = found.get("fc.weight"), len(config.hidden_layers)
    if fc is not None and fc.shape[1] == (read + 1) * config.target_width:
        raise ValueError(
            f"{name}: fc.weight reads {read + 1} layers of the target, config.json names {read}: "
            "the converter of speculators drops the id of the target's last layer. Put it back in "
            "aux_hidden_state_layer_ids, or give the original checkpoint"
        )


def check_embedding(target: TransformerConfig, head: HeadConfig, name: str) -> None:
    """Raises ValueError for a head with a layer that shares the embedding of a target with scaled
    embeddings.
    """
    is_shared = head.has_layer and not (head.own_embedding or head.takes_target_width)
    if is_shared and target.embedding_scale not in (None, 1.0):
        raise ValueError(
            f"{name} shares the embedding of its target, which scales embeddings: take a head "
            "with an embedding of its own (own_embedding=True in training)"
        )


def read_head(
    checkpoint: HeadCheckpoint, head: Head, progress: OnProgress = lambda *_: None
) -> Any:
    """Reads the parameters of ``head`` in its compute dtype and onto its devices.

    Args:
      head: of the checkpoint's config. It may have a larger vocabulary, whose added rows are zero.

    Raises:
      ValueError: a number is infinite or NaN; names file and tensor.
    """
    dtype, sources = (
        head.config.layer.compute_dtype,
        head_sources(checkpoint.config, checkpoint.layout),
    )
    in_dtype = jax.tree.map(
        lambda x: x if x.dtype == np.int32 else jax.ShapeDtypeStruct(x.shape, dtype),
        init_shapes(head.config.head()),
    )
    places = flatten_dict(placed(in_dtype, head), sep="/")
    of_ids = {name: places.pop(name) for name in (DRAFT_IDS, CLUSTERS) if name in places}
    leaves = read_leaves(places, sources, checkpoint.tensors, progress)
    for name, ids in of_ids.items():
        more = ids.shape[0] - len(checkpoint.draft_ids)  # rows of padding are in no cluster
        padded = np.pad(checkpoint.draft_ids, (0, more), constant_values=np.iinfo(np.int32).max)
        leaves[name] = jax.make_array_from_callback(ids.shape, ids.sharding, padded.__getitem__)
    return unflatten_dict(leaves, sep="/")


def head_sources(config: HeadConfig, layout: HeadLayout) -> dict[str, TensorSource]:
    """Returns the source of each parameter; raises KeyError for a parameter that the layout does
    not have.
    """
    shapes = flatten_dict(init_shapes(config.head()), sep="/")
    read = {
        "X": ("attention/query", 1),
        "Y": ("module_0/fc" if "module_0/fc" in shapes else "fc", 0),
        "R": ("correction/embedding", 1),
        "G": ("correction/gate", 0),
        "J": ("correction/gate", 1),
        "B": ("correction/trust", 0),
        "T": (f"{AROUND}/base", 1),
        "A": (f"{AROUND}/coefficients", 1),
        "C": ("centroids", 0),
    }
    wide = {
        letter: shapes[name].shape[axis] for letter, (name, axis) in read.items() if name in shapes
    }
    wide |= dict(U=config.num_outputs, W=config.target_width, O=1, Q=2)
    return {
        name: find_source(name, layout.names, sizes(config.layer, name) | wide)
        for name in shapes
        if name not in (DRAFT_IDS, CLUSTERS)
    }


def _find(folder: epath.Path) -> dict[str, Tensor]:
    """Returns all tensors of a folder, by their names in speculators; prefers safetensors to
    pickles.
    """
    files = [name for name in HEAD_FILES if (folder / name).exists()]
    if not files or (folder / INDEX).exists() or (folder / SINGLE).exists():
        return _renamed(find_tensors(folder))
    return _renamed((read_header if files[0] == MEDUSA_SINGLE else read_pickle)(folder / files[0]))


def _renamed(found: dict[str, Tensor]) -> dict[str, Tensor]:
    """Returns tensors by their names in speculators."""
    names = {re.sub(r"^medusa_heads?\.", "", name): name for name in found}
    return {re.sub(r"^midlayer\.", "layers.0.", new): found[name] for new, name in names.items()}


def _read_ids(name: str, found: Mapping[str, Tensor], config: HeadConfig) -> np.ndarray:
    """Returns the target's id of each token of a reduced vocabulary."""
    size, num_ids = config.layer.vocab_size, config.num_outputs
    if OFFSETS not in found:
        raise ValueError(
            f"{name} has a reduced vocabulary of {num_ids} tokens, but no tensor {OFFSETS}"
        )
    for key, shape in ((OFFSETS, (num_ids,)), (KEPT, (size,))):
        tensor = found.get(key)
        if tensor is not None and (tensor.shape != shape or tensor.kind not in INTEGERS):
            raise ValueError(
                f"{tensor.file} has {key} {tensor.shape} of {tensor.kind}; it must be integers "
                f"{shape}"
            )
    file = found[OFFSETS].file
    ids_U = np.asarray(found[OFFSETS].read([slice(None)]), np.int64) + np.arange(num_ids)
    check_draft_ids(f"{file}: {OFFSETS}", ids_U, size)
    if KEPT in found and not np.array_equal(np.flatnonzero(found[KEPT].read([slice(None)])), ids_U):
        raise ValueError(f"{file}: {KEPT} and {OFFSETS} name different tokens")
    return ids_U.astype(np.int32)


def _read_clusters(name: str, found: Mapping[str, Tensor], config: AssistantConfig) -> np.ndarray:
    """Returns the cluster of each token, from the ids in the order of their clusters."""
    size, count = config.layer.vocab_size, config.num_centroids
    order = found.get(ORDER)
    if order is None or order.kind not in INTEGERS or order.shape != (size,) or size % count:
        raise ValueError(
            f"{name} has {count} clusters of a vocabulary of {size}; it must have {ORDER}, as many "
            "integers, and clusters of equal size"
        )
    ids_V = np.asarray(order.read([slice(None)]), np.int64)
    if not np.array_equal(np.sort(ids_V), np.arange(size)):
        raise ValueError(f"{order.file}: {ORDER} does not have every token once")
    clusters_V = np.empty(size, np.int32)
    clusters_V[ids_V] = np.arange(size) // (size // count)
    return clusters_V

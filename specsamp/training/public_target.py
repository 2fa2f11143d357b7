"""Public checkpoints that drafts and heads learn from, by folder, bucket or hub id.

A target of billions of parameters is never whole on one device: each device reads its own part, when the parameters
are first asked for, so that all that can be wrong with a training is found before.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

from etils import epath
from jax.sharding import Mesh

from specsamp.checkpoints.hugging_face import Checkpoint, Progress, check_readable, open_checkpoint, read_params
from specsamp.checkpoints.params import digest
from specsamp.checkpoints.tokenizer import JsonTokenizer
from specsamp.decoding.data_shards import DataShards
from specsamp.decoding.pair import Pair
from specsamp.mesh.layout import MODEL, Layout
from specsamp.mesh.sharded import ShardedModel, shard_model
from specsamp.models.config import TransformerConfig
from specsamp.models.transformer import TransformerLM
from specsamp.training.run import TrainedModel

# What the decoder layer of a head takes from its target's layers, where a configuration leaves it open. Norms of
# queries and keys, windows and caps it does not: public heads are plain layers beside any target.
OF_ITS_LAYERS = (
    "vocab_size",
    "width",
    "num_heads",
    "num_kv_heads",
    "head_size",
    "feedforward_width",
    "max_positions",
    "norm_epsilon",
    "rotary_base",
    "rotary_scaling",
)


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class PublicTarget:
    """Serves a public checkpoint as `specsamp.training.run.TrainedModel` serves the model of a run.

    Attributes:
      checkpoint: opened, its tensors checked.
      mesh: of the training; the devices of its model axis hold a copy together.
      progress: see `read_params`.
    """

    checkpoint: Checkpoint
    mesh: Mesh
    progress: Progress = lambda *_: None
    is_spread = True  # all processes must call together whatever computes with the parameters

    @property
    def folder(self) -> epath.Path:
        return self.checkpoint.folder

    @property
    def config(self) -> TransformerConfig:
        return self.checkpoint.config

    @functools.cached_property
    def params(self) -> Any:
        """Returns the parameters in the compute dtype, each where the training asks for it."""
        return read_params(self.checkpoint, self._sharded(self.config), self.progress)

    @property
    def tokenizer(self) -> JsonTokenizer:
        """Returns the tokenizer, with the chat template.

        Raises:
          ValueError: there is no tokenizer.json, or nothing ends a text.
        """
        tokenizer = self.checkpoint.tokenizer
        if not isinstance(tokenizer, JsonTokenizer):
            raise ValueError(f"{self.checkpoint.name} has no tokenizer.json, which training reads texts with: add one")
        if tokenizer.eos_id is None:
            raise ValueError(f"{self.checkpoint.name} names no eos_token_id, which parts texts: add it to config.json")
        return tokenizer

    def model_in(self, dtype: str) -> TransformerLM:
        """Builds the model with another compute dtype."""
        return TransformerLM(dataclasses.replace(self.config, dtype=dtype))

    def writer(self, dtype: str) -> Pair:
        """Returns the target as it writes text: over the mesh, without the tokens of padding."""
        real = min(self.tokenizer.vocab_size, self.config.vocab_size)
        model = self._sharded(dataclasses.replace(self.config, num_real_tokens=real, dtype=dtype))
        return Pair(target=model, target_params=self.params, shards=DataShards(self.mesh))

    def run_config(self) -> dict:
        """Returns nothing: how it was trained is in no file."""
        return {}

    def describe(self) -> dict:
        """Returns the name under which others find it, and a digest of all parameters."""
        name = self.checkpoint.name if self.checkpoint.from_hub else self.folder.name
        return {"name": name, "sha256": self._digest}

    @functools.cached_property
    def _digest(self) -> str:
        return digest(self.params)

    def _sharded(self, config: TransformerConfig) -> ShardedModel:
        return shard_model(TransformerLM(config), Layout.tensor_parallel(self.mesh))


Target = TrainedModel | PublicTarget  # what a draft or a head learns from


def open_public_target(name: str, dtype: str, mesh: Mesh, progress: Progress = lambda *_: None) -> PublicTarget:
    """Opens a checkpoint of which nothing but its values can be wrong afterwards.

    Args:
      name: a folder, ``gs://`` folder or id of the hub.
      dtype: of the parameters and of the target's forward pass.

    Raises:
      FileNotFoundError, ValueError: see `open_checkpoint` and `Checkpoint.tensors`; or the model does not divide over
        the mesh.
    """
    checkpoint = open_checkpoint(name, dtype=dtype)
    if checkpoint.in_int8:
        raise ValueError(f"{name} holds weights in int8, which nothing is trained beside: give the float checkpoint")
    if checkpoint.config.vocab_size % mesh.shape[MODEL]:
        raise ValueError(
            f"{name} has {checkpoint.config.vocab_size} tokens, which do not divide over the {mesh.shape[MODEL]} devices "
            "of mesh.model: choose a number that divides them, or 1"
        )
    target = PublicTarget(checkpoint=checkpoint, mesh=mesh, progress=progress)
    target.tokenizer
    check_readable(checkpoint, target._sharded(target.config))
    return target


def of_target(fields: Mapping[str, Any], target: TransformerConfig) -> dict[str, Any]:
    """Returns the fields of a head's decoder layer; those that are None are those of the target's layers.

    Raises:
      ValueError: a field is open that a head does not take from its target.
    """
    open_fields = [name for name, value in fields.items() if value is None]
    if beyond := set(open_fields) - set(OF_ITS_LAYERS):
        raise ValueError(f"model.{min(beyond)} is None, but is not taken from the target: give a value")
    taken = {name: getattr(target, name) for name in open_fields}
    scaling = taken.get("rotary_scaling")
    return {**fields, **taken} | ({} if scaling is None else {"rotary_scaling": dataclasses.asdict(scaling)})

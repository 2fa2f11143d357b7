"""One step of a head as a model, so that compile reports measure it like a step of a draft model."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from specsamp.models.config import TransformerConfig
from specsamp.models.decoder import OUTPUT_EMBEDDING
from specsamp.models.heads import FeatureHead
from specsamp.models.interface import LanguageModel, LayeredModel, Output

Array = jax.Array


@dataclasses.dataclass(frozen=True)
class HeadModel(LanguageModel):
    """Scores the next token from a token and the feature of the step before, which is kept in the cache.

    Attributes:
      target: a target of one layer, which is not run. It has the embedding and the output for heads without them.
      head: the head that a step calls.
    """

    target: LayeredModel
    head: FeatureHead

    @property
    def vocab_size(self) -> int:
        return self.head.vocab_size

    @property
    def config(self) -> TransformerConfig:
        """Returns the shape of the head's layer."""
        return self.head.config.layer

    def init(self, key: Array) -> Any:
        """Returns random parameters of head and target."""
        return {"head": self.head.init(key), "target": self.target.init(key)}

    def prepare(self, params: Any) -> Any:
        return {"head": self.head.prepare(params["head"]), "target": self.target.prepare(params["target"])}

    def fit_slots(self, weights: Any, slots: int) -> Any:
        return weights | {"target": self.target.fit_slots(weights["target"], slots)}

    def matrices_read(self, weights: Any, tokens: int) -> list[tuple[Array, float]]:
        """See `LanguageModel.matrices_read`. A step does not read the matrices of `FeatureHead.fuse`; a round does."""
        params, of_target = weights["head"]["params"], weights["target"]["params"]
        matrices = jax.tree.leaves([part for name, part in params.items() if self.head.config.is_read_by_a_step(name)])
        if not self.head.config.own_output:
            matrices.append(of_target.get(OUTPUT_EMBEDDING, of_target["embedding"]))
        return [(matrix, 1.0) for matrix in matrices if matrix.ndim >= 2]

    def weight_axes(self) -> Any:
        return {"head": self.head.weight_axes(), "target": self.target.weight_axes()}

    def init_cache(self, batch: int, slots: int) -> Any:
        layer = self.config
        features_BD = jnp.zeros((batch, layer.width), layer.compute_dtype)
        return {"cache": self.head.init_cache(batch, slots), "features_BD": features_BD}

    def cache_axes(self) -> Any:
        return {"cache": self.head.cache_axes(), "features_BD": PartitionSpec("batch", None)}

    def __call__(
        self, weights: Any, tokens_BT: Array, start_B: Array, cache: Any, *, hidden_layers: Any = (), block: Any = None
    ) -> Output:
        if self.head.config.own_embedding:
            embedded_BTD = self.head.embed(weights["head"], tokens_BT)
        else:
            embedded_BTD, _ = self.target.embed(weights["target"], tokens_BT, start_B, None)
        of_target = functools.partial(self.target.unembed_normed, weights["target"])
        features_BTD = jnp.repeat(cache["features_BD"][:, None], tokens_BT.shape[1], axis=1)
        features_BTD, of_head = self.head(weights["head"], embedded_BTD, features_BTD, start_B - 1, cache["cache"])
        logits_BTU = self.head.logits(weights["head"], features_BTD, of_target)
        logits_BV = self.head.expand(weights["head"], logits_BTU[:, 0])  # the rows behind the first are stale
        return Output(logits_BTV=logits_BV[:, None], cache={"cache": of_head, "features_BD": features_BTD[:, 0]})

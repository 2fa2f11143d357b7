"""Heads that draft from a target's hidden states; the modules are in `eagle.py`, `mtp.py`,
`medusa.py` and `dflash.py`.

A `FeatureHead` reads pairs (h_t, x_{t+1}): the hidden states of a position, and the token after it.
`fuse` turns the hidden states into *features*, a call turns pairs into the features of the next
position, and `logits` scores the next token from them. Pair t is in slot t of the cache. A
`BlockHead` drafts in one call.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, Self

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from specsamp import validate
from specsamp.arrays import pad_axis
from specsamp.models.cache import KERNEL_SLOTS, KVCache, LayerCache, kind_of_cache
from specsamp.models.config import TransformerConfig
from specsamp.models.int8 import decode_weights, pad_rows, take_rows
from specsamp.models.interface import Block, DeviceLayout, Kernels, LanguageModel, LayeredModel
from specsamp.models.modules import embedding, table, weight
from specsamp.models.products import contract, full_precision
from specsamp.models.visibility import positions_of
from specsamp.sampling.rules import take_row

Array = jax.Array
IDS_OF_BLOCK = 128  # that a kernel expands together
DRAFT_IDS = "draft_ids"  # int32 [U], the target's ids of a reduced vocabulary, increasing


@dataclasses.dataclass(frozen=True, kw_only=True)
class HeadConfig:
    """The shape of a head.

    Attributes:
      layer: the shape of its decoder layer; ``width`` is the head's, ``vocab_size`` the target's.
      target_layers: the number of layers of the target.
      target_width: of the target's hidden states; None: the head's width.
      hidden_layers: the layers of the target, counted from 0, whose outputs it reads;
        ``target_layers`` stands for the stream after the final norm, and -1 for the embedded
        tokens. See `Output.hidden`.
      draft_vocab_size: U, the size of a reduced vocabulary, the ids in the parameter ``draft_ids``;
        None: no reduction.
      own_embedding: whether the head has an embedding; False: it uses the target's.
      own_output: whether the head has an output matrix; False: it uses the target's.
    """

    layer: TransformerConfig
    target_layers: int
    hidden_layers: tuple[int, ...]
    target_width: int | None = None
    draft_vocab_size: int | None = None
    own_embedding: bool = False
    own_output: bool = False

    module: ClassVar[type[HeadModule]]
    kind: ClassVar[str]  # the name of such heads in messages
    fused: ClassVar[tuple[str, ...]] = ()  # parameters that `Head.fuse` alone reads
    has_layer: ClassVar[bool] = True  # and so a cache; False: only the sizes of ``layer`` count
    drafts_blocks: ClassVar[bool] = False  # in one call, see dflash.py
    least: ClassVar[Mapping[str, int]] = {}  # the smallest integers of fields, where it is not 1
    # Of tokens and features, which it projects to its own width.
    takes_target_width: ClassVar[bool] = False
    # Its one hidden state is the stream after the final norm.
    reads_final_norm: ClassVar[bool] = False

    def __post_init__(self):
        object.__setattr__(self, "hidden_layers", tuple(self.hidden_layers))
        if self.target_width is None:
            object.__setattr__(self, "target_width", self.layer.width)
        validate.fields(self, least=self.least)
        validate.integers("hidden_layers", self.hidden_layers, -1, self.target_layers + 1)
        if len(set(self.hidden_layers)) < len(self.hidden_layers):
            raise ValueError(
                f"hidden_layers {self.hidden_layers} names a layer twice: choose different ones"
            )
        if self.reads_final_norm and self.hidden_layers != (self.target_layers,):
            raise ValueError(
                f"{self.kind} heads read the stream after the final norm, hidden_layers "
                f"({self.target_layers},); got {self.hidden_layers}"
            )
        if self.has_layer and self.layer.positions != "rotary":
            raise ValueError(f"positions of a head must be 'rotary'; got {self.layer.positions!r}")
        has_ends = (self.own_embedding or self.takes_target_width) and self.own_output
        if self.target_width != self.layer.width and not has_ends:
            raise ValueError(
                f"a head of width {self.layer.width} cannot share embedding or output of a target "
                f"of width {self.target_width}: set own_embedding and own_output"
            )
        if self.draft_vocab_size is not None:
            validate.integer(
                "draft_vocab_size", self.draft_vocab_size, 1, self.layer.vocab_size + 1
            )
            if not self.own_output:
                raise ValueError(
                    "a head with a reduced vocabulary needs its own output matrix: set own_output"
                )

    @classmethod
    def usual_layers(cls, target_layers: int) -> tuple[int, ...]:
        """Returns the default of ``hidden_layers``: the stream after the final norm."""
        return (target_layers,)

    def head(self) -> Head:
        """Returns the head of this shape."""
        return FeatureHead(self)

    def begin(self, params: Any, output_UD: Array, scale_D: Array | None) -> Any:
        """Returns the initial parameters for training, from random parameters, and for the head's
        tokens the target's output matrix with the scale of the norm in front of it.

        The scale is halved: as it is, features that mean nothing yet would give confident logits,
        and these the largest gradients.

        Args:
          scale_D: the factor of the target's last norm; None: the head has another kind of norm,
            and keeps its own.
        """
        if not self.own_output or self.target_width != self.layer.width:
            return params
        params = params | {"output": output_UD}
        if scale_D is None or "final_norm" not in params:
            return params
        scale_D = scale_D / 2 - float(self.layer.norm_offset)
        return params | {"final_norm": params["final_norm"] | {"scale": scale_D}}

    def is_read_by_a_step(self, name: str) -> bool:
        """Returns whether drafting a token multiplies by the top-level parameter ``name``."""
        return name != "embedding" and name not in self.fused

    @property
    def num_outputs(self) -> int:
        """Returns U, the size of its vocabulary."""
        return self.draft_vocab_size or self.layer.vocab_size

    @property
    def max_tokens(self) -> int | None:
        """Returns the longest draft; None: any length."""
        return None


class HeadModule(nn.Module):
    """Base of the modules of all heads. Derived classes define `__call__`, see `FeatureHead`.

    Attributes:
      layout, kernels: see `Head`.
    """

    config: HeadConfig
    layout: DeviceLayout = DeviceLayout()
    kernels: Kernels | None = None

    def declare_ends(self) -> None:
        """Declares the embedding and the output, unless they are the target's."""
        config, width = self.config, self.config.layer.width
        if config.own_embedding:
            self.embedding = embedding(self, config.layer.vocab_size, width)
        if config.own_output:
            self.output = table(self, "output", config.num_outputs, width)

    def declare_fc(self, read: int) -> None:
        """Declares the matrix of `join`, for inputs of ``read`` entries."""
        self.fc = weight(self, "fc", (read, self.config.layer.width), ("features", "embed"))

    def join(self, parts: Sequence[Array]) -> Array:
        """Concatenates streams ``[B, T, ...]``, and projects them to the head's width."""
        x_BTX = self.layout.split_features(jnp.concatenate(parts, axis=-1))
        return contract("BTX,XD->BTD", x_BTX, self.fc)

    def embed(self, tokens_BT: Array) -> Array:
        """Returns the head's own embedding of tokens, ``[B, T, D]``."""
        x_BTD = take_rows(self.embedding, tokens_BT)[..., : self.config.layer.width]
        return x_BTD.astype(self.config.layer.compute_dtype)

    def fuse(self, hidden: tuple[Array, ...]) -> Array:
        """Returns the features ``[B, T, D]`` of hidden states; by default the single
        hidden state.
        """
        return hidden[0]

    def normed(self, features_BTD: Array, offset: Array | int) -> Array:
        """Returns the features that are projected to logits; by default unchanged."""
        return features_BTD

    def project(self, x_BTD: Array, offset: Array | int) -> Array:
        """Returns float32 logits ``[B, T, U]`` of the result of `normed`, with the head's output
        matrix.
        """
        return self.multiply(self.output, x_BTD)

    @staticmethod
    def multiply(output_UD: Array, x_BTD: Array) -> Array:
        """Multiplies by an output matrix; returns logits ``[B, T, U]`` float32."""
        return contract("BTD,UD->BTU", x_BTD, output_UD, dtype=jnp.float32)

    def everything(self, hidden: tuple[Array, ...], start_B: Array) -> Array:
        """Runs all parts once, to declare all parameters."""
        features_BTD = self.fuse(hidden)
        return self.normed(self(jnp.zeros_like(features_BTD), features_BTD, start_B, None)[0], 0)


def finish_layer(
    module: HeadModule,
    x: Array,
    residual_BTD: Array,
    start_B: Array,
    cache: KVCache | None,
    block: Block | None,
) -> tuple[Array, KVCache]:
    """Runs attention and feed-forward of a head, each added to the stream.

    Args:
      x: the input of attention, ``[B, T, X]``.
      residual_BTD: the stream that attention is added to.
    """
    positions_BT = positions_of(start_B, x.shape[1], block)
    rope = module.config.layer.rotary_of(None).angles(positions_BT)
    with jax.named_scope("attention"):
        y_BTD, cache = module.attention(x, start_B, rope, cache, None, block)
    with jax.named_scope("mlp"):
        y_BTD, normed_BTD = module.mlp_norm.after(residual_BTD, y_BTD)
        return y_BTD + module.mlp(normed_BTD), cache


def check_draft_ids(name: str, ids_U: np.ndarray, size: int) -> None:
    """Raises ValueError unless the ids of a reduced vocabulary increase and are below ``size``."""
    wrong = np.flatnonzero((ids_U < 0) | (ids_U >= size) | (np.diff(ids_U, prepend=-1) <= 0))
    if len(wrong):
        at = wrong[0]
        raise ValueError(
            f"{name}[{at}] makes token {ids_U[at]} of {at}; tokens must increase and be below "
            f"{size}, the number of the target's tokens"
        )


def kernel_tables(ranks_V: Array, size: int) -> tuple[Array, Array]:
    """Returns ranks ``[1, V]``, and the least rank of each block of ids, ``[J]``, at most
    ``size``.
    """
    padded = pad_axis(ranks_V, -len(ranks_V) % IDS_OF_BLOCK, value=size)
    return ranks_V[None], padded.reshape(-1, IDS_OF_BLOCK).min(-1)


@dataclasses.dataclass(frozen=True)
class Head:
    """A head as a static, hashable value; parameters and weights are arguments of its methods.

    Attributes:
      layout: a `specsamp.mesh.layout.Layout` of weights, caches and logits; features are on all
        devices of a data shard.
      kernels: of its layers, for TPUs; None: XLA's operations.
    """

    config: HeadConfig
    layout: DeviceLayout = DeviceLayout()
    kernels: Kernels | None = None

    @property
    def hidden_layers(self) -> tuple[int, ...]:
        return self.config.hidden_layers

    @property
    def vocab_size(self) -> int:
        """Returns V, the target's."""
        return self.config.layer.vocab_size

    @functools.partial(jax.jit, static_argnums=0)
    def init(self, key: Array) -> Any:
        """Returns random float32 parameters; a reduced vocabulary has the first ids."""
        params = nn.meta.unbox(self._boxed(key))
        if self.config.draft_vocab_size is not None:
            params = params | {DRAFT_IDS: jnp.arange(self.config.draft_vocab_size, dtype=jnp.int32)}
        return params

    def param_axes(self) -> Any:
        """Returns the logical axis names of every parameter, as a tree of `PartitionSpec`."""
        axes = nn.get_partition_spec(jax.eval_shape(self._boxed, jax.random.key(0)))
        return (
            axes
            if self.config.draft_vocab_size is None
            else axes | {DRAFT_IDS: PartitionSpec(None)}
        )

    def _boxed(self, key: Array) -> Any:
        config, start_B = self.config, jnp.zeros((1,), jnp.int32)
        hidden = (jnp.zeros((1, 1, config.target_width)),) * len(config.hidden_layers)
        return config.module(config).init(key, hidden, start_B, method="everything")["params"]

    def param_shardings(self, params: Any) -> Any:
        """Returns the shardings of parameters, or of their shapes."""
        return self.layout.shardings(self.param_axes(), params)

    def prepare(self, params: Any) -> Any:
        """Casts parameters to the compute dtype, and turns a reduced vocabulary into a table of
        ranks.
        """
        params = dict(params)
        ids_U = params.pop(DRAFT_IDS, None)
        layer = self.config.layer
        weights = decode_weights(params, layer.compute_dtype, layer.weight_dtype)
        if self.config.own_embedding and self.kernels is not None:
            weights["embedding"] = pad_rows(weights["embedding"])
        return self.training_weights(weights, ids_U)

    def training_weights(self, params: Any, ids_U: Array | None) -> Any:
        """Returns the weights for the other methods, from float32 parameters and the ids of a
        reduced vocabulary.

        ``ranks_V`` holds the index of each target id among the head's ids, and U if the head does
        not have the id; ``tables`` are those of kernels.
        """
        if ids_U is None:
            return {"params": params, "ranks_V": None, "tables": None}
        size = len(ids_U)
        ranks_V = jnp.full((self.vocab_size,), size, jnp.int32)
        ranks_V = ranks_V.at[ids_U].set(jnp.arange(size, dtype=jnp.int32))
        return {"params": params, "ranks_V": ranks_V, "tables": kernel_tables(ranks_V, size)}

    def weight_axes(self) -> Any:
        """Returns the logical axis names of the result of `prepare`."""
        params = self.param_axes()
        ids = params.pop(DRAFT_IDS, None)
        tables = None if ids is None else (PartitionSpec(None, None), ids)
        return {"params": params, "ranks_V": ids, "tables": tables}

    def fit_slots(self, weights: Any, slots: int) -> Any:
        """Returns the weights on their devices; no weight of a head depends on the number
        of slots.
        """
        return self.layout.put(self.weight_axes(), weights)

    def in_dtype(self, dtype: str) -> Self:
        """Returns this head with another compute dtype, on the same mesh."""
        layer = dataclasses.replace(self.config.layer, dtype=dtype)
        return dataclasses.replace(self, config=dataclasses.replace(self.config, layer=layer))

    def check_target(self, target: LanguageModel) -> None:
        """Raises ValueError, with both sizes, unless the head was made for a target of
        these sizes.
        """
        if not isinstance(target, LayeredModel):
            raise ValueError(f"a head reads the layers of a LayeredModel; the target is {target!r}")
        for name, ours, theirs in (
            ("width", self.config.target_width, target.width),
            ("vocabulary", self.vocab_size, target.vocab_size),
            ("number of layers", self.config.target_layers, target.num_layers),
        ):
            if ours != theirs:
                raise ValueError(
                    f"the head was made for another target: its {name} is {ours}, this target's is "
                    f"{theirs}"
                )

    def _empty_layer(self, batch: int, slots: int) -> LayerCache:
        """Returns the empty cache of a layer; with kernels, of whole blocks of slots."""
        kind, kernels = kind_of_cache(self.config.layer, self.kernels)
        slots += 0 if kernels is None else -slots % KERNEL_SLOTS
        return kind.zeros(self.config.layer, batch, slots, kernels)

    def _layer_axes(self) -> LayerCache:
        kind, kernels = kind_of_cache(self.config.layer, self.kernels)
        return kind.logical_axes(kernels)

    def fuse(self, weights: Any, hidden: tuple[Array, ...]) -> Array:
        """Returns features ``[B, T, D]`` of the target's hidden states, one array for each of
        ``hidden_layers``.
        """
        dtype = self.config.layer.compute_dtype
        with jax.named_scope("fuse"):
            return self.layout.on_all_devices(
                self._apply("fuse", weights, tuple(x_BTD.astype(dtype) for x_BTD in hidden))
            )

    def embed(self, weights: Any, tokens_BT: Array) -> Array:
        """Returns the head's own embedding of tokens ``[B, T, D]``; requires
        ``config.own_embedding``.
        """
        return self.layout.on_all_devices(
            self._apply("embed", weights, self.layout.on_all_devices(tokens_BT))
        )

    def embed_tokens(
        self,
        weights: Any,
        target: LayeredModel,
        target_weights: Any,
        tokens_BT: Array,
        start_B: Array,
        cache: Any = None,
    ) -> Array:
        """Returns the embedding of tokens ``[B, T, D]``: the head's own, or the target's, whose
        ``cache`` stays as it is.
        """
        if self.config.own_embedding:
            return self.embed(weights, tokens_BT)
        return target.embed(target_weights, tokens_BT, start_B, cache)[0]

    def logits(
        self,
        weights: Any,
        features_BTD: Array,
        of_target: Callable[[Array], Array],
        offset: Array | int = 0,
    ) -> Array:
        """Returns float32 logits ``[B, T, U]`` of the next tokens.

        Args:
          of_target: `LayeredModel.unembed_normed` with its weights, for heads that share the
            target's output matrix.
          offset: of the token in its draft, below ``config.max_tokens``.
        """
        with jax.named_scope("logits"):
            x_BTD = self._apply("normed", weights, features_BTD, offset)
            if not self.config.own_output:
                return of_target(x_BTD)
            return self.layout.by_rows(self._apply("project", weights, x_BTD, offset))

    def expand(self, weights: Any, logits: Array, kernels: Kernels | None = None) -> Array:
        """Returns logits ``[..., V]`` over the target's vocabulary: -inf for ids outside the head's
        vocabulary.

        Args:
          kernels: of the target; None: there are none.
        """
        ranks_V = weights["ranks_V"]
        if ranks_V is None:
            return logits
        if kernels is not None:
            return kernels.expand(logits, *weights["tables"])
        return jnp.take(logits, ranks_V, axis=-1, mode="fill", fill_value=-jnp.inf)

    def _run(
        self, method: str, weights: Any, arrays: tuple[Array, ...], cache: Any, *options: Any
    ) -> tuple[Array, Any]:
        """Computes a method that returns an array and the written cache, in the layout."""
        arrays = self.layout.on_all_devices(arrays)
        made_BTD, cache = self._apply(method, weights, *arrays, cache, *options)
        cache = self.layout.place_cache(self.cache_axes(), cache)
        return self.layout.on_all_devices(made_BTD), cache

    def _apply(self, method: str, weights: Any, *arguments: Any) -> Any:
        module = self.config.module(self.config, self.layout, self.kernels)
        with full_precision(self.config.layer.dtype):
            return module.apply({"params": weights["params"]}, *arguments, method=method)


@dataclasses.dataclass(frozen=True)
class FeatureHead(Head):
    """A head that reads pairs and returns the features of the next position, with one call per
    drafted token.
    """

    def init_cache(self, batch: int, slots: int) -> LayerCache | tuple[()]:
        """Returns an empty cache, of one layer or none."""
        if not self.config.has_layer:
            return ()
        return self.layout.place_cache(self.cache_axes(), self._empty_layer(batch, slots))

    def cache_axes(self) -> LayerCache | tuple[()]:
        """Returns the logical axis names of `init_cache`'s result."""
        return self._layer_axes() if self.config.has_layer else ()

    def __call__(
        self,
        weights: Any,
        embedded_BTD: Array,
        features_BTD: Array,
        start_B: Array,
        cache: KVCache | None,
        block: Block | None = None,
        number: int | None = None,
    ) -> tuple[Array, KVCache]:
        """Reads pairs in slots ``start_B ..``; returns the features ``[B, T, D]`` of the positions
        after them.

        Args:
          weights: from `prepare`.
          embedded_BTD: the tokens x_{t+1}.
          features_BTD: of positions t, from `fuse` or an earlier call.
          cache: see `LanguageModel.__call__`; None: the pairs of the call attend to each other
            only.
          block: positions and visibility of the pairs of a token tree; None: a chain.
          number: of a module, see `ModuleChain`; None: the head has one.
        """
        embedded_BTD = embedded_BTD.astype(self.config.layer.compute_dtype)
        # The compiler would keep input features split in the carry, for their product.
        arrays = embedded_BTD, features_BTD, start_B
        options = (block,) if number is None else (block, number)
        return self._run("__call__", weights, arrays, cache, *options)

    def take(self, features_BTD: Array, row_B: Array) -> Array:
        """Returns the features of one position of each sequence, ``[B, D]``."""
        row_B = self.layout.on_all_devices(row_B)
        return self.layout.on_all_devices(take_row(features_BTD, row_B))

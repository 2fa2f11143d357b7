"""Tables of names: which tensor of a checkpoint is which parameter, and how the axes of one lie in the other.

A line such as ``"NH D -> NDH"`` reads: the tensor has two axes, the first of them N heads of H entries; the
parameter has the axes N, D, H. C is the three of queries, keys and values in one tensor, of which a line names
one: ``"NCH D -> NDH: C=0"``. Of E experts, each in a tensor of its own, a line names all: ``"x.{e}.y  F D -> EDF"``.
For the letters see `sizes`.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from specsamp.models.config import TransformerConfig

# Tensors of some files that no model needs: masks and tables that are computed.
BUFFERS = re.compile(r"(attn|attention)\.(masked_)?bias$|rotary_emb\.inv_freq$")

ReadTensor = Callable[[tuple[slice, ...]], np.ndarray]


def sizes(config: TransformerConfig) -> dict[str, int]:
    """Returns the size of the axis that each letter stands for."""
    return dict(
        V=config.vocab_size,
        D=config.width,
        F=config.feedforward_width,
        N=config.num_heads,
        M=config.num_kv_heads,
        H=config.head_size,
        P=config.max_positions,
        C=3,
        E=0 if config.experts is None else config.experts.num_experts,
        I=0 if config.experts is None else config.experts.width,
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class TensorSource:
    """The tensor that holds a parameter, or the tensors of all experts."""

    tensor: str  # its name; of experts one with the place of their number, "{e}"
    tensor_axes: tuple[str, ...]  # each a product of letters, the outermost first
    axes: str  # of the parameter
    part: int | None = None  # of C

    def members(self, sizes: Mapping[str, int]) -> list[TensorSource]:
        """Returns one source for each expert of a stacked parameter; [self] for any other parameter."""
        if not self.is_stacked:
            return [self]
        tensors = [self.tensor.format(e=expert) for expert in range(sizes["E"])]
        return [dataclasses.replace(self, tensor=tensor, axes=self.axes[1:]) for tensor in tensors]

    @property
    def is_stacked(self) -> bool:
        """Returns whether the parameter stacks the tensors of all experts."""
        return "{e}" in self.tensor

    def shape(self, sizes: Mapping[str, int]) -> tuple[int, ...]:
        """Returns the shape of the tensor, or of each expert's."""
        return tuple(math.prod(sizes[letter] for letter in axis) for axis in self.tensor_axes)

    def read(self, read: ReadTensor, sizes: Mapping[str, int], index: Sequence[slice]) -> np.ndarray:
        """Returns the slice ``index`` of the parameter, perhaps as a view of the array that ``read`` returned.

        Args:
          read: reads a slice of the tensor. Of an axis that is a product, the outermost letter limits what is read,
            the others what is kept.
          sizes: of every letter.
          index: one slice for each axis of the parameter.
        """
        wanted = {letter: piece.indices(sizes[letter])[:2] for letter, piece in zip(self.axes, index, strict=True)}
        if self.part is not None:
            wanted["C"] = (self.part, self.part + 1)
        inner = [math.prod(sizes[letter] for letter in axis[1:]) for axis in self.tensor_axes]
        spans = [wanted[axis[0]] for axis in self.tensor_axes]
        block = read(tuple(slice(first * n, last * n) for (first, last), n in zip(spans, inner)))
        letters = "".join(self.tensor_axes)
        outermost = {axis[0] for axis in self.tensor_axes}
        block = block.reshape([np.diff(wanted[x])[0] if x in outermost else sizes[x] for x in letters])
        block = block[tuple(slice(None) if x in outermost else slice(*wanted[x]) for x in letters)]
        if self.part is not None:
            block, letters = block.squeeze(letters.index("C")), letters.replace("C", "")
        return block.transpose([letters.index(letter) for letter in self.axes])

    def write(self, parameter: np.ndarray, sizes: Mapping[str, int]) -> np.ndarray:
        """Returns the tensor of a whole parameter. A tensor of three parameters cannot be made of one of them."""
        letters = "".join(self.tensor_axes)
        return parameter.transpose([self.axes.index(letter) for letter in letters]).reshape(self.shape(sizes))


def find_source(parameter: str, names: Mapping[str, str]) -> TensorSource:
    """Returns the source of a parameter by a family's table; raises KeyError for one that the family does not have."""
    layer = re.match(r"(?:layer|head)_(\d+)/", parameter)
    line = names[re.sub(r"^(layer|head)_\d+/", r"\1/", parameter)]
    match = re.fullmatch(r"(?P<tensor>\S+) +(?P<axes>[A-Z ]+) -> (?P<ours>[A-Z]+)(: C=(?P<part>\d))?", line)
    return TensorSource(
        tensor=match["tensor"].format(i=layer and layer[1], e="{e}"),
        tensor_axes=tuple(match["axes"].split()),
        axes=match["ours"],
        part=None if match["part"] is None else int(match["part"]),
    )


LLAMA = {
    "embedding": "model.embed_tokens.weight  V D -> VD",
    "output_embedding": "lm_head.weight  V D -> VD",
    "final_norm/scale": "model.norm.weight  D -> D",
    "layer/attention_norm/scale": "model.layers.{i}.input_layernorm.weight  D -> D",
    "layer/mlp_norm/scale": "model.layers.{i}.post_attention_layernorm.weight  D -> D",
    "layer/attention/query": "model.layers.{i}.self_attn.q_proj.weight  NH D -> NDH",
    "layer/attention/query_bias": "model.layers.{i}.self_attn.q_proj.bias  NH -> NH",
    "layer/attention/key": "model.layers.{i}.self_attn.k_proj.weight  MH D -> MDH",
    "layer/attention/key_bias": "model.layers.{i}.self_attn.k_proj.bias  MH -> MH",
    "layer/attention/value": "model.layers.{i}.self_attn.v_proj.weight  MH D -> MDH",
    "layer/attention/value_bias": "model.layers.{i}.self_attn.v_proj.bias  MH -> MH",
    "layer/attention/query_norm/scale": "model.layers.{i}.self_attn.q_norm.weight  H -> H",
    "layer/attention/key_norm/scale": "model.layers.{i}.self_attn.k_norm.weight  H -> H",
    "layer/attention/output": "model.layers.{i}.self_attn.o_proj.weight  D NH -> NHD",
    "layer/attention/output_bias": "model.layers.{i}.self_attn.o_proj.bias  D -> D",
    "layer/mlp/gate": "model.layers.{i}.mlp.gate_proj.weight  F D -> DF",
    "layer/mlp/gate_bias": "model.layers.{i}.mlp.gate_proj.bias  F -> F",
    "layer/mlp/up": "model.layers.{i}.mlp.up_proj.weight  F D -> DF",
    "layer/mlp/up_bias": "model.layers.{i}.mlp.up_proj.bias  F -> F",
    "layer/mlp/down": "model.layers.{i}.mlp.down_proj.weight  D F -> FD",
    "layer/mlp/down_bias": "model.layers.{i}.mlp.down_proj.bias  D -> D",
}
GEMMA = LLAMA | {
    "layer/attention_post_norm/scale": "model.layers.{i}.post_attention_layernorm.weight  D -> D",
    "layer/mlp_norm/scale": "model.layers.{i}.pre_feedforward_layernorm.weight  D -> D",
    "layer/mlp_post_norm/scale": "model.layers.{i}.post_feedforward_layernorm.weight  D -> D",
}
QWEN_EXPERTS = LLAMA | {
    "layer/experts/router": "model.layers.{i}.mlp.gate.weight  E D -> DE",
    "layer/experts/gate": "model.layers.{i}.mlp.experts.{e}.gate_proj.weight  I D -> EDI",
    "layer/experts/up": "model.layers.{i}.mlp.experts.{e}.up_proj.weight  I D -> EDI",
    "layer/experts/down": "model.layers.{i}.mlp.experts.{e}.down_proj.weight  D I -> EID",
}
MIXTRAL = LLAMA | {
    "layer/experts/router": "model.layers.{i}.block_sparse_moe.gate.weight  E D -> DE",
    "layer/experts/gate": "model.layers.{i}.block_sparse_moe.experts.{e}.w1.weight  I D -> EDI",
    "layer/experts/up": "model.layers.{i}.block_sparse_moe.experts.{e}.w3.weight  I D -> EDI",
    "layer/experts/down": "model.layers.{i}.block_sparse_moe.experts.{e}.w2.weight  D I -> EID",
}
GPT2 = {
    "embedding": "transformer.wte.weight  V D -> VD",
    "output_embedding": "lm_head.weight  V D -> VD",
    "position_embedding": "transformer.wpe.weight  P D -> PD",
    "final_norm/scale": "transformer.ln_f.weight  D -> D",
    "final_norm/bias": "transformer.ln_f.bias  D -> D",
    "layer/attention_norm/scale": "transformer.h.{i}.ln_1.weight  D -> D",
    "layer/attention_norm/bias": "transformer.h.{i}.ln_1.bias  D -> D",
    "layer/mlp_norm/scale": "transformer.h.{i}.ln_2.weight  D -> D",
    "layer/mlp_norm/bias": "transformer.h.{i}.ln_2.bias  D -> D",
    "layer/attention/query": "transformer.h.{i}.attn.c_attn.weight  D CNH -> NDH: C=0",
    "layer/attention/key": "transformer.h.{i}.attn.c_attn.weight  D CMH -> MDH: C=1",
    "layer/attention/value": "transformer.h.{i}.attn.c_attn.weight  D CMH -> MDH: C=2",
    "layer/attention/query_bias": "transformer.h.{i}.attn.c_attn.bias  CNH -> NH: C=0",
    "layer/attention/key_bias": "transformer.h.{i}.attn.c_attn.bias  CMH -> MH: C=1",
    "layer/attention/value_bias": "transformer.h.{i}.attn.c_attn.bias  CMH -> MH: C=2",
    "layer/attention/output": "transformer.h.{i}.attn.c_proj.weight  NH D -> NHD",
    "layer/attention/output_bias": "transformer.h.{i}.attn.c_proj.bias  D -> D",
    "layer/mlp/up": "transformer.h.{i}.mlp.c_fc.weight  D F -> DF",
    "layer/mlp/up_bias": "transformer.h.{i}.mlp.c_fc.bias  F -> F",
    "layer/mlp/down": "transformer.h.{i}.mlp.c_proj.weight  F D -> FD",
    "layer/mlp/down_bias": "transformer.h.{i}.mlp.c_proj.bias  D -> D",
}
GPT_NEOX = {
    "embedding": "gpt_neox.embed_in.weight  V D -> VD",
    "output_embedding": "embed_out.weight  V D -> VD",
    "final_norm/scale": "gpt_neox.final_layer_norm.weight  D -> D",
    "final_norm/bias": "gpt_neox.final_layer_norm.bias  D -> D",
    "layer/attention_norm/scale": "gpt_neox.layers.{i}.input_layernorm.weight  D -> D",
    "layer/attention_norm/bias": "gpt_neox.layers.{i}.input_layernorm.bias  D -> D",
    "layer/mlp_norm/scale": "gpt_neox.layers.{i}.post_attention_layernorm.weight  D -> D",
    "layer/mlp_norm/bias": "gpt_neox.layers.{i}.post_attention_layernorm.bias  D -> D",
    "layer/attention/query": "gpt_neox.layers.{i}.attention.query_key_value.weight  NCH D -> NDH: C=0",
    "layer/attention/key": "gpt_neox.layers.{i}.attention.query_key_value.weight  MCH D -> MDH: C=1",
    "layer/attention/value": "gpt_neox.layers.{i}.attention.query_key_value.weight  MCH D -> MDH: C=2",
    "layer/attention/query_bias": "gpt_neox.layers.{i}.attention.query_key_value.bias  NCH -> NH: C=0",
    "layer/attention/key_bias": "gpt_neox.layers.{i}.attention.query_key_value.bias  MCH -> MH: C=1",
    "layer/attention/value_bias": "gpt_neox.layers.{i}.attention.query_key_value.bias  MCH -> MH: C=2",
    "layer/attention/output": "gpt_neox.layers.{i}.attention.dense.weight  D NH -> NHD",
    "layer/attention/output_bias": "gpt_neox.layers.{i}.attention.dense.bias  D -> D",
    "layer/mlp/up": "gpt_neox.layers.{i}.mlp.dense_h_to_4h.weight  F D -> DF",
    "layer/mlp/up_bias": "gpt_neox.layers.{i}.mlp.dense_h_to_4h.bias  F -> F",
    "layer/mlp/down": "gpt_neox.layers.{i}.mlp.dense_4h_to_h.weight  D F -> FD",
    "layer/mlp/down_bias": "gpt_neox.layers.{i}.mlp.dense_4h_to_h.bias  D -> D",
}


def _layer_of_head(prefix: str) -> dict[str, str]:
    """Returns the lines of a head's decoder layer; its projections to heads may read more than the stream."""
    lines = {
        name.removeprefix("layer/"): line.replace("model.layers.{i}", prefix)
        for name, line in LLAMA.items()
        if name.startswith("layer/")
    }
    return lines | {
        "attention/query": f"{prefix}.self_attn.q_proj.weight  NH X -> NXH",
        "attention/key": f"{prefix}.self_attn.k_proj.weight  MH X -> MXH",
        "attention/value": f"{prefix}.self_attn.v_proj.weight  MH X -> MXH",
    }


# Of heads. U is the reduced vocabulary, W the target's width, X and Y what the projections to heads and fc read. This
# is the layout of speculators; what EAGLE calls midlayer is layers.0 there.
HEAD = {
    "embedding": "embed_tokens.weight  V D -> VD",
    "output": "lm_head.weight  U D -> UD",
    "fc": "fc.weight  D Y -> YD",
    "fc_bias": "fc.bias  D -> D",
    "input_norm/scale": "input_norm.weight  Y -> Y",
    "hidden_norm/scale": "layers.0.hidden_norm.weight  D -> D",
    "final_norm/scale": "norm.weight  D -> D",
    **{f"fc_norm_{i}/scale": f"fc_norm.{i}.weight  W -> W" for i in range(16)},
    **_layer_of_head("layers.0"),
}
MEDUSA = {  # as its authors write them
    "head/linear": "{i}.0.linear.weight  D W -> WD",
    "head/bias": "{i}.0.linear.bias  D -> D",
    "head/output": "{i}.1.weight  U D -> UD",
}
MEDUSA_BLOCKS = {  # as vLLM reads them
    "head/linear": "blocks.{i}.layers.0.weight  D W -> WD",
    "head/bias": "blocks.{i}.layers.0.bias  D -> D",
    "head/output": "lm_heads.{i}.weight  U D -> UD",
}
MIMO_MTP = {  # the module in a checkpoint of MiMo
    "fc": "model.mtp_layers.0.input_proj.weight  D Y -> YD",
    "token_norm/scale": "model.mtp_layers.0.token_layernorm.weight  D -> D",
    "hidden_norm/scale": "model.mtp_layers.0.hidden_layernorm.weight  D -> D",
    "final_norm/scale": "model.mtp_layers.0.final_layernorm.weight  D -> D",
    **_layer_of_head("model.mtp_layers.0"),
}

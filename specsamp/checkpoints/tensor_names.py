"""Tables of names: which tensor of a checkpoint is which parameter, and how the axes of one lie in the other.

A line such as ``"NH D -> NDH"`` reads: the tensor has two axes, the first of them N heads of H entries; the
parameter has the axes N, D, H. C is the three of queries, keys and values in one tensor, of which a line names
one: ``"NCH D -> NDH: C=0"``. Of E experts, each in a tensor of its own, a line names all: ``"x.{e}.y  F D -> EDF"``.
For the letters see `sizes`; of heads U is the reduced vocabulary, W the target's width, X and Y are the widths that the
projections to heads and fc read.

The tables are tensor_names.json. A family of models names its table in architectures.py, a kind of heads in
head_config.py. Heads of EAGLE are written in the layout of speculators; EAGLE calls their layers.0 midlayer. Medusa has
two tables: its authors' names, and in medusa_blocks those that vLLM reads.
"""

from __future__ import annotations

import dataclasses
import math
import pathlib
import re
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from specsamp import storage
from specsamp.models.config import TransformerConfig

TABLES: dict[str, dict[str, str]] = storage.read_json(pathlib.Path(__file__).with_suffix(".json"))

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

"""Finds the tensor of each parameter by tables of names, and reads and writes its values.

A line of a table such as ``"NH D -> NDH"`` means: the tensor has two axes, of which the first is N
heads of H entries; the parameter has the axes N, D, H. If several parameters share an axis, a line
has the index of its part: ``"NH+MH+MH D -> MDH: 1"``; or ``"N(H+H+H) D -> NDH: 0"``, if each head
has such parts; with parts of one entry, ``I(O+O)``, they are interleaved. E is the axis of experts,
which may be separate tensors: ``"x.{e}.y  I D -> EID"``. For other letters see `sizes`. In heads U
is the size of the reduced vocabulary and W the target's width; X and Y are the widths of the inputs
of attention and of fc.

The tables are in tensor_names.json. architectures.py has the table's name for each family,
head_config.py for each head. Heads of EAGLE have the names of the package speculators. Medusa has
two tables: ``medusa`` with the names of its authors, ``medusa_blocks`` with vLLM's.
"""

from __future__ import annotations

import dataclasses
import math
import pathlib
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from specsamp import storage
from specsamp.checkpoints.params import MOST_SHOWN
from specsamp.checkpoints.safetensors_io import DTYPES, Tensor
from specsamp.models.config import TransformerConfig

TABLES: dict[str, dict[str, str]] = storage.read_json(pathlib.Path(__file__).with_suffix(".json"))

# Tensors that no model needs, but some files have: masks and tables that are computed.
BUFFERS = re.compile(r"(attn|attention)\.(masked_)?bias$|rotary_emb\.inv_freq$")


def sizes(config: TransformerConfig, parameter: str = "") -> dict[str, int]:
    """Returns the size of the axis of each letter, in the layer of a parameter."""
    layer = re.match(r"layer_(\d+)/", parameter)
    config = config.of_layer(int(layer[1])) if layer else config
    found = dict(
        V=config.vocab_size,
        D=config.width,
        F=config.feedforward_width,
        N=config.num_heads,
        M=config.num_kv_heads,
        H=config.head_size,
        P=config.max_positions,
        O=1,
    )
    if (experts := config.experts) is not None:
        found |= dict(E=experts.num_experts, I=experts.width, J=experts.shared_width)
    if (recurrent := config.recurrent) is not None:
        # R value heads for each of G key heads, with Y entries together.
        group = recurrent.num_value_heads // recurrent.num_key_heads
        found |= dict(
            G=recurrent.num_key_heads,
            K=recurrent.key_size,
            R=group,
            Y=group * recurrent.value_size,
            Z=recurrent.value_size,
            T=recurrent.taps,
        )
    return found


@dataclasses.dataclass(frozen=True, kw_only=True)
class TensorSource:
    """The tensor that holds a parameter, or the tensors of all experts."""

    tensor: str  # its name; of experts with "{e}" for their number
    # Each a product of letters, the outermost first, or a sum of such parts.
    tensor_axes: tuple[str, ...]
    axes: str  # of the parameter
    sizes: Mapping[str, int]  # of the axis that each letter stands for, in the checkpoint
    part: int = 0  # of a sum

    def members(self) -> list[TensorSource]:
        """Returns the source of each expert of a stacked parameter; [self] for any other
        parameter.
        """
        if not self.is_stacked:
            return [self]
        tensors = [self.tensor.format(e=expert) for expert in range(self.sizes["E"])]
        return [dataclasses.replace(self, tensor=tensor, axes=self.axes[1:]) for tensor in tensors]

    @property
    def is_stacked(self) -> bool:
        """Returns whether the parameter stacks the tensors of all experts."""
        return "{e}" in self.tensor

    @property
    def shape(self) -> tuple[int, ...]:
        """Returns the shape of the tensor, or of each expert's."""
        return tuple(map(self._size, self.tensor_axes))

    def _size(self, axis: str) -> int:
        outer, parts = _split(axis)
        return self._product(outer) * sum(map(self._product, parts))

    def _product(self, letters: str) -> int:
        return math.prod(self.sizes[letter] for letter in letters)

    def read(
        self,
        tensors: Mapping[str, Tensor],
        index: Sequence[slice],
        *,
        shape: Sequence[int],
        dtype: np.dtype,
    ) -> np.ndarray:
        """Reads a slice of the parameter in ``dtype``; the array owns its memory.

        Experts are read one after another. If a tensor axis is a product of letters, only the slice
        of the outermost letter limits the bytes that are read.

        Args:
          tensors: of the checkpoint, by name.
          index: one slice for each axis of the parameter, without steps.
          shape: of the parameter in the model. Rows beyond the tensor's rows pad the vocabulary,
            and are zero.
        """
        spans = [part.indices(size)[:2] for part, size in zip(index, shape, strict=True)]
        values = np.zeros([last - first for first, last in spans], dtype)
        if self.is_stacked:
            for expert, member in zip(values, self.members()[index[0]], strict=True):
                expert[...] = member.read(tensors, index[1:], shape=shape[1:], dtype=dtype)
            return values
        if self.axes[0] == self.tensor_axes[0] == "E" and len(values) > 1:
            for i, expert in enumerate(range(*spans[0])):
                here = (slice(expert, expert + 1), *index[1:])
                values[i] = self.read(tensors, here, shape=shape, dtype=dtype)[0]
            return values
        wanted = {
            letter: np.minimum(span, self.sizes[letter]) for letter, span in zip(self.axes, spans)
        }
        wanted = {letter: wanted.get(letter, (0, size)) for letter, size in self.sizes.items()}
        letters, outermost, read, inside = "", "", [], []
        for axis in self.tensor_axes:
            outer, parts = _split(axis)
            part = parts[self.part % len(parts)]
            before = sum(map(self._product, parts[: self.part % len(parts)]))
            names = outer + part
            inner = self._size(axis) // self.sizes[outer] if outer else self._product(part[1:])
            first, last = np.multiply(wanted[names[0]], inner)
            is_interleaved = outer and inner == len(parts)
            if is_interleaved:
                read.append(slice(first + before, last, inner))
            else:
                read.append(slice(first, last) if outer else slice(first + before, last + before))
            is_cut = outer and not is_interleaved
            inside.append(slice(before, before + self._product(part)) if is_cut else None)
            letters, outermost = letters + names, outermost + names[0]
        block = tensors[self.tensor].read(read)
        for at, (axis, cut) in reversed([*enumerate(zip(self.tensor_axes, inside))]):
            if cut is not None:
                shape = (*block.shape[:at], -1, self._size(axis[1:]), *block.shape[at + 1 :])
                block = block.reshape(shape)[(*[slice(None)] * (at + 1), cut)]
        block = block.reshape(
            [np.diff(wanted[x])[0] if x in outermost else self.sizes[x] for x in letters]
        )
        block = block[tuple(slice(None) if x in outermost else slice(*wanted[x]) for x in letters)]
        block = block.squeeze(tuple(at for at, x in enumerate(letters) if x not in self.axes))
        letters = "".join(x for x in letters if x in self.axes)
        block = block.transpose([letters.index(letter) for letter in self.axes])
        values[tuple(map(slice, block.shape))] = block
        return values

    def write(self, parameter: np.ndarray) -> np.ndarray:
        """Returns the tensor of a whole parameter; not for a tensor of several parameters."""
        letters = "".join(self.tensor_axes)
        moved = parameter.transpose([self.axes.index(letter) for letter in letters])
        return np.ascontiguousarray(moved.reshape(self.shape))


def find_source(parameter: str, names: Mapping[str, str], sizes: Mapping[str, int]) -> TensorSource:
    """Returns the source of a parameter by a family's table; raises KeyError if the family does not
    have it.
    """
    layer = re.match(r"(?:layer|head|module)_(\d+)/", parameter)
    line = names[re.sub(r"^(layer|head|module)_\d+/", r"\1/", parameter)]
    match = re.fullmatch(
        r"(?P<tensor>\S+) +(?P<axes>[A-Z+() ]+) -> (?P<ours>[A-Z]+)(: (?P<part>\d))?", line
    )
    return TensorSource(
        tensor=match["tensor"].format(i=layer and layer[1], e="{e}"),
        tensor_axes=tuple(match["axes"].split()),
        axes=match["ours"],
        sizes=sizes,
        part=int(match["part"] or 0),
    )


def _split(axis: str) -> tuple[str, list[str]]:
    """Returns the outer letter of an axis, if it has parts within, and its parts."""
    outer, _, parts = axis.rpartition("(")
    return outer, parts.rstrip(")").split("+")


def check_tensors(
    name: str,
    found: Mapping[str, Tensor],
    sources: Mapping[str, TensorSource],
    is_harmless: Callable[[str], Any],
) -> None:
    """Raises ValueError unless files hold exactly the tensors of a model, in their shapes and a
    known dtype.

    Args:
      name: of the checkpoint, for messages.
      found: the tensors of its files.
      sources: of each parameter.
      is_harmless: returns whether the files may hold a tensor with this name that is not part of
        the model.

    Raises:
      ValueError: lists tensors that are missing, unknown, misshapen or of another dtype.
    """
    wanted = {
        member.tensor: member.shape for source in sources.values() for member in source.members()
    }
    there = {name: found[name] for name in wanted if name in found}

    def where(name: str) -> str:
        return f"{name} {found[name].shape} in {found[name].file.name}"

    problems = {
        "missing": [f"{name} {shape}" for name, shape in wanted.items() if name not in found],
        "not part of the model": [
            where(name) for name in sorted(found.keys() - wanted) if not is_harmless(name)
        ],
        "of another shape than config.json says": [
            f"{where(name)}, {wanted[name]} wanted"
            for name, tensor in there.items()
            if tensor.shape != wanted[name]
        ],
        f"of a dtype that is not supported (quantised?; known are {', '.join(DTYPES)})": [
            f"{where(name)}: {tensor.kind}"
            for name, tensor in there.items()
            if tensor.kind not in DTYPES
        ],
    }
    described = [
        f"{len(names)} tensors are {what}: "
        f"{'; '.join(names[:MOST_SHOWN])}{' ...' if len(names) > MOST_SHOWN else ''}"
        for what, names in problems.items()
        if names
    ]
    if described:
        raise ValueError(
            f"{name} does not contain the model of its config.json. {'. '.join(described)}"
        )

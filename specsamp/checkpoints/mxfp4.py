"""Reads MXFP4 tensors (gpt-oss), exactly: four-bit numbers, of which 32 share a power of two.

A tensor is stored as two, ``NAME_blocks`` and ``NAME_scales``; it is read by the name of its
blocks. Formats e2m1 and e8m0 of the Open Compute Project's microscaling formats 1.0.
"""

import dataclasses
from collections.abc import Mapping, Sequence

import ml_dtypes
import numpy as np
from etils import epath

from specsamp.checkpoints.safetensors_io import Tensor

BLOCKS, SCALES = "_blocks", "_scales"
GROUP = 32  # entries with one scale
BIAS = 127  # of a scale, the exponent of two
POSITIVE = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
VALUES = np.concatenate([POSITIVE, -POSITIVE])
# Of a byte both numbers, as one of 64 bits, which is looked up faster; the low half is the first.
PAIRS = VALUES[np.arange(256)[:, None] >> np.array([0, 4]) & 15].view(np.uint64)[:, 0]


@dataclasses.dataclass(frozen=True, kw_only=True)
class PackedTensor:
    """A `Tensor` of two tensors, which is read in bfloat16."""

    blocks: Tensor  # uint8, [..., groups, 16]
    scales: Tensor  # uint8, [..., groups]
    kind: str = "BF16"

    @property
    def file(self) -> epath.Path:
        return self.blocks.file

    @property
    def shape(self) -> tuple[int, ...]:
        *outer, groups = self.scales.shape
        return (*outer, groups * GROUP)

    def read(self, index: Sequence[slice]) -> np.ndarray:
        """Returns a slice of the values, see `Tensor.read`; only its groups are read."""
        index = (*index, *[slice(None)] * (len(self.shape) - len(index)))
        first, last, _ = index[-1].indices(self.shape[-1])
        groups = slice(first // GROUP, -(-last // GROUP))
        bytes_XGb = self.blocks.read((*index[:-1], groups))
        scales_XG = self.scales.read((*index[:-1], groups)).astype(np.int32)
        values = PAIRS.take(bytes_XGb).view(np.float32)
        with np.errstate(over="ignore", invalid="ignore"):  # of a damaged file; refused later
            values *= np.ldexp(np.float32(1), scales_XG - BIAS)[..., None]
        # Exact: the numbers have two significant bits.
        values = values.reshape(*scales_XG.shape[:-1], -1).astype(ml_dtypes.bfloat16)
        start = first - groups.start * GROUP
        return values[..., start : start + last - first]


def join_packed(found: Mapping[str, Tensor]) -> dict[str, Tensor | PackedTensor]:
    """Returns tensors in which each pair of blocks and scales is one, under the name of its blocks.

    Raises:
      ValueError: blocks without scales, or shapes that are not those of groups of 32.
    """
    joined = dict(found)
    for name, blocks in found.items():
        scales = found.get(name.removesuffix(BLOCKS) + SCALES)
        if not name.endswith(BLOCKS) or blocks.kind != "U8":
            continue
        if scales is None or scales.kind != "U8" or blocks.shape != (*scales.shape, GROUP // 2):
            raise ValueError(
                f"{blocks.file}: {name} {blocks.shape} is not MXFP4: beside it must be {SCALES} "
                f"in U8, of its shape without the last axis of {GROUP // 2} bytes; got "
                f"{scales and (scales.kind, scales.shape)}"
            )
        joined[name] = PackedTensor(blocks=blocks, scales=scales)
        del joined[name.removesuffix(BLOCKS) + SCALES]
    return joined

"""Position schemes: rotary, and the relative keys of Transformer-XL.

Relative keys (Dai et al., arXiv 1901.02860): the score of query i on key j is

    (q_i + u) . k_j + (q_i + v) . r_{i-j},      r_d = R sinusoid(d)

with biases u, v per head. R does not change in decoding, so ``r`` is computed once for every
distance: the D^2 matrices of all layers are not read for each token. The table is stored
*reversed*, slot ``S-1-d`` for distance d; so the scores of a query on all slots are a contiguous
slice of its scores on the whole table, and no keys are gathered.
"""

import dataclasses
import math

import jax
import jax.numpy as jnp

from specsamp import validate
from specsamp.arrays import pad_axis
from specsamp.models.slots import read_slots
from specsamp.models.visibility import Visibility

Array = jax.Array


@dataclasses.dataclass(frozen=True, kw_only=True)
class RotaryScaling:
    """Scaling of rotary angles, for sequences longer than in pretraining.

    "linear" divides all frequencies by ``factor`` (Chen et al., arXiv 2306.15595). "llama3" divides
    frequencies of wavelengths beyond ``original_positions / low``, keeps frequencies of wavelengths
    below ``original_positions / high`` and interpolates in between (Llama 3.1). "yarn" divides the
    frequencies of dimensions that turn less than ``low`` times within the original positions, keeps
    those of dimensions that turn more than ``high`` times, with a ramp in between, and multiplies
    cosine and sine by ``amplitude`` (Peng et al., arXiv 2309.00071). "proportional" turns the first
    ``share`` of the dimensions, and divides their frequencies by ``factor`` (Gemma 4). "longrope"
    divides each frequency by one of the ``divisors``, and multiplies as "yarn", within the original
    positions (Ding et al., arXiv 2402.13753).
    """

    kind: str
    factor: float
    original_positions: int | None = None  # of "llama3", "yarn" and "longrope"
    low: float = 1.0
    high: float = 4.0
    amplitude: float = 1.0
    whole_dimensions: bool = True  # of "yarn": the ramp begins and ends on whole dimensions
    share: float = 1.0  # of "proportional"
    divisors: tuple[float, ...] = ()  # of "longrope"

    def __post_init__(self):
        object.__setattr__(self, "divisors", tuple(self.divisors))
        kinds = ("linear", "llama3", "yarn", "proportional", "longrope")
        validate.choice("the kind of a RotaryScaling", self.kind, kinds)
        validate.number("the factor of a RotaryScaling", self.factor, 0, above=True)
        if self.kind in ("llama3", "yarn") and (
            self.original_positions is None or not 0 < self.low < self.high
        ):
            raise ValueError(
                f"{self.kind} scaling needs original_positions and 0 < low < high; got "
                f"{self.original_positions}, {self.low} and {self.high}"
            )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rotary:
    """The rotary embedding of a layer."""

    size: int  # entries of a head that are rotated, the first ones
    base: float
    scaling: RotaryScaling | None = None

    def angles(self, positions_BT: Array) -> tuple[Array, Array]:
        """Returns cosine and sine of the angles (Su et al., arXiv 2104.09864), each ``[B, T,
        size/2]`` float32.
        """
        half = self.size // 2
        frequencies = self.base ** (-jnp.arange(half, dtype=jnp.float32) / half)
        if self.scaling is not None:
            frequencies = self._scaled(frequencies, self.scaling)
        angles = positions_BT.astype(jnp.float32)[:, :, None] * frequencies[None, None, :]
        cos, sin = jnp.cos(angles), jnp.sin(angles)
        if self.scaling is not None and self.scaling.amplitude != 1:
            cos, sin = cos * self.scaling.amplitude, sin * self.scaling.amplitude
        # Without the barrier XLA's CPU backend computes both again for every head, layer and
        # gradient.
        return jax.lax.optimization_barrier((cos, sin))

    def _scaled(self, frequencies: Array, scaling: RotaryScaling) -> Array:
        if scaling.kind == "linear":
            return frequencies / scaling.factor
        if scaling.kind == "longrope":
            return frequencies / jnp.asarray(scaling.divisors, jnp.float32)
        if scaling.kind == "proportional":
            num_turned = int(scaling.share * self.size // 2)
            is_turned = jnp.arange(self.size // 2) < num_turned
            return jnp.where(is_turned, frequencies / scaling.factor, 0)
        if scaling.kind == "llama3":
            # Within the original positions.
            turned = scaling.original_positions * frequencies / (2 * math.pi)
            kept = (turned - scaling.low) / (scaling.high - scaling.low)
        else:

            def dimension(times):
                """Returns the dimension that turns ``times`` times within the original
                positions.
                """
                return (
                    math.log(scaling.original_positions / (times * 2 * math.pi))
                    * self.size
                    / (2 * math.log(self.base))
                )

            first, last = dimension(scaling.high), dimension(scaling.low)
            if scaling.whole_dimensions:
                first, last = math.floor(first), math.ceil(last)
            first, last = max(first, 0), min(last, self.size - 1)
            kept = 1 - (jnp.arange(self.size // 2, dtype=jnp.float32) - first) / max(
                last - first, 1e-3
            )
        kept = jnp.clip(kept, 0, 1)
        return frequencies * (kept + (1 - kept) / scaling.factor)


def apply_rope(x_BNTH: Array, cos_BTH: Array, sin_BTH: Array) -> Array:
    """Rotates the first half of each head against its second half, in float32.

    With angles for fewer entries, only the first entries of a head are rotated, half against half.
    """
    half, size = cos_BTH.shape[-1], x_BNTH.shape[-1]
    cos, sin = cos_BTH[:, None], sin_BTH[:, None]
    x1, x2 = (
        x_BNTH[..., :half].astype(jnp.float32),
        x_BNTH[..., half : 2 * half].astype(jnp.float32),
    )
    turned = jnp.concatenate([x1 * cos - x2 * sin, x2 * cos + x1 * sin], axis=-1).astype(
        x_BNTH.dtype
    )
    return (
        turned if 2 * half == size else jnp.concatenate([turned, x_BNTH[..., 2 * half :]], axis=-1)
    )


def relative_keys(weight_MDH: Array, slots: int) -> Array:
    """Returns ``r`` for the distances ``S-1 .. 0``, ``[M, S, H]``."""
    width = weight_MDH.shape[1]
    distances = jnp.arange(slots - 1, -1, -1, dtype=jnp.float32)
    frequencies = 10_000.0 ** (-jnp.arange(0, width, 2, dtype=jnp.float32) / width)
    angles = distances[:, None] * frequencies[None, :]
    waves_SD = jnp.concatenate([jnp.sin(angles), jnp.cos(angles)], axis=-1)[:, :width].astype(
        weight_MDH.dtype
    )
    # One product per head: its result is not transposed. XLA's CPU backend would fold a transpose
    # into the product that uses the table, and would then refuse to run in bfloat16.
    waves_MSD = jnp.broadcast_to(waves_SD[None], (weight_MDH.shape[0], *waves_SD.shape))
    return jnp.einsum("MSD,MDH->MSH", waves_MSD, weight_MDH)


def align_distances(scores_BXTS: Array, visible: Visibility) -> Array:
    """Turns scores by distance into scores by slot; the scores of masked slots are arbitrary.

    Args:
      scores_BXTS: ``[B, ..., T, S]``, of each query with the reversed table.

    Returns:
      ``[B, ..., T, S]``: entry (t, s) is the score at distance ``start_B + t - s``. In a block, the
      score of each slot is gathered by its distance.
    """
    (num_queries, slots), start_B = scores_BXTS.shape[-2:], visible.start_B
    if visible.block is not None:
        column_BTS = jnp.clip(slots - 1 - visible.distances(slots), 0, slots - 1)
        return jnp.take_along_axis(scores_BXTS, column_BTS[:, None], axis=-1)
    padded = pad_axis(scores_BXTS, slots)
    # Distance start + t - s lies in column S-1-start-t + s: one slice per sequence is enough for
    # all its queries.
    width = slots + num_queries - 1
    rows = read_slots(padded, slots - num_queries - start_B, width, padded.ndim - 1)
    # Rows of one column more, laid end to end, shift row t by t. (A slice for each query costs a
    # TPU more.)
    flat = pad_axis(rows, 1)
    flat = flat.reshape(rows.shape[:-2] + (num_queries * (width + 1),))[..., num_queries - 1 :]
    flat = flat[..., : num_queries * width]
    return flat.reshape(rows.shape[:-2] + (num_queries, width))[..., :slots]

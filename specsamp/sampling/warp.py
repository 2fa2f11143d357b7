"""Warps (temperature, top-k, top-p and so on): from a model's logits to the distribution that is
sampled.

A warp is a pytree of numbers that maps logits to logits of the same shape, ``-inf`` for excluded
tokens. Its numbers are data, so they may change between calls without recompiling. Each is a scalar
or has one value per row::

    sampling = chain(temperature([0.0, 0.8]), top_p(0.95))     # row 0 greedy, row 1 sampled
    log_probs_BTV = log_probs(sampling, logits_BTV)

The same function serves the target, the draft and verification, so the distribution that was
sampled is the distribution that is verified. Warps apply in the order in which they are chained.

Ties. Of equally probable tokens the lower index comes first, as in ``argmax``:

* ``top_k``: token x stays if fewer than k tokens come before x, so exactly k tokens stay, and
``top_k(1)`` is greedy;
* ``top_p``: token x stays if the tokens before x have mass below p, so the smallest nucleus stays;
* ``min_p``: token x stays if its probability is at least ``min_p`` times the largest, so equal
tokens stay together.

Each keeps the most probable token.

The thresholds of ``top_k`` and ``top_p`` are found by a binary search over the *bit pattern* of the
threshold (floats of one sign are ordered like their bits). It is exact after all bits, and avoids
sorting the vocabulary, which is slow, above all on a TPU. The vocabulary is folded into eight rows,
so that a single sequence fills a TPU's registers; all sums use this order. The search is skipped if
the numbers of the warps show that no row of a call needs it. A second search, over indices, follows
only if some row has more tokens at its threshold than fit. Warps that have no state follow each
other on the folded vocabulary, on a TPU in one kernel.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from specsamp.arrays import pad_axis
from specsamp.jax_names import core

Array = jax.Array


class Warp:
    """A pytree of numbers that maps logits ``[B, ..., V]`` to logits; new warps derive from it,
    under `register_warp`.

    A warp that depends on the tokens before a position (a repetition penalty, a grammar) overrides
    `init` and `advance`, and is called on ``[B, V]`` with the state of each row's context. Every
    leaf of a state leads with the batch. A warp must keep at least one token: a row without any
    token ends as invalid. A number is a scalar or has one value per row; a list of numbers has two
    axes, of which the first has one entry or one per row.
    """

    asks_host = False  # whether a program with this warp calls the host, as for a grammar

    @property
    def may_exclude_all(self) -> bool:
        """Returns whether a row may be left without any token, as by a grammar; the loop then
        checks for such rows.
        """
        return type(self).advance is not Warp.advance

    def check(self, vocab_size: int) -> None:
        """Raises ValueError if a token id in the warp is outside of the vocabulary."""

    def init(self, tokens_BP: Array, lengths_B: Array, vocab_size: int) -> Any:
        """Returns the state after the prompts ``tokens_BP[b, :lengths_B[b]]``; () for a warp
        without a state.
        """
        return ()

    def advance(self, state: Any, tokens_B: Array) -> Any:
        """Returns the state after one more token per row."""
        return state

    def __call__(self, logits: Array, state: Any = ()) -> Array:
        """Returns warped logits, ``-inf`` where a token is excluded."""
        raise NotImplementedError(
            f"{type(self).__name__} has no __call__(): define how it warps logits"
        )


class FoldedWarp(Warp):
    """A warp without a state, of a folded vocabulary; its operations are those that a kernel has.

    It adds no tokens to a row, and its numbers are scalars or one per row.
    """

    def __call__(self, logits: Array, state: Any = ()) -> Array:
        return chain(self)(logits)

    def on_folded(self, folded: Array, all_greedy: bool | Array) -> Array:
        """Returns warped logits ``[..., 8, V / 8]``; with ``all_greedy`` every row has a single
        token already.
        """
        raise NotImplementedError


def is_stateless(state: Any) -> bool:
    """Returns whether a warp's state has no arrays, which is known while tracing."""
    return not jax.tree.leaves(state)


def advance_where(moves_B: Array, warp: Warp, state: Any, token_B: Array) -> Any:
    """Returns the state after one more token where ``moves_B`` is true, and ``state`` elsewhere."""

    def choose(new: Array, old: Array) -> Array:
        return jnp.where(moves_B.reshape(-1, *[1] * (new.ndim - 1)), new, old)

    return jax.tree.map(choose, warp.advance(state, token_B), state)


# Below this temperature a draw differs from the argmax only where two logits agree to five digits.
GREEDY_BELOW = 1e-5


def register_warp(cls: type) -> type:
    """Makes a class a frozen dataclass and a pytree of its fields: the decorator of every warp.

    Not `jax.tree_util.register_dataclass`: with it, trees of different classes compare equal (JAX
    0.10 to 0.12), and if their hashes also collide, jit runs the program of one warp for another.
    """
    cls = dataclasses.dataclass(frozen=True)(cls)
    names = [field.name for field in dataclasses.fields(cls)]
    jax.tree_util.register_pytree_node(
        cls,
        lambda warp: (tuple(getattr(warp, name) for name in names), None),
        lambda _, values: cls(*values),
    )
    return cls


def chain(*warps: Warp) -> Chain:
    """Applies ``warps`` from left to right; ``chain()`` is the model's own distribution."""
    flat = []
    for warp in warps:
        if not isinstance(warp, Warp):
            raise TypeError(f"chain takes warps such as temperature(0.8); got {warp!r}")
        flat += warp.warps if isinstance(warp, Chain) else [warp]
    return Chain(tuple(flat))


def greedy() -> Greedy:
    """Puts all mass on the most probable token (lowest index on ties): temperature 0 for
    every row.
    """
    return Greedy()


def temperature(value: float | Sequence[float]) -> Temperature:
    """Divides logits by ``value`` (>= 0, finite, a scalar or one per row); rows below 1e-5 are
    greedy.
    """

    def valid(v):
        return (v >= 0) & (v <= np.finfo(np.float32).max)

    return Temperature(checked("temperature", value, np.float32, valid, "must be >= 0 and finite"))


def top_k(value: int | Sequence[int]) -> TopK:
    """Keeps the ``value`` (>= 1) most probable tokens (lowest indices on ties)."""
    return TopK(checked("top_k", value, np.int32, lambda v: v >= 1, "must be an integer >= 1"))


def top_p(value: float | Sequence[float]) -> TopP:
    """Keeps the smallest nucleus of mass ``value`` in (0, 1] (Holtzman et al., arXiv
    1904.09751).
    """
    return TopP(
        checked("top_p", value, np.float32, lambda v: (v > 0) & (v <= 1), "must lie in (0, 1]")
    )


def min_p(value: float | Sequence[float]) -> MinP:
    """Keeps tokens at least ``value`` in [0, 1] times as probable as the most probable token."""
    return MinP(
        checked("min_p", value, np.float32, lambda v: (v >= 0) & (v <= 1), "must lie in [0, 1]")
    )


def first_tokens(count: int) -> FirstTokens:
    """Keeps the first ``count`` (>= 1) token ids, and excludes the padding of a vocabulary."""
    return FirstTokens(
        checked("first_tokens", count, np.int32, lambda v: v >= 1, "must be an integer >= 1")
    )


def log_probs(warp: Warp, logits: Array, state: Any = ()) -> Array:
    """Returns the warped distribution as normalised log-probabilities, in float32 (float64 stays
    float64).

    Args:
      warp: as made by `chain`; per-row numbers match the leading axis of ``logits``.
      logits: ``[B, ..., V]``.
      state: for a warp with a state, see `Warp`; then ``logits`` are ``[B, V]``.

    Returns:
      ``[B, ..., V]``; excluded tokens are ``-inf``.
    """
    logits = logits.astype(jnp.promote_types(logits.dtype, jnp.float32))
    warp, state = followed_by(warp, state, Normalised())
    return warp(logits, state)


class RowKernels(Protocol):
    """The kernels of warps, a part of `specsamp.models.interface.Kernels`."""

    def row_by_row(self, function: Callable[..., Array], x: Array, numbers: Any) -> Array:
        """Computes a function of ``[..., X, Y]`` and a tree of ``[..., 1, 1]``, row by row."""


def with_kernels(warp: Warp, kernels: RowKernels | None) -> Warp:
    """Returns a warp whose parts without a state are kernels, or XLA's operations if ``kernels`` is
    None.
    """
    warp = chain(warp) if isinstance(warp, FoldedWarp) else warp
    return dataclasses.replace(warp, kernels=kernels) if isinstance(warp, Chain) else warp


def followed_by(warp: Warp, state: Any, last: Warp) -> tuple[Chain, Any]:
    """Returns a warp followed by ``last``, which has no state, and the state of both."""
    if not is_stateless(state):
        state = (*state, ()) if isinstance(warp, Chain) else (state, ())
    kernels = warp.kernels if isinstance(warp, Chain) else None
    return with_kernels(chain(warp, last), kernels), state


def for_rows(warp: Warp, rows: int) -> Warp:
    """Gives every number of ``warp`` one value per row, so that its shape never causes a recompile.

    Args:
      warp: its numbers are scalars or have one value per row, or are lists, see `Warp`.

    Raises:
      ValueError: a number is neither a scalar nor has ``rows`` values.
    """

    def expand(value: Any) -> np.ndarray:
        if callable(value):
            raise ValueError(
                "sampling must be a warp of numbers, such as chain(temperature(0.8)); got "
                f"{value!r}"
            )
        value = np.asarray(value)
        if value.ndim > 2 or (
            value.ndim and value.shape[0] not in ((1, rows) if value.ndim == 2 else (rows,))
        ):
            raise ValueError(
                f"sampling parameter of shape {value.shape} for {rows} prompts: give one number, "
                "or one per prompt"
            )
        return np.broadcast_to(value, (rows, *value.shape[1:]))

    if not callable(warp):
        raise ValueError(f"sampling must be a warp such as chain(temperature(0.8)); got {warp!r}")
    return jax.tree.map(expand, warp)


@dataclasses.dataclass(frozen=True)
class Chain(Warp):
    warps: tuple[Warp, ...]
    kernels: RowKernels | None = None  # for the warps without a state; static

    @property
    def may_exclude_all(self) -> bool:
        return any(warp.may_exclude_all for warp in self.warps)

    @property
    def asks_host(self) -> bool:
        return any(warp.asks_host for warp in self.warps)

    def excluding(self, state: Any) -> tuple[Chain, Any]:
        """Returns the warps up to the last that may leave a row without any token, and their part
        of a state.
        """
        count = max((n for n, warp in enumerate(self.warps, 1) if warp.may_exclude_all), default=0)
        return dataclasses.replace(self, warps=self.warps[:count]), state[:count]

    def check(self, vocab_size: int) -> None:
        for warp in self.warps:
            warp.check(vocab_size)

    def init(self, tokens_BP: Array, lengths_B: Array, vocab_size: int) -> Any:
        states = tuple(warp.init(tokens_BP, lengths_B, vocab_size) for warp in self.warps)
        return () if is_stateless(states) else states

    def advance(self, state: Any, tokens_B: Array) -> Any:
        if is_stateless(state):
            return ()
        return tuple(
            warp.advance(each, tokens_B) for warp, each in zip(self.warps, state, strict=True)
        )

    def __call__(self, logits: Array, state: Any = ()) -> Array:
        states = ((),) * len(self.warps) if is_stateless(state) else state
        pairs = zip(self.warps, states, strict=True)
        for is_folded, group in itertools.groupby(
            pairs, lambda pair: isinstance(pair[0], FoldedWarp)
        ):
            if is_folded:
                logits = self._on_folded(tuple(warp for warp, _ in group), logits)
                continue
            for warp, each in group:
                logits = warp(logits, each)
        return logits

    def _on_folded(self, warps: tuple[FoldedWarp, ...], logits: Array) -> Array:
        folded, vocab_size = fold(logits, -jnp.inf), logits.shape[-1]
        if self.kernels is None:
            return unfold(_in_order(folded, warps), vocab_size)
        numbers = jax.tree.map(
            lambda x: jnp.broadcast_to(per_row(x, folded), (*folded.shape[:-2], 1, 1)), warps
        )
        return unfold(self.kernels.row_by_row(_in_order, folded, numbers), vocab_size)


jax.tree_util.register_pytree_node(
    Chain,
    lambda chain: ((chain.warps,), chain.kernels),
    lambda kernels, fields: Chain(*fields, kernels),
)


def _in_order(folded: Array, warps: tuple[FoldedWarp, ...]) -> Array:
    """Applies warps to a folded vocabulary."""
    all_greedy: bool | Array = False
    for warp in warps:
        folded = warp.on_folded(folded, all_greedy)
        if isinstance(warp, Temperature):
            all_greedy = jnp.all(jnp.asarray(warp.value) < GREEDY_BELOW)
    return folded


@register_warp
class Greedy(FoldedWarp):
    def on_folded(self, folded: Array, all_greedy: bool | Array) -> Array:
        return _only_argmax(folded)


@register_warp
class Temperature(FoldedWarp):
    value: Array  # [] or [B]

    def on_folded(self, folded: Array, all_greedy: bool | Array) -> Array:
        value = per_row(self.value, folded)
        is_greedy = value < GREEDY_BELOW
        # On the values before broadcasting, since a reduction over rows that are split over devices
        # would communicate.
        only = _only_argmax(folded, jnp.any(jnp.asarray(self.value) < GREEDY_BELOW))
        return jnp.where(is_greedy, only, folded / jnp.where(is_greedy, 1, value))


@register_warp
class TopK(FoldedWarp):
    value: Array  # [] or [B] int32

    def on_folded(self, folded: Array, all_greedy: bool | Array) -> Array:
        k, bits = per_row(self.value, folded), _ordered_bits(folded)

        def too_low(t):
            return _count(bits >= t, folded.dtype) >= k

        low = jnp.full_like(bits[..., :1, :1], jnp.iinfo(bits.dtype).min)
        # Of a vocabulary with padding, a k of all tokens is searched; it keeps them, too.
        skipped = all_greedy | jnp.all(jnp.asarray(self.value) >= ROWS * bits.shape[-1])
        threshold = _largest(too_low, low, 8 * bits.dtype.itemsize, skipped)
        kept = (bits >= threshold) & (folded > -jnp.inf)
        surplus = _count(kept, folded.dtype) - k
        return jnp.where(_without_last(kept, kept & (bits == threshold), surplus), folded, -jnp.inf)


@register_warp
class TopP(FoldedWarp):
    value: Array  # [] or [B]

    def on_folded(self, folded: Array, all_greedy: bool | Array) -> Array:
        p, probs = per_row(self.value, folded), jax.nn.softmax(folded, axis=FOLDED)
        # So the largest probability stays for any p.
        least = jnp.maximum(p, jnp.finfo(probs.dtype).tiny)

        def mass(chosen):
            return jnp.sum(jnp.where(chosen, probs, 0), axis=FOLDED, keepdims=True)

        def as_float(t):
            return jax.lax.bitcast_convert_type(t, probs.dtype)

        def too_low(t):
            """Returns whether the tokens with probability at least ``t`` have at least mass p."""
            return mass(probs >= as_float(t)) >= least

        # Probabilities are at most one, whose two highest bits are zero.
        low = jnp.zeros_like(probs[..., :1, :1], _integer_of(probs))
        skipped = all_greedy | jnp.all(jnp.asarray(self.value) >= 1)
        threshold = as_float(_largest(too_low, low, 8 * probs.dtype.itemsize - 2, skipped))
        # A sum that rounds to just above one must not cost p = 1 its last tokens.
        kept, tied = (probs >= threshold) | (p >= 1), probs == threshold
        needed = jnp.ceil(
            (least - mass(probs > threshold)) / jnp.maximum(threshold, jnp.finfo(probs.dtype).tiny)
        )
        surplus = jnp.where((p >= 1) | (threshold == 0), 0, _count(tied, probs.dtype) - needed)
        return jnp.where(_without_last(kept, tied, surplus), folded, -jnp.inf)


@register_warp
class MinP(FoldedWarp):
    value: Array  # [] or [B]

    def on_folded(self, folded: Array, all_greedy: bool | Array) -> Array:
        floor = folded.max(FOLDED, keepdims=True) + jnp.log(per_row(self.value, folded))
        return jnp.where(folded >= floor, folded, -jnp.inf)


@register_warp
class FirstTokens(FoldedWarp):
    value: Array  # [] or [B] int32

    def on_folded(self, folded: Array, all_greedy: bool | Array) -> Array:
        return jnp.where(token_ids(folded) < per_row(self.value, folded), folded, -jnp.inf)


@register_warp
class Normalised(FoldedWarp):
    """Turns logits into log-probabilities."""

    def on_folded(self, folded: Array, all_greedy: bool | Array) -> Array:
        return jax.nn.log_softmax(folded, axis=FOLDED)


def checked(
    name: str, value: Any, dtype: Any, valid: Callable[[np.ndarray], Any], requirement: str
) -> Any:
    """Returns a number of a warp, or one per row, as an array; raises ValueError with the
    requirement.
    """
    if isinstance(value, core.Tracer):
        return value
    given = np.asarray(value)
    if (
        given.dtype.kind not in ("iu" if np.issubdtype(dtype, np.integer) else "iuf")
        or given.ndim > 1
        or not given.size
    ):
        raise ValueError(f"{name} {requirement}, as one number or one per row; got {value!r}")
    if not np.all(valid(given)):  # NaN compares false, so it is refused as well
        raise ValueError(f"{name} {requirement}; got {value!r}")
    return (
        np.minimum(given, np.iinfo(dtype).max).astype(dtype)
        if dtype == np.int32
        else given.astype(dtype)
    )


def per_row(value: Array, logits: Array) -> Array:
    """Reshapes ``[]`` or ``[B]`` to broadcast against ``[B, ..., V]``; never widens the dtype."""
    value = jnp.asarray(value)
    if jnp.issubdtype(value.dtype, jnp.floating):
        value = value.astype(logits.dtype)
    return value.reshape(value.shape + (1,) * (logits.ndim - value.ndim))


def _only_argmax(folded: Array, wanted: bool | Array = True) -> Array:
    """Puts all mass on the most probable token; where ``wanted`` is false, on token 0, which saves
    the argmax.
    """
    tokens = token_ids(folded)

    def argmax():
        is_most = folded == folded.max(FOLDED, keepdims=True)
        return jnp.where(is_most, tokens, jnp.iinfo(jnp.int32).max).min(FOLDED, keepdims=True)

    best = jax.lax.cond(wanted, argmax, lambda: jnp.zeros((*folded.shape[:-2], 1, 1), jnp.int32))
    return jnp.where(tokens == best, jnp.zeros_like(folded), -jnp.inf)


def token_ids(folded: Array) -> Array:
    """Returns the tokens of a folded vocabulary, ``[1, ..., 8, V / 8]``: ids of every row would be
    stored.
    """
    shape = (1,) * (folded.ndim - 2) + folded.shape[-2:]
    row, column = (
        jax.lax.broadcasted_iota(jnp.int32, shape, folded.ndim + axis) for axis in FOLDED
    )
    return row * folded.shape[-1] + column


ROWS, FOLDED = 8, (-2, -1)  # of the registers of a TPU; the axes of a folded vocabulary


def fold(x: Array, padding: float = 0.0) -> Array:
    """Folds ``[..., V]`` into ``[..., 8, V / 8]``."""
    missing = -x.shape[-1] % ROWS
    x = pad_axis(x, missing, value=padding) if missing else x
    # Without the barrier the compiler computes before it folds.
    return jax.lax.optimization_barrier(x.reshape(*x.shape[:-1], ROWS, -1))


def unfold(folded: Array, vocab_size: int) -> Array:
    """Returns a folded vocabulary as ``[..., V]``."""
    return folded.reshape(*folded.shape[:-2], -1)[..., :vocab_size]


def _integer_of(x: Array) -> Any:
    return jnp.int32 if x.dtype == jnp.float32 else jnp.int64


def _ordered_bits(x: Array) -> Array:
    """Maps floats to signed integers of the same width in the same order; -0.0 equals 0.0, as it
    must for ties.
    """
    integer = _integer_of(x)
    bits = jax.lax.bitcast_convert_type(x, integer)
    return jnp.where(bits < 0, jnp.iinfo(integer).min - bits, bits)


def _count(chosen: Array, dtype: Any) -> Array:
    """Returns how many tokens of a folded vocabulary are chosen, ``[..., 1, 1]``."""
    # Sums of floats are several at a time on a CPU, and whole numbers up to 2**24 are exact.
    return jnp.sum(jnp.where(chosen, 1.0, 0.0).astype(dtype), axis=FOLDED, keepdims=True)


def _without_last(kept: Array, tied: Array, surplus: Array) -> Array:
    """Returns the kept tokens without the last ``surplus`` of those that tie; all where it is not
    positive.
    """
    tied_ids = jnp.where(tied, token_ids(tied), -1)

    def too_low(t):
        return _count(tied_ids >= t, surplus.dtype) >= surplus

    low = jnp.zeros_like(surplus, jnp.int32)
    num_bits = (ROWS * tied.shape[-1]).bit_length()
    first = jax.lax.cond(
        jnp.any(surplus > 0), lambda: _search(too_low, low, num_bits, 1), lambda: low
    )
    return kept & ((tied_ids < first) | (surplus <= 0))


def _largest(holds: Callable[[Array], Array], low: Array, num_bits: int, skipped: Array) -> Array:
    """Returns the largest integer in ``[low, low + 2**num_bits)`` up to which a monotone ``holds``
    is true; or ``low``.

    If ``skipped``, it is ``low``.
    On a TPU a pass finds two bits, because a pass costs more than a sum there; on a CPU one bit.
    """

    def searched():
        return jax.lax.platform_dependent(
            cpu=lambda: _search(holds, low, num_bits, 1),
            default=lambda: _search(holds, low, num_bits, 2),
        )

    return jax.lax.cond(skipped, lambda: low, searched)


def _search(holds: Callable[[Array], Array], low: Array, num_bits: int, bits: int) -> Array:
    """Returns the integer of `_largest`; each pass finds so many ``bits``, which divide
    ``num_bits``.
    """

    def one_pass(i, found):
        place = num_bits - bits * (i + 1)
        true = [
            holds(found + (jnp.asarray(digit, low.dtype) << place)) for digit in range(1, 2**bits)
        ]
        return found + (sum(each.astype(low.dtype) for each in true) << place)

    return jax.lax.fori_loop(0, num_bits // bits, one_pass, low)

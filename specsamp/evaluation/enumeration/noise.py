"""Symbolic random numbers: intervals of uniforms, monotone functions of them, and races.

Uniforms are real numbers here, not floats on a grid.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

MAX_DRAWS = 2_000


class Outside(BaseException):  # code under test may not swallow it as one of its own errors
    """Raised for code that cannot be enumerated: other draws, an unknown use of noise, an endless path."""


class Paths:
    """The branches of all draws; a path is a choice at each, and the next path changes the last possible choice."""

    def __init__(self):
        self.branches: list[tuple[int, np.ndarray]] = []
        self.begin()

    def begin(self) -> None:
        """Begins a path, which repeats the branches that are kept."""
        self.depth, self.probability = 0, 1.0
        self.bounds: list[list[float]] = []  # of each uniform
        self.spent: set[int] = set()  # uniforms that a race has used up
        self.numbers: list[Number | float] = []  # the elements of all `Noise`
        self.streams: dict[Any, np.ndarray] = {}  # numbers of a JAX key

    def choose(self, weights: Any) -> int:
        """Returns the branch of this path; raises ValueError for weights that are no distribution."""
        weights = np.asarray(weights, np.float64)
        if not (np.isfinite(weights).all() and (weights >= 0).all() and weights.sum() > 0):
            raise ValueError(f"weights {weights} are not a distribution")
        weights = weights / weights.sum()
        if self.depth == len(self.branches):
            self.branches.append((int(np.argmax(weights > 0)), weights))
        chosen, known = self.branches[self.depth]
        if known.shape != weights.shape or not np.allclose(known, weights, rtol=0, atol=1e-9):
            raise Outside("the same draws led to another distribution: code keeps a state, or draws from elsewhere")
        self.depth += 1
        if self.depth > MAX_DRAWS:
            raise Outside(f"a path did not end after {MAX_DRAWS} draws")
        self.probability *= weights[chosen]
        return chosen

    def advance(self) -> bool:
        """Moves on to the next path; False after the last."""
        while self.branches:
            chosen, weights = self.branches.pop()
            later = np.flatnonzero(weights[chosen + 1 :])
            if later.size:
                self.branches.append((chosen + 1 + int(later[0]), weights))
                return True
        return False

    def uniform(self) -> Number:
        """Returns a new number between 0 and 1."""
        self.bounds.append([0.0, 1.0])
        return Number(len(self.bounds) - 1, lambda t: min(max(t, 0.0), 1.0), True)

    def is_below(self, number: Number, t: float) -> bool:
        """Returns whether a number lies below t; a branch where its interval allows both."""
        if number.uniform in self.spent:
            raise Outside("noise of a race is compared once more")
        cut, bounds = number.at(t), self.bounds[number.uniform]
        if bounds[0] < cut < bounds[1]:
            low = self.choose([cut - bounds[0], bounds[1] - cut]) == 0
            bounds[1 if low else 0] = cut
        return (bounds[1] <= cut) == number.rising

    def race(self, row: Sequence[Number | float], count: int = 1, sign: int = 1) -> list[int]:
        """Returns the places of the ``count`` largest of independent numbers, for ``sign`` -1 of the smallest.

        The numbers must be a race: log P(x_i < t) is -w_i h(t) with one h for all. Then i wins with probability w_i / sum w.
        """
        constant = np.array([math.nan if isinstance(x, Number) else x for x in row])
        noisy = [x.uniform for x in row if isinstance(x, Number)]
        missing = [i for i, x in enumerate(row) if not isinstance(x, Number) and math.isnan(x)]
        if missing or not noisy:  # as the argmax of torch and of NumPy
            return missing[:count] if missing else list(np.argsort(-sign * constant, kind="stable")[:count])
        if self.spent.intersection(noisy) or len(set(noisy)) < len(noisy):
            raise Outside("numbers of a race are not independent, or race a second time")
        if any(self.bounds[uniform] != [0.0, 1.0] for uniform in noisy):
            raise Outside("noise that was compared races")
        self.spent.update(noisy)
        weights, order = _hazards(row, sign), []
        while len(order) < count:
            left = np.where(np.isin(np.arange(len(row)), order), 0, weights)
            rest = [i for i in range(len(row)) if i not in order]
            order.append(self.choose(left) if left.sum() > 0 else max(rest, key=lambda i: sign * constant[i]))
        return order


PATHS: list[Paths] = []  # that of the running enumeration


@dataclasses.dataclass(frozen=True)
class Number:
    """A monotone function f of one uniform u: ``at(t)`` is the u where f crosses t."""

    uniform: int
    at: Callable[[float], float]
    rising: bool

    def through(self, inverse: Callable[[float], float], rising: bool = True) -> Number:
        """Returns g(f(u)) for the inverse of a monotone g."""
        return Number(self.uniform, lambda t: self.at(inverse(t)), self.rising == rising)

    @property
    def sign(self) -> int:
        """Returns 1 or -1 for numbers of one sign, else 0."""
        below = self.at(0.0) if self.rising else 1 - self.at(0.0)
        return {0.0: 1, 1.0: -1}.get(below, 0)


def _hazards(row: Sequence[Number | float], sign: int) -> np.ndarray:
    """Returns w_i of a race: -log P(x_i < t), or of P(x_i > t), at a t where they sum to about one."""

    def hazards(t: float) -> np.ndarray:
        def one(x: Number | float) -> float:
            if not isinstance(x, Number):
                return 0.0 if sign * x <= sign * t else math.inf
            p = x.at(t)
            return -float(np.log(p) if x.rising == (sign > 0) else np.log1p(-p))

        with np.errstate(divide="ignore"):
            return np.array([one(x) for x in row])

    def summing_to(level: float) -> np.ndarray:
        low, high = -1e5, 1e5  # hazards fall towards high if sign > 0
        for _ in range(200):
            found = hazards((low + high) / 2)
            if level / 2 < found.sum() < 2 * level:
                return found
            above = (found.sum() > level) == (sign > 0)
            low, high = ((low + high) / 2, high) if above else (low, (low + high) / 2)
        raise Outside("an argmax of noise that is not a race")

    first, second = summing_to(1.0), summing_to(0.1)
    if not np.allclose(first / first.sum(), second / second.sum(), rtol=0, atol=1e-7):
        raise Outside("an argmax of noise that is not a race")
    return first


def _scaled(x: Number, c: float) -> Number | float:
    if c == 0 or math.isnan(c):
        return c
    if math.isinf(c):
        if not x.sign:
            raise Outside("noise of both signs times infinity")
        return c * x.sign
    return x.through(lambda t: t / c, c > 0)


def _over(c: float, x: Number) -> Number | float:
    if x.sign <= 0:
        raise Outside("a quotient by noise that is not positive")
    return _scaled(x.through(lambda t: 1 / t if t > 0 else math.inf, rising=False), c)


def _shifted(x: Number, c: float) -> Number | float:
    return x.through(lambda t: t - c) if math.isfinite(c) else c


def _log(x: Number) -> Number:
    return x.through(lambda t: math.exp(min(t, 700)))


UNARY = {  # by NumPy's names, as all that follow
    "negative": lambda x: _scaled(x, -1.0),
    "log": _log,
    "log1p": lambda x: _log(_shifted(x, 1.0)),
    "exp": lambda x: x.through(lambda t: math.log(t) if t > 0 else -math.inf),
}
BINARY = {  # with the noise first, and with the noise second
    "add": (_shifted, lambda c, x: _shifted(x, c)),
    "subtract": (lambda x, c: _shifted(x, -c), lambda c, x: _shifted(_scaled(x, -1.0), c)),
    "multiply": (_scaled, lambda c, x: _scaled(x, c)),
    "divide": (lambda x, c: _scaled(x, 1 / c if c else math.inf), _over),
    "maximum": (lambda x, c: x.through(lambda t: t if t > c else -math.inf), lambda c, x: BINARY["maximum"][0](x, c)),
    "minimum": (lambda x, c: x.through(lambda t: t if t <= c else math.inf), lambda c, x: BINARY["minimum"][0](x, c)),
}
COMPARE = ("less", "less_equal", "greater", "greater_equal")
ALIASES = {"sub": "subtract", "mul": "multiply", "div": "divide", "truediv": "divide", "true_divide": "divide"}
ALIASES |= {"neg": "negative", "max": "maximum", "min": "minimum", "clamp": "maximum", "clamp_min": "maximum"}
ALIASES |= {"lt": "less", "le": "less_equal", "gt": "greater", "ge": "greater_equal"}
OPERATIONS = {*UNARY, *BINARY, *COMPARE}


def _apply(name: str, *operands: Number | float) -> Number | float | bool:
    noisy = [isinstance(x, Number) for x in operands]
    if not any(noisy):
        with np.errstate(all="ignore"):
            return getattr(np, name)(*operands).item()
    if len(operands) == 1:
        return UNARY[name](*operands)
    if all(noisy):
        raise Outside(f"{name} of two random numbers")
    if name not in COMPARE:
        return BINARY[name][noisy.index(True)](*operands)
    number, t = operands if noisy[0] else operands[::-1]
    return not math.isnan(t) and PATHS[-1].is_below(number, t) == (name.startswith("less") == noisy[0])


class Noise:
    """An array of random and plain numbers: ``index`` has the index of each element among the path's numbers.

    The framework moves elements, on the index; arithmetic and comparisons are done here.
    """

    __array_ufunc__ = None  # NumPy leaves operators to this class

    def __init__(self, index: Any):
        self.index = np.asarray(index, np.int64)

    @classmethod
    def uniforms(cls, shape: Sequence[int] = ()) -> Noise:
        return cls.of([PATHS[-1].uniform() for _ in range(math.prod(shape))], shape)

    @classmethod
    def of(cls, numbers: Sequence[Number | float], shape: Sequence[int]) -> Noise:
        start = len(PATHS[-1].numbers)
        PATHS[-1].numbers += numbers
        return cls(np.arange(start, start + len(numbers)).reshape(tuple(shape)))

    @classmethod
    def from_values(cls, x: Any) -> Noise:
        """Returns plain numbers as noise."""
        if isinstance(x, Noise):
            return x
        values = np.asarray(x.detach().double().cpu() if hasattr(x, "detach") else x, np.float64)
        return cls.of(values.ravel().tolist(), values.shape)

    @classmethod
    def wrapped(cls, found: Noise | np.ndarray) -> Any:
        """Returns a result of `elementwise` as operators give it."""
        return found

    def numbers(self) -> list[Number | float]:
        return [PATHS[-1].numbers[i] for i in self.index.ravel()]

    @property
    def shape(self) -> tuple[int, ...]:
        return self.index.shape


def elementwise(name: str, *operands: Any) -> Noise | np.ndarray:
    """Returns arithmetic of arrays as `Noise`, comparisons as booleans."""
    indices = np.broadcast_arrays(*(Noise.from_values(x).index for x in operands))
    rows = zip(*(index.ravel() for index in indices), strict=True)
    values = [_apply(name, *(PATHS[-1].numbers[i] for i in row)) for row in rows]
    return np.array(values, bool).reshape(indices[0].shape) if name in COMPARE else Noise.of(values, indices[0].shape)


def _operator(name: str, swapped: bool) -> Callable[..., Any]:
    return lambda x, *others: x.wrapped(elementwise(name, *((*others, x) if swapped else (x, *others))))


for _name in ("add", "sub", "mul", "truediv", "neg", "lt", "le", "gt", "ge"):
    setattr(Noise, f"__{_name}__", _operator(ALIASES.get(_name, _name), swapped=False))
    setattr(Noise, f"__r{_name}__", _operator(ALIASES.get(_name, _name), swapped=True))


def winners(noise: Noise, axis: int = -1, count: int = 1, sign: int = 1) -> np.ndarray:
    """Returns the places of the largest elements along an axis, ``[..., count]``."""
    index = np.moveaxis(noise.index, axis, -1)
    rows = [PATHS[-1].race(Noise(row).numbers(), count, sign) for row in index.reshape(-1, index.shape[-1])]
    return np.array(rows, np.int64).reshape(*index.shape[:-1], count)

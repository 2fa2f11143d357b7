"""Replaces the draws of torch, NumPy and ``random`` with `Noise`, and refuses draws that it cannot replace."""

from __future__ import annotations

import contextlib
import functools
import math
import random
import sys
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import numpy as np

from specsamp.evaluation.enumeration.noise import ALIASES, OPERATIONS, PATHS, Noise, Outside, elementwise, winners

IDENTITIES = {"to", "float", "double", "type", "type_as", "clone", "contiguous", "detach", "cpu", "cuda", "item"}
MOVES = {"reshape", "view", "expand", "expand_as", "unsqueeze", "squeeze", "flatten", "transpose", "permute", "getitem"}
MOVES |= {"gather", "index_select", "cat", "stack", "where", "masked_fill", "repeat", "t", "view_as"}
REFUSED = {  # draws that are not replaced
    "torch": "randn randn_like randint randint_like randperm normal poisson",
    "torch.Tensor": "normal_ random_ bernoulli_ geometric_ log_normal_ cauchy_",
    "numpy.random": "randn randint permutation shuffle normal exponential gumbel multinomial standard_normal binomial",
    "random": "uniform randint randrange choice shuffle sample gauss betavariate expovariate getrandbits",
}


class TorchNoise(Noise):
    """Noise that torch's functions and methods accept."""

    device = property(lambda self: sys.modules["torch"].device("cpu"))
    dtype = property(lambda self: sys.modules["torch"].float32)
    ndim = property(lambda self: self.index.ndim)

    @classmethod
    def wrapped(cls, found):
        return cls(found.index) if isinstance(found, Noise) else sys.modules["torch"].from_numpy(np.array(found))

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        torch, name, kwargs = sys.modules["torch"], function.__name__.strip("_"), kwargs or {}
        name = ALIASES.get(name, name)
        if name in IDENTITIES:
            return args[0]
        if name in OPERATIONS:
            return cls.wrapped(elementwise(name, *args, *kwargs.values()))
        if name in ("argmax", "argmin", "topk"):
            return cls._races(name, *args, **kwargs)
        if name not in MOVES:
            raise Outside(f"torch's {name} of random numbers")
        constant = name in ("cat", "stack", "where", "masked_fill")  # plain numbers among the noise are elements too

        def index(x: Any) -> Any:
            if isinstance(x, (list, tuple)):
                return type(x)(map(index, x))
            is_value = isinstance(x, (Noise, float)) or torch.is_tensor(x) and x.is_floating_point()
            return (
                torch.from_numpy(Noise.from_values(x).index) if is_value and (constant or isinstance(x, Noise)) else x
            )

        return cls(function(*map(index, args), **kwargs).numpy())

    @classmethod
    def _races(cls, name: str, noise: Noise, k: int = -1, dim: int | None = None, keepdim: bool = False, **_) -> Any:
        torch = sys.modules["torch"]
        if name == "topk":
            found = torch.from_numpy(winners(noise, -1 if dim is None else dim, k))
            return torch.return_types.topk((torch.full(found.shape, math.nan), found))
        found = winners(noise, k if dim is None else dim, sign=1 if name == "argmax" else -1)
        return torch.from_numpy(found if keepdim else found[..., 0])

    def __getattr__(self, name: str) -> Any:
        function = getattr(sys.modules["torch"].Tensor, name)
        return lambda *args, **kwargs: self.__torch_function__(function, (), (self, *args), kwargs)

    def __getitem__(self, key: Any) -> TorchNoise:
        return TorchNoise(self.index[tuple(key) if isinstance(key, (list, tuple)) else key])

    def __len__(self) -> int:
        return len(self.index)


def _uniform(kind: type[Noise], *size: Any, **_: Any) -> Noise:
    return kind.uniforms(size[0] if size and np.ndim(size[0]) else size)


def _fill(make: Callable[[TorchNoise], TorchNoise]) -> Callable[..., TorchNoise]:
    def fill(tensor, *limits, **_):
        if tensor.numel():
            tensor.fill_(math.nan)  # code that goes on with it, and not with what is returned, is not enumerated
        return make(TorchNoise.uniforms(tensor.shape))

    return fill


def _multinomial(weights, num_samples: int, replacement: bool = False, **_):
    torch, found = sys.modules["torch"], []
    for row in weights.detach().double().reshape(-1, weights.shape[-1]).numpy().copy():
        for _ in range(num_samples):
            found.append(PATHS[-1].choose(row))
            row[found[-1]] *= replacement
    return torch.tensor(found).reshape(*weights.shape[:-1], num_samples)


def _choice(a, size=None, replace=True, p=None):
    if size is not None:
        raise Outside("numpy.random.choice with a size")
    values = np.arange(a) if np.ndim(a) == 0 else np.asarray(a)
    weights = np.ones(len(values)) if p is None else np.asarray(p, np.float64)
    if abs(weights.sum() - 1) > 1e-6 and p is not None:
        raise ValueError("probabilities do not sum to 1")
    return values[PATHS[-1].choose(weights)]


class _Generator:
    random, choice = functools.partial(_uniform, Noise), staticmethod(_choice)

    def __getattr__(self, name: str) -> Any:
        raise Outside(f"numpy.random.Generator.{name} is not replaced")


REPLACED = {
    "torch": {
        "multinomial": _multinomial,
        "rand": functools.partial(_uniform, TorchNoise),
        "rand_like": lambda x, **_: TorchNoise.uniforms(x.shape),
    },
    "torch.Tensor": {
        "multinomial": _multinomial,
        "uniform_": _fill(lambda uniforms: uniforms),
        "exponential_": _fill(lambda uniforms: -uniforms.log()),
    },
    "numpy.random": {
        **dict.fromkeys(("random", "random_sample", "rand"), functools.partial(_uniform, Noise)),
        "choice": _choice,
        "default_rng": lambda *_: _Generator(),
    },
    "random": {"random": lambda: Noise.uniforms()},
}


def _refuse(name: str, *_, **__) -> None:
    raise Outside(f"{name} is not replaced")


def _states() -> list[Any]:
    torch = sys.modules.get("torch")
    numpys = np.random.get_state()
    return [random.getstate(), (numpys[1].tobytes(), *numpys[2:])] + ([torch.get_rng_state().tolist()] if torch else [])


@contextlib.contextmanager
def replaced_draws() -> Iterator[None]:
    """Replaces the draws in a block; other threads must not draw. `specsamp.evaluation.enumeration.law` calls it."""
    torch, before = sys.modules.get("torch"), _states()
    places = {"numpy.random": np.random, "random": random}
    if torch is not None:
        places |= {"torch": torch, "torch.Tensor": torch.Tensor}
    with contextlib.ExitStack() as stack:
        for place, module in places.items():
            refused = {name: functools.partial(_refuse, f"{place}.{name}") for name in REFUSED[place].split()}
            for name, function in (refused | REPLACED[place]).items():
                stack.enter_context(mock.patch.object(module, name, function))
        yield
    for generator, state, now in zip(("random", "numpy.random", "torch"), before, _states()):
        if state != now:
            raise Outside(f"{generator} drew by a function that is not replaced")

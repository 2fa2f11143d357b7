"""Runs JAX code equation by equation on one path: draws from keys are `Noise`, and control flow has concrete values."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from specsamp.evaluation.enumeration.noise import ALIASES, OPERATIONS, PATHS, Noise, Outside, elementwise, winners
from specsamp.jax_names import jaxprs

MOVES = {"reshape", "broadcast_in_dim", "squeeze", "slice", "dynamic_slice", "gather", "transpose", "rev"}
GATHERS = {"concatenate", "select_n"}  # whose other operands are elements too
IDENTITIES = {"or", "convert_element_type", "copy", "stop_gradient"}  # "or" gives random bits the exponent of 1.0
CALLS = {"jit", "pjit", "closed_call", "core_call", "custom_jvp_call", "custom_vjp_call", "checkpoint", "remat"}


def interpret(function: Callable) -> Callable:
    """Returns a function that computes the same on one path of `distribution`; it is traced once, for its first shapes.

    Raises Outside, with its name, for an unknown operation on noise.
    """
    traced = []

    def run(*args: Any) -> Any:
        if not traced:
            traced.append(jax.make_jaxpr(function, return_shape=True)(*args))
        closed, shapes = traced[0]
        return jax.tree.unflatten(jax.tree.structure(shapes), _evaluate(closed, jax.tree.leaves(args)))

    return run


def _evaluate(code: jaxprs.Jaxpr | jaxprs.ClosedJaxpr, values: Sequence[Any]) -> list[Any]:
    jaxpr, constants = (code.jaxpr, code.consts) if isinstance(code, jaxprs.ClosedJaxpr) else (code, ())
    known = dict(zip(jaxpr.constvars, constants)) | dict(zip(jaxpr.invars, values))

    def read(variable: Any) -> Any:
        return variable.val if isinstance(variable, jaxprs.Literal) else known[variable]

    for equation in jaxpr.eqns:
        known.update(zip(equation.outvars, _result(equation, [read(variable) for variable in equation.invars])))
    return [read(variable) for variable in jaxpr.outvars]


def _result(equation: jaxprs.JaxprEqn, values: list[Any]) -> Sequence[Any]:
    name, params = equation.primitive.name, equation.params
    if name in CALLS:
        return _evaluate(params.get("jaxpr") or params["call_jaxpr"], values)
    if name == "cond":
        return _evaluate(params["branches"][int(values[0])], values[1:])
    if name in ("while", "scan"):
        return (_while if name == "while" else _scan)(params, values)
    if name == "random_bits":
        return [_random_bits(params, *values)]
    if any(isinstance(x, Noise) for x in values):
        return [_noise(equation, values)]
    found = equation.primitive.bind(*values, **params)
    return found if equation.primitive.multiple_results else [found]


def _noise(equation: jaxprs.JaxprEqn, values: list[Any]) -> Any:
    name, params, dtype = equation.primitive.name, equation.params, equation.outvars[0].aval.dtype
    operation = ALIASES.get(name, name)
    if name in IDENTITIES:
        return values[0]
    if operation in OPERATIONS:
        return elementwise(operation, *values)
    if name == "shift_right_logical":  # random bits as a real number
        return elementwise("multiply", values[0], 1 / 2 ** np.asarray(values[1], np.float64))
    if name == "bitcast_convert_type":  # bits of the mantissa, with the exponent of 1.0
        return elementwise("add", elementwise("multiply", values[0], 2.0 ** -jnp.finfo(dtype).nmant), 1.0)
    if name in ("argmax", "argmin"):
        return winners(values[0], params["axes"][0], sign=1 if name == "argmax" else -1)[..., 0].astype(dtype)
    if name in MOVES | GATHERS:
        start = 1 if name == "select_n" else 0
        index = [
            x if i < start or name in MOVES and not isinstance(x, Noise) else _index(x) for i, x in enumerate(values)
        ]
        return Noise(equation.primitive.bind(*index, **params))
    raise Outside(f"JAX's {name} of random numbers")


def _index(x: Any) -> jax.Array:
    return jnp.asarray(Noise.from_values(x).index, jnp.int32)


def _random_bits(params: Any, keys: Any) -> Noise:
    """Returns the bits of keys as real numbers below 2^width; equal keys have equal bits."""
    width, shape, rows = params["bit_width"], params["shape"], []
    for key in np.asarray(jax.random.key_data(keys)).reshape(math.prod(keys.shape), 2):
        seen = (key.tobytes(), width, shape)
        if seen not in PATHS[-1].streams:
            PATHS[-1].streams[seen] = elementwise("multiply", Noise.uniforms(shape), 2.0**width).index
        rows.append(PATHS[-1].streams[seen])
    return Noise(np.reshape(rows, (*keys.shape, *shape)))


def _while(params: Any, values: list[Any]) -> list[Any]:
    first, second = params["cond_nconsts"], params["cond_nconsts"] + params["body_nconsts"]
    state = values[second:]
    while bool(_evaluate(params["cond_jaxpr"], [*values[:first], *state])[0]):
        state = _evaluate(params["body_jaxpr"], [*values[first:second], *state])
    return state


def _scan(params: Any, values: list[Any]) -> list[Any]:
    first, second = params["num_consts"], params["num_consts"] + params["num_carry"]
    constants, state, rows = values[:first], values[first:second], []
    steps = range(params["length"])
    for i in reversed(steps) if params["reverse"] else steps:
        found = _evaluate(params["jaxpr"], [*constants, *state, *(x[i] for x in values[second:])])
        state, rows = found[: second - first], [*rows, found[second - first :]]
    stacked = [np.stack(column[::-1] if params["reverse"] else column) for column in zip(*rows)]
    return [*state, *stacked]

"""The training loop: one jitted step over a mesh, checkpoints, metrics, exact resume.

A step depends on the state, the seed and its own number only: data windows are addressed by step, and
nothing else is random. So a run that is killed and resumed gives the losses it would have given.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from rich.console import Console

from specsamp import storage
from specsamp.checkpoints.params import check_shapes
from specsamp.mesh.layout import DATA, Layout, put
from specsamp.sampling.warp import Warp
from specsamp.training.checkpoint import Checkpoints
from specsamp.training.evaluate import data_mesh, evaluate, evaluation_batch, frozen_shardings
from specsamp.training.log import MetricsLog, Progress
from specsamp.training.task import Task

Array = jax.Array


@dataclasses.dataclass(frozen=True, kw_only=True)
class Recipe:
    """AdamW (Loshchilov and Hutter, arXiv 1711.05101) with warm-up and cosine decay."""

    steps: int
    batch: int  # rows per step, over all devices and microbatches
    microbatches: int = 1  # gradients are averaged over this many before each update
    learning_rate: float = 1e-3  # at its peak
    warmup_steps: int = 100
    final_share: float = 0.1  # of the peak, reached at the last step
    beta1: float = 0.9
    beta2: float = 0.98
    weight_decay: float = 0.1  # of matrices; scales are left alone
    clip_norm: float = 1.0
    seed: int = 0

    def __post_init__(self):
        for name in ("steps", "batch", "microbatches"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be >= 1; got {getattr(self, name)}")
        if self.batch % self.microbatches:
            raise ValueError(f"batch {self.batch} is no multiple of microbatches {self.microbatches}")
        if not 0 <= self.warmup_steps < self.steps:
            raise ValueError(f"warmup_steps must be in [0, steps); got {self.warmup_steps} of {self.steps}")

    def learning_rates(self) -> optax.Schedule:
        return optax.warmup_cosine_decay_schedule(
            0.0 if self.warmup_steps else self.learning_rate,
            self.learning_rate,
            self.warmup_steps,
            self.steps,
            self.final_share * self.learning_rate,
        )

    def optimizer(self) -> optax.GradientTransformation:
        def matrices(params):
            return jax.tree.map(lambda p: p.ndim > 1, params)

        return optax.chain(
            optax.clip_by_global_norm(self.clip_norm),
            optax.adamw(self.learning_rates(), self.beta1, self.beta2, weight_decay=self.weight_decay, mask=matrices),
        )


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainState:
    """All that changes, and all that a checkpoint holds."""

    step: Array  # int32, updates made
    params: Any  # float32
    opt_state: Any


class Batches(Protocol):
    """Rows by step; see data.py."""

    def batch(self, step: int, size: int) -> np.ndarray: ...


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rhythm:
    """How often, in steps; none of it changes what is learned."""

    log: int = 20
    evaluate: int = 500
    checkpoint: int = 500

    def __post_init__(self):
        for field in dataclasses.fields(self):
            if getattr(self, field.name) < 1:
                raise ValueError(f"rhythm.{field.name} must be >= 1 (steps); got {getattr(self, field.name)}")


def init_state(task: Task, recipe: Recipe, params: Any = None) -> TrainState:
    """At step 0, from random parameters or from the given ones."""
    key = jax.random.key(recipe.seed, impl="threefry2x32")
    if params is None:
        params = task.model.init(key)
    else:
        check_shapes("what training starts from", params, jax.eval_shape(task.model.init, key))
    return TrainState(step=jnp.zeros((), jnp.int32), params=params, opt_state=recipe.optimizer().init(params))


def state_shardings(task: Task, recipe: Recipe, mesh: Mesh) -> TrainState:
    """Where a state lives: parameters and their moments by the table of the layout, counters everywhere."""
    shapes = jax.eval_shape(lambda: init_state(task, recipe))
    params = Layout.tensor_parallel(mesh).shardings(task.model.param_axes(), shapes.params)
    everywhere = NamedSharding(mesh, PartitionSpec())
    opt_state = optax.tree_map_params(
        recipe.optimizer(),
        lambda _, sharding: sharding,
        shapes.opt_state,
        params,
        transform_non_params=lambda _: everywhere,
    )
    return TrainState(step=everywhere, params=params, opt_state=opt_state)


def train_step(
    task: Task, recipe: Recipe, state: TrainState, frozen: Any, rows_ABT: Array
) -> tuple[TrainState, dict[str, Array]]:
    """One update from ``A`` microbatches of ``[B, T + 1]`` tokens; returns loss and gradient norm too."""

    def gradients(rows_BT):
        return jax.value_and_grad(task.loss)(state.params, frozen, rows_BT)

    if rows_ABT.shape[0] == 1:
        loss, grads = gradients(rows_ABT[0])
    else:
        first = jax.eval_shape(gradients, rows_ABT[0])
        zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), first)

        def add(total, rows_BT):
            return (jax.tree.map(jnp.add, total, gradients(rows_BT)), None)

        total, _ = jax.lax.scan(add, zeros, rows_ABT)
        loss, grads = jax.tree.map(lambda x: x / rows_ABT.shape[0], total)
    updates, opt_state = recipe.optimizer().update(grads, state.opt_state, state.params)
    new_state = TrainState(step=state.step + 1, params=optax.apply_updates(state.params, updates), opt_state=opt_state)
    return new_state, {"loss": loss, "grad_norm": optax.tree.norm(grads)}


def train(
    task: Task,
    recipe: Recipe,
    data: Batches,
    folder: str | os.PathLike,
    *,
    held_out: np.ndarray,
    frozen: Any = None,
    params: Any = None,
    warps: dict[str, Warp] | None = None,
    rhythm: Rhythm = Rhythm(),
    mesh: Mesh | None = None,
    console: Console | None = None,
) -> TrainState:
    """Trains to the last step, from the latest checkpoint in ``folder`` if there is one.

    Args:
      held_out: ``[rows, T + 1]`` tokens, for evaluation.
      frozen: parameters the task looks at (a target's).
      params: to start from, when there is no checkpoint; they are copied.
      warps: distributions under which a draft is compared with its target, by name; default: the models' own.

    Raises:
      ValueError: rows do not divide over the shares of ``data`` or do not fill them, the model does not divide
        over ``model``, or a checkpoint or ``params`` do not fit.
      FloatingPointError: the loss or its gradient is no longer finite; nothing of that is saved.
    """
    folder, console, mesh = storage.place(folder), console or Console(), mesh or data_mesh()
    per_microbatch = recipe.batch // recipe.microbatches
    check_devices(recipe, held_out, mesh)
    shardings = state_shardings(task, recipe, mesh)
    rows_ABT_sharding = NamedSharding(mesh, PartitionSpec(None, DATA))

    # Closed whatever happens: what is being written is finished.
    with contextlib.closing(Checkpoints(folder / "checkpoints")) as checkpoints:
        if checkpoints.latest is None and params is None:
            state = jax.jit(init_state, static_argnums=(0, 1), out_shardings=shardings)(task, recipe)
        elif checkpoints.latest is None:
            state = put(init_state(task, recipe, jax.tree.map(jnp.copy, params)), shardings)
        else:
            shapes = jax.eval_shape(lambda: init_state(task, recipe))
            shapes = jax.tree.map(lambda x, at: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=at), shapes, shardings)
            saved = checkpoints.restore(params=shapes.params, rest=(shapes.step, shapes.opt_state))
            step, opt_state = saved["rest"]
            state = TrainState(step=step, params=saved["params"], opt_state=opt_state)
        frozen = put(frozen, frozen_shardings(task, frozen, mesh))
        numbers_everywhere = NamedSharding(mesh, PartitionSpec())
        step_function = jax.jit(
            train_step, static_argnums=(0, 1), donate_argnums=2, out_shardings=(shardings, numbers_everywhere)
        )

        done = int(state.step)
        log = MetricsLog(folder / "metrics.jsonl", resumed_at=done) if jax.process_index() == 0 else None
        progress = Progress(recipe.steps, recipe.batch * (held_out.shape[1] - 1), done, console)
        if done:
            progress.note(f"resumed at step {done}")
        for step in range(done, recipe.steps):
            rows = data.batch(step, recipe.batch).reshape(recipe.microbatches, per_microbatch, -1)
            rows_ABT = jax.make_array_from_callback(rows.shape, rows_ABT_sharding, rows.__getitem__)
            state, numbers = step_function(task, recipe, state, frozen, rows_ABT)
            now = step + 1
            last = now == recipe.steps
            if now % rhythm.log == 0 or now % rhythm.checkpoint == 0 or last:
                numbers = {name: float(value) for name, value in numbers.items()}
                check_finite(now, numbers, checkpoints.latest)
            if now % rhythm.log == 0 or last:
                pace = progress.report(now, **numbers)
                if log is not None:
                    rate = float(recipe.learning_rates()(step))
                    log.write(now, **numbers, learning_rate=rate, tokens_per_second=pace)
            if now % rhythm.evaluate == 0 or last:
                measured = evaluate(task, state.params, frozen, held_out, per_microbatch, mesh, warps)
                if log is not None:
                    log.write(now, **{f"held_out/{name}": value for name, value in measured.items()})
                progress.note("held out: " + "  ".join(f"{name} {value:.4f}" for name, value in measured.items()))
            if now % rhythm.checkpoint == 0 or last:
                checkpoints.save(now, state.params, (state.step, state.opt_state))
    return state


def check_finite(step: int, numbers: dict[str, float], saved: int | None) -> None:
    """Ends a training that has nothing more to learn, before it is saved over what it had learned.

    Raises:
      FloatingPointError: with the numbers, and what can be done.
    """
    if not np.isfinite(list(numbers.values())).all():
        raise FloatingPointError(
            f"training diverged: at step {step} "
            + ", ".join(f"{name} is {value:g}" for name, value in numbers.items())
            + ("; nothing was saved yet" if saved is None else f"; the checkpoint of step {saved} is as it was")
            + ". Begin again in another --workdir with a lower recipe.learning_rate, a longer recipe.warmup_steps, or "
            "compute_dtype float32"
        )


def check_devices(recipe: Recipe, held_out: np.ndarray, mesh: Mesh) -> None:
    """Refuses rows that cannot be spread over the devices: now, not after hundreds of steps.

    Raises:
      ValueError: with the numbers.
    """
    per_microbatch = recipe.batch // recipe.microbatches
    if per_microbatch % mesh.shape[DATA]:
        raise ValueError(
            f"{per_microbatch} rows of a microbatch do not divide over {mesh.shape[DATA]} devices of the mesh axis "
            f"'{DATA}': change batch"
        )
    evaluation_batch(held_out, per_microbatch, mesh)

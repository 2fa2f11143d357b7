"""The training loop: one jitted step over a mesh, checkpoints, metrics, exact resume.

A step depends on the state, the seed and its number only: data windows are addressed by step, and
random numbers by seed, step and microbatch. So a run that is killed and resumed gives the losses it
would have given.
"""

import contextlib
import dataclasses
import functools
import os
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from rich.console import Console

from specsamp import storage, validate
from specsamp.checkpoints.orbax import Checkpoints
from specsamp.checkpoints.params import check_shapes
from specsamp.mesh.layout import DATA, Layout, put
from specsamp.models.int8 import is_int8
from specsamp.training.data import Mixture, Windows
from specsamp.training.held_out import evaluate, evaluation_batch
from specsamp.training.run_folder import MetricsLog, Progress
from specsamp.training.training_task import Task

Array = jax.Array


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """AdamW (Loshchilov and Hutter, arXiv 1711.05101) with warm-up and cosine decay.

    Attributes:
      optimizer: "adamw"; or "muon" (Jordan et al., 2024), which gives matrices an update whose
        singular values are nearly equal and whose entries are as large as AdamW's on average (arXiv
        2502.16982). Its momentum is 0.95; biases, scales and the rows of the vocabulary are left to
        Adam, without weight decay.
    """

    steps: int
    batch: int  # rows per step, over all devices and microbatches
    microbatches: int = 1  # gradients are averaged over this many before each update
    optimizer: str = "adamw"
    learning_rate: float = 1e-3  # at its peak
    warmup_steps: int = 100
    final_share: float = 0.1  # of the peak learning rate, reached at the last step
    beta1: float = 0.9
    beta2: float = 0.98
    weight_decay: float = 0.1  # of matrices; scales are left alone
    clip_norm: float = 1.0  # largest norm of a gradient over all parameters
    seed: int = 0  # of random parameters, of the order of the data and of a task's draws

    def __post_init__(self):
        for name in ("steps", "batch", "microbatches"):
            validate.integer(f"train.{name}", getattr(self, name), 1)
        if self.batch % self.microbatches:
            raise ValueError(
                f"train.batch {self.batch} is no multiple of train.microbatches {self.microbatches}"
            )
        validate.integer("train.warmup_steps", self.warmup_steps, 0, limit=self.steps)
        validate.integer("train.seed", self.seed, limit=2**32)  # keys of larger seeds would repeat
        validate.choice("train.optimizer", self.optimizer, ("adamw", "muon"))
        for name in ("learning_rate", "clip_norm"):
            validate.number(f"train.{name}", getattr(self, name), 0, above=True)
        validate.number("train.weight_decay", self.weight_decay, 0)
        for name in ("final_share", "beta1", "beta2"):
            validate.number(f"train.{name}", getattr(self, name), 0, 1)

    @property
    def rows(self) -> int:
        """Returns the rows of a microbatch."""
        return self.batch // self.microbatches

    def learning_rates(self) -> optax.Schedule:
        """Returns the learning rate as a function of the step."""
        return optax.warmup_cosine_decay_schedule(
            0.0 if self.warmup_steps else self.learning_rate,
            self.learning_rate,
            self.warmup_steps,
            self.steps,
            self.final_share * self.learning_rate,
        )

    def make_optimizer(self, axes: Any) -> optax.GradientTransformation:
        """Builds the optimizer: gradients are clipped together, then give the update.

        Args:
          axes: the logical axis names of every parameter, as a tree of `PartitionSpec`.
        """

        def matrices(params):
            return jax.tree.map(lambda p: p.ndim > 1, params)

        rates = self.learning_rates()
        if self.optimizer == "muon":
            update = optax.contrib.muon(
                rates,
                adam_b1=self.beta1,
                adam_b2=self.beta2,
                weight_decay=self.weight_decay,
                muon_weight_dimension_numbers=jax.tree.map(muon_matrix, axes, is_leaf=is_spec),
                consistent_rms=0.2,
            )
        else:
            update = optax.adamw(
                rates, self.beta1, self.beta2, weight_decay=self.weight_decay, mask=matrices
            )
        return optax.chain(optax.clip_by_global_norm(self.clip_norm), update)


def is_spec(x: Any) -> bool:
    return isinstance(x, PartitionSpec)


def muon_matrix(axes: PartitionSpec) -> optax.contrib.MuonDimensionNumbers | None:
    """Returns the axes of a parameter's matrices, its last two; None for biases, scales and rows of
    the vocabulary.
    """
    if len(axes) < 2 or "vocab" in axes or "embed" not in axes:
        return None
    return optax.contrib.MuonDimensionNumbers(len(axes) - 2, len(axes) - 1)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Intervals:
    """Logging, evaluation and checkpoint intervals, in steps; they do not change the trained
    parameters.
    """

    log: int = 20
    evaluate: int = 500
    checkpoint: int = 500

    def __post_init__(self):
        for field in dataclasses.fields(self):
            validate.integer(f"intervals.{field.name}", getattr(self, field.name), 1)

    def due(self, step: int, steps: int) -> set[str]:
        """Returns the actions that are due after a step; after the last, all."""
        return {
            name for name, interval in vars(self).items() if step % interval == 0 or step == steps
        }


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainState:
    """The state that a training step changes and a checkpoint holds."""

    step: Array  # int32, updates made
    params: Any  # float32
    opt_state: Any


def init_state(
    task: Task, config: TrainConfig, params: Any = None, teacher_params: Any = None
) -> TrainState:
    """Builds the state of step 0, from a float32 copy of ``params`` or from the task's initial
    parameters; raises ValueError for weights in int8.
    """
    if any(map(is_int8, jax.tree.leaves(params, is_leaf=is_int8))):
        raise ValueError("weights in int8 cannot be trained: give the model's float weights")
    params = task.init(run_key(config), teacher_params) if params is None else params
    # Copies: an update donates its state.
    params = jax.tree.map(lambda x: jnp.array(x, jnp.float32), params)
    optimizer = config.make_optimizer(task.param_axes())
    return TrainState(
        step=jnp.zeros((), jnp.int32), params=params, opt_state=optimizer.init(params)
    )


def run_key(config: TrainConfig) -> Array:
    """Returns the key of a run: its parameters begin with it, and each step has one derived from
    it.
    """
    return jax.random.key(config.seed, impl="threefry2x32")


def state_shardings(task: Task, config: TrainConfig, mesh: Mesh) -> TrainState:
    """Returns the sharding of each leaf of a state: moments lie as their parameters, counters are
    replicated.
    """
    shapes = jax.eval_shape(lambda: init_state(task, config))
    params = Layout.tensor_parallel(mesh).shardings(task.param_axes(), shapes.params)
    replicated = NamedSharding(mesh, PartitionSpec())
    by_path = {jax.tree_util.keystr(path): at for path, at in jax.tree.leaves_with_path(params)}

    def of_leaf(path, _):
        name = jax.tree_util.keystr(path)
        return by_path.get(max(filter(name.endswith, by_path), key=len, default=""), replicated)

    opt_state = jax.tree_util.tree_map_with_path(of_leaf, shapes.opt_state)
    return TrainState(step=replicated, params=params, opt_state=opt_state)


def train_step(
    task: Task, config: TrainConfig, state: TrainState, teacher_params: Any, tokens_ABT: Any
) -> tuple[TrainState, dict[str, Array]]:
    """Makes one update from ``A`` microbatches of ``[B, T + 1]`` tokens, or of the arrays that
    the task reads.

    Returns:
      The new state, and scalars for the log: the loss, other metrics of the task, and the norm of
      the gradient.
    """
    num_microbatches = jax.tree.leaves(tokens_ABT)[0].shape[0]
    keys_A = jax.random.split(jax.random.fold_in(run_key(config), state.step), num_microbatches)

    def gradients(tokens_BT, key):
        return jax.value_and_grad(task.loss, has_aux=True)(
            state.params, teacher_params, tokens_BT, key, state.step
        )

    microbatches = tokens_ABT, keys_A
    first = jax.tree.map(lambda x: x[0], microbatches)
    if num_microbatches == 1:
        (loss, metrics), grads = gradients(*first)
    else:
        zeros = jax.tree.map(jnp.zeros_like, jax.eval_shape(gradients, *first))

        def add(total, microbatch):
            return jax.tree.map(jnp.add, total, gradients(*microbatch)), None

        total, _ = jax.lax.scan(add, zeros, microbatches)
        (loss, metrics), grads = jax.tree.map(lambda x: x / num_microbatches, total)
    optimizer = config.make_optimizer(task.param_axes())
    updates, opt_state = optimizer.update(grads, state.opt_state, state.params)
    new_state = TrainState(
        step=state.step + 1, params=optax.apply_updates(state.params, updates), opt_state=opt_state
    )
    return new_state, {"loss": loss, **metrics, "grad_norm": optax.tree.norm(grads)}


@functools.partial(jax.jit, static_argnums=(0, 1), donate_argnums=2)
def train_update(
    task: Task, config: TrainConfig, state: TrainState, teacher_params: Any, batch: Any
) -> tuple[TrainState, dict[str, Array]]:
    """Makes one update by `train_step`, compiled, from arrays that are split into microbatches; the
    state is donated.
    """
    split = jax.tree.map(lambda x: x.reshape(config.microbatches, -1, *x.shape[1:]), batch)
    return train_step(task, config, state, teacher_params, split)


def train(
    task: Task,
    config: TrainConfig,
    data: Windows | Mixture,
    folder: str | os.PathLike,
    *,
    held_out: np.ndarray,
    mesh: Mesh,
    teacher_params: Any = None,
    params: Any = None,
    intervals: Intervals = Intervals(),
    console: Console | None = None,
) -> TrainState:
    """Trains to the last step, from the latest checkpoint in ``folder`` if there is one.

    Args:
      held_out: ``[rows, T + 1]`` tokens, for evaluation.
      teacher_params: parameters that are read but not trained (a target's).
      params: the initial parameters where there is no checkpoint; they are copied.

    Raises:
      ValueError: rows do not divide over the data shards or do not fill them, the model does not
        divide over ``model``, or a checkpoint or ``params`` do not fit.
      FloatingPointError: the loss or its gradient is no longer finite; that state is not saved.
    """
    folder = storage.place(folder)
    check_rows(config, held_out, mesh)
    shardings = state_shardings(task, config, mesh)

    # Closing finishes a checkpoint that is being written.
    with contextlib.closing(Checkpoints(folder / "checkpoints")) as checkpoints:
        teacher_params = Layout.tensor_parallel(mesh).put(task.teacher_axes(), teacher_params)
        state = initial_state(task, config, checkpoints, shardings, params, teacher_params)
        step_function = jax.jit(
            train_step,
            static_argnums=(0, 1),
            donate_argnums=2,
            out_shardings=(shardings, NamedSharding(mesh, PartitionSpec())),
        )
        done = int(state.step)
        log = MetricsLog(
            folder / "metrics.jsonl" if jax.process_index() == 0 else None, resumed_at=done
        )
        tokens = config.batch * (held_out.shape[1] - 1)
        progress = Progress(config.steps, tokens, done, console or Console())
        if done:
            end = ", the last: nothing is left" if done == config.steps else ""
            progress.note(f"resumed at step {done}{end}")
        for step in range(done, config.steps):
            rows = data.batch(step, config.batch).reshape(config.microbatches, config.rows, -1)
            rows_ABT = put(rows, NamedSharding(mesh, PartitionSpec(None, DATA)))
            state, numbers = step_function(task, config, state, teacher_params, rows_ABT)
            now = step + 1
            due = intervals.due(now, config.steps)
            if "log" in due or "checkpoint" in due:
                numbers = {name: float(value) for name, value in numbers.items()}
                check_finite(now, numbers, checkpoints.latest)
            if "log" in due:
                log.write(
                    now,
                    **numbers,
                    learning_rate=float(config.learning_rates()(step)),
                    tokens_per_second=progress.report(now, **numbers),
                )
            if "evaluate" in due:
                measured = evaluate(task, state.params, teacher_params, held_out, config.rows, mesh)
                log.write(now, **{f"held_out/{name}": value for name, value in measured.items()})
                shown = "  ".join(f"{name} {value:.4f}" for name, value in measured.items())
                progress.note(f"held out: {shown}")
            if "checkpoint" in due:
                checkpoints.save(now, params=state.params, rest=(state.step, state.opt_state))
    return state


def initial_state(
    task: Task,
    config: TrainConfig,
    checkpoints: Checkpoints,
    shardings: TrainState,
    params: Any = None,
    teacher_params: Any = None,
) -> TrainState:
    """Restores the latest checkpoint; without a checkpoint, returns `init_state`.

    Raises:
      ValueError: the checkpoint is damaged, or it or ``params`` are of another model.
    """
    if checkpoints.latest is not None:
        shapes = jax.eval_shape(lambda: init_state(task, config))
        shapes = jax.tree.map(
            lambda x, at: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=at), shapes, shardings
        )
        saved = checkpoints.restore(params=shapes.params, rest=(shapes.step, shapes.opt_state))
        step, opt_state = saved["rest"]
        return TrainState(step=step, params=saved["params"], opt_state=opt_state)
    if params is not None:
        check_shapes("the initial parameters", params, jax.eval_shape(task.init, run_key(config)))
        params = put(params, shardings.params)
    # Compiled, so that each device makes its part of each array.
    return jax.jit(init_state, static_argnums=(0, 1), out_shardings=shardings)(
        task, config, params, teacher_params
    )


def check_finite(step: int, numbers: dict[str, float], saved: int | None) -> None:
    """Raises FloatingPointError, with a fix, if a number is not finite: before the state replaces a
    good checkpoint.
    """
    if not np.isfinite(list(numbers.values())).all():
        found = ", ".join(f"{name} is {value:g}" for name, value in numbers.items())
        kept = (
            "nothing was saved yet"
            if saved is None
            else f"the checkpoint of step {saved} is as it was"
        )
        raise FloatingPointError(
            f"training diverged: at step {step} {found}; {kept}. Begin again in another --workdir "
            "with a lower train.learning_rate, a longer train.warmup_steps, or compute_dtype "
            "float32"
        )


def check_rows(config: TrainConfig, held_out: np.ndarray, mesh: Mesh) -> None:
    """Checks that rows can be spread over the devices, before the first step.

    Raises:
      ValueError: the rows of a microbatch do not divide over the data shards, or held-out rows do
        not fill them.
    """
    if config.rows % mesh.shape[DATA]:
        raise ValueError(
            f"{config.rows} rows of a microbatch do not divide over {mesh.shape[DATA]} devices of "
            f"the mesh axis '{DATA}': change batch"
        )
    evaluation_batch(held_out, config.rows, mesh)

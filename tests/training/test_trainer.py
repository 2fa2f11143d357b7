"""Training: exact resumption, equal results for any split of the rows, and drafts that approach
their target.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec
from numpy.testing import assert_allclose, assert_array_equal

from specsamp import TransformerLM
from specsamp.mesh.layout import make_mesh
from specsamp.models.config import tiny
from specsamp.training.data import Windows
from specsamp.training.held_out import COMPARED_DISTRIBUTIONS, evaluate
from specsamp.training.trainer import (
    Intervals,
    TrainConfig,
    init_state,
    state_shardings,
    train,
    train_step,
    train_update,
)
from specsamp.training.training_task import TrainModel
from support.extras import slow_but
from support.refusals import refusal, refused_calls
from support.training import metrics, quiet
from support.weights import drawn_params

V, LENGTH = 32, 8


def lm(width=16):
    return TransformerLM(
        tiny(vocab_size=V, width=width, num_layers=1, num_heads=2, positions="rotary")
    )


MODEL = lm()
KEY = jax.random.key(0)
TASK = TrainModel(MODEL)
TRAIN = TrainConfig(steps=12, batch=8, warmup_steps=3, learning_rate=1e-2)
INTERVALS = Intervals(log=1, evaluate=6, checkpoint=4)
STREAM = np.random.default_rng(0).integers(0, V, 600).astype(np.int32)
DATA = Windows(STREAM, LENGTH)
HELD_OUT = DATA.in_order()[:16]


def mesh_of(devices, model=1):
    return make_mesh(devices // model, model, devices=jax.devices()[:devices])


def run(
    folder, task=TASK, config=TRAIN, data=DATA, devices=1, intervals=INTERVALS, mesh=None, **options
):
    folder.mkdir(exist_ok=True)
    return train(
        task,
        config,
        data,
        folder,
        held_out=HELD_OUT,
        intervals=intervals,
        mesh=mesh or mesh_of(devices),
        console=quiet(),
        **options,
    )


def losses(folder):
    return [record["loss"] for record in metrics(folder) if "loss" in record]


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """Returns the folder and the last state of an uninterrupted run."""
    folder = tmp_path_factory.mktemp("whole")
    return folder, run(folder)


class Killed(Exception):
    pass


@dataclasses.dataclass
class Breaking:
    """Data that ends the run before a step, and records the requested steps."""

    at: int
    asked: list = dataclasses.field(default_factory=list)

    def batch(self, step, size):
        if step == self.at:
            raise Killed
        self.asked.append(step)
        return DATA.batch(step, size)


@pytest.mark.parametrize("at, resumed", slow_but([(2, 0), (11, 8)], (11, 8)))
def test_killed_training_resumes_exactly(whole, tmp_path, at, resumed):
    """Losses and parameters are equal to the last bit; no step before the last checkpoint is
    repeated.
    """
    folder, state = whole
    with pytest.raises(Killed):
        run(tmp_path / "run", data=Breaking(at))
    assert len(losses(tmp_path / "run")) == at
    again = Breaking(at=-1)
    resumed_state = run(tmp_path / "run", data=again)
    assert again.asked == list(range(resumed, TRAIN.steps))
    assert metrics(tmp_path / "run") == metrics(folder)
    jax.tree.map(assert_array_equal, resumed_state, state)


def test_losses_and_learning_rates_are_logged(whole):
    records = metrics(whole[0])
    assert [r["step"] for r in records if "loss" in r] == list(range(1, 13))
    assert [r["step"] for r in records if "held_out/loss" in r] == [6, 12]
    assert losses(whole[0])[-1] < losses(whole[0])[0]
    rates = [r["learning_rate"] for r in records if "loss" in r]
    assert_allclose(rates, [TRAIN.learning_rates()(step) for step in range(12)])


one_step = jax.jit(train_step, static_argnums=(0, 1))


@pytest.fixture(scope="module")
def params():
    return drawn_params(MODEL, 5)


def test_update_leaves_the_given_parameters(params):
    half = jax.tree.map(lambda x: x.astype(jnp.bfloat16), params)
    for given in (params, half):
        state, _ = train_update(TASK, TRAIN, init_state(TASK, TRAIN, given), None, DATA.batch(0, 8))
        assert {leaf.dtype for leaf in jax.tree.leaves(state.params)} == {jnp.dtype("float32")}
        assert not any(leaf.is_deleted() for leaf in jax.tree.leaves(given))


def test_microbatches_change_nothing_but_rounding(params):
    def two_steps(microbatches, rows_of=lambda rows: rows):
        """Takes two steps, since the first has a learning rate of zero."""
        config = dataclasses.replace(TRAIN, microbatches=microbatches)
        state = init_state(TASK, config, params)
        for step in range(2):
            rows = rows_of(DATA.batch(step, 8)).reshape(microbatches, -1, LENGTH + 1)
            state, numbers = one_step(TASK, config, state, None, rows)
        return state.params, numbers

    one, of_one = two_steps(1)
    four, of_four = two_steps(4)
    for name in of_one:
        assert_allclose(of_one[name], of_four[name], rtol=1e-5)
    jax.tree.map(lambda a, b: assert_allclose(a, b, atol=1e-5), one, four)
    assert any(
        (a != b).any() for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(params), strict=True)
    )

    def half_twice(rows):
        return np.concatenate([rows[:4], rows[:4]])

    # The control: some rows are missing.
    assert abs(two_steps(4, half_twice)[1]["loss"] - of_one["loss"]) > 1e-3


@dataclasses.dataclass(frozen=True)
class Noisy:
    """A task that draws a number in every microbatch; the loss is a parameter times this number."""

    def init(self, key, teacher_params=None):
        return {"scale": jnp.ones(())}

    def param_axes(self):
        return {"scale": PartitionSpec()}

    def loss(self, params, teacher_params, tokens_BT, key, step):
        drawn = jax.random.uniform(key)
        return params["scale"] * drawn, {"drawn": drawn}


def test_task_noise_depends_on_step_and_microbatch():
    def drawn(seed, step, microbatches=1):
        config = dataclasses.replace(TRAIN, seed=seed, microbatches=microbatches)
        state = dataclasses.replace(init_state(Noisy(), config), step=jnp.int32(step))
        _, numbers = one_step(
            Noisy(), config, state, None, np.zeros((microbatches, 2, LENGTH + 1), np.int32)
        )
        assert numbers["drawn"] == numbers["loss"] == numbers["grad_norm"]
        return float(numbers["drawn"])

    # The last is a mean of two.
    draws = [drawn(0, 3), drawn(0, 4), drawn(1, 3), drawn(0, 3, microbatches=2)]
    assert len(set(draws)) == 4 and drawn(0, 3) == draws[0]


@pytest.mark.slow
def test_every_mesh_gives_the_losses_of_one_device(tmp_path):
    """A draft of a split target is distilled in data and tensor parallel, then on another mesh."""
    model = TransformerLM(dataclasses.replace(MODEL.config, num_heads=8, num_kv_heads=2))
    task = TrainModel(model, model)
    teacher_params = drawn_params(model, 9)
    short = {"config": dataclasses.replace(TRAIN, steps=8), "teacher_params": teacher_params}
    run(tmp_path / "one", task, **short)
    with pytest.raises(Killed):
        run(tmp_path / "2", task, data=Breaking(at=6), mesh=mesh_of(8, 4), **short)
    mesh = mesh_of(8, 2)
    state = run(tmp_path / "2", task, mesh=mesh, **short)
    assert_allclose(losses(tmp_path / "2"), losses(tmp_path / "one"), rtol=2e-5)

    def lies(leaf, *spec):
        return leaf.sharding.is_equivalent_to(NamedSharding(mesh, PartitionSpec(*spec)), leaf.ndim)

    for tree in (state.params, state.opt_state[1][0].mu):
        layer = tree["layer_0"]
        assert lies(layer["mlp"]["up"], None, "model") and lies(tree["final_norm"]["scale"])
        assert lies(layer["attention"]["query"], "model")
        assert lies(layer["attention"]["key"], "model")
    assert lies(state.step)


def test_rows_that_do_not_divide_over_the_devices(tmp_path):
    with refusal("4 rows of a microbatch.* 8 devices.*'data'"):
        run(tmp_path, config=dataclasses.replace(TRAIN, microbatches=2), devices=8)
    with refusal("3 held-out rows do not fill 8 devices"):
        # The refusal precedes the first step.
        train(TASK, TRAIN, Breaking(at=0), tmp_path, held_out=HELD_OUT[:3], mesh=mesh_of(8))


def test_initial_parameters_are_used_and_kept(params, tmp_path):
    with pytest.raises(Killed):
        run(tmp_path, params=params, data=Breaking(2))  # steps donate their own copy
    expected, _ = TASK.loss(params, None, jnp.asarray(DATA.batch(0, 8)), KEY)
    assert_allclose(losses(tmp_path)[0], expected, rtol=1e-5)
    with refusal(r"embedding: \(32, 16\) there, \(32, 24\) wanted"):
        run(tmp_path / "other", TrainModel(lm(width=24)), params=params)


def test_gradients_are_clipped_and_scales_undecayed():
    """Adam cancels a common factor, so the first moment is checked: a norm of 5 becomes 1."""
    params = {"matrix": jnp.ones((2, 2)), "scale": jnp.ones(1)}
    grads = {"matrix": jnp.full((2, 2), 2.0), "scale": jnp.full(1, 3.0)}
    optimizer = dataclasses.replace(TRAIN, warmup_steps=0, weight_decay=0.5).make_optimizer(None)
    _, state = optimizer.update(grads, optimizer.init(params), params)
    assert_allclose(state[1][0].mu["scale"] / (1 - TRAIN.beta1), 3 / 5, rtol=1e-5)
    updates, _ = optimizer.update(
        jax.tree.map(jnp.zeros_like, params), optimizer.init(params), params
    )
    assert_allclose(updates["matrix"], -0.5 * TRAIN.learning_rate)
    assert_array_equal(updates["scale"], 0)


def test_muon_updates_matrices_by_equal_singular_values():
    """Five iterations bring singular values near 1; AdamW keeps scales and the vocabulary."""
    axes = {
        "matrices": PartitionSpec(None, "embed", "heads"),
        "rows": PartitionSpec("vocab", "embed"),
        "scale": PartitionSpec("embed"),
    }
    shapes = {"matrices": (2, 4, 8), "rows": (6, 4), "scale": (4,)}
    normal = np.random.default_rng(0).normal
    params = {name: jnp.zeros(shape) for name, shape in shapes.items()}
    grads = {name: jnp.asarray(normal(size=shape)) for name, shape in shapes.items()}
    config = dataclasses.replace(TRAIN, warmup_steps=0, optimizer="muon")
    optimizer = config.make_optimizer(axes)
    updates, _ = optimizer.update(grads, optimizer.init(params), params)
    singular = np.linalg.svd(updates["matrices"], compute_uv=False)
    before = np.linalg.svd(grads["matrices"], compute_uv=False)
    assert (before.max(axis=1) > 2 * before.min(axis=1)).all()
    assert (singular.max(axis=1) < 2 * singular.min(axis=1)).all()
    for name in ("rows", "scale"):  # the first update of AdamW depends on signs alone
        sizes = abs(updates[name]).ravel()
        assert_allclose(sizes, sizes[0], rtol=1e-3)


def test_muon_states_lie_as_their_parameters():
    config = dataclasses.replace(TRAIN, optimizer="muon")
    shardings = state_shardings(TASK, config, mesh_of(2, model=2))
    parts = shardings.opt_state[1].inner_states
    moments = parts["muon"].inner_state[0].mu, parts["adam"].inner_state[0].mu
    found = dict(leaf for one in moments for leaf in jax.tree.leaves_with_path(one))
    assert found == dict(jax.tree.leaves_with_path(shardings.params))
    assert len(set(found.values())) > 2  # parameters lie differently


def test_bfloat16_training_keeps_state_in_float32(tmp_path):
    model = TransformerLM(dataclasses.replace(MODEL.config, dtype="bfloat16"))
    state = run(tmp_path, task=TrainModel(model), config=dataclasses.replace(TRAIN, steps=4))
    kept = [leaf for leaf in jax.tree.leaves((state.params, state.opt_state)) if leaf.ndim]
    assert len(kept) == 3 * len(jax.tree.leaves(state.params))
    assert {leaf.dtype for leaf in kept} == {jnp.dtype("float32")}

    def program(task):
        return str(jax.make_jaxpr(task.loss)(state.params, None, jnp.asarray(HELD_OUT), KEY))

    assert "bf16" in program(TrainModel(model)) and "bf16" not in program(TASK)


def test_diverging_training_ends_and_saves_nothing(params, tmp_path):
    broken = jax.tree.map(lambda x: x * jnp.nan, params)
    with pytest.raises(FloatingPointError, match="at step 1 .*loss is nan.*learning_rate"):
        run(tmp_path / "nan", params=broken)
    assert not [
        path for path in (tmp_path / "nan" / "checkpoints").iterdir() if path.name.isdigit()
    ]
    # Also where nothing is logged.
    with pytest.raises(FloatingPointError, match="at step 8 .*loss is nan"):
        run(
            tmp_path / "rare",
            params=broken,
            intervals=Intervals(log=100, evaluate=100, checkpoint=8),
        )


@pytest.fixture(scope="module")
def target():
    """Returns a larger model whose distribution is far from uniform."""
    model = lm(width=24)
    params = drawn_params(model, 1)
    return model, {**params, "embedding": params["embedding"] * 4}


def test_a_draft_gets_closer_to_its_target(target, params):
    model, teacher_params = target
    task = TrainModel(MODEL, model, "total_variation")
    config = TrainConfig(steps=40, batch=8, warmup_steps=1, learning_rate=2e-2)
    state = init_state(task, config, params)

    def acceptance(state):
        return evaluate(task, state.params, teacher_params, HELD_OUT, 16, mesh_of(1))[
            "acceptance (temperature 1)"
        ]

    before = acceptance(state)
    for number in range(config.steps):
        state, numbers = one_step(task, config, state, teacher_params, DATA.batch(number, 8)[None])
    assert np.isfinite(numbers["loss"])
    assert before < 0.6 and acceptance(state) > before + 0.1


def test_cross_entropy_needs_no_target(target, params):
    """The loss is computed without parameters of the target."""
    model, teacher_params = target
    text, _ = TASK.loss(params, None, jnp.asarray(HELD_OUT), KEY)
    assert TrainModel(MODEL, model, "cross_entropy").loss(
        params, None, jnp.asarray(HELD_OUT), KEY
    ) == (text, {})
    divergence, metrics = TrainModel(MODEL, model).loss(
        params, teacher_params, jnp.asarray(HELD_OUT), KEY
    )
    assert metrics == {"text_loss": text} and abs(divergence - text) > 0.1


def test_draft_equal_to_target_is_always_accepted(target):
    model, params = target
    task = TrainModel(model, model)
    measured = evaluate(task, params, params, HELD_OUT, 16, mesh_of(1))
    compared = {
        f"{number} ({name})"
        for number in ("acceptance", "greedy_agreement")
        for name in COMPARED_DISTRIBUTIONS
    }
    assert measured.keys() == {"loss"} | compared
    assert_allclose([measured[name] for name in compared], 1.0, atol=1e-5)
    assert_allclose(task.loss(params, params, jnp.asarray(HELD_OUT), KEY)[0], 0.0, atol=1e-5)


make_config = functools.partial(dataclasses.replace, TRAIN)
OTHER = TransformerLM(dataclasses.replace(MODEL.config, vocab_size=33))

test_refused_trainers = refused_calls(
    {
        "train.steps must be an integer >= 1 .*; got 0": lambda: make_config(steps=0),
        "train.batch 8 is no multiple of train.microbatches 3": lambda: make_config(microbatches=3),
        "train.seed must be .*; got 4294967296": lambda: make_config(seed=2**32),
        "train.warmup_steps must be .* below 12; got 12": lambda: make_config(warmup_steps=12),
        "learning_rate must be a number above 0; got 0.0": lambda: make_config(learning_rate=0.0),
        "train.beta2 must be a number from 0 to 1; got 1.5": lambda: make_config(beta2=1.5),
        "intervals.evaluate must be an integer >= 1 .*; got 0": lambda: Intervals(evaluate=0),
        "draft vocabulary 32 != target 33": lambda: TrainModel(MODEL, OTHER),
    }
)

"""The folder of a run: missing, damaged and wrong parts are named; the log drops repeated steps."""

import contextlib
import dataclasses
import io
import json
import shutil

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from numpy.testing import assert_array_equal
from rich.console import Console

from specsamp import TransformerLM, storage
from specsamp.checkpoints.orbax import Checkpoints
from specsamp.models.config import tiny
from specsamp.training import run_folder, source
from specsamp.training.run_folder import MetricsLog, Progress
from support.refusals import refusal
from support.weights import drawn_params

CONFIG = tiny(num_layers=1, width=16, vocab_size=32, num_heads=2, positions="rotary")
PARAMS = {"matrix": jnp.arange(6.0).reshape(2, 3), "scale": jnp.ones(3)}
REST = {"moment": jnp.full(4, 2.0)}


def opened(folder, **options):
    return contextlib.closing(Checkpoints(folder, **options))


def shapes(tree):
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), tree)


@pytest.fixture(scope="module")
def original(tmp_path_factory):
    """Saves steps 1, 3 and 6, and keeps the last two; parameters are the step times `PARAMS`."""
    folder = tmp_path_factory.mktemp("checkpoints")
    with opened(folder) as checkpoints:
        for step in (1, 3, 6):
            checkpoints.save(step, params=jax.tree.map(lambda x: step * x, PARAMS), rest=REST)
    return folder


@pytest.fixture
def saved(original, tmp_path):
    return shutil.copytree(original, tmp_path / "checkpoints")


def params_of(folder, step=None):
    with opened(folder) as checkpoints:
        return checkpoints.restore(step, params=shapes(PARAMS))["params"]


def test_the_last_states_come_back(saved, tmp_path):
    assert_array_equal(params_of(saved)["matrix"], 6 * PARAMS["matrix"])
    assert_array_equal(params_of(saved, 3)["matrix"], 3 * PARAMS["matrix"])
    with opened(saved) as checkpoints:
        assert checkpoints.latest == 6
        restored = checkpoints.restore(params=shapes(PARAMS), rest=shapes(REST))
    assert_array_equal(restored["rest"]["moment"], REST["moment"])
    with refusal(r"no checkpoint in .*nothing: it has steps \[\]", FileNotFoundError):
        params_of(tmp_path / "nothing")
    with refusal(r"no checkpoint of step 1 in .*: it has steps \[3, 6\]", FileNotFoundError):
        params_of(saved, 1)  # only the last two are kept


def truncate_largest(folder):
    largest = max(
        (path for path in folder.rglob("*") if path.is_file()), key=lambda path: path.stat().st_size
    )
    largest.write_bytes(largest.read_bytes()[: largest.stat().st_size // 2])


def test_damaged_checkpoint_is_named_and_deletable(saved):
    truncate_largest(saved / "6" / "params")
    with refusal("checkpoints/6 is damaged .*: delete that folder to go back") as caught:
        params_of(saved)
    assert str(saved) in str(caught.value)
    shutil.rmtree(saved / "6")
    assert_array_equal(params_of(saved)["matrix"], 3 * PARAMS["matrix"])


def test_cut_checkpoint_is_skipped(saved):
    """A cut checkpoint, under Orbax's temporary name, is skipped, and its step can be saved."""
    cut = shutil.copytree(saved / "6", saved / "9.orbax-checkpoint-tmp")
    truncate_largest(cut / "params")
    assert_array_equal(params_of(saved)["matrix"], 6 * PARAMS["matrix"])
    with opened(saved) as checkpoints:
        assert checkpoints.latest == 6
        checkpoints.save(9, params=jax.tree.map(lambda x: 9 * x, PARAMS), rest=REST)
    assert_array_equal(params_of(saved)["matrix"], 9 * PARAMS["matrix"])


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Writes a run with parameters on all eight devices; returns its folder and the parameters."""
    folder = tmp_path_factory.mktemp("run")
    shape = {k: v for k, v in dataclasses.asdict(CONFIG).items() if k != "dtype"}
    run_folder.open_run(
        folder, {"model": shape, "train": {"batch": 2}, "data": {"length": 10}}, "{}"
    )
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
    params = jax.device_put(
        drawn_params(TransformerLM(CONFIG)), NamedSharding(mesh, PartitionSpec())
    )
    with opened(folder / "checkpoints") as checkpoints:
        checkpoints.save(7, params=params, rest=REST)
    log = MetricsLog(folder / "metrics.jsonl")
    log.write(5, loss=2.0, tokens_per_second=10.0)
    log.write(7, loss=1.0, tokens_per_second=20.0)
    log.write(7, **{"held_out/loss": 3.0})
    log.write(9, loss=0.5, tokens_per_second=20.0)  # killed before the next checkpoint
    return folder, params


def test_a_trained_model_is_opened_without_its_optimizer(trained):
    """It is opened on one device, since there may be fewer devices than in training."""
    folder, params = trained
    model = source.open_trained(folder)
    assert model.config == CONFIG and model.step == 7
    # Steps of 2 rows of 10 tokens, at the pace of each report.
    seconds = 5 * 20 / 10 + 2 * 20 / 20
    expected = {"step": 7, "loss": 1.0, "held_out/loss": 3.0, "training_seconds": seconds}
    assert expected.items() <= run_folder.last_metrics(model.folder, model.step).items()
    assert model.model_in("bfloat16").config == dataclasses.replace(CONFIG, dtype="bfloat16")
    jax.tree.map(assert_array_equal, model.params, params)
    assert all(len(leaf.devices()) == 1 for leaf in jax.tree.leaves(model.params))


def test_folder_without_trained_model_is_refused(trained, tmp_path):
    with refusal("no training run at '.*nowhere': it has no run.json", FileNotFoundError):
        source.open_trained(tmp_path / "nowhere")
    folder = shutil.copytree(trained[0], tmp_path / "run")
    config = source.open_trained(folder).provenance["config"]
    config["model"]["feedforward_width"] += 1
    storage.write_json(folder / "run.json", config)
    with refusal(r"7/params is of another .*up: \(16, 64\) there, \(16, 65\) wanted") as caught:
        source.open_trained(folder)
    assert "delete" not in str(caught.value)
    shutil.rmtree(folder / "checkpoints")
    with refusal("no checkpoint in", FileNotFoundError):
        source.open_trained(folder)


def test_a_damaged_run_json_is_named(tmp_path):
    for content, message in (
        ('{"model": 3}', "describes no model .TypeError: .*must be a mapping, not int"),
        (
            '{"model": {"vocab_size": 9, "width": 0, "num_layers": 1, "num_heads": 1}}',
            ".ValueError: width",
        ),
        ("{", "is no JSON: Expecting property name"),
    ):
        (tmp_path / "run.json").write_text(content)
        with refusal(f"{tmp_path}/run.json .*{message}.*--workdir"):
            source.open_trained(tmp_path)
    with refusal(message):
        run_folder.check_run(tmp_path, RUN)


RUN = {
    "model": {"width": 16, "layers": 2},
    "intervals": {"log": 10},
    "exclude": ("a", "b"),
    "folder": "é",
}


def test_a_run_belongs_to_its_configuration(tmp_path):
    folder = tmp_path / "new" / "run"
    run_folder.check_run(folder, RUN)  # no folder yet
    run_folder.open_run(folder, RUN, "{}", corpus={"sha256": "a", "files": 3})
    run_folder.check_run(folder, RUN)
    changed = {**RUN, "model": {"width": 32, "depth": 2}, "intervals": {"log": 1}}
    with pytest.raises(ValueError) as caught:
        run_folder.check_run(folder, changed, changeable=("intervals",))
    message = str(caught.value)
    assert "model.width was 16, is 32" in message
    assert "model.layers was 2, is 'absent'" in message
    assert "model.depth was 'absent', is 2" in message
    assert "intervals" not in message and "exclude" not in message
    run_folder.check_run(folder, {**RUN, "intervals": {"log": 1}}, changeable=("intervals",))
    with refusal("intervals.log was 10, is 1"):
        run_folder.check_run(folder, {**RUN, "intervals": {"log": 1}})
    run_folder.check_same(folder, "corpus", {"sha256": "a", "files": 4})  # the hash decides
    run_folder.check_same(folder, "target", {"sha256": "b"})  # the run records no target
    with refusal("another corpus: {.*'files': 3.*}, now {.*'files': 4.*}"):
        run_folder.check_same(folder, "corpus", {"sha256": "b", "files": 4})


def test_log_drops_steps_to_be_repeated(tmp_path):
    path = tmp_path / "metrics.jsonl"
    log = MetricsLog(path)
    for step in (1, 2, 3, 4):
        log.write(step, loss=1 / step)
    path.write_text(path.read_text(encoding="utf-8") + '{"step": 5, "lo')
    MetricsLog(path, resumed_at=3).write(4, loss=0.125)
    records = [json.loads(line) for line in path.read_text().splitlines()]
    assert [(record["step"], record["loss"]) for record in records] == [
        (1, 1.0),
        (2, 0.5),
        (3, 1 / 3),
        (4, 0.125),
    ]
    MetricsLog(path)
    assert path.read_text() == ""


def test_progress_tells_pace_and_time_left(monkeypatch):
    clock = iter([100.0, 110.0, 115.0])
    monkeypatch.setattr("time.monotonic", lambda: next(clock))
    console = Console(file=io.StringIO())
    progress = Progress(steps=100, tokens_per_step=50, start=20, console=console)
    # Each pace is measured since the last report.
    assert [progress.report(30, loss=1.5), progress.report(40)] == [50.0, 100.0]
    assert console.file.getvalue() == (
        "step 30/100  loss 1.5  50 tokens/s  0:01:10 left\nstep 40/100    100 tokens/s  0:00:45 "
        "left\n"
    )

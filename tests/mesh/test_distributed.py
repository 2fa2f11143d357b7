"""Two processes with eight devices: the tokens of one process, checkpoints, and ends of a job."""

import json
import os
import pathlib
import re
import signal
import socket
import subprocess
import sys
import urllib.request

import jax
import numpy as np
import pytest

from configs import chinchilla
from launch.lib import experiment
from launch.lib.fields import ExperimentConfig
from specsamp import generate, load_pair
from specsamp.analysis.workload import decoders
from specsamp.checkpoints.export import export
from specsamp.mesh import distributed
from specsamp.serving.request_warps import make_warp
from specsamp.training.run_folder import read_metrics
from support import mesh_worker as worker
from support import run_script
from support.checkpoint_shapes import random_params
from support.refusals import refused_calls
from support.training import SMALL, write_texts

WORKER = pathlib.Path(worker.__file__)
ROOT = WORKER.parents[2]


MESH = "--config.mesh.data=4", "--config.mesh.model=2"


def free_port():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


# A busy machine may answer late; only tests of a lost process have short timeouts.
PATIENT = {"SPECSAMP_HEARTBEAT_SECONDS": "300", "SPECSAMP_CONNECT_SECONDS": "300"}


def start(scenario, folder, present=(0, 1), **environment):
    paths = {"PYTHONPATH": os.pathsep.join(map(str, (ROOT, ROOT / "tests")))}
    env = os.environ | paths | PATIENT | environment
    command = [sys.executable, str(WORKER), scenario, str(folder), str(free_port())]
    return [begin([*command, f"--process_id={index}"], ROOT, env) for index in present]


def begin(command, folder, env):
    told = dict(text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    return subprocess.Popen(command, cwd=folder, env=env, **told)


def finish(jobs, timeout=1800):
    outputs = [job.communicate(timeout=timeout)[0] for job in jobs]
    return [job.returncode for job in jobs], outputs


@pytest.mark.slow
def test_processes_decode_save_and_read_like_one(tmp_path):
    worker.save(tmp_path / "one")
    export(tmp_path / "public", worker.PUBLIC, random_params(worker.PUBLIC))
    codes, outputs = finish(start("work", tmp_path))
    assert codes == [0, 0], "\n".join(outputs)
    expected = worker.tokens(generate(worker.pair(), worker.PROMPTS, **worker.CALL))
    assert len({tuple(row) for row in expected}) == len(expected)
    for process in range(2):
        results = np.load(tmp_path / f"decoded{process}.npy", allow_pickle=True).item()
        assert [*results] == ["one model over both", "rows over both, streamed", "queue", "service"]
        for how, tokens in results.items():
            # Only the first process has the texts of the service.
            assert tokens == (expected if process == 0 or how != "service" else []), (process, how)

    # A checkpoint crosses layouts and processes, in both directions.
    assert len(list(tmp_path.glob("one/restored*"))) == 2
    worker.restore(tmp_path / "two")
    assert len(list(tmp_path.glob("two/restored*"))) == 1

    # Each process reads its part of a public checkpoint.
    assert len(list(tmp_path.glob("read*"))) == 2


@pytest.mark.slow
@pytest.mark.parametrize(
    "scenario, survivor, message",
    [
        ("die", 0, "specsamp: the runtime ended process 0 of 2: most likely another process died"),
        ("coordinator_dies", 1, "specsamp: the runtime ended process 1 of 2"),
        ("die_caught", 0, "a computation failed"),
    ],
)
def test_survivor_of_a_dead_process_ends_with_reason(tmp_path, scenario, survivor, message):
    jobs = start(scenario, tmp_path, SPECSAMP_HEARTBEAT_SECONDS="10")
    jobs[1 - survivor].communicate(timeout=1800)
    output, _ = jobs[survivor].communicate(timeout=1800)
    assert jobs[survivor].returncode == 1 and output.splitlines()[-1].startswith(message), output


@pytest.mark.slow
def test_lone_process_reports_missing_processes(tmp_path):
    (alone,) = start("nothing", tmp_path, present=[0], SPECSAMP_CONNECT_SECONDS="3")
    output, _ = alone.communicate(timeout=1800)
    last = output.splitlines()[-1]
    assert alone.returncode == 1
    assert re.fullmatch(r"specsamp: not all 2 .* reached 127.0.0.1:\d+ within 3 seconds", last)


def test_processes_with_other_code_refuse_to_start(tmp_path):
    codes, outputs = finish(start("other_code", tmp_path))
    assert all(codes)
    for output in outputs:
        assert "processes run different code" in output and "process 1 has specsamp 0000" in output
        assert "the same commit" in output


def test_unreachable_coordinator_is_an_error(monkeypatch):
    assert distributed.CONNECT_SECONDS + 10 < 60
    monkeypatch.setattr(distributed, "CONNECT_SECONDS", 1)
    address = f"127.0.0.1:{free_port()}"
    with pytest.raises(
        ConnectionError, match=f"no coordinator answered at {address} within 1 seconds"
    ):
        distributed.start(address, 2, 1)


def test_code_version_is_a_digest_of_source(tmp_path, monkeypatch):
    monkeypatch.setattr("sys.argv", ["x", "--process_id=3", "--config.batch=2"])
    monkeypatch.setenv("SPECSAMP_VERSION", "0123abc")
    before = distributed.code_version()
    assert before.startswith("specsamp 0123abc")
    assert before.endswith(f", jax {jax.__version__}, --config.batch=2")
    (tmp_path / "__init__.py").write_text("")
    monkeypatch.setattr(distributed.machine, "PACKAGE", tmp_path)
    assert distributed.code_version() != before


def begin_both(script, *arguments, folders=(ROOT, ROOT)):
    """Starts a command as two processes with 8 devices together, each in its folder."""
    port = free_port()
    four = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=4"
    env = (
        os.environ | PATIENT | {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu", "XLA_FLAGS": four}
    )
    env |= {"JAX_ENABLE_COMPILATION_CACHE": "false"}
    command = [sys.executable, f"{ROOT}/launch/{script}.py", *map(str, arguments)]
    command += [f"--coordinator=127.0.0.1:{port}", "--num_processes=2"]
    return [
        begin([*command, f"--process_id={index}"], folder, env)
        for index, folder in enumerate(folders)
    ]


def launch(script, *arguments, folders=(ROOT, ROOT), code=0, timeout=1800):
    """Runs a command as two processes, and returns their outputs."""
    codes, outputs = finish(begin_both(script, *arguments, folders=folders), timeout)
    assert codes == [code] * 2, "\n".join(outputs)
    return outputs


def launch_alone(script, *arguments):
    """Runs the same command in this process, with 8 devices."""
    done = run_script.call(script, *arguments)
    assert not done.returncode, done.stdout + done.stderr


@pytest.mark.slow
def test_a_benchmark_of_two_processes_is_written_once(tmp_path):
    """Counts equal a run on eight devices of this process; prompt lookup compiles no draft."""
    output = tmp_path / "result.json"
    fields = {
        "mesh.model": 4,
        "mesh.data": 2,
        "repeats": 1,
        "target.num_layers": 1,
        "draft_length": 2,
    }
    fields |= {"drafter": "ngram", "max_new_tokens": 12, "target.positions": "rotary"}
    flags = ["--config=configs/chinchilla.py:tiny,batch=2", f"--output={output}", "--plain"]
    printed = launch("benchmark", *flags, *run_script.flags_of(fields))
    assert ["written to" in text for text in printed] == [True, False]
    document = json.loads(output.read_text())
    assert document["environment"]["devices"] == 8
    here = experiment.build(
        ExperimentConfig.from_config_dict(chinchilla.get_config("tiny,batch=2")).turned(fields)
    )
    side = decoders(here.pair, {"x": here.method}, here.workload)["x"]
    stats = side.decode(0).stats
    (cell,) = document["cells"]
    assert cell["result"]["acceptance"]["accepted_counts"] == list(stats.accepted_counts)
    assert cell["result"]["acceptance"]["emitted"] == stats.emitted


@pytest.mark.slow
def test_evaluation_of_two_processes_equals_one(tmp_path):
    """The first process holds the texts, and sends the second one each request."""
    run_script.save_tiny_pair(tmp_path / "pair", [f"def f{i}(x):" for i in range(6)])
    results = []
    flags = "--task=python --samples=2 --blocks=1 --methods=token --config.max_new_tokens=6".split()
    flags += [
        f"--source={tmp_path / 'pair'}",
        f"--config=configs/trained_pair.py:{tmp_path / 'pair'}",
    ]
    for how in (launch, launch_alone):
        output = tmp_path / f"{how.__name__}.json"
        how("evaluate", *flags, *MESH, f"--output={output}")
        (cell,) = run_script.read_cells(output)
        results.append([round(score["log_prob"], 3) for score in cell["result"]["scores"]])
        assert cell["result"]["timed"]["completions"] == 12
    assert results[0] == results[1] and len(set(results[0])) == 6


@pytest.mark.slow
def test_endpoint_of_two_processes_answers_and_ends(tmp_path):
    """The text equals the text of one process."""
    run_script.save_tiny_pair(tmp_path / "pair", [f"def f{i}(x):" for i in range(6)])
    flags = [f"--config=configs/trained_pair.py:{tmp_path / 'pair'}"]
    flags += ["--port=0", "--plain", "--rows=4", "--context=64"]
    jobs = begin_both("serve", *flags, *MESH)
    said = []
    for line in jobs[0].stdout:
        said.append(line)
        if url := re.search(r"ready: (\S+)/v1 ", line):
            break
    asked = {"prompt": "def f1(x):", "max_tokens": 12, "temperature": 0.8, "seed": 3}
    request = urllib.request.Request(f"{url[1]}/v1/completions", json.dumps(asked).encode())
    request.add_header("content-type", "application/json")
    with urllib.request.urlopen(request, timeout=600) as answer:
        (choice,) = json.load(answer)["choices"]
    pair = load_pair(tmp_path / "pair")
    (alone,) = generate(
        pair, ["def f1(x):"], 12, sampling=make_warp({"temperature": 0.8}), seed=3, draft_length=3
    )
    assert choice["text"] == alone.text, said
    for job in reversed(jobs):  # as a launcher of jobs ends them: all at once
        job.send_signal(signal.SIGTERM)
    codes, outputs = finish(jobs)
    assert codes == [130, 130], outputs
    assert "the first process has ended the server" in outputs[1].splitlines()[-1], outputs


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    """Returns the flags of a short training on a few files."""
    folder = write_texts(tmp_path_factory.mktemp("texts"))
    return run_script.flags_of(SMALL | {"train.steps": 6, "data.folder": folder})


@pytest.mark.slow
def test_two_processes_train_like_one(tmp_path, small):
    """A draft, trained on text of its target, has the same losses with two processes."""
    config = f"--config={ROOT}/configs/python_pair.py:tiny_"
    launch_alone("train", f"{config}target", f"--workdir={tmp_path}/target", *small)
    losses = []
    for how in (launch, launch_alone):
        folder = tmp_path / how.__name__
        flags = (
            f"--workdir={folder}",
            f"--config.target={tmp_path}/target",
            "--config.generated.rows=16",
        )
        flags = *flags, "--config.generated.prompt_length=8", "--config.model.ngram_rows=0"
        how("train", f"{config}draft", *flags, *small)
        losses.append(
            [
                record["loss"]
                for record in read_metrics(folder / "metrics.jsonl")
                if "loss" in record
            ]
        )
    assert len(losses[1]) == 6
    np.testing.assert_allclose(*losses, rtol=1e-4)


@pytest.mark.slow
def test_folders_that_only_share_a_name_are_refused(tmp_path, small):
    """Hosts with separate disks are refused: each would keep only a part of every checkpoint."""
    folders = [tmp_path / "a", tmp_path / "b"]
    for folder in folders:
        folder.mkdir()
    config = f"--config={ROOT}/configs/python_pair.py:tiny_target"
    for output in launch("train", config, "--workdir=run", *small, folders=folders, code=2):
        assert "is not the same folder for all processes" in output


test_refused_processes = refused_calls(
    {
        "together, or none": lambda: distributed.start("host:1", None, None),
        "process_id must be .* below 2; got 2": lambda: distributed.start("host:1", 2, 2),
        "must be host:port; got 'host'": lambda: distributed.start("host", 2, 1),
        "must be host:port; got 'localhost'": lambda: distributed.start("localhost", 2, 0),
        "must be host:port; got 'host:70000'": lambda: distributed.start("host:70000", 2, 0),
    }
)

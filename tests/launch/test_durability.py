"""Long commands that are killed without cleanup, or on a full disk, keep all finished work.

Killed trainings are in test_train.py. A limit on the size of files stands for a full disk: the
kernel refuses the bytes beyond it in the middle of a write, as a disk does.
"""

import json
import os
import re
import signal
import subprocess
import sys
import time

import pytest

from specsamp import storage
from support.run_script import FIXED, ROOT, flags_of
from support.training import SMALL, metrics

pytestmark = pytest.mark.slow

TINY = ["--config=configs/random_pair.py:tiny", "--config.repeats=1", "--config.max_new_tokens=4"]
TINY += ["--config.target.num_layers=1", "--config.target.positions=rotary"]
LIMITED = """
import os, resource, sys
resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[1]),) * 2)
os.execv(sys.executable, [sys.executable, *sys.argv[2:]])
"""


def start(arguments, largest_file=None, **options):
    """Starts a command as a user does, with no more devices than a laptop has."""
    environment = os.environ | FIXED | {"XLA_FLAGS": "", "JAX_ENABLE_COMPILATION_CACHE": "false"}
    limited = [] if largest_file is None else ["-c", LIMITED, largest_file]
    command = map(str, [sys.executable, *limited, *arguments])
    return subprocess.Popen([*command], cwd=ROOT, env=environment, text=True, **options)


def killed_when(is_time, arguments):
    process = start(arguments, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    try:
        until = time.monotonic() + 900
        while process.poll() is None and not is_time() and time.monotonic() < until:
            time.sleep(0.002)
    finally:
        process.kill()
    errors = process.communicate()[1]
    assert process.returncode == -signal.SIGKILL, errors


def done(arguments, **options):
    process = start(arguments, stdout=subprocess.PIPE, stderr=subprocess.PIPE, **options)
    output, errors = process.communicate(timeout=900)
    return process.returncode, output, errors


def cells(path):
    return json.loads(path.read_text())["cells"] if path.exists() else []


GRID = ["launch/benchmark.py", *TINY, "--grid=draft_length=0,1"]


def test_full_disk_keeps_the_measured_cells(tmp_path):
    command = [*GRID, f"--output={tmp_path}/out.json"]
    killed_when(lambda: cells(tmp_path / "out.json"), command)
    size = (tmp_path / "out.json").stat().st_size
    before = cells(tmp_path / "out.json")
    status, _, errors = done(command, largest_file=size + 100)
    assert status == 2 and "File too large" in errors and "Traceback" not in errors, errors
    assert cells(tmp_path / "out.json") == before
    status, _, errors = done(command)
    found = cells(tmp_path / "out.json")
    assert status == 0 and len(found) == 2 > len(before) and found[: len(before)] == before, errors
    assert [path.name for path in tmp_path.iterdir()] == ["out.json"]


def test_training_resumes_after_a_full_disk(tmp_path):
    (tmp_path / "texts").mkdir()
    for number in range(12):
        text = f"def f{number}(x):\n    return x + {number}\n" * 20
        (tmp_path / "texts" / f"{number}.py").write_text(text)
    fields = SMALL | {
        "data.folder": tmp_path / "texts",
        "train.steps": 12,
        "intervals.checkpoint": 4,
    }
    config = "--config=configs/python_pair.py:tiny_target"
    command = ["launch/train.py", config, *flags_of(fields)]
    status, _, errors = done([*command, f"--workdir={tmp_path}/alone"])
    assert status == 0, errors
    largest = max(
        path.stat().st_size
        for path in (tmp_path / "alone" / "checkpoints").rglob("*")
        if path.is_file()
    )
    status, _, errors = done([*command, f"--workdir={tmp_path}/run"], largest_file=largest // 2)
    assert status == 2 and "File too large" in errors, errors
    # Libraries that write tensors may print tracebacks of their own files at exit.
    assert not re.search(r'File ".*/(specsamp|launch)/', errors), errors
    with storage.locked(tmp_path / "run"):
        status, _, errors = done([*command, f"--workdir={tmp_path}/run"])
    assert status == 2 and f"{tmp_path}/run is being written by another run" in errors, errors
    status, _, errors = done([*command, f"--workdir={tmp_path}/run"])
    assert status == 0, errors
    assert metrics(tmp_path / "run") == metrics(tmp_path / "alone")

"""Long commands that are killed without cleanup, or on a full disk, keep all finished work.

Killed trainings are in test_train.py.
"""

import json
import re

import pytest

from specsamp import storage
from support.processes import done, killed_when
from support.run_script import TINY_PAIR, flags_of
from support.training import SMALL, metrics, write_texts

pytestmark = pytest.mark.slow


def cells(path):
    return json.loads(path.read_text())["cells"] if path.exists() else []


GRID = ["launch/benchmark.py", *TINY_PAIR, "--grid=draft_length=0,1"]
GRID += ["--config.repeats=1", "--config.max_new_tokens=4"]


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
    fields = SMALL | {
        "data.folder": write_texts(tmp_path / "texts"),
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

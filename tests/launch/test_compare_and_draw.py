"""Agreement, rounds and figures from the command line: what they refuse in one line, before any work."""

import importlib.util
import pathlib

import pytest

from support.run_script import call

ROOT = pathlib.Path(__file__).parents[2]
TINY = "--config=configs/random_pair.py:tiny"


@pytest.mark.parametrize(
    "script, arguments, message",
    [
        ("study", ["adaptive", "--drafters=none"], "--drafters must be one of"),
        ("study", ["adaptive", "--texts=17"], "--texts=17 needs a quarter more prompts, and there are 20"),
        ("study", ["serving", "--problems=/nowhere.jsonl"], "/nowhere.jsonl"),
    ],
)
def test_what_is_refused(script, arguments, message):
    done = call(script, *arguments)
    assert done.returncode == 2
    assert message in done.stderr and "Traceback" not in done.stderr


@pytest.mark.skipif(importlib.util.find_spec("torch") is not None, reason="torch is installed")
def test_without_torch_there_is_nothing_to_compare_with():
    assert call("study", "transformers", "--help").returncode == 0
    done = call("study", "transformers")
    assert done.returncode == 2 and "No module named 'torch': pip install torch transformers" in done.stderr

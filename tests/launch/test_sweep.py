"""Sweeps from the command line: what they ask for, print, resume and refuse."""

import json

import pytest

from configs import chinchilla, trained_pair
from launch.lib.cells import parse_grid
from support.run_script import call


def test_the_shipped_sweeps():
    shipped, papers = ([p for texts in one.GRIDS for p in parse_grid(texts)] for one in (trained_pair, chinchilla))
    assert len(shipped) == 3 * 5 * 2 * 2 + 6 and {"draft_temperature": 0.4, "draft_length": 4} in shipped
    assert [point["draft_length"] for point in papers] == 2 * list(range(8))


SWEPT = """
from configs import random_pair

GRIDS = [["draft_length=0"]]

def get_config():
    config = random_pair.get_config("tiny")
    config.repeats, config.max_new_tokens, config.prompt_length = 1, 1, 1
    return config
"""


@pytest.mark.slow
def test_a_sweep_is_measured_and_gathered(tmp_path):
    (swept := tmp_path / "swept.py").write_text(SWEPT, encoding="utf-8")
    output = tmp_path / "sweep.json"
    done = call("benchmark", "--sweep", f"--config={swept}", f"--output={output}", "--plain")
    assert done.returncode == 0, done.stderr
    assert [cell["key"]["draft_length"] for cell in json.loads(output.read_text())["cells"]] == [0]
    gathered = call("benchmark", f"--gather={output}", f"--gather={output}", "--plain")
    assert gathered.stdout.count("plain") >= 2 == gathered.stdout.count("ms per token over all rows")


def test_a_file_of_another_kind_is_refused_before_the_pair_is_read(tmp_path):
    other = tmp_path / "other.json"
    other.write_text('{"a": 1}', encoding="utf-8")
    for more in ([], ["--grid=draft_length=1"]):
        done = call("benchmark", *more, "--config=configs/trained_pair.py:nothing", f"--output={other}")
        assert done.returncode == 2 and "holds no cells" in done.stderr and "left alone" in done.stderr
    assert other.read_text(encoding="utf-8") == '{"a": 1}'
    other.write_text('{"identity": {"jax": "0.1"}, "cells": []}', encoding="utf-8")
    for more in ([], ["--grid=draft_length=1"]):
        done = call("benchmark", *more, "--config=configs/trained_pair.py:nothing", f"--output={other}")
        assert done.returncode == 2 and f"{other} holds cells of a" in done.stderr

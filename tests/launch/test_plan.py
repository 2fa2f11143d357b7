"""Forecasts from the command line, with the examples of its docstring; damaged files are named."""

import json
import pathlib
import shlex

import pytest

from specsamp.tpu.calibration import Band
from support.run_script import ROOT, call, refuse, succeed

RATE = "--acceptance=0.8"
FORECASTS = pathlib.Path(__file__).with_name("forecasts.txt").read_text().splitlines()[1:]


@pytest.mark.parametrize("line", FORECASTS)
def test_forecasts_equal_recorded_lines(line):
    arguments, *found = line.split(" => ")
    done = succeed("plan", "--plain", *shlex.split(arguments))
    assert found and all(text in done.stdout for text in found), done.stdout


def measured(K, draft_temperature, emitted):
    """Returns a cell whose rounds emit ``emitted`` tokens."""
    distribution = {
        "temperature": 0.8,
        "top_k": 0,
        "top_p": 1.0,
        "min_p": 0.0,
        "draft_temperature": draft_temperature,
    }

    def ms(value):
        return {"ms_per_round": {"median": value, "lower": value, "upper": value}}

    accepted = [0] * (emitted - 1) + [100] + [0] * (K + 1 - emitted)
    counts = {
        "accepted_counts": accepted,
        "reached": [100] * min(emitted, K) + [0] * (K - min(emitted, K)),
    }
    counts |= {"rounds": 100, "emitted": 100 * emitted}
    return {
        "key": {"draft_length": K, "drafter": "model", "rule": "token", "batch": 1, **distribution},
        "workload": {"repeats": 4},
        "result": {
            "autoregressive": ms(1.0),
            "speculative": ms(2.0),
            "acceptance": counts,
            "split": None,
        },
    }


@pytest.mark.parametrize(
    "flag, content, message",
    [
        (
            "measured",
            {"identity": {}, "cells": [{"key": {"drafter": "none"}, "result": {}}]},
            "is damaged, or of",
        ),
        ("compile_report", {}, "is damaged, or of another kind: KeyError 'report'"),
    ],
)
def test_damaged_files_are_named(tmp_path, flag, content, message):
    path = tmp_path / "damaged.json"
    path.write_text(json.dumps(content))
    assert message in refuse("plan", RATE, f"--{flag}={path}")


def test_cells_of_another_draft_temperature_are_ignored(tmp_path):
    """A draft with a temperature of its own, as in the shipped sweep, has another acceptance than
    the pair.
    """
    path = tmp_path / "cells.json"
    cells = [measured(4, *one) for one in ((0.2, 1), (None, 1), (None, 5))]
    cells[1]["key"]["adaptive"] = {"lengths": [0, 4]}
    document = {"identity": {}, "cells": cells}
    path.write_text(json.dumps(document))
    done = succeed("plan", f"--measured={path}", "--longest=4", "--plain")
    assert "batch 1, rows that never end: K = 4, 2.50x" in done.stdout


def test_plan_shows_bands_like_compile_report():
    """A plan shows the bands of the compile report, and the error of their calibration."""
    path = "notebooks/results/compile_qwen_3b_v5e.json"
    document = json.loads((ROOT / path).read_text())
    step, drafted = (
        str(Band(**document["calibrated_ms"][name])) for name in ("target step", "round")
    )
    done = call("plan", RATE, f"--compile_report={path}", "--longest=4", "--plain")
    rows = {line[:5]: line for line in done.stdout.splitlines() if line.startswith("K = ")}
    assert step in rows["K = 0"] and drafted in rows["K = 4"], done.stdout
    assert "each left out once, were within" in " ".join(done.stdout.split())

"""launch/compile_report.py and launch/studies/compile_study.py: what they write, and what they refuse before they compile."""

import json
import shutil

import pytest

from support import extras
from support.run_script import ROOT, call

pytestmark = extras.needs("libtpu", "matplotlib")

RESULTS = ROOT / "notebooks" / "results"


def test_a_report_of_a_small_pair(tmp_path):
    output = tmp_path / "report.json"
    done = call(
        "compile_report",
        "--plain",
        "--config=configs/chinchilla.py:tiny",
        "--topology=v5e:1x1",
        "--slots=64",
        "--acceptance=0.8",
        f"--output={output}",
    )
    assert not done.returncode, done.stderr
    assert "compiler estimate" in done.stdout and "Milliseconds per token" in done.stdout
    document = json.loads(output.read_text(encoding="utf-8"))
    programs = {program["name"]: program for program in document["report"]["programs"]}
    assert set(programs) == {"draft step", "target step", "score", "draft prefill", "prefill", "round"}
    assert all(p["host_transfers"] == 0 and p["collectives"] == {} for p in programs.values())
    assert set(document["ms_per_token"]) == {"0.8"} and set(document["calibrated_ms"]) == set(programs)


def test_what_fits(tmp_path):
    output = tmp_path / "fits.json"
    done = call(
        "compile_report",
        "--plain",
        "--config=configs/chinchilla.py:tiny",
        "--topology=v5e:1x1",
        "--fits",
        f"--output={output}",
    )
    assert not done.returncode, done.stderr
    for cell in json.loads(output.read_text(encoding="utf-8"))["fits"]:
        assert (cell["share"] <= 0.98) == (cell["batch"] <= cell["most_rows"])


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--topology=v9:2x2"], "no TPU topology 'v9:2x2': give a chip (v3, v4, v5e, v5p, v6e, v7x)"),
        (["--config.mesh.data=3"], "data 3 does not divide the 16 devices of 'v4:2x2x4'"),
        (["--config.drafter=early_exit", "--config.exit_layer=80"], "from 1 to 79, for a target of 80 layers; got 80"),
        (
            ["--config.drafter=ngram"],
            "a report is of a draft model, an early exit or a head; config.drafter is 'ngram'",
        ),
        (["--acceptance=0.5", "--acceptance=1.5"], "--acceptance=1.5 is no rate"),
        (["--output=/proc/none/report.json"], "--output=/proc/none/report.json cannot be written"),
    ],
)
def test_what_has_no_report(arguments, message):
    done = call("compile_report", "--plain", *arguments)
    assert done.returncode == 2 and message in done.stderr, done.stderr
    assert "Traceback" not in done.stderr


def test_answers_to_another_study_are_left_alone(tmp_path):
    """And nobody is told to remove them."""
    output = tmp_path / "compile_slices.json"
    shutil.copy(RESULTS / output.name, output)
    done = call("studies/compile_study", "--plain", "--study=shapes", f"--output={output}")
    assert done.returncode == 2 and "answers to 'slices'" in done.stderr and "remove" not in done.stderr, done.stderr
    assert output.read_bytes() == (RESULTS / output.name).read_bytes()


def test_a_figure_of_complete_answers_is_drawn_whatever_compiler_gave_them(tmp_path):
    """Nothing is compiled; one that is missing is not mixed with those of another compiler."""
    output, figure = tmp_path / "compile_scoring.json", tmp_path / "scoring.png"
    document = json.loads((RESULTS / output.name).read_text(encoding="utf-8")) | {"libtpu": "0.0.1"}
    output.write_text(json.dumps(document), encoding="utf-8")
    asked = ["--plain", "--study=scoring", f"--output={output}"]
    done = call("studies/compile_study", *asked, f"--figure={figure}")
    assert not done.returncode, done.stderr
    assert figure.read_bytes().startswith(b"\x89PNG") and json.loads(output.read_text(encoding="utf-8")) == document
    output.write_text(json.dumps(document | {"cells": document["cells"][1:]}), encoding="utf-8")
    done = call("studies/compile_study", *asked)
    assert done.returncode and "by libtpu and jax ('0.0.1', " in done.stderr, done.stderr


def test_a_figure_that_cannot_be_written_is_refused_at_once(tmp_path):
    done = call(
        "studies/compile_study",
        "--plain",
        "--study=shapes",
        f"--output={tmp_path / 'shapes.json'}",
        "--figure=/proc/none/x.png",
    )
    assert done.returncode == 2 and "--figure=/proc/none/x.png cannot be written" in done.stderr, done.stderr
    assert not list(tmp_path.iterdir())

"""The runner of studies measures missing results, shows stored ones, and replaces no other file."""

import json

import pytest
from absl import flags

from launch.lib import study
from launch.lib.study import Published, Study
from specsamp.analysis.report import Table
from support.run_script import only_shared_flags, succeed


def table(document):
    return Table(title="Times", header=("", "ms"), rows=[("loop", f"{document['ms']:.1f}")])


@pytest.fixture
def run(capsys):
    """Returns a function that runs a study and counts its measurements; a scale below 0 fails."""
    measured = []

    def measure(options, say):
        if float(options.scale) < 0:
            raise KeyboardInterrupt
        measured.append(float(options.scale))
        return {"ms": float(options.scale)}

    STUDY = Study(
        question="How long?",
        options={"scale": ("1.0", "Multiplies."), "ways": (["a", "b"], "Ways.")},
        measure=measure,
        tables={"times": Published(["times"], table)},
    )

    def run(*arguments):
        measured.clear()
        with only_shared_flags():
            status = study.run_study(STUDY, ["study.py times", "--plain", *map(str, arguments)])
            flags.FLAGS.unparse_flags()
        shown = capsys.readouterr()
        return status, list(measured), shown.out, shown.err

    return run


def test_study_result_is_measured_once(run, tmp_path):
    output = tmp_path / "times.json"
    assert run(f"--output={output}", "--scale=-1")[:2] == (130, [])
    assert run(f"--output={output}")[:2] == (0, [1.0])
    status, measured, out, _ = run(f"--output={output}")
    assert (status, measured) == (0, []) and "--again" in out
    assert run(f"--output={output}", "--again")[:2] == (0, [1.0])
    document = study.read_result("times", tmp_path)
    assert document["ms"] == 1.0 and "jax" in document["environment"], (
        "tables read the fields of a single cell"
    )
    another = json.dumps({"identity": {"study": "other"}, "cells": []})
    for content, told in (
        (another, "cells of another run"),
        ("[1]", "times.json"),
        ("{", "times.json"),
    ):
        output.write_text(content)
        status, measured, _, err = run(f"--output={output}")
        assert (status, measured, output.read_text()) == (2, [], content) and told in err


@pytest.mark.parametrize(
    "argument, told", [("--scale=2", "options.scale was '1.0', is '2'"), ("--ways=b", "is ['b']")]
)
def test_study_file_of_other_options_is_refused(run, tmp_path, argument, told):
    output = tmp_path / "times.json"
    run(f"--output={output}")
    before = output.read_bytes()
    status, measured, _, err = run(argument, f"--output={output}")
    assert (status, measured) == (2, []) and told in err and output.read_bytes() == before


def test_results_are_shown_without_measuring(run, tmp_path):
    run(f"--output={tmp_path}/times.json", "--scale=4")
    status, measured, out, _ = run(f"--results={tmp_path}")
    assert (status, measured) == (0, []) and "4.0" in out
    assert run(f"--results={tmp_path}/none")[0] == 2


def test_every_study_has_a_question_and_is_listed():
    found = succeed("study", "--list", "--plain")
    for name in study.names():
        question = study.load_study(name).question
        assert question.endswith("?") and f"{name} " in found.stdout and question in found.stdout

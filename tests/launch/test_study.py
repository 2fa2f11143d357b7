"""The runner of studies: it measures what is missing, shows what is there, and refuses what it
cannot keep.
"""

import json

import pytest
from absl import flags

from launch.lib import study
from launch.lib.study import Option, Published, Study
from specsamp.analysis.report import Table
from support.run_script import call, only_shared_flags


def table(document):
    rows = [(str(cell["key"]["K"]), f"{cell['result']['ms']:.1f}") for cell in document["cells"]]
    return Table(title="Times", header=("K", "ms"), rows=rows)


@pytest.fixture
def run(capsys):
    """Runs a study of three cells, which counts what it measures and fails at the cell that
    ``fail_at`` names.
    """
    measured = []

    def measure(options, key, say):
        if key["K"] == int(options.fail_at):
            raise KeyboardInterrupt
        measured.append(key["K"])
        return {"ms": float(options.scale) * key["K"]}

    STUDY = Study(
        question="How long?",
        options={
            "scale": Option("1.0", "Multiplies."),
            "fail_at": Option("-1", "Ends there."),
            "lengths": Option(("1", "2", "4"), "K."),
            "ways": Option(("a", "b"), "Ways.", choices=("a", "b")),
        },
        cells=lambda options: [{"K": int(K)} for K in options.lengths],
        identity=lambda options: {"scale": options.scale},
        measure=measure,
        tables={
            "times": Published(["times"], table),
            "both": Published(["times", "times"], lambda one, _: table(one)),
        },
    )

    def alone(options, key, say):
        measured.append(float(options.scale))
        return {"ms": float(options.scale)}

    one = Study(
        question="How long alone?", options={"scale": Option("1.0", "Multiplies.")}, measure=alone
    )

    def run(*arguments, of=STUDY):
        measured.clear()
        with only_shared_flags():
            status = study.run_study(
                one if of == "one" else of, ["study.py times", "--plain", *map(str, arguments)]
            )
            flags.FLAGS.unparse_flags()
        shown = capsys.readouterr()
        return status, list(measured), shown.out, shown.err

    return run


def test_cells_that_were_measured_are_kept_and_the_same_command_goes_on(run, tmp_path):
    output = tmp_path / "times.json"
    status, measured, _, err = run("--fail_at=4", f"--output={output}")
    assert (status, measured) == (130, [1, 2]) and str(output) in err
    status, measured, out, _ = run(f"--output={output}")
    assert (status, measured) == (0, [4])
    assert [
        line.split() for line in out.splitlines() if line[:1].isdigit() and "cells" not in line
    ] == [
        ["1", "1.0"],
        ["2", "2.0"],
        ["4", "4.0"],
    ]
    assert run("--again", f"--output={output}")[1] == [1, 2, 4]
    assert run("--lengths=2", f"--output={output}")[1] == []
    document = json.loads(output.read_text())
    assert (
        len(document["cells"]) == 3
        and document["identity"]["scale"] == "1.0"
        and "jax" in document["environment"]
    )


def test_a_file_of_another_identity_is_refused_and_left_alone(run, tmp_path):
    output = tmp_path / "times.json"
    run(f"--output={output}")
    before = output.read_bytes()
    status, measured, _, err = run("--scale=2", f"--output={output}")
    assert (
        (status, measured) == (2, [])
        and "scale was '1.0', is '2'" in err
        and output.read_bytes() == before
    )


def test_a_single_result_is_measured_once_and_replaces_nothing_else(run, tmp_path):
    output = tmp_path / "alone.json"
    assert run(f"--output={output}", of="one")[:2] == (0, [1.0])
    status, measured, out, _ = run(f"--output={output}", of="one")
    assert (status, measured) == (0, []) and "--again" in out
    assert run(f"--output={output}", "--again", of="one")[:2] == (0, [1.0])
    another = json.dumps({"identity": {"study": "other"}, "cells": []})
    for content, told in (
        (another, "cells of another run"),
        ("[1]", "alone.json"),
        ("{", "alone.json"),
    ):
        output.write_text(content)
        status, measured, _, err = run(f"--output={output}", of="one")
        assert (status, measured, output.read_text()) == (2, [], content) and told in err
    output.unlink()
    run(f"--output={output}", of="one")
    status, measured, _, err = run(f"--output={output}", "--scale=2", of="one")
    assert (status, measured) == (2, []) and "options.scale was '1.0', is '2'" in err
    document = study.read_result("alone", tmp_path)
    assert document["ms"] == 1.0 and "jax" in document["environment"], (
        "tables read the fields of a single cell"
    )


def test_results_are_shown_without_measuring(run, tmp_path):
    run(f"--output={tmp_path}/times.json")
    status, measured, out, _ = run(f"--results={tmp_path}")
    assert (status, measured) == (0, []) and "4.0" in out
    assert "4.0" in run(f"--results={tmp_path}")[2]
    assert run(f"--results={tmp_path}/none")[0] == 2


WRONG = [
    ("--lengths=", "--lengths= is empty"),
    ("--ways=a,c", "--ways must be one of a, b; got 'c'"),
]


@pytest.mark.parametrize("argument, told", WRONG)
def test_elements_of_lists_are_checked(run, argument, told):
    status, measured, _, err = run(argument)
    assert (status, measured) == (2, []) and told in err


def test_every_study_has_a_question_and_is_listed():
    found = call("study", "--list", "--plain")
    assert found.returncode == 0
    for name in study.names():
        question = study.load_study(name).question
        assert question.endswith("?") and f"{name} " in found.stdout and question in found.stdout

"""The table of verifiers: which are exact, biased or lossy by design, and rows that cannot run here say why."""

import json
import pathlib
import re

import pytest

from launch.lib import study
from launch.studies import conformance
from launch.studies.conformance import cases, systems
from specsamp.evaluation.enumeration import Raised
from support.run_script import call

ONE, JOINT = cases.CASES[:2]


def variation(name, case):
    return conformance.compare_laws(*systems.SYSTEMS[name].samplers(None, case), case.count)["variation"]


@pytest.mark.parametrize("name", ["mlx-lm", "llama.cpp", "SGLang (target only)"])
def test_described_rules_that_are_exact(name):
    assert variation(name, JOINT) < 1e-15


def test_drafts_that_are_judged_as_if_they_had_been_drawn():
    """Of (0.7, 0.2, 0.1), drafts at (0.2, 0.3, 0.5): the last token stays with a fifth, else it becomes the first."""
    assert variation("mistral.rs (DFlash outside of CUDA graphs)", ONE) == pytest.approx(0.2)
    assert variation("mistral.rs (DFlash outside of CUDA graphs)", JOINT) == pytest.approx(1 - 0.6**2)


def test_adapters_are_functions_that_take_what_is_given():
    """Looked up in the text of their modules, which import packages that may be missing."""
    for system in systems.SYSTEMS.values():
        module, _, name = system.adapter.partition(".")
        if module:
            path = pathlib.Path(systems.__file__).with_name(f"{module}.py")
            signature = re.search(rf"^def {name}\(files\b.*, case: Case(.*)\) -> ", path.read_text(), re.MULTILINE)
            assert signature and all(re.search(rf"\b{each}: |\*\*", signature[1]) for each in system.given), system.name


def result(variation=0.0, raised=(), **known):
    defaults = {"missing": "", "how": "function", "says": "", "read": "", "version": "1.0", "examined": "1.0"}
    found = {
        "cases": {"one": {"variation": 0.0, "raised": {}}, "two": {"variation": variation, "raised": dict(raised)}}
    }
    return defaults | {"place": "x.py:1", "draws": "", "note": ""} | found | known


@pytest.mark.parametrize(
    ("found", "expected"),
    [
        (result(), ("exact", "")),
        (result(0.2), ("**biased**", "two")),
        (result(0.2, says="lossy by a flag"), ("by design: lossy by a flag", "two")),
        (result(0.0, {"TypeError: x": 1.0}), ("raises: TypeError: x", "two")),
        (result(missing="gpt-fast, as a package", cases={}), ("not run: gpt-fast, as a package", "")),
        (result(how="read", read="exact by reading"), ("exact by reading", "")),
    ],
)
def test_verdicts(found, expected):
    assert conformance.verdict(found) == expected


def test_exceptions_of_either_sampler_are_kept():
    found = conformance.compare_laws(lambda last: [1 // last], lambda last: [1 // last], 1)
    assert found == {"variation": 0, "raised": {"ZeroDivisionError: integer division or modulo by zero": 1.0}}
    assert Raised("a") == Raised("a")


def test_rows_name_what_is_missing_and_other_versions(tmp_path, monkeypatch):
    (tmp_path / "gpt-fast").mkdir()
    done = call("study", "conformance", "--systems=gpt-fast,LayerSkip,sglang-jax", f"--checkouts={tmp_path}",
                f"--output={tmp_path}/table.json", "--plain")  # fmt: skip
    assert done.returncode == 0, done.stderr
    found = {
        cell["key"]["system"]: cell["result"] for cell in json.loads((tmp_path / "table.json").read_text())["cells"]
    }
    assert found["LayerSkip"]["missing"] == "LayerSkip, as a package or in --checkouts"
    assert re.search("FileNotFoundError|No module named 'torch'", found["gpt-fast"]["missing"])
    assert not found["sglang-jax"]["missing"]
    other = {"cells": [{"key": {"system": "x"}, "result": result(examined="2.0")}]}
    assert "2.0 (expected 1.0), x.py:1" in conformance.table(other).rows[0]


def test_the_study_is_listed_and_refuses_what_it_does_not_know(tmp_path):
    assert "conformance" in study.names()
    assert "gpt-faster" in call("study", "conformance", "--systems=gpt-faster").stderr
    assert "is no folder" in call("study", "conformance", f"--checkouts={tmp_path}/none").stderr

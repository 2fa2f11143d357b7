"""Every notebook runs as a script, and its ``.ipynb`` holds the same cells with their outputs."""

import json
import os
import pathlib
import re
import subprocess
import sys
import tomllib

import pytest

from support import extras
from support.run_script import FIXED, ROOT

jupytext = pytest.importorskip("jupytext")
pytestmark = extras.needs("matplotlib")

SCRIPTS = sorted((ROOT / "notebooks").glob("*.py"))
LARGEST = 2**20  # bytes of a notebook: git is no place for pictures of many colours

all_notebooks = pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)


SMALLER = tomllib.loads(pathlib.Path(__file__).with_name("smaller.toml").read_text())


@pytest.mark.slow
@all_notebooks
def test_notebook_runs_with_smaller_sizes(script, tmp_path, tmp_path_factory):
    """The notebooks assert their own claims: which rules are exact, and which are not."""
    text = script.read_text()
    for size, smaller in SMALLER[script.stem].items():
        assert size in text
        text = text.replace(size, smaller)
    copy = tmp_path_factory.mktemp("notebook") / script.name
    copy.write_text(text)
    environment = os.environ | FIXED | {"MPLBACKEND": "Agg", "HF_HUB_OFFLINE": "1"}
    how = dict(cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=1800)
    done = subprocess.run([sys.executable, copy], **how)
    assert done.returncode == 0, done.stderr
    assert not list(tmp_path.iterdir())


@all_notebooks
def test_the_pair_has_not_drifted(script):
    told = [(cell.cell_type, cell.source) for cell in jupytext.read(script).cells]
    kept = json.loads(script.with_suffix(".ipynb").read_text())
    assert [(cell["cell_type"], "".join(cell["source"])) for cell in kept["cells"]] == told, (
        f"{script.name} was changed: jupytext --to ipynb --execute notebooks/{script.name}"
    )


@all_notebooks
def test_was_run_from_top_to_bottom(script):
    text = script.with_suffix(".ipynb").read_text()
    code = [cell for cell in json.loads(text)["cells"] if cell["cell_type"] == "code"]
    assert [cell["execution_count"] for cell in code] == list(range(1, len(code) + 1))
    outputs = [output for cell in code for output in cell["outputs"]]
    assert not [
        output
        for output in outputs
        if output["output_type"] == "error" or output.get("name") == "stderr"
    ]
    assert sum("image/png" in output.get("data", {}) for output in outputs)
    assert len(text) < LARGEST
    assert not re.search(r"/(home|root|tmp|Users)/", text)

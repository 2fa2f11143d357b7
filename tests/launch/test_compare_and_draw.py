"""Agreement, rounds and figures from the command line: what they refuse in one line, before any work."""

import importlib.util
import json
import pathlib

import pytest

from support import extras
from support.run_script import call, save_tiny_pair

ROOT = pathlib.Path(__file__).parents[2]
TINY = "--config=configs/random_pair.py:tiny"


@pytest.mark.parametrize(
    "script, arguments, message",
    [
        ("studies/agreement", [TINY, "--config.drafter=none"], "without a drafter there is nothing to forecast"),
        ("studies/agreement", [TINY, "--batch=1", "--batch=2"], "--check_batch=4 must lie within --batch=[1, 2]"),
        (
            "studies/agreement",
            [TINY, "--config.synthetic_acceptance=0.8"],
            "synthetic_acceptance = 0.8 would not be heeded",
        ),
        ("studies/agreement", [TINY], "a pair without prompts has no halves of them"),
        ("studies/speedup", [TINY, "--config.draft_temperature=0.5"], "draft_temperature = 0.5 would not be heeded"),
        ("study", ["serving", "--task=nothing"], "there is no task 'nothing'"),
        ("study", ["serving", "--ask=arrivals", "--task=python", "--past=19"], "--past=19: give less than 19, as 20"),
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


def test_an_agreement_goes_on_where_it_was_interrupted(tmp_path):
    """Nothing that the file holds is measured again; another question makes another file."""
    folder, output = tmp_path / "pair", tmp_path / "agreement.json"
    save_tiny_pair(folder, prompts=["a b", "c", "d e f", "b"])
    asked = [f"--config=configs/trained_pair.py:{folder}", "--config.max_new_tokens=4", "--check_batch=0", "--plain"]
    asked += ["--fit=1", "--longest=1", "--config.prompt_length=8", f"--output={output}"]
    done = call("studies/agreement", *asked)
    assert done.returncode == 0, done.stderr
    document = json.loads(output.read_text(encoding="utf-8"))
    assert [cell["key"]["law"] for cell in document["cells"]] == ["greedy", "T = 0.8, top_p 0.95"]
    assert [check["draft_length"] for check in document["cells"][0]["result"]["checks"]] == [0, 1]
    again = call("studies/agreement", *asked)
    assert again.returncode == 0 and again.stdout.count("already, worst error") == 2
    assert json.loads(output.read_text(encoding="utf-8")) == document
    other = call("studies/agreement", *asked, "--longest=2")
    assert other.returncode == 2 and "asked.longest was 1, is 2. Give another --output" in other.stderr


@extras.needs("matplotlib")
def test_schedules_are_drawn_from_the_committed_results(tmp_path):
    done = call("study", "serving", "--results=notebooks/results", f"--figures={tmp_path}")
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "scheduling.png").read_bytes().startswith(b"\x89PNG")

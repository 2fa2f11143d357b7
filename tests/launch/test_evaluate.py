"""launch/evaluate.py: the same requests in several ways, a control that comes out as different, and runs that go on."""

import json

import pytest

from support.run_script import call

FLAGS = ["--task=python", "--problems=6", "--samples=2", "--rows=4", "--blocks=2", "--config.max_new_tokens=8"]


def result(path):
    return json.loads(path.read_text(encoding="utf-8"))


@pytest.mark.slow
def test_methods_are_added_and_a_run_goes_on(tmp_path):
    """Plain first; then the token rule and a control, and nothing is decoded twice. Texts of a killed block are kept."""
    output = tmp_path / "python.json"
    done = call("evaluate", *FLAGS, "--methods=plain", f"--output={output}", "--plain")
    assert done.returncode == 0, done.stderr
    plain = result(output)["cells"]
    assert [cell["key"]["block"] for cell in plain] == ["1 of 2", "2 of 2"]
    assert all(len(cell["result"]["scores"]) == 3 and cell["result"]["timed"]["completions"] == 6 for cell in plain)
    (kept,) = (tmp_path / "python.json.texts").glob("plain.1_of_2.*.jsonl")
    lines = kept.read_text(encoding="utf-8").splitlines()
    kept.write_text("\n".join([*lines[:4], ""]), encoding="utf-8")
    output.write_text(json.dumps(result(output) | {"cells": plain[1:]}), encoding="utf-8")

    done = call("evaluate", *FLAGS, "--methods=plain,token,always/model/2", f"--output={output}", "--plain")
    assert done.returncode == 0, done.stderr
    again = [cell for cell in result(output)["cells"] if cell["key"] == plain[0]["key"]]
    assert again[0]["result"]["timed"] == {} and again[0]["result"]["scores"] == plain[0]["result"]["scores"]
    rows = {row["name"]: row for row in result(output)["evaluation"]}
    assert list(rows) == ["plain", "token, model, K = 3", "always, model, K = 2"]
    always, token = rows["always, model, K = 2"], rows["token, model, K = 3"]
    assert not always["exact"] and token["exact"] and not rows["plain"]["differences"]
    assert always["differences"]["log_prob"]["high"] < 0 < token["differences"]["log_prob"]["high"]
    assert always["counts"]["rate"] == 1 and 0.3 < token["counts"]["rate"] < 1
    assert "always, model, K = 2 (control, not exact)" in done.stdout and "Acceptance by position" in done.stdout

    assert "fewer than 20 problems" in done.stdout and "temperature = 0.8" in done.stdout
    refused = call("evaluate", *FLAGS[:1], "--problems=5", *FLAGS[2:], f"--output={output}")
    assert refused.returncode == 2 and "task.problems was 6, is 5" in refused.stderr


@pytest.mark.slow
def test_a_head_and_a_draft_model_are_compared_in_one_run(tmp_path):
    """Greedy texts of all three are those of the target: the scores are equal."""
    output = tmp_path / "both.json"
    asked = ("--methods=plain,token/head/2,token/model/2", "--config.sampling.temperature=0.0", f"--output={output}")
    done = call("evaluate", *FLAGS[:1], "--problems=3", "--rows=3", "--blocks=1", *FLAGS[-1:], *asked)
    assert done.returncode == 0, done.stderr
    cells = {cell["key"]["method"]: cell["result"] for cell in result(output)["cells"]}
    assert list(cells) == ["plain", "token, head, K = 2", "token, model, K = 2"]
    scores = [cell["scores"] for cell in cells.values()]
    for of_one in scores[1:]:
        for one, plain in zip(of_one, scores[0], strict=True):
            assert one == pytest.approx(plain, abs=1e-5)
    rounds = [sum(one["rounds"] for one in cell["counts"].values()) for cell in cells.values()]
    assert rounds[1] < rounds[0] and rounds[2] < rounds[0] and rounds[1] != rounds[2]
    assert len(result(output)["identity"]["weights"].split(", ")) == 2

"""launch/evaluate.py: the same requests in several ways, a control that comes out as different, and runs that go on."""

import dataclasses
import json

import numpy as np
import pytest

from specsamp import Method, NgramDrafter
from specsamp.decoding.results import RowStats
from specsamp.evaluation.evaluate import Requests, decode, tabulate
from specsamp.evaluation.task import EvaluationTask, Problem
from support.byte_tokenizer import ByteTokenizer
from support.fakes import counting_pair
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


@pytest.mark.parametrize(
    "flags, message",
    [
        (["--methods=slow"], "got 'slow'"),
        (["--methods=plain,ears:0.3", "--require_exact"], "exactness is required, but EARS(beta=0.3"),
        (["--methods=token/eagle"], "got 'eagle'"),
        (["--methods=token/model/x"], "write plain, or RULE, RULE/DRAFTER or RULE/DRAFTER/K"),
        (["--methods=token/model/0"], "draft at least one token"),
        (["--config=configs/hf.py:llama-8b-eagle3"], "python is completed and not answered"),
        (["--methods="], "--methods has ''"),
        (["--methods=token/none"], "drafts nothing: write plain"),
        (["--config.rule=block"], "--config.rule=block has no effect: name it in --methods"),
        (["--config.draft_temperature=0.5"], "--config.draft_temperature=0.5 has no effect here"),
        (["--methods=token,token"], "names token, model, K = 3 twice"),
        (["--task=humaneval", "--source=/nowhere.jsonl"], "/nowhere.jsonl"),
        (["--config.max_new_tokens=2040"], "all 6 problems are too long for 2048 positions"),
        (["--config=configs/random_pair.py:tiny"], "a pair without a tokenizer"),
    ],
)
def test_what_cannot_be_evaluated_is_said(flags, message):
    given = [flag for flag in FLAGS if not any(flag.split("=")[0] == one.split("=")[0] for one in flags)]
    done = call("evaluate", *given, *flags)
    assert done.returncode == 2 and message in done.stderr and "Traceback" not in done.stderr, done.stderr


def test_a_turn_follows_the_answer_to_the_one_before():
    """A second turn, by a template that repeats all it is given, holds the first and its answer."""
    given = []

    class Template(ByteTokenizer):
        def encode_chat(self, messages):
            given.append([(one["role"], one["content"]) for one in messages])
            return self.encode(messages[-1]["content"])

    pair = dataclasses.replace(counting_pair(), tokenizer=Template())
    problems = {3: Problem(id="a", prompt="ab", further_turns=("uv", "x" * 70)), 5: Problem(id="b", prompt="mn")}
    task = EvaluationTask(name="chat", problems=list(problems.values()))
    method = Method(drafter=NgramDrafter(K=2))
    found = decode(pair, task, problems, method, Requests(max_new_tokens=3, chat=True))
    assert [("user", "ab"), ("assistant", "cde"), ("user", "uv")] in given
    assert found["timed"]["completions"] == 3 and found["turns_left_out"] == 1, "the third turn has 70 of 64 positions"
    alone = decode(pair, task, problems, method, Requests(max_new_tokens=3))
    assert alone["timed"]["completions"] == 2 and alone["turns_left_out"] == 2, "without a template there is one turn"


def block(scores, seconds, category="", dropped=0):
    stats = RowStats(rounds=2, emitted=5, drafted=4, reached=(2, 1), accepted_counts=(1, 0, 1))
    timed = dict(completions=1, tokens=10, seconds=seconds, rounds=5, busy=8, row_rounds_in_demand=8, busy_in_demand=7)
    return dict(
        problems=list(range(len(scores))),
        scores=[{"right": score} for score in scores],
        counts={category: dataclasses.asdict(stats)},
        exact=True,
        row_independent=True,
        finish={},
        dropped=dropped,
        timed=timed,
    )


def test_blocks_are_put_together():
    """Scores are compared problem by problem on blocks that both have, times block by block."""
    found = {
        ("plain", "a"): block([0.0, 1.0, 0.0, 1.0], 2.0, "a"),
        ("plain", "b"): block([1.0, 0.0], 1.0, "b"),
        ("fast", "b"): block([1.0, 0.0], 0.5, "b", dropped=5),
        ("fast", "a"): block([0.0, 1.0, 1.0, 1.0], 0.5, "a"),
        ("half", "a"): block([0.0, 0.0, 0.0, 0.0], 4.0, "a"),
    }
    cells = [{"key": {"method": key[0], "block": key[1]}, "result": one} for key, one in found.items()]
    plain, fast, half = tabulate(cells, "plain")
    assert (plain["problems"], plain["scores"]["right"].mean) == (6, 0.5)
    assert (plain["differences"], plain["speedups"]) == ({}, [])
    assert fast["differences"]["right"]["mean"] == pytest.approx(1 / 6)
    assert fast["differences"]["right"]["problems"] == 6 and fast["dropped"] == pytest.approx(1 / 3)
    assert sorted(fast["speedups"]) == [2, 4] and fast["ms_per_token"] == pytest.approx(50)
    assert fast["counts"].rounds == 4 and set(fast["counts_by_category"]) == {"a", "b"}
    assert half["differences"]["right"]["mean"] == -0.5 and half["speedups"] == [0.5]
    assert fast["occupancy"] == pytest.approx(7 / 8) and np.isfinite(fast["scores"]["right"].error)

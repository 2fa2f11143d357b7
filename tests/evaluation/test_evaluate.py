"""Evaluations in blocks of problems, and turns that follow earlier answers."""

import dataclasses

import pytest

from specsamp import Method, NgramDrafter, RowStats
from specsamp.evaluation.harness import Requests, decode_and_score, tabulate
from specsamp.evaluation.task import EvaluationTask, Problem
from support.byte_tokenizer import ByteTokenizer
from support.fakes import counting_pair


def test_second_turn_contains_the_first_answer():
    """The messages of a second turn contain the first turn and its answer."""
    given = []

    class Template(ByteTokenizer):
        def encode_chat(self, messages):
            given.append([(one["role"], one["content"]) for one in messages])
            return self.encode(messages[-1]["content"])

    pair = dataclasses.replace(counting_pair(), tokenizer=Template())
    problems = {
        3: Problem(id="a", prompt="ab", further_turns=("uv", "x" * 70)),
        5: Problem(id="b", prompt="mn"),
    }
    task = EvaluationTask(name="chat", problems=list(problems.values()))
    method = Method(drafter=NgramDrafter(K=2))
    found = decode_and_score(pair, task, problems, method, Requests(max_new_tokens=3, chat=True))
    assert [("user", "ab"), ("assistant", "cde"), ("user", "uv")] in given
    assert found["timed"]["completions"] == 3 and found["turns_left_out"] == 1, (
        "the third turn has 70 of 64 positions"
    )


def block(scores, seconds, category=""):
    stats = RowStats(rounds=2, emitted=5, drafted=4, reached=(2, 1), accepted_counts=(1, 0, 1))
    return dict(
        problems=list(range(len(scores))),
        scores=[{"right": score} for score in scores],
        counts={category: dataclasses.asdict(stats)},
        exact=True,
        finish={},
        timed=dict(completions=1, tokens=10, seconds=seconds),
    )


def test_blocks_are_put_together():
    """Scores are compared by problem, in the blocks that both methods have, and times by block."""
    found = {
        ("plain", "a"): block([0.0, 1.0, 0.0, 1.0], 2.0, "a"),
        ("plain", "b"): block([1.0, 0.0], 1.0, "b"),
        ("fast", "b"): block([1.0, 0.0], 0.5, "b"),
        ("fast", "a"): block([0.0, 1.0, 1.0, 1.0], 0.5, "a"),
        ("half", "a"): block([0.0, 0.0, 0.0, 0.0], 4.0, "a"),
    }
    cells = [
        {"key": {"method": key[0], "block": key[1]}, "result": one} for key, one in found.items()
    ]
    plain, fast, half = tabulate(cells, "plain")
    assert (plain["problems"], plain["scores"]["right"].mean) == (6, 0.5)
    assert (plain["differences"], plain["speedups"]) == ({}, [])
    assert fast["differences"]["right"]["mean"] == pytest.approx(1 / 6)
    assert fast["differences"]["right"]["problems"] == 6
    assert sorted(fast["speedups"]) == [2, 4] and fast["ms_per_token"] == pytest.approx(50)
    assert fast["counts"].rounds == 4 and set(fast["counts_by_category"]) == {"a", "b"}
    assert half["differences"]["right"]["mean"] == -0.5 and half["speedups"] == [0.5]

"""Blocks of problems, whose turns follow their answers; and the adapter of lm-evaluation-harness."""

import dataclasses
import sys
import types

import numpy as np
import pytest

from specsamp import Method, NgramDrafter, Pair
from specsamp.decoding.results import RowStats
from specsamp.evaluation.evaluate import Requests, decode, tabulate
from specsamp.evaluation.task import EvaluationTask, Problem
from specsamp.sampling.warp import Chain, Greedy
from support.byte_tokenizer import ByteTokenizer
from support.fakes import BYTES, CountingLM, counting_pair


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


# The adapter of lm-evaluation-harness, on a stand-in of its interface.


@pytest.fixture(scope="module")
def harness():
    """The module, on a stand-in of the library where that is not installed."""
    sys.modules.pop("specsamp.evaluation.harness", None)
    names = ("lm_eval", "lm_eval.api", "lm_eval.api.model")
    before = {name: sys.modules.get(name) for name in names}
    sys.modules |= {name: types.ModuleType(name) for name in names}
    sys.modules["lm_eval.api.model"].LM = type("LM", (), {})
    from specsamp.evaluation import harness

    yield harness
    for name, module in before.items():
        sys.modules.pop(name)
        if module is not None:
            sys.modules[name] = module


def asked(*arguments):
    return types.SimpleNamespace(args=arguments)


def test_texts_come_in_order_and_end_where_the_task_says(harness):
    model = harness.HarnessModel(counting_pair(), rows=2, draft_length=2)
    requests = [
        asked("a", {"until": ["ef"], "max_gen_toks": 9}),
        asked("k", {"until": "n", "max_gen_toks": 9}),
        asked("c", {"until": ["ef"], "max_gen_toks": 9}),
        asked("s", {"max_gen_toks": 3, "do_sample": True, "temperature": 0.7, "top_p": 0.9}),
        asked("x" * 70 + "p", {"until": [], "max_gen_toks": 4}),
    ]
    assert model.generate_until(requests) == ["bcd", "lm", "d", "tuv", "qrst"]


def test_likelihoods_are_those_of_the_target(harness):
    """Of 'bc' after 'a', and of 'bx', which greedy decoding would not write; an empty context begins anew."""
    model = harness.HarnessModel(counting_pair())
    right = 20.0 - np.log(np.exp(20.0) + BYTES - 1)
    found = model.loglikelihood([asked("a", "bc"), asked("a", "bx"), asked("", "bc"), asked("ab ", "c")])
    assert [best for _, best in found] == [True, False, False, False]
    np.testing.assert_allclose(
        [score for score, _ in found], [2 * right, 2 * right - 20, 2 * right - 20, 2 * right - 40], atol=1e-4
    )


def test_a_text_beyond_the_positions_is_read_in_windows(harness):
    """Each token once: as many as the model has positions, and as many again."""
    text = bytes(range(1, 121)).decode()
    (total,) = harness.HarnessModel(counting_pair()).loglikelihood_rolling([asked(text)])
    right = 20.0 - np.log(np.exp(20.0) + BYTES - 1)
    assert total == pytest.approx(120 * right - 20, abs=1e-3), "only the first token is a surprise"


def test_sampling_is_what_the_task_asks(harness):
    assert isinstance(harness.sampling_of({}), Greedy)
    assert isinstance(harness.sampling_of({"do_sample": False, "temperature": 0.8}), Greedy)
    sampled = harness.sampling_of({"do_sample": True, "temperature": 0.8, "top_p": 0.9, "top_k": 5})
    assert isinstance(sampled, Chain) and len(sampled.warps) == 3
    with pytest.raises(ValueError, match="the task sets num_beams, which is not supported"):
        harness.sampling_of({"num_beams": 4})


def test_what_the_harness_cannot_ask_is_refused(harness):
    with pytest.raises(ValueError, match="give a pair with a tokenizer"):
        harness.HarnessModel(Pair(target=CountingLM(), target_params=()))
    with pytest.raises(ValueError, match="a budget of 64 tokens leaves no room in 64 positions"):
        harness.HarnessModel(counting_pair()).generate_until([asked("a", {"max_gen_toks": 64})])

"""The adapter of lm-evaluation-harness, on a stand-in of its interface."""

import sys
import types

import numpy as np
import pytest

from specsamp import Pair
from specsamp.sampling.warp import Chain, Greedy
from support.fakes import BYTES, CountingLM, counting_pair


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

"""Requests at any time: completions are the same as alone; no caller or error blocks them."""

import functools
import threading

import pytest

from specsamp import Method, NoDrafter, generate_many
from specsamp.decoding.engine import Engine
from specsamp.serving.answer import Failed
from specsamp.serving.batch import Batch
from specsamp.serving.request_warps import make_warp
from specsamp.serving.service import Service
from support.fakes import compiled_programs
from support.refusals import refusal, refused_arguments
from support.services import (
    CONTEXT,
    PAIR,
    Caller,
    alone,
    compile_all,
    make_service,
    running,
    sampling_request,
    submit,
)
from support.services import METHOD as QUEUE

METHOD = Method(drafter=NoDrafter(), sampling=make_warp({}))


@pytest.fixture(scope="module")
def service():
    made = make_service()
    compile_all(made.batch)
    with running(made):
        yield made


def of(completions):
    return [(one.tokens, one.finish, one.text) for one in completions]


def test_served_texts_equal_texts_decoded_alone(service):
    """More requests than rows run at once, with different warps, seeds, budgets, samples and ends,
    streamed and whole.
    """
    asked = [
        dict(prompts=["abc"], budget=9),
        dict(prompts=["x", "def"], budget=12, temperature=5.0, top_p=0.9, seed=7),
        dict(prompts=["h"], budget=30, stop=["no", "zz"]),
        dict(prompts=[[99, 100]], budget=5, temperature=4.0, seed=3, num_samples=2),
    ]
    before = compiled_programs()
    callers = [Caller(service, is_streamed=len(one["prompts"]) == 2, **one) for one in asked]
    found = [caller.wait() for caller in callers]
    assert compiled_programs() == before, "all of it was compiled"
    assert found == [of(alone(**one)) for one in asked]
    assert found[2] == [(list(b"ijklmno"), "stop", "ijklm")]
    assert found[1][0] != found[1][1] and found[3][0] != found[3][1], (
        "the control: they are sampled"
    )
    assert max(map(len, callers[1].got)) > 1 and len(callers[0].got[0]) == 1
    work = generate_many(PAIR, [sampling_request(**one) for one in asked], rows=3, method=QUEUE)
    queued = sorted(work, key=lambda one: (one.prompt_index, one.sample_index))
    assert of(queued) == sum(found, []), "and of a queue of the same requests"
    assert service.unfinished == 0


def test_queue_of_requests_begins_with_the_smallest_priority(monkeypatch):
    monkeypatch.setattr("specsamp.decoding.engine.DEFAULT_CONTEXT", 4)  # cuts no given budget
    asked = [sampling_request(["a"], priority=5), sampling_request(["b"], priority=-5)]
    first = next(generate_many(PAIR, asked, rows=1, method=QUEUE))
    assert first.prompt_index == 1 and len(first.tokens) == 8


def test_prompts_of_any_length_up_to_the_context(service):
    """Without a budget, a completion fills the context."""
    ((tokens, finish, _),) = Caller(service, ["ab"], None).wait()
    assert (len(tokens), finish) == (CONTEXT - 2, "length")
    for size in (1, 16, 17, 33, CONTEXT - 1):
        ((tokens, _, _),) = Caller(service, [[50] * size], 1).wait()
        assert tokens == [51]


def test_cancelled_request_frees_rows_and_places(service):
    """Two endless streams hold both rows, and three requests are queued; then all are cancelled."""
    leaving = [Caller(service, ["a"], None, is_streamed=True) for _ in range(2)]
    waiting = [Caller(service, ["b"], None) for _ in range(3)]
    for caller in (*leaving, *waiting):
        caller.answer.cancel()
    assert Caller(service, ["c"], 2).wait() == of(alone(["c"], 2))
    assert service.unfinished == 0 and all(caller.pieces.qsize() < 20 for caller in leaving)
    assert all(caller.pieces.empty() for caller in waiting)


def test_impossible_request_is_refused_without_a_place(service):
    for given, message in (
        (
            dict(prompts=["a" * CONTEXT]),
            "prompt 0 has 40 tokens, of 40 for prompt and text: shorten it",
        ),
        (dict(prompts=[[999]]), "prompt 0.* below 257; got 999"),
        (dict(prompts=["a"], stop=["a"] * 33), "33 stop texts: at most 32"),
        (
            dict(prompts=["a"], num_samples=7),
            "the request needs 7 completions; the limit is 6: request fewer",
        ),
        (dict(prompts="ab"), "prompts must be a list; got 'ab'"),
        (dict(prompts=["a"], ignore_eos="no"), "ignore_eos must be True or False; got 'no'"),
        (dict(prompts=["a"], client=["ann"]), r"client must be a str, such as 'ann'; got \['ann'"),
        (dict(prompts=["a"], grammar="[a-z]+"), "tuple of kind and source, .*; got '\\[a-z"),
    ):
        with refusal(message):
            Caller(service, **given)
    assert service.unfinished == 0


@pytest.mark.parametrize("part", ["text", "extend"])
def test_an_error_of_one_request_is_its_own(service, monkeypatch, part):
    """The failure occurs while the text is decoded, or while the prompt is read."""
    before = getattr(Engine, part)

    def break_one(self, *arguments):
        request = arguments[-1] if part == "text" else arguments[0][0]
        if request is not None and request.prompt == tuple(b"bad"):
            raise RuntimeError("no such\nthing")
        return before(self, *arguments)

    monkeypatch.setattr(Engine, part, break_one)
    sound = Caller(service, ["abc"], 20, is_streamed=True)
    bad = Caller(service, ["bad"], 20, num_samples=2)
    with pytest.raises(Failed, match="RuntimeError: no such thing"):
        bad.wait()
    assert sound.wait()[0] == of(alone(["abc"], 20))[0]
    assert Caller(service, ["abc"], 2).wait() == of(alone(["abc"], 2)) and service.unfinished == 0


def test_batch_error_fails_running_requests_alone(service, monkeypatch):
    """The new batch counts its rounds from its own start."""
    hold, run, calls = threading.Event(), Engine.run, []

    def fail_once(*arguments):
        calls.append(hold.wait(120))
        return run(*arguments) if len(calls) > 1 else 1 / 0

    monkeypatch.setattr(Engine, "run", fail_once)
    lost = Caller(service, ["a", "b"], 9)
    waiting = Caller(service, ["abc"], 9)
    before = service.batch.usage.busy
    hold.set()
    with pytest.raises(Failed, match="decoding failed: ZeroDivisionError: division by zero"):
        lost.wait()
    assert waiting.wait() == of(alone(["abc"], 9)) and service.unfinished == 0
    assert service.batch.usage.busy - before == waiting.got[0][-1].stats.rounds


def test_service_without_batch_fails_its_requests(service, monkeypatch):
    with monkeypatch.context() as broken:
        broken.setattr(Batch, "fill", lambda _: 1 / 0)
        with pytest.raises(Failed, match="decoding failed: ZeroDivisionError"):
            Caller(service, ["a"], 9).wait()
    assert Caller(service, ["abc"], 9).wait() == of(alone(["abc"], 9)) and service.unfinished == 0


def test_failing_caller_delays_no_request(service):
    def refuse(piece):
        raise RuntimeError("the event loop is closed")

    submit(service, ["a"], None, deliver=refuse, is_streamed=True)
    assert Caller(service, ["abc"], 9).wait() == of(alone(["abc"], 9))


def test_closing_service_fails_waiting_requests():
    made = Service(PAIR, METHOD, rows=1, context=CONTEXT, max_waiting=2)
    callers = [Caller(made, ["a"], None) for _ in range(2)]
    assert made.close("the server ends") == 2, "it was never started"
    assert [caller.pieces.qsize() for caller in callers] == [1, 1]
    made.start()  # it is already closed
    for caller in callers:
        with pytest.raises(Failed, match="the server ends"):
            caller.wait()
    with pytest.raises(Failed, match="the server ends"):
        submit(made, ["a"], 1, deliver=print)


make = functools.partial(Service, pair=PAIR, method=METHOD)

test_refused_services = refused_arguments(
    make,
    {
        "rows must be": dict(rows=0),
        "max_waiting must be": dict(max_waiting=-1),
        "context = 65, but the models have 64 positions": dict(context=65),
        "method must be a Method.*got None": dict(method=None),
    },
)

"""Many prompts over few rows: each completion is the same as alone, and rows are seldom idle."""

import dataclasses
import gc
import io

import numpy as np
import pytest

from specsamp import (
    Adaptive,
    BlockRule,
    CompletionLog,
    CoupledRule,
    NgramDrafter,
    SamplingRequest,
    ShortestFirst,
    chain,
    generate,
    generate_many,
    temperature,
    top_p,
)
from specsamp.decoding.engine import Engine
from specsamp.serving.orders import parse_order
from support.extras import slow_but
from support.fakes import counting_pair, table_pair
from support.refusals import refusal, refused_calls

PROMPTS = [[1, 2], [3], [4, 5, 6], [7], [8, 9], [10], [11, 1]]
BUDGETS = [5, 21, 9, 30, 1, 13, 17]
PAIR = table_pair()
VALUES = np.linspace(0.5, 1.2, len(PROMPTS)).tolist()


def by_row(completions):
    return {(row.prompt_index, row.sample_index): row for row in completions}


def queue(order=range(7), **options):
    """Decodes the prompts in ``order``; a prompt keeps its id, budget and temperature."""
    prompts, budgets, values = ([of[i] for i in order] for of in (PROMPTS, BUDGETS, VALUES))
    sampling = chain(temperature(values), top_p(0.9))
    options = dict(rule=BlockRule(), num_samples=2, prompt_ids=list(order)) | options
    return generate_many(PAIR, prompts, budgets, sampling=sampling, **options)


@pytest.fixture(scope="module")
def alone():
    """Returns the completions of each prompt by itself."""
    rows = []
    for index, (prompt, budget, value) in enumerate(zip(PROMPTS, BUDGETS, VALUES)):
        sampling = chain(temperature(value), top_p(0.9))
        given = dict(sampling=sampling, num_samples=2, prompt_ids=[index], rule=BlockRule())
        rows += [
            dataclasses.replace(row, prompt_index=index)
            for row in generate(PAIR, [prompt], budget, **given)
        ]
    return by_row(rows)


@pytest.mark.parametrize("rows", slow_but([1, 3], 3))
def test_queued_texts_equal_texts_decoded_alone(alone, rows):
    """Tokens, end and counts are the same for any order and number of rows."""
    order = [3, 6, 0, 5, 1, 4, 2]
    done = [
        dataclasses.replace(row, prompt_index=order[row.prompt_index])
        for row in queue(order, rows=rows)
    ]
    assert len(done) == 2 * len(PROMPTS) and by_row(done) == alone


def test_adaptive_completions_are_marked_as_batch_dependent():
    """Drafts may depend on other rows, and completions as well, except under the coupled rule."""

    @dataclasses.dataclass(frozen=True)
    class Scheduler(NgramDrafter):
        row_independent = False

    def said(rule, **options):
        (row,) = generate_many(PAIR, [[1]], 2, rule=rule, **options)
        return row.row_independent

    adaptive = dict(
        draft_length=Adaptive(lengths=(0, 2), costs_ms=(1, 1.6)), drafter=NgramDrafter(2)
    )
    for options in (dict(drafter=Scheduler(K=2)), adaptive):
        assert (said(BlockRule(), **options), said(CoupledRule(), **options)) == (False, True)
    assert all(row.row_independent for row in queue(rows=3))


def test_rows_are_busy_while_prompts_wait():
    """With budgets from 1 to 60, rows of fixed batches idle until the longest completion ends."""
    budgets = np.random.default_rng(0).integers(1, 61, 96).tolist()
    prompts = [[1 + index % 11] for index in range(96)]
    work = generate_many(PAIR, prompts, budgets, rows=8, draft_length=0)
    done = by_row(work)
    assert len(done) == 96 and work.usage.busy == sum(budgets)
    fixed = sum(max(budgets[first : first + 8]) for first in range(0, 96, 8))
    assert sum(budgets) > 0.9 * 8 * work.usage.rounds and work.usage.rounds < 0.7 * fixed


def test_stop_text_frees_its_row_for_prompts():
    prompts = ["c", "x", "m", "d"]
    budgets = [30, 5, 4, 40]
    stop = ["gh", "pq"]
    options = dict(draft_length=3, stop=stop)
    together = generate(counting_pair(), prompts, budgets, **options)
    work = generate_many(counting_pair(), prompts, budgets, rows=2, **options)
    done = by_row(work)
    assert [done[index, 0].text for index in range(4)] == ["def", "yz{|}", "no", "ef"]
    for row in together:
        cut = done[row.prompt_index, 0]
        assert dataclasses.replace(cut, dropped=0) == dataclasses.replace(row, dropped=0)
        assert cut.dropped <= 3 + 1
    assert work.usage.rounds < 12
    assert work.usage.busy == sum(row.stats.rounds for row in done.values()), (
        "rounds past a stop are not busy"
    )


def test_a_killed_run_goes_on_where_it_was(tmp_path, alone):
    path = tmp_path / "logs" / "texts.jsonl"
    first = queue(rows=3, log=path)
    seen = [next(first) for _ in range(5)]
    first.close()
    with open(path, "a") as file:
        file.write('{"prompt_index": 6, "samp')  # killed within this line
    second = queue(rows=2, log=path)
    done = list(second)
    assert done[:5] == seen and by_row(done) == alone
    assert second.usage.busy == sum(row.stats.rounds for row in done[5:])
    third = queue(rows=2, log=path)
    assert by_row(third) == alone and third.usage.rounds == 0
    assert len(path.read_text().splitlines()) == 1 + len(alone)


def test_log_has_one_writer_and_finished_completions(tmp_path):
    """Completions that end together are in the log before the first of them is returned."""
    path = tmp_path / "texts.jsonl"

    def ask(pair=PAIR):
        return generate_many(pair, [[1]] * 4, 3, rows=4, draft_length=0, log=path)

    first = ask()
    next(first)
    with refusal("is being written by another run"):
        ask()
    gc.disable()
    try:
        del first  # a queue that is dropped, as by a loop that ends early, unlocks its log
        again = ask()
    finally:
        gc.enable()
    assert again.known == 4 and len(list(again)) == 4
    with refusal("another call: weights was"):
        ask(dataclasses.replace(PAIR, target_params=2 * PAIR.target_params))


def test_the_log_of_another_call_is_refused(tmp_path):
    path = tmp_path / "texts.jsonl"
    list(queue(rows=3, log=CompletionLog(path, {"weights": "a"})))
    content = path.read_text()
    for options, message in (
        (dict(log=CompletionLog(path, {"a": object()})), "must be JSON"),
        (dict(seed=1), "another call: .*seed was 0, is 1"),
        (dict(rule=CoupledRule()), r"rule was 'BlockRule\(\)', is 'CoupledRule\(\)'"),
        (dict(log=CompletionLog(path, {"weights": "b"})), "weights was 'a', is 'b'"),
    ):
        with refusal(message):
            queue(**dict(log=CompletionLog(path, {"weights": "a"})) | options)
    assert path.read_text() == content
    damaged = content.replace('"prompt_index": 3', '"prompt_index": 99')
    for written, message in (
        ("no log\n", "is no file of completions"),
        ("no log, and no line break", "is no file of completions"),
        (
            f'{content.splitlines()[0]}\n{{"text": "a"}}\n',
            "line 2 is no completion .*remove the line",
        ),
        (damaged, "no completion .sample . of prompt 99.: remove the line"),
    ):
        path.write_text(written)
        with refusal(message):
            queue(log=CompletionLog(path, {"weights": "a"}))
        assert path.read_text() == written


def test_a_full_disk_loses_nothing_that_was_written(tmp_path, monkeypatch):
    path = tmp_path / "texts.jsonl"
    first = queue(rows=3, log=path)
    next(first)
    written = path.read_bytes()

    class Full(io.FileIO):
        def write(self, line):
            super().write(line[:7])
            raise OSError(28, "No space left on device")

    open_before = open
    monkeypatch.setattr(
        "builtins.open", lambda *args: Full(*args) if args[0] == path else open_before(*args)
    )
    with pytest.raises(OSError, match="No space left"):
        list(first)
    assert path.read_bytes() == written


def test_prompts_are_read_together(monkeypatch):
    """One call reads four prompts of any length into free rows, and changes no completion."""
    counted, extend = [], Engine.extend

    def count(engine, requests, *arguments):
        counted.append(len(requests))
        return extend(engine, requests, *arguments)

    prompts = [[index % 12] for index in range(7)] + [[token % 12 for token in range(70)]]
    monkeypatch.setattr(Engine, "extend", count)
    options = dict(rows=8, sampling=chain(temperature(1.0)))
    together = by_row(generate_many(PAIR, prompts, 5, **options))
    assert counted == [4, 4]
    monkeypatch.setattr("specsamp.serving.generate_many.TOGETHER", 1)
    assert by_row(generate_many(PAIR, prompts, 5, **options)) == together
    assert counted[2:] == [1] * 8


def test_shared_prefix_is_prefilled_once():
    """Samples of one prompt share all of it, different prompts the examples at their beginning."""
    shots = [index % 11 for index in range(60)]
    work = generate_many(PAIR, [[*shots, 3], [*shots, 4]], 3, rows=1, num_samples=2, draft_length=1)
    together = by_row(work)
    assert work.batch.prefill.tokens_copied >= 3 * 58
    assert together == by_row(
        generate(PAIR, [[*shots, 3], [*shots, 4]], 3, num_samples=2, draft_length=1)
    )


WRONG = ShortestFirst(predictor=lambda request: "ten")
REQUEST = SamplingRequest(prompts=["a"])
SCORED = dataclasses.replace(REQUEST, is_scored=True)


def ask(requests, **options):
    return generate_many(counting_pair(), requests, **options)


test_refused_queues = refused_calls(
    {
        "rows must be": lambda: queue(rows=0),
        "predictor must be a function of a request; got 3": lambda: ShortestFirst(predictor=3),
        "aging must be a number from 0; got -1": lambda: ShortestFirst(aging=-1),
        "number of tokens must be a number from 0; got 'ten'": lambda: ask(
            ["a"], max_new_tokens=4, order=WRONG
        ),
        r"an Order, such as ShortestFirst\(\); got 'shortest'": lambda: ask(
            ["a"], order="shortest"
        ),
        "sampling requests have .* of their own: leave out": lambda: ask([REQUEST], stop=["b"]),
        "priority must be an integer >= -1000 and below 1001; got 1001": lambda: (
            dataclasses.replace(REQUEST, priority=1001)
        ),
        "--order=shortest_first:x: write first_come, .* or": lambda: parse_order(
            "shortest_first:x"
        ),
        "--order=longest: write first_come": lambda: parse_order("longest"),
        "learner was given, but NgramDrafter has no draft model": lambda: ask(
            [REQUEST], drafter=NgramDrafter(2), learner=print
        ),
        "a budget of 20, together 22, more than the target.s 16": lambda: generate_many(
            table_pair(max_positions=16), [SamplingRequest(prompts=[[1, 2]], max_new_tokens=20)]
        ),
        "generate_many neither streams nor scores: leave both out": lambda: ask([SCORED]),
    }
)

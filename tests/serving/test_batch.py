"""Rows and slots follow the requests; prompts are read in chunks, and no token in a row twice."""

import dataclasses
import functools
import queue
import threading

import jax
import numpy as np
import pytest

from specsamp import (
    ModelDrafter,
    NgramDrafter,
    Pair,
    ShortestFirst,
    TransformerLM,
    chain,
    generate,
    temperature,
)
from specsamp.decoding.drafters.translating import SharedVocabulary, TranslatingDrafter
from specsamp.decoding.engine import Engine
from specsamp.decoding.method import Method, head_drafter
from specsamp.models.config import tiny
from specsamp.serving import batch, sizes
from specsamp.serving.runner import Runner
from specsamp.serving.service import Service
from specsamp.serving.sizes import Size
from support.fakes import random_table
from support.heads import LayeredTable, eagle3, mtp
from support.hybrids import hybrid
from support.services import compile_all, submit
from support.weights import drawn_params

CONTEXT, K, V = 112, 3, 50
SAMPLING = chain(temperature(1.0))


def model_pair():
    """Returns a target with positions by number of slots, and a draft whose cache holds tokens."""
    target = TransformerLM(tiny(vocab_size=V, num_layers=2, positions="relative"))
    draft = TransformerLM(tiny(vocab_size=V, num_layers=1, positions="rotary", ngram_rows=32))
    pair = Pair(
        target=target,
        target_params=drawn_params(target),
        draft=draft,
        draft_params=drawn_params(draft, 1),
    )
    return pair, ModelDrafter(draft, K)


def head_pair(head=eagle3(V)):
    target = LayeredTable(V)
    pair = Pair(
        target=target, target_params=random_table(5, V), head=head, draft_params=drawn_params(head)
    )
    return pair, head_drafter(target, head, K)


def tokenizer_pair():
    """Returns a pair whose draft has 60 tokens and reads odd tokens of the target as two ids: its
    text is longer.
    """
    pair, _ = model_pair()
    draft = TransformerLM(tiny(vocab_size=60, num_layers=1, positions="rotary"))
    ids_V = [token if token % 2 == 0 else -1 for token in range(V)]
    reading_VM = [[token, -1] if token % 2 == 0 else [50 + token % 10, token] for token in range(V)]
    vocabulary = SharedVocabulary(ids_V, reading_VM, 60, begin=(59,))
    pair = dataclasses.replace(
        pair, draft=draft, draft_params=drawn_params(draft, 1), vocabulary=vocabulary
    )
    return pair, TranslatingDrafter(draft, vocabulary, K)


PAIRS = {"model": model_pair, "head": head_pair, "tokenizer": tokenizer_pair}
PAIRS["modules"] = functools.partial(head_pair, mtp(V, num_modules=K + 1))


@pytest.fixture
def small(monkeypatch):
    """Sets sizes of 32, 64 and 128 slots."""
    monkeypatch.setattr(batch, "SMALLEST_SLOTS", 32)
    monkeypatch.setattr(sizes, "PATIENCE", 2)


class Texts:
    """A service and its batch, whose completions are compared with `generate`."""

    def __init__(self, kind="model", rows=4, **options):
        self.pair, drafter = PAIRS[kind]()
        self.method = Method(drafter=drafter, sampling=SAMPLING)
        self.service = Service(
            self.pair, self.method, rows=rows, context=CONTEXT, rounds_per_slice=2, **options
        )
        self.batch = self.service.batch
        self.asked = []
        self.pieces = queue.SimpleQueue()

    def ask(self, prompt, budget):
        number = len(self.asked)
        self.asked.append((prompt, budget))
        submit(
            self.service,
            [prompt],
            budget,
            seed=number,
            deliver=lambda piece: self.pieces.put((number, piece)),
        )

    def step(self):
        self.service._wait()
        self.service._step()

    def check(self):
        """Collects the requested completions, and compares them with `generate`."""
        found = dict(self.pieces.get(timeout=300) for _ in self.asked)
        for number, (prompt, budget) in enumerate(self.asked):
            (alone,) = generate(self.pair, [prompt], budget, method=self.method, seed=number)
            assert found[number].tokens == alone.tokens, number
            assert found[number].stats == alone.stats
        self.asked.clear()

    def __enter__(self):
        self.service.start()
        return self

    def __exit__(self, *_):
        self.service.close()
        self.service.join()


@pytest.mark.slow
def test_texts_are_the_same_in_every_size(small, monkeypatch):
    """The size grows with requests up to the context, shrinks again, and changes no completion."""
    seen, resize = [], Runner.resize
    monkeypatch.setattr(Runner, "resize", lambda *of: (resize(*of), seen.append(of[-1]))[0])
    with Texts(in_background=False) as texts:
        texts.ask([1, 2, 3], 6)
        texts.check()
        assert texts.batch.table.size == Size(1, 32) and seen == []
        for prompt, budget in (
            ([4] * 5, 20),
            ([7, 8] * 9, 60),
            ([9], 3),
            ([5, 6, 7] * 20, CONTEXT - 60),
            ([3], 110),
        ):
            texts.ask(prompt, budget)
        texts.check()
        assert max(seen).rows == 4 and max(size.slots for size in seen) == 128
        texts.ask([1], 12)
        texts.check()
        assert texts.batch.table.size.rows == 1 and texts.batch.table.size.slots < 128


@pytest.mark.slow
def test_background_compilation_delays_no_running_text(small, monkeypatch):
    """A short completion ends meanwhile; one that outgrows its slots has the same tokens."""
    compile_, is_open = Runner.compile, threading.Event()

    def slowly(self, thing):
        if isinstance(thing, Size) and thing.slots > 32:
            assert is_open.wait(300)
        compile_(self, thing)

    monkeypatch.setattr(Runner, "compile", slowly)
    texts = Texts(rows=2)
    texts.service.compile()
    with texts:
        texts.ask([1, 2], 30)
        texts.ask([9] * 40, 5)
        texts.ask([3], 4)
        first = texts.pieces.get(timeout=300)
        assert first[0] == 2 and texts.service.unfinished == 2
        texts.pieces.put(first)
        is_open.set()
        texts.check()
        assert texts.batch.usage.preempted == 1


@pytest.mark.slow
@pytest.mark.parametrize("kind", [*PAIRS, "lost"])
def test_preempted_text_and_copied_prefix_change_no_text(small, monkeypatch, kind):
    """Of two long completions with a common prefix, one yields its row to a short request."""
    keep, begun = Runner.set_aside, [3, 1, 4, 1, 5, 9, 2, 6] * 5

    def lose(*of):
        rows = keep(*of)
        return dataclasses.replace(rows, cache=jax.tree.map(np.zeros_like, rows.cache))

    if kind == "lost":  # the control
        monkeypatch.setattr(Runner, "set_aside", lose)
    order = ShortestFirst(predictor=lambda request: request.max_new_tokens, aging=0)
    texts = Texts(kind.replace("lost", "model"), rows=2, in_background=False, order=order)
    asked = ([begun, 60], [[*begun, 7, 8], 50], [begun[:30] + [8], 5], [[5, 1], 9])
    for prompt, budget in asked:
        texts.ask(prompt, budget)
        for _ in range(5):
            texts.step()
    while texts.service.unfinished:
        texts.step()
    assert texts.batch.usage.preempted and texts.batch.prefill.tokens_copied > 60
    if kind == "lost":
        with pytest.raises(AssertionError):
            texts.check()
    else:
        texts.check()


def hybrid_pair():
    target = TransformerLM(hybrid(vocab_size=V))
    return Pair(target=target, target_params=drawn_params(target)), NgramDrafter(K)


@pytest.mark.slow
def test_hybrid_prompt_far_ahead_is_prefilled_again(monkeypatch):
    """A recurrent state cannot be rolled back to the end of a shared prompt."""
    monkeypatch.setitem(PAIRS, "hybrid", hybrid_pair)
    texts = Texts("hybrid", rows=2, in_background=False)
    prompt = [3, 1, 4, 1, 5, 9, 2, 6] * 4
    texts.ask(prompt, 75)
    while not texts.batch.table.decoding or texts.batch.table.decoding[0][1].emitted < 66:
        texts.step()
    texts.ask(prompt, 9)
    while texts.service.unfinished:
        texts.step()
    texts.check()


@pytest.mark.slow
def test_resumed_row_lends_no_former_prefix(small):
    """A preempted completion resumes in the row of an ended one, whose prompt a new request repeats
    in the same step.
    """
    order = ShortestFirst(predictor=lambda request: request.max_new_tokens, aging=0)
    texts = Texts(rows=1, in_background=False, order=order)
    begun = [3, 1, 4, 1, 5, 9, 2, 6] * 5
    texts.ask([7, 8], 40)
    for _ in range(3):
        texts.step()
    texts.ask(begun, 3)
    while not texts.batch.usage.preempted or texts.service.unfinished > 1:
        texts.step()
    texts.batch.fill()  # the first text is back in the only row
    assert texts.batch.table.longest_prefix(0, begun) == (0, 0)
    while texts.service.unfinished:
        texts.step()
    texts.check()


@pytest.mark.slow
def test_host_memory_keeps_one_text_per_row(small):
    """Each request is shorter than all earlier ones, and preempts the running completion."""
    order = ShortestFirst(predictor=lambda request: request.max_new_tokens, aging=0)
    texts = Texts(rows=1, in_background=False, order=order)
    for budget in (90, 60, 35, 10):
        texts.ask([budget % V], budget)
        texts.step()
        assert sum(entry.kept is not None for entry in texts.batch.scheduler.waiting) <= 1
    while texts.service.unfinished:
        texts.step()
    assert texts.batch.usage.preempted
    texts.check()


@pytest.mark.slow
def test_text_without_slots_waits_during_prefill(small, monkeypatch):
    texts = Texts(rows=2, in_background=False)
    texts.ask([3, 1, 4, 1, 5] * 4, 80)
    while not texts.batch.table.decoding or texts.batch.table.decoding[0][1].length < 36:
        texts.step()
    monkeypatch.setattr(texts.batch.prefill, "chunks", (4,))
    texts.batch.prefill.budget = 4
    slots = texts.batch.table.size.slots
    texts.ask([2] * 40, 1)
    while texts.service.unfinished:
        texts.step()
    assert texts.batch.table.size.slots > slots
    texts.check()


def test_long_prompt_delays_running_text_by_two_chunks(monkeypatch):
    calls, extend = [], Engine.extend
    texts = Texts(rows=2, in_background=False)
    compile_all(texts.batch)
    monkeypatch.setattr(Engine, "extend", lambda *of: (calls.append(0), extend(*of))[1])
    monkeypatch.setattr(texts.batch.prefill, "chunks", (16,))
    texts.batch.prefill.budget = 32
    for prompt, budget in (([1], 80), ([2] * 100, 5)):
        texts.ask(prompt, budget)
        texts.step()
    assert len(calls) == 1 + 2
    while texts.service.unfinished:
        texts.step()
    assert len(calls) == 1 + 7
    texts.check()

"""Decisions about requests on the host: orders, rows, chunks and sizes, without a device."""

import subprocess
import sys
import threading
import time

import pytest

from specsamp import NoDrafter, TokenRule
from specsamp.decoding.request import Request
from specsamp.serving.orders import FirstCome, Nearest, ShortestFirst
from specsamp.serving.prefill import plan
from specsamp.serving.scheduler import Entry, Scheduler, Stage
from specsamp.serving.sizes import PATIENCE, Background, Chunks, Resize, Size, Sizes
from specsamp.serving.slots import SlotTable
from support.fakes import table_loop


def entry(length=4, budget=100, **fields):
    return Entry(Request(prompt=(1,) * length, max_new_tokens=budget), **fields)


def scheduler_of(*entries, order=FirstCome()):
    scheduler = Scheduler(order)
    scheduler.waiting += entries
    scheduler.sort()
    return scheduler


def decode(scheduler, *entries):
    for one in entries:
        scheduler.admit(one)
        scheduler.start(one)


def test_scheduler_loads_no_jax():
    code = "import sys, specsamp.serving.scheduler; sys.exit('jax' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_request_lives_from_queued_to_finished():
    first, second = entry(), entry()
    scheduler = scheduler_of(first, second)
    scheduler.admit(first)
    assert first.stage == Stage.PREFILLING and scheduler.waiting == [second]
    scheduler.start(first)
    scheduler.preempt(first, shard=1, kept="row")
    assert scheduler.waiting == [first, second] and not scheduler.active
    assert scheduler.next(0, lambda _: True) is second, "the row of another shard"
    assert scheduler.next(1, lambda _: True) is first
    assert scheduler.next(1, lambda _: True, can_resume=False) is second
    scheduler.resume(first)
    assert first.stage == Stage.DECODING and first.kept is None
    for one in (first, second):
        scheduler.finish(one)
    assert not scheduler.active and not scheduler.waiting and second.stage == Stage.FINISHED


def test_clients_take_turns_after_preempted_texts_and_priorities():
    a, b, c = (entry(client="a") for _ in range(3))
    other = entry(client="b")
    urgent = entry(client="a", priority=-1)
    scheduler = scheduler_of(a, b, c, other, urgent)
    assert scheduler.waiting == [urgent, a, other, b, c]
    decode(scheduler, a)
    scheduler.sort()
    assert scheduler.waiting == [urgent, other, b, c]
    scheduler.preempt(a, 0, None)
    scheduler.sort()
    assert scheduler.waiting == [urgent, a, other, b, c]


def test_shortest_text_goes_first_and_preempts_longer_ones():
    order = ShortestFirst(predictor=lambda request: request.max_new_tokens, aging=0, worth=16)
    long = entry(budget=100)
    short = entry(budget=10)
    middle = entry(budget=90)
    scheduler = scheduler_of(long, short, middle, order=order)
    assert scheduler.waiting == [short, middle, long]
    decode(scheduler, long)
    assert scheduler.displaced(short, [long]) is long
    assert scheduler.displaced(middle, [long]) is None, "it is not shorter by 16 tokens"
    middle.priority = -1
    assert scheduler.displaced(middle, [long]) is long
    scheduler.preempt(long, 0, None, after=short)
    assert scheduler.waiting == [short, long, middle], "not before the request that takes its row"
    long.length += 95
    assert order.rank(long) == 5


def test_first_come_preempts_nothing_even_for_priority():
    running, urgent = entry(), entry(priority=-5)
    assert scheduler_of(urgent).displaced(urgent, [running]) is None


@pytest.mark.parametrize("aging, first", [(9.4, "short"), (9.6, "long")])
def test_waiting_counts_as_tokens(aging, first):
    """The short request has 38 tokens less, and arrives 4 seconds later."""
    order = ShortestFirst(predictor=lambda request: request.max_new_tokens, aging=aging)
    long, short = entry(budget=40), entry(budget=2, arrived=4.0)
    assert (scheduler_of(long, short, order=order).waiting[0] is short) == (first == "short")


def test_lengths_are_learned_from_near_prompts():
    nearest = Nearest()
    short, long = (entry(length).request for length in (3, 30))
    short.prompt += (7,)
    assert nearest.predict(short) == 100, "the budget, before any text has ended"
    for _ in range(Nearest.NEIGHBOURS):
        nearest.learn(short, 10)
        nearest.learn(long, 70)
    assert (nearest.predict(short), nearest.predict(long)) == (10, 70)
    order = ShortestFirst()
    ended = entry(budget=50)
    ended.length += 7
    order.finish(ended)
    assert order.rank(entry(budget=50)) == 7
    ended.length += 3
    assert order.rank(ended) == 40, "the budget, for a text that is longer than predicted"


@pytest.mark.parametrize(
    "left, slots, is_whole, planned",
    [
        ([(5, 0), (60, 0)], 128, False, (64, 1)),
        ([(5, 0)], 128, False, (16, 1)),
        ([(100, 0)], 128, False, (64, 1)),
        ([(40, 80)], 128, False, (16, 1)),  # a chunk of 64 would end at 144
        ([(100, 0)], 128, True, (64, 2)),
        ([(90, 0), (50, 40)], 128, True, (64, 1)),  # two calls would end at 168
    ],
)
def test_chunks_fit_the_slots_of_every_row(left, slots, is_whole, planned):
    assert plan(left, (16, 64), slots, is_whole) == planned


def test_slot_table_lends_prefixes_and_frees_oldest():
    table = SlotTable(Size(rows=3, slots=64), 2, table_loop(TokenRule(), NoDrafter()))
    table.hold(1, range(20))
    table.hold(0, [*range(10), 99, 98, 97])
    assert table.free(0) == [2, 1, 0] and table.free(1) == [3, 4, 5]
    assert table.longest_prefix(0, [*range(15), 7]) == (1, 14)
    assert table.longest_prefix(1, range(20)) == (3, 0), "rows of other shards are not copied"
    running = table.entries[4] = entry()
    assert table.resize(Size(rows=1, slots=8)) == [0, 4], "the running text, and the newest"
    assert table.decoding == [(1, running)] and table.longest_prefix(0, range(20)) == (0, 6)


def sizes_of(programs):
    return Sizes((1, 2, 4), (32, 64, 256), 1, step_tokens=4, spare=16, programs=programs)


def test_size_follows_requests_as_programs_become_ready():
    programs = Background(print, in_thread=False)
    programs.is_ready = programs.ready.__contains__
    ready = programs.ready
    sizes = sizes_of(programs)
    small, long = [entry() for _ in range(3)], entry(length=40)
    now, wanted = Size(1, 32), Size(4, 64)
    assert sizes.choose(now, small[:1], [*small[1:], long]) == now, "nothing is compiled"
    programs.ready |= {Size(4, 32), Chunks(32), Resize(now, Size(4, 32))}
    assert sizes.choose(now, small[:1], [*small[1:], long]) == Size(4, 32), "the short requests"
    programs.ready |= {wanted, Chunks(64), Resize(Size(4, 32), wanted), Resize(wanted, now), now}
    assert sizes.choose(Size(4, 32), small, [long]) == wanted
    chosen = [sizes.choose(wanted, small[:1], []) for _ in range(PATIENCE + 1)]
    assert chosen == [wanted] * PATIENCE + [now]
    assert sizes.choose(wanted, [], small[:1]) == now, "an empty batch shrinks at once"
    ready.remove(now)
    ready.add(Resize(wanted, Size(4, 32)))
    assert sizes.choose(wanted, [], small[:1]) == Size(4, 32), "the best that is compiled"


def test_larger_size_serves_until_compilation_ends():
    programs = Background(print, in_thread=False)
    programs.is_ready = programs.ready.__contains__
    ready = programs.ready
    sizes = sizes_of(programs)
    now = Size(1, 32)
    largest = Size(4, 64)
    ready |= {largest, Chunks(64), Resize(now, largest)}
    assert sizes.choose(now, [entry()], [entry()]) == largest
    assert sizes.choose(now, [entry()], [entry(length=60)]) == now, "no compiled size has 256 slots"


def test_needed_programs_are_compiled_before_likely_ones():
    made, is_open = [], threading.Event()
    programs = Background(lambda one: (is_open.wait(60), made.append(one)), in_thread=True)
    sizes, first = sizes_of(programs), Size(1, 32)
    sizes.begin_first()
    assert sizes.choose(first, [entry(budget=200)], []) == first
    needed = Size(4, 32)
    assert sizes.choose(first, [entry(budget=200)], [entry() for _ in range(3)]) == first
    is_open.set()
    while not programs.ready >= {needed, Size(1, 256), Resize(needed, first)}:
        time.sleep(0.01)
    programs.close()
    assert needed in made[:4], "before the size for the whole text, which was begun first"


def test_size_that_failed_to_compile_serves_nothing_else():
    programs = Background(lambda one: 1 / (one != Size(4, 32)), in_thread=True)
    sizes, first = sizes_of(programs), Size(1, 32)
    for program in (Size(4, 32), Chunks(32), Resize(first, Size(4, 32))):
        while not programs.is_ready(program):
            time.sleep(0.01)
    assert programs.failed == {Size(4, 32)}
    assert sizes.choose(first, [entry()], [entry()]) in (first, Size(2, 32))
    programs.close()

"""The next round is the same if the text is read anew, however it entered the caches.

Wrong caches of a draft only cost acceptance: texts stay exact, so that no distribution shows it.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specsamp import (
    Adaptive,
    FeatureDrafter,
    Method,
    ModuleDrafter,
    ParallelDrafter,
    chain,
    temperature,
)
from specsamp.decoding.engine import Engine
from specsamp.decoding.request import make_requests
from specsamp.decoding.trees import block_of
from specsamp.sampling.rules import Rule, make_verdict, take_row
from specsamp.serving import batch
from specsamp.serving.scheduler import Entry, Stage
from specsamp.serving.sizes import Size
from support import mutants, tree_mutants
from support.drafters import DRAFTERS, V
from support.extras import slow_but

SLOTS, CHUNK = 256, 16
SAMPLING = chain(temperature(1.0))
TOLERANCE = 1e-3  # of a probability; rounding errors are 1e-4, the mistakes below .01 and more


@dataclasses.dataclass(frozen=True)
class AcceptsByLength(Rule):
    """Accepts a number of tokens by lengths alone, so that weak drafts have accepted tokens too."""

    trees = True

    def sample(self, log_probs_BV, keys, offset):
        return jnp.argmax(log_probs_BV, axis=-1).astype(jnp.int32)

    def siblings(self, log_probs_BPV, keys, *, nodes_PC, depth):
        return jax.lax.top_k(log_probs_BPV, nodes_PC.shape[1])[1].astype(jnp.int32)

    def verify(self, draft, target, keys):
        row_B = 5 * keys.starts_B // 3 % (draft.num_drafted_B + 1)  # any row, for every count
        last_B = 5 * keys.starts_B % V
        if draft.parents_BK is None:
            return make_verdict(draft, row_B, last_B)
        on_path_BT = take_row(block_of(draft, keys.starts_B).visible_BTR, row_B)
        rows_BT = jnp.argsort(~on_path_BT, axis=1)[:, : draft.depth + 1].astype(jnp.int32)
        return make_verdict(draft, on_path_BT.sum(axis=1) - 1, last_B, rows_BT)


class InTurn(Adaptive):
    """Cycles through drafts of all lengths, and pauses."""

    def learn(self, state, running_B, num_drafted_B, num_accepted_B):
        most, few = self.K, self.shortest
        turns = jnp.asarray([most, 0, 0, most, few, most, most, 0, 0, 0, few])
        idle_B = state.idle_B + running_B
        return dataclasses.replace(state, idle_B=idle_B, draft_lengths_B=turns[idle_B % len(turns)])


@functools.partial(jax.jit, static_argnames="loop")
def next_round(loop, weights, state):
    """Returns the next draft, its probabilities, and the target's probabilities after each row."""
    request = state.request
    state = dataclasses.replace(state, request=None)
    state = loop._catch_up(weights, state, jnp.ones((), bool))  # as after a pause
    loop = dataclasses.replace(loop, adaptive=None)
    draft, _, cache = loop.draft(weights, request, state)
    logits_BTV = loop.score(weights, state, draft, cache).logits_BTV
    laws = draft.log_probs_BRV
    if laws is None:  # a one-hot draft
        laws = jnp.zeros((*draft.tokens_BK.shape, V))
    return draft, jnp.exp(laws), jax.nn.softmax(logits_BTV)


class Batch(batch.Batch):
    """Compares two rows, before every slice, with their texts read anew.

    The first ``perfect`` tokens of a draft have the target's distribution.
    """

    def __init__(self, pair, drafter, lengths, perfect):
        fixed = dict(usual=drafter.K, margin=0, pause=1)
        adaptive = InTurn(lengths=lengths, costs_ms=(1,) * len(lengths), **fixed)
        rule = AcceptsByLength()
        self.method = Method(drafter=drafter, rule=rule, sampling=SAMPLING, adaptive=adaptive)
        self.pair, self.perfect, self.texts = pair, perfect, {}
        example = make_requests(pair, self.method, [[0]], 1)
        engine = Engine.create(pair, self.method, example, batch=2, slots=SLOTS)
        super().__init__(engine, rows=2, rounds=2)

    def begin(self, prompt, budget):
        (request,) = make_requests(self.pair, self.method, [prompt], budget)
        entry = Entry(request)
        self.scheduler.waiting.append(entry)
        return entry

    def end(self, prompt, budget):
        """Decodes until this text ends, and returns it with its prompt."""
        entry = self.begin(prompt, budget)
        while entry.stage != Stage.FINISHED:
            self.fill()
            self.compare()
            self.run()
            for one, text in self.collect(self.text, always=True):
                self.texts[one] = [*one.request.prompt, *text.tokens]
        return self.texts[entry]

    def text(self, state, row, entry):
        return self.runner.engine.text(state, row, entry.request)

    def swap(self):
        """Resizes to more slots and back, and reverses the rows each time."""
        for slots in (2 * SLOTS, SLOTS):
            self.runner.resize([1, 0], Size(2, slots))
        self.compare()

    def compare(self):
        engine = self.runner.engine
        for row, entry in self.table.decoding:
            state = engine.extract(self.runner._state, [row])
            text = state.tokens_BS[0, : state.lengths_B[0]].tolist()
            request = dataclasses.replace(entry.request, prompt=tuple(text))
            blank = dataclasses.replace(engine.blank(1), request=None)
            anew = engine.extend([request], blank, [0], [len(text)], CHUNK)
            state = dataclasses.replace(state, request=engine.arrays([request]))
            self.assert_equal(self.next_round(state), self.next_round(anew))

    def next_round(self, state):
        engine = self.runner.engine
        return jax.device_get(next_round(engine.loop, engine.weights, state))

    def assert_equal(self, found, expected):
        draft, drafted_BRV, target_BTV = found
        wanted, wanted_BRV, wanted_BTV = expected
        count = int(wanted.num_drafted_B[0])
        assert draft.num_drafted_B[0] == count
        assert draft.tokens_BK[0, :count].tolist() == wanted.tokens_BK[0, :count].tolist()
        assert_close(target_BTV[0, : count + 1], wanted_BTV[0, : count + 1])
        if not count:
            return
        assert_close(drafted_BRV, wanted_BRV)
        rows = np.arange(self.perfect)
        if self.perfect and draft.parents_BK is not None:
            rows = np.unique(draft.parents_BK[0])
        laws = rows if draft.law_rows_BT is None else draft.law_rows_BT[0, rows]
        assert_close(drafted_BRV[0, laws], target_BTV[0, rows])


def assert_close(found, expected):
    np.testing.assert_allclose(found, expected, rtol=0, atol=TOLERANCE)


@pytest.fixture(autouse=True)
def one_size(monkeypatch):
    """Keeps the batch at one size, and prefill in short chunks."""
    monkeypatch.setattr(batch, "powers", lambda least, most: (most,))
    monkeypatch.setattr(batch, "chunk_sizes", lambda: (CHUNK, CHUNK))


def decode_session(rows):
    """Decodes a long text next to turns, one of them edited, and prompts with shared beginnings."""
    random = np.random.default_rng(0)

    def text(least, most):
        return random.integers(0, V, random.integers(least, most + 1)).tolist()

    def beginning(text, least):
        return text[: int(random.integers(least, len(text)))]

    long = rows.begin(text(1, 40), 120)
    first = rows.end(text(1, 40), 20)
    second = rows.end(first + text(1, 9), 15)
    third = rows.end(beginning(second, len(second) - 14) + text(1, 20), 12)
    rows.swap()
    rows.end(beginning(rows.texts[long], 8) + text(1, 9), 9)
    rows.end(beginning(third, 8) + text(1, 60), 9)
    assert rows.prefill.tokens_copied > 60


# Two trees move the target's cache alone. A grown tree is drafted as a model tree, and a block of
# DSpark as one of DFlash 2.
LEFT_OUT = "early exit tree", "Medusa tree", "grown tree", "DSpark"
KINDS = [kind for kind in DRAFTERS if kind not in LEFT_OUT]


@pytest.mark.parametrize("kind", slow_but(KINDS, "model", "EAGLE-3 tree"))
def test_next_round_equals_a_text_read_anew(kind):
    """Covers pauses, turns, copies of running and finished rows, shorter drafts and resizing."""
    decode_session(Batch(*DRAFTERS[kind]()))


class SeesMasks(ParallelDrafter):
    looks_ahead = 0


class LeavesMasks(ParallelDrafter):
    def of_length(self, K):
        return None


class LooksNowhere(ModuleDrafter):
    looks_ahead = 0


class KeepsTooLittle(ModuleDrafter):
    kept = property(lambda self: self.modules + 1)


@dataclasses.dataclass(frozen=True)
class ForgetsTheEdge(FeatureDrafter):
    """Reads each chunk without the last feature of the chunk before it."""

    def read(self, weights, state, *rest):
        forgetful = dataclasses.replace(state, edge_BD=jnp.zeros_like(state.edge_BD))
        return super().read(weights, forgetful, *rest)


MUTANTS = [
    ("model", mutants.HoleInTheCache),
    ("model", mutants.NeverCatchesUp),
    ("parallel", SeesMasks),
    ("parallel", LeavesMasks),
    ("EAGLE-3", mutants.OfTheWrongRow),
    ("EAGLE-3", ForgetsTheEdge),
    ("model tree", tree_mutants.DraftNotMoved),
    ("modules", LooksNowhere),
    ("modules", KeepsTooLittle),
]


@pytest.mark.slow
@pytest.mark.parametrize("kind, mutant", MUTANTS, ids=[mutant.__name__ for _, mutant in MUTANTS])
def test_wrong_slot_in_the_draft_cache_is_caught(kind, mutant):
    pair, drafter, *rest = DRAFTERS[kind]()
    names = [field.name for field in dataclasses.fields(drafter) if field.init]
    wrong = mutant(**{name: getattr(drafter, name) for name in names})
    with pytest.raises(AssertionError):
        decode_session(Batch(pair, wrong, *rest))

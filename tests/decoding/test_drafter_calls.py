"""Third-party drafters with wrong counts, ids or types: completions stay exact, or an error of one
line states the reason.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specsamp import Draft, Drafter, Pair, chain, generate, temperature
from specsamp.decoding import drafter_calls
from specsamp.decoding.state import Prefix
from support.extras import slow_but
from support.fakes import TableLM, p_value
from support.refusals import refusal

V, K, LENGTH = 3, 3, 3
PROBS_V = np.array([0.2, 0.2, 0.6])
PAIR = Pair(
    target=TableLM(V), target_params=jnp.broadcast_to(jnp.log(PROBS_V), (V + 1, V + 1, V + 1, V))
)
OUTSIDE = {
    "fewer tokens than counted": ((2, 2), K),
    "negative ids": ((-1, -1, -1), K),
    "ids beyond the vocabulary": ((10**6, 2, 2), K),
    "an id beyond it behind a token": ((2, V, 2), K),
    "more counted than K": ((2, 2, 2), 99),
    "a negative count": ((2, 2, 2), -5),
}
QUICK = "fewer tokens than counted", "negative ids"


@dataclasses.dataclass(frozen=True)
class Scripted(Drafter):
    """Drafts the given tokens in every round, and reports ``counted`` as their number."""

    tokens: tuple[int, ...]
    counted: int
    K: int = K

    def propose(self, weights, state, prefix, cache, sample):
        batch = len(prefix.lengths_B)
        tokens_BK = jnp.broadcast_to(jnp.array(self.tokens, jnp.int32), (batch, len(self.tokens)))
        return Draft(tokens_BK=tokens_BK, num_drafted_B=jnp.full(batch, self.counted)), state, cache


def complete(drafter):
    options = dict(sampling=chain(temperature(1.0)), num_samples=2048)
    return generate(PAIR, [[1]], LENGTH, drafter=drafter, **options)


def texts(drafter):
    completions = complete(drafter)
    assert all(one.exact and one.finish == "length" for one in completions)
    return np.array([one.tokens for one in completions]), completions


def joint():
    return np.einsum("a,b,c->abc", PROBS_V, PROBS_V, PROBS_V)


@pytest.mark.parametrize("name", slow_but(OUTSIDE, *QUICK))
def test_draft_of_unknown_tokens_keeps_the_distribution(name):
    tokens, counted = OUTSIDE[name]
    tokens_NT, completions = texts(Scripted(tokens, counted))
    assert tokens_NT.min() >= 0 and tokens_NT.max() < V
    assert p_value([(tokens_NT, joint())], powered=False) > 1e-5
    is_token = np.cumprod([0 <= token < V for token in tokens])
    assert max(one.stats.drafted / one.stats.rounds for one in completions) <= max(
        0, min(counted, is_token.sum())
    )


@pytest.mark.parametrize("name", [QUICK[1], "logits"])
def test_unchecked_draft_changes_the_distribution(monkeypatch, name):
    """The control: without the check, wrong ids or the statistic above reveal the mistake."""

    monkeypatch.setattr("specsamp.decoding.loop.cut_draft", lambda drafter, draft, *sizes: draft)
    jax.clear_caches()
    drafter = (
        Scripted(*OUTSIDE[name], K=K + 1) if name in OUTSIDE else Drawing(name, K=K + 1)
    )  # a new K, hence a new program
    tokens_NT = np.array([(one.tokens + [-1] * LENGTH)[:LENGTH] for one in complete(drafter)])
    is_wrong = tokens_NT.min() < 0
    assert is_wrong or p_value([(tokens_NT, joint())], powered=False) < 1e-9


@dataclasses.dataclass(frozen=True)
class Drawing(Drafter):
    """Draws tokens from a distribution, some beyond the vocabulary, and returns a different one."""

    kind: str
    K: int = 2

    def propose(self, weights, state, prefix, cache, sample):
        probs_U, law_V = LAWS[self.kind]
        batch = len(prefix.lengths_B)
        keys_B = jax.vmap(jax.random.fold_in)(
            jax.random.split(jax.random.key(3), batch), prefix.lengths_B
        )
        drawn = functools.partial(
            jax.random.categorical, logits=jnp.log(jnp.array(probs_U)), shape=(self.K,)
        )
        draft = Draft(
            tokens_BK=jax.vmap(drawn)(keys_B),
            num_drafted_B=jnp.full(batch, self.K),
            log_probs_BRV=jnp.broadcast_to(jnp.array(law_V), (batch, self.K, V)),
        )
        return draft, state, cache


LAWS = {
    "a vocabulary with padding": ((0.2, 0.2, 0.2, 0.4), np.log([0.2, 0.2, 0.2])),
    "logits": ((1 / 3, 1 / 3, 1 / 3), np.array([-4.0, -4.0, -4.0])),
    "the distribution of another token": (
        (0.0, 1.0, 0.0),
        np.array([np.log(0.5), -np.inf, np.log(0.5)]),
    ),
}


@pytest.mark.parametrize("kind", LAWS)
def test_draft_without_distribution_keeps_the_targets(kind):
    tokens_NT, completions = texts(Drawing(kind))
    assert p_value([(tokens_NT, joint())], powered=False) > 1e-5
    assert not any(one.stats.drafted for one in completions)


@dataclasses.dataclass(frozen=True)
class Returning(Drafter):
    """Returns a wrong value from one of its methods."""

    method: str
    change: str
    K: int = K

    def init(self, batch, slots):
        return jnp.zeros((batch, 2))

    def read(self, weights, state, chunk, cache):
        return self._changed("read", (state, cache))

    def propose(self, weights, state, prefix, cache, sample):
        batch = len(prefix.lengths_B)
        draft = Draft(tokens_BK=jnp.zeros((batch, K), jnp.int32), num_drafted_B=jnp.full(batch, K))
        return self._changed("propose", (draft, state, cache))

    def commit(self, weights, state, scored, cache):
        return self._changed("commit", (state, cache))

    def _changed(self, method, returned):
        return CHANGES[self.change](*returned) if method == self.method else returned


def field(**changes):
    """Returns a change of a draft's fields."""
    return lambda draft, state, cache: (dataclasses.replace(draft, **changes), state, cache)


CHANGES = {
    "None": lambda *returned: None,
    "float ids": field(tokens_BK=jnp.zeros((1, K))),
    "more than K": field(tokens_BK=jnp.zeros((1, K + 1), jnp.int32)),
    "another vocabulary": field(log_probs_BRV=jnp.zeros((1, K, V + 1))),
    "laws of another length": field(
        parents_BK=jnp.zeros((1, K), jnp.int32), law_rows_BT=jnp.zeros((1, K), jnp.int32)
    ),
    "a larger state": lambda *returned: (*returned[:-2], jnp.zeros((1, 3)), returned[-1]),
    "another cache": lambda *returned: (*returned[:-1], returned[-1].astype(jnp.float32)),
}
REFUSED = [
    ("propose", "None", r"propose must return a tuple \(draft, state, cache\); got NoneType"),
    (
        "propose",
        "float ids",
        r"tokens_BK must be an array of integer \[1, any\]; got float32\[1, 3\]",
    ),
    ("propose", "more than K", "tokens_BK has 4 tokens per row, more than K = 3"),
    ("propose", "another vocabulary", r"log_probs_BRV .*\[1, 3, 3\]; got float32\[1, 3, 4\]"),
    ("propose", "laws of another length", r"law_rows_BT .*\[1, 4\]; got int32\[1, 3\]"),
    (
        "commit",
        "a larger state",
        r"commit must return a state like .*float32\[1, 2\], returned was float32\[1, 3\]",
    ),
    ("read", "None", r"read must return a tuple \(state, cache\); got NoneType"),
    ("commit", "another cache", r"commit must return a cache like .*int32\[.*returned was float32"),
]


@pytest.mark.parametrize(
    "method, change, message", REFUSED, ids=[f"{one}: {two}" for one, two, _ in REFUSED]
)
def test_method_that_returns_something_else_is_refused(method, change, message):
    with refusal(message) as error:
        generate(PAIR, [[1]], LENGTH, drafter=Returning(method, change))
    assert f"Returning.{method}" in str(error.value)


@dataclasses.dataclass(frozen=True)
class Tree(Drafter):
    """Drafts nodes with these parents, each drawn from one of these rows of distributions."""

    parents: tuple[int, ...]
    laws: tuple[int, ...]
    masses: tuple[float, float]
    K: int = K

    def propose(self, weights, state, prefix, cache, sample):
        batch = len(prefix.lengths_B)
        draft = Draft(
            tokens_BK=jnp.full((batch, K), 2),
            num_drafted_B=jnp.full(batch, K),
            log_probs_BRV=jnp.broadcast_to(
                jnp.log(jnp.outer(jnp.array(self.masses), PROBS_V)), (batch, 2, V)
            ),
            parents_BK=jnp.broadcast_to(jnp.array(self.parents), (batch, K)),
            law_rows_BT=jnp.broadcast_to(jnp.array(self.laws), (batch, K + 1)),
        )
        return draft, state, cache


@pytest.mark.parametrize(
    "parents, laws, masses, kept",
    [
        ((0, 1, 2), (0, 1, 1, 0), (1.0, 1.0), 3),
        ((0, 2, 2), (0, 1, 1, 0), (1.0, 1.0), 1),  # the second node is its own parent
        ((0, 1, 2), (0, 1, 2, 0), (1.0, 1.0), 2),  # the third node has no distribution
        ((0, 1, 2), (-1, 1, 1, 0), (1.0, 1.0), 0),
        ((0, 1, 2), (0, 1, 1, 0), (1.0, 0.9), 1),
        ((0, 1, 2), (0, 1, 1, 0), (1.0, np.nan), 3),
    ],
)
def test_tree_ends_before_an_invalid_node(parents, laws, masses, kept):
    """A distribution of NaN stays in the tree: the rules handle it, and keep other branches."""
    prefix = Prefix(tokens_BS=jnp.zeros((2, 8), jnp.int32), lengths_B=jnp.full(2, 3))
    tree = Tree(parents, laws, masses)
    draft, _, _ = tree.propose(None, (), prefix, (), None)
    draft = drafter_calls.cut_draft(tree, draft, 2, V)
    assert draft.num_drafted_B.tolist() == [kept, kept]

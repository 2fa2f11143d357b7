"""The check of heads passes a head that fits, and detects each mistake in reading a head."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specsamp import Pair, load_pair
from specsamp.checkpoints.trained_pair import load_prompts
from specsamp.evaluation import head_check
from specsamp.evaluation.head_check import check_head, other_readings
from specsamp.models.heads import DRAFT_IDS
from support.fakes import ORDER
from support.heads import LAYERS, WIDTH, LayeredTable, block, eagle3, medusa, mtp
from support.weights import drawn_params

V, TARGET = 6, LayeredTable(6)
# The next token depends on the last but one alone: the features of a pair suffice for its head.
FOLLOWS_VV = 3.0 * np.random.default_rng(0).normal(size=(V + 1, V))
PROMPTS = [[0, 1], [2, 3], [4, 5], [5, 1, 3]]


def target_params(ids=range(V)):
    """Returns the table of a target that prefers ``ids``."""
    table = FOLLOWS_VV + np.where(np.isin(np.arange(V), list(ids)), 0, -6)[None]
    return jnp.asarray(np.broadcast_to(table[:, None], (V + 1,) * ORDER + (V,)), jnp.float32)


def fitted(head, ids=range(V)):
    """Returns a pair whose head has its target's logits: the layer adds nothing, and the output is
    solved for.

    The scales of norms differ, so that swapped norms are worse.
    """
    table, rng = target_params(ids), np.random.default_rng(1)
    params = drawn_params(head)

    def rough(path, x):
        name = jax.tree_util.keystr(path)
        if "norm" in name:
            return jnp.exp(jnp.asarray(rng.normal(size=x.shape), jnp.float32))
        return 0 * x if "['attention']['output']" in name or "['down']" in name else x

    params = jax.tree.map_with_path(rough, params)
    layer = params.get("module_0", params)
    if "fc" in layer:  # keeps its first part alone, the hidden state
        fc = np.zeros(layer["fc"].shape, np.float32)
        fc[:WIDTH] = np.eye(WIDTH)
        layer["fc"] = jnp.asarray(fc)
    if head.config.draft_vocab_size is not None:
        params[DRAFT_IDS] = jnp.asarray(list(ids), jnp.int32)
    tokens = jnp.arange(V)[None]
    hidden = TARGET(
        table,
        tokens,
        jnp.zeros(1, jnp.int32),
        TARGET.init_cache(1, V),
        hidden_layers=head.hidden_layers,
    ).hidden
    weights = head.prepare(params)
    features = head.fuse(weights, hidden)[0][:, None]  # each token is a text of its own
    embedded = TARGET.embed(table, tokens, None, None)[0][0][:, None]
    returned, _ = head(weights, embedded, features, jnp.zeros(V, jnp.int32), head.init_cache(V, 4))
    normed_VD = np.asarray(head._apply("normed", weights, returned, 0))[:, 0]
    output_UD = np.linalg.lstsq(normed_VD, np.asarray(table[0, :V, 0][:, list(ids)]), rcond=None)[
        0
    ].T
    if "output" in params:
        params["output"] = jnp.asarray(output_UD, jnp.float32)
    else:
        params["head_0"] = dict(params["head_0"]) | {"output": jnp.asarray(output_UD, jnp.float32)}
    return Pair(target=TARGET, target_params=table, head=head, draft_params=params)


def read_otherwise(pair, params=None, **fields):
    """Returns the pair with its head read wrongly: other fields, or other parameters."""
    head = dataclasses.replace(pair.head, config=dataclasses.replace(pair.head.config, **fields))
    return dataclasses.replace(pair, head=head, draft_params=params or pair.draft_params)


LAYERS_READ = {"hidden_layers": (1, 2, 4)}
HEADS = {
    "eagle3": lambda: fitted(eagle3(V, **LAYERS_READ)),
    "mtp": lambda: fitted(mtp(V, own_output=True, hidden_first=True, hidden_layers=(LAYERS - 1,))),
    "medusa": lambda: fitted(medusa(V, 3)),
    "reduced": lambda: fitted(eagle3(V, draft_vocab_size=3, **LAYERS_READ), ids=(0, 1, 3)),
}


def with_params(change):
    return lambda pair: read_otherwise(pair, dict(pair.draft_params) | change(pair.draft_params))


MISTAKES = [
    ("eagle3", lambda pair: read_otherwise(pair, hidden_layers=(2, 3, 5))),
    ("mtp", lambda pair: read_otherwise(pair, hidden_first=False)),
    ("medusa", with_params(lambda params: {"head_0": params["head_2"]})),
    ("reduced", with_params(lambda _: {DRAFT_IDS: jnp.asarray([0, 2, 5])})),
]


@pytest.fixture(scope="module")
def pairs():
    return {name: make() for name, make in HEADS.items()}


@pytest.mark.slow
@pytest.mark.parametrize("name", HEADS)
def test_fitting_head_passes_the_check(pairs, name):
    found = check_head(pairs[name], PROMPTS)
    assert found.acceptance > 0.95 and found.fits
    assert len(found.sentences) == 1 and "WARNING" not in found.sentences[0]


@pytest.mark.slow
@pytest.mark.parametrize("name, make", MISTAKES, ids=[name for name, _ in MISTAKES])
def test_each_mistake_costs_acceptance(pairs, name, make):
    assert check_head(make(pairs[name]), PROMPTS).acceptance < 0.6


def test_a_better_reading_is_named(pairs):
    """The wrong reading takes each layer one too late; the right reading has no better one."""
    wrong = check_head(MISTAKES[0][1](pairs["eagle3"]), PROMPTS, others=True)
    assert wrong.better == "hidden_layers = (1, 2, 4)"
    assert wrong.readings[wrong.better] > 0.95
    assert not wrong.fits
    assert wrong.sentences[1].startswith(
        "WARNING: THE HEAD IS READ WRONGLY: with hidden_layers = (1, 2, 4)"
    )
    right = check_head(pairs["eagle3"], PROMPTS, others=True)
    assert right.fits and right.better is None and right.readings["hidden_layers = (2, 3, 5)"] < 0.6


def test_other_block_readings_fit_the_tensors():
    config = block(V, hidden_layers=(-1, 2)).config
    sizes = [f"block_size = {size}" for size in (2, 3, 5, 8)]
    assert [*other_readings(config)] == ["hidden_layers = (0, 3)", *sizes, "from_anchor = True"]


@pytest.mark.slow
def test_misread_block_head_names_the_right_reading(monkeypatch):
    """The head is the shipped one."""

    def last(config):
        return dict([*other_readings(config).items()][-1:])

    monkeypatch.setattr(head_check, "other_readings", last)
    pair = load_pair("python", draft="block")
    wrong = read_otherwise(pair, from_anchor=False)
    found = check_head(wrong, load_prompts("python")[:2], others=True)
    assert len(found.readings) == 2 and found.better == "from_anchor = True"


def test_head_of_another_target_is_a_warning(pairs):
    pair = pairs["eagle3"]
    wrong = read_otherwise(
        pair, dict(pair.draft_params) | {"output": -3 * pair.draft_params["output"]}
    )
    found = check_head(wrong, PROMPTS)
    assert not found.fits and found.acceptance < 0.1
    assert found.sentences[1].startswith("WARNING: THE HEAD DOES NOT FIT: ")


def test_pair_without_head_is_refused(pairs):
    with pytest.raises(ValueError, match="the pair has no head"):
        check_head(dataclasses.replace(pairs["eagle3"], head=None, draft_params=None), PROMPTS)

"""The pair that comes with the package: small enough, trained, and a draft of its own target."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specsamp import generate, greedy, load_pair
from specsamp.checkpoints.pair import load_prompts, pair_folder
from specsamp.training.objective import cross_entropy, overlap

OPTIMISED = True


@pytest.fixture(scope="module")
def pair():
    return load_pair("python")


@pytest.fixture(scope="module")
def distributions(pair):
    """Log-probabilities of target and draft on one prompt, and its tokens."""
    tokens_BT = jnp.asarray([pair.tokenizer.encode(load_prompts("python")[1])])

    def distribution(model, params):
        return jax.nn.log_softmax(jax.jit(model.forward)(params, tokens_BT).logits_BTV[:, :-1])

    return distribution(pair.target, pair.target_params), distribution(pair.draft, pair.draft_params), tokens_BT[:, 1:]


def test_it_fits_a_package_and_is_too_large_for_a_cache(pair):
    """48 MB for both with the tokenizer; in float32 the target streams more than twice a cache of 32 MiB."""
    assert sum(path.stat().st_size for path in pair_folder("python").iterdir()) < 48e6

    def streamed(model, params):
        return sum(x.nbytes for x in model.streamed(model.fit_slots(model.prepare(params), 128)))

    target, draft = streamed(pair.target, pair.target_params), streamed(pair.draft, pair.draft_params)
    assert target > 2 * 32 * 2**20 and draft < target / 25


def test_it_knows_python(distributions):
    """Far better than chance (7.6 nats a token) on text it has not seen, and on that text in order only."""
    target, draft, labels = distributions
    shuffled = jax.random.permutation(jax.random.key(0), labels, axis=1)
    for distribution in (target, draft):
        assert cross_entropy(distribution, labels).mean() < 4
        assert cross_entropy(distribution, shuffled).mean() > 6


def test_the_draft_imitates_the_target(distributions):
    target, draft, _ = distributions
    assert overlap(target, draft).mean() > 0.5 > 1.3 * overlap(target, jnp.roll(draft, 1, axis=1)).mean()


def test_its_greedy_text_does_not_depend_on_the_draft(pair):
    prompt = load_prompts("python")[1:2]
    plain, drafted = (generate(pair, prompt, 24, sampling=greedy(), draft_length=K)[0] for K in (0, 3))
    assert plain.tokens == drafted.tokens and drafted.stats.rounds < 24
    assert np.isfinite(drafted.stats.acceptance_rate)


def test_where_it_comes_from_is_written_down():
    described = json.loads((pair_folder("python") / "pair.json").read_text(encoding="utf-8"))
    provenance = described["provenance"]
    assert provenance["target"]["corpus"]["sha256"] == provenance["draft"]["corpus"]["sha256"]
    assert provenance["target"]["last_metrics"]["training_seconds"] > 0
    stored, before = (provenance["held_out"][weights] for weights in ("int8", "float32"))
    assert abs(stored["target"]["loss"] - before["target"]["loss"]) < 0.01
    assert abs(stored["draft"]["acceptance (temperature 1)"] - before["draft"]["acceptance (temperature 1)"]) < 0.01

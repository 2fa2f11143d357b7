"""The draft length that is chosen by itself: from clocks that are known, and never from the noise of the text."""

import dataclasses

import jax
import numpy as np
import pytest

from specsamp import NgramDrafter, Pair, TokenRule, chain, generate, greedy, stream, temperature
from specsamp.analysis import auto_length
from specsamp.decoding.job import Job
from support import fakes

V = 8
PROMPTS = [[1, 2, 3], [4, 5]]


def make_pair(closeness):
    table, model = fakes.random_table(0, V, scale=2.0), fakes.TableLM(V, max_positions=64)
    return Pair(target=model, target_params=table, draft=model, draft_params=fakes.near(table, 1, closeness))


@pytest.fixture
def clocks(monkeypatch):
    """Seconds of a round by draft length, of products by rows; what the rounds do is real."""

    def set_to(seconds, products=lambda rows: 0.0):
        real, ran = auto_length._some_rounds, []

        monkeypatch.setattr(auto_length, "ProductClock", fakes.product_clock(lambda rows: products(rows) * 1e3))

        def timed(job, repeat):
            ran.append(job.loop.drafter.K)
            _, stats = real(job, repeat)
            return seconds[job.loop.drafter.K] * max(row.rounds for row in stats), stats

        monkeypatch.setattr(auto_length, "_some_rounds", timed)
        return ran

    return set_to


@pytest.mark.parametrize("law, repeats", [(greedy(), 1), (chain(temperature(1.0)), auto_length.REPEATS)])
def test_repeats_count_where_they_differ(clocks, monkeypatch, law, repeats):
    """Greedy ones are copies; samples of a prompt are of one prompt."""
    clocks({0: 1.0, 1: 1.05, 8: 1.4})
    told, of_texts = [], auto_length.Profile.of_texts
    monkeypatch.setattr(auto_length.Profile, "of_texts", lambda *texts: told.append(texts) or of_texts(*texts))
    generate(make_pair(1.0), PROMPTS, 36, draft_length="auto", sampling=law, num_samples=2)
    ((texts, prompts),) = told
    assert prompts == [0, 0, 1, 1]
    fewest = sum(text.emitted for text in texts) / (4 * 36)  # budgets end some repeats, sixteen rounds the others
    assert repeats / 2 < fewest <= repeats


def test_a_draft_that_pays_is_used_and_said_once(clocks, capfd):
    pair, ran = make_pair(0.0), clocks({0: 1.0, 1: 1.05, 8: 1.4})
    options = dict(draft_length="auto", sampling=chain(temperature(1.0)), seed=3)
    chosen = generate(pair, PROMPTS, 36, **options)
    assert set(ran) == {0, 1, 8}
    assert len(chosen[0].stats.accepted_counts) == 9  # K = 8: all is accepted, and drafting is cheap
    said = capfd.readouterr().err
    assert 'draft_length="auto" is 8 for 2 rows' in said
    times = len(ran)
    assert [row.tokens for row in generate(pair, PROMPTS, 36, **options)] == [row.tokens for row in chosen]
    assert len(ran) == times and capfd.readouterr().err == ""  # kept
    by_hand = generate(pair, PROMPTS, 36, **{**options, "draft_length": 8})
    assert [row.tokens for row in by_hand] == [row.tokens for row in chosen]
    assert sum(len(chunk.tokens) for chunk in stream(pair, PROMPTS, 36, **options)) == 72
    assert len(ran) == times
    generate(pair, PROMPTS, 36, **{**options, "sampling": chain(temperature(0.7))})  # another distribution
    assert len(ran) == 2 * times


def test_where_speculation_does_not_pay_decoding_is_plain_and_says_so(clocks, capfd):
    clocks({0: 1.0, 1: 2.5, 8: 12.0})
    rows = generate(make_pair(0.3), PROMPTS, 20, draft_length="auto")
    assert rows[0].stats.drafted == 0 and rows[0].stats.accepted_counts == (20,)
    said = capfd.readouterr().err
    assert "decodes plainly, K = 0, for 2 rows: speculation does not pay here" in said
    assert "the best draft, K = 1" in said


def test_a_poor_draft_is_left_out_whatever_it_costs(clocks):
    """Acceptance counts, not only clocks: the same clocks, another draft."""
    seconds = {0: 1.0, 1: 1.5, 8: 5.0}
    clocks(seconds)

    def drafted(closeness):
        return generate(make_pair(closeness), PROMPTS, 30, draft_length="auto")[0].stats.drafted

    assert drafted(0.0) > 0 and drafted(50.0) == 0


def test_a_step_in_the_products_is_avoided(clocks):
    """Eight rows cost much more than seven: K = 7 and 8 do not pay for it, K = 6 was never decoded with."""

    def chosen():
        return len(generate(make_pair(0.0), PROMPTS[:1], 50, draft_length="auto")[0].stats.accepted_counts) - 1

    seconds = {0: 1.0, 1: 1.05, 8: 3.0}
    ran = clocks(seconds, lambda rows: 1.5 if rows >= 8 else 0.0)
    assert chosen() == 6 and set(ran) == {0, 1, 8}
    clocks(seconds)
    assert chosen() == 8  # the control: on lines the longest is best
    clocks(seconds, lambda rows: 1.2 if rows == 2 else 0.0)
    assert chosen() == 8  # disturbed: products of two rows took longer than a round that has them


def test_prompt_lookup_is_taken_with_every_length_up_to_its_own(clocks):
    ran = clocks({0: 1.0, 1: 1.0, 5: 1.0})
    rows = generate(make_pair(0.0), [[1, 2, 1, 2, 1, 2]], 30, draft_length="auto", drafter=NgramDrafter(K=5))
    assert set(ran) == {0, 1, 5} and len(rows[0].stats.accepted_counts) <= 6


def test_the_noise_is_not_that_of_the_completions(monkeypatch):
    """K must not depend on the numbers that decide the text: every key of the calibration is another one."""
    seen = []
    run = auto_length._some_rounds

    def spy(job, repeat):
        real = type(job.loop).run

        def note(loop, weights, request, state, rounds):
            seen.append(np.asarray(jax.random.key_data(request.row_keys_B)))
            return real(loop, weights, request, state, rounds)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(type(job.loop), "run", note)
            return run(job, repeat)

    monkeypatch.setattr(auto_length, "_some_rounds", spy)
    pair = make_pair(0.2)
    generate(pair, PROMPTS, 8, draft_length="auto", sampling=chain(temperature(1.0)))
    calibrating = {tuple(key) for keys in seen for key in keys.tolist()}
    assert len(calibrating) == 2 * auto_length.REPEATS
    job = Job.make(
        pair=pair,
        prompts=PROMPTS,
        max_new_tokens=8,
        sampling=None,
        draft_sampling=None,
        draft_length=2,
        rule=TokenRule(),
        drafter=None,
        seed=0,
        stop=None,
        num_samples=1,
        return_log_probs=False,
        prompt_ids=None,
    )
    own = {tuple(key) for key in np.asarray(jax.random.key_data(job.request.row_keys_B)).tolist()}
    rounds = jax.vmap(lambda key: jax.vmap(lambda n: jax.random.fold_in(key, n))(np.arange(64)))(job.request.row_keys_B)
    own |= {tuple(key) for key in np.asarray(jax.random.key_data(rounds)).reshape(-1, 2).tolist()}
    assert not calibrating & own


def test_another_size_of_caches_is_another_calibration():
    """Attention reads all slots: what pays for short texts need not pay for long ones."""
    job = Job.make(
        pair=make_pair(0.0),
        prompts=PROMPTS,
        max_new_tokens=8,
        sampling=None,
        draft_sampling=None,
        draft_length=2,
        rule=TokenRule(),
        drafter=None,
        seed=0,
        stop=None,
        num_samples=1,
        return_log_probs=False,
        prompt_ids=None,
    )

    def key_with(**changes):
        return auto_length._key(dataclasses.replace(job, **changes))

    assert key_with(slots=2 * job.slots) != key_with() == key_with(tokens_BP=job.tokens_BP + 1)


def test_what_auto_refuses():
    pair = make_pair(0.0)
    with pytest.raises(ValueError, match="or \"auto\".*got 'fast'"):
        generate(pair, PROMPTS, 4, draft_length="fast")
    with pytest.raises(ValueError, match="prompt 1 is empty"):
        generate(pair, [[1], []], 4, draft_length="auto")
    with pytest.raises(ValueError, match="the pair has no draft model"):
        generate(Pair(target=pair.target, target_params=pair.target_params), PROMPTS, 4, draft_length="auto")
    with jax.disable_jit(), pytest.raises(ValueError, match="give a number under JAX_DISABLE_JIT"):
        generate(pair, PROMPTS, 4, draft_length="auto")

    class Fixed:
        K, exact, hidden_layers = 4, True, ()
        propose = prepare = init = commit = lambda *_: None

    with pytest.raises(ValueError, match="needs a drafter whose K is a field of a dataclass"):
        generate(pair, PROMPTS, 4, draft_length="auto", drafter=Fixed())


def test_one_token_is_no_trouble(clocks):
    clocks({0: 1.0, 1: 1.5, 8: 3.0})
    (row,) = generate(make_pair(0.0), [[1]], 1, draft_length="auto", sampling=greedy())
    assert len(row.tokens) == 1 and row.stats.drafted == 0  # the first token is the last

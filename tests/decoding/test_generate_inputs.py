"""What the Python interface refuses before anything is compiled, what it takes, and what odd logits do to a row."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specsamp import (
    Adaptive,
    BlockRule,
    Method,
    ModelDrafter,
    NgramDrafter,
    NoDrafter,
    Pair,
    TokenRule,
    chain,
    generate,
    generate_many,
    stream,
    temperature,
    top_p,
)
from specsamp.models.config import tiny
from specsamp.models.transformer import TransformerLM
from support.byte_tokenizer import ByteTokenizer
from support.fakes import (
    BYTES,
    FALSE_ALARM,
    CountingLM,
    TableLM,
    counting_pair,
    joint_distribution,
    near,
    p_value,
    random_table,
    table_pair,
)
from support.weights import drawn_params


class WithoutHash(CountingLM):
    __hash__ = None


@pytest.mark.parametrize(
    "parts, message",
    [
        (dict(target=CountingLM(vocab_size=200), tokenizer=ByteTokenizer()), "tokenizer has 257 tokens.* 200"),
        (dict(draft=CountingLM()), "without draft_params"),
        (dict(target=object()), "target must be a LanguageModel, .* got <object"),
        (dict(target=WithoutHash()), "the target must be hashable"),
        (dict(draft="python", draft_params=()), "the draft must be a LanguageModel, .* got 'python'"),
        (dict(tokenizer="gpt2"), "the tokenizer must be an object such as .* got 'gpt2'"),
        (dict(shards=None), "shards must be a DataShards"),
        (dict(head="eagle", draft_params=()), "the head must be a FeatureHead"),
    ],
)
def test_parts_that_make_no_pair(parts, message):
    with pytest.raises(ValueError, match=message):
        Pair(**(dict(target=CountingLM(), target_params=()) | parts))


@pytest.mark.parametrize(
    "change, message",
    [
        (dict(prompts=[]), "no prompts"),
        (dict(method=Method(drafter=None)), "drafter must be a Drafter, .* got None"),
        (dict(method=Method(drafter=NgramDrafter(2), adaptive=3)), "adaptive must be an Adaptive, .* got 3"),
        (
            dict(method=Method(drafter=NgramDrafter(2), adaptive=Adaptive(lengths=(1, 4), costs_ms=(1, 2)))),
            "the method's adaptive drafts up to 4 tokens, its drafter K = 2",
        ),
        (dict(require_exact="no"), "require_exact must be True or False; got 'no'"),
        (dict(prompt_ids={7}), "prompt_ids must be a list; got .7."),
        (dict(prompts={"a": 1}), "prompts must be a list of prompts"),
        (dict(prompts={"a", "b"}), "prompts must be a list of prompts"),
        (dict(prompts=[b"ab"]), "prompt 0 is bytes: give a text"),
        (dict(prompts=[{1: 2}]), "prompt 0 must be a text, a list of token ids or a list of messages"),
        (dict(prompts=["a", "\ud800"]), "prompt 1 is no valid Unicode"),
        (dict(prompts="text"), r"write \[prompt\]"),
        (dict(prompts=[1, 2]), "prompt 0 must be a text, a list of token ids or a list of messages; got 1"),
        (dict(prompts=[[1.7]]), r"prompt 0\[0\] must be an integer .* got 1.7"),
        (dict(prompts=["a", ""]), "prompt 1 is empty"),
        (dict(prompts=[[1, 300]]), r"prompt 0\[1\] must be an integer >= 0 and below 257; got 300"),
        (dict(max_new_tokens=64), "together 65, more than the target's 64 positions"),
        (dict(max_new_tokens=0), "max_new_tokens must be an integer >= 1 .* got 0"),
        (dict(max_new_tokens=[1, 2]), "2 max_new_tokens for 1 prompts"),
        (dict(seed=-1), "seed must be an integer >= 0"),
        (dict(prompt_ids=[0.5]), r"prompt_ids\[0\] must be an integer"),
        (dict(prompts=np.array(5)), "prompts must be a list of prompts"),
        (dict(stop=3), "stop must be a list"),
        (dict(sampling=0.8), "sampling must be a warp"),
        (dict(drafter=NgramDrafter), "drafter must be a Drafter"),
        (dict(draft_length=-1), r"0 decodes autoregressively.*got -1"),
        (dict(draft_length=64), "does not fit the target's 64 positions"),
        (dict(draft_length=10**5), "K must be .* below 1025; got 100000"),
        (dict(drafter=NgramDrafter(2), draft_length=4), "draft_length 4 differs from the drafter's K = 2"),
        (dict(drafter=ModelDrafter(CountingLM(vocab_size=8), 2)), "draft vocabulary 8 != target vocabulary 257"),
        (dict(drafter=ModelDrafter(CountingLM(stumbles_at=3), 2)), "is not the pair's draft"),
        (dict(stop=[257]), "a stop id must be an integer >= 0 and below 257; got 257"),
        (dict(stop=[""]), "a stop text is empty"),
        (dict(stop="a"), r"write \[stop\]"),
        (dict(num_samples=0), "num_samples must be an integer >= 1 .* got 0"),
        (dict(prompt_ids=[1, 2]), "2 prompt_ids for 1 prompts"),
        (dict(sampling=chain(temperature([0.5, 1.0]))), r"shape \(2,\) for 1 prompts"),
        (dict(rule="token"), "rule must be a rule such as TokenRule"),
    ],
)
def test_bad_input_fails_before_anything_is_traced(change, message):
    class Untraceable(CountingLM):
        def __call__(self, *args, **kwargs):
            raise AssertionError("was traced")

        prepare = __call__

    pair = Pair(target=Untraceable(), target_params=(), draft=Untraceable(), draft_params=(), tokenizer=ByteTokenizer())
    options = dict(prompts=["a"], max_new_tokens=8) | change
    with pytest.raises(ValueError, match=message):
        generate(pair, **options)
    with pytest.raises(ValueError, match=message):
        stream(pair, **options)


def test_missing_parts_are_named():
    alone = Pair(target=CountingLM(), target_params=())
    with pytest.raises(ValueError, match="the pair has no draft model"):
        generate(alone, [[1]], 4)
    with pytest.raises(ValueError, match="needs a tokenizer in the pair"):
        generate(alone, ["a"], 4, draft_length=0)
    with pytest.raises(ValueError, match="rounds_per_chunk must be an integer >= 1"):
        stream(alone, [[1]], 4, rounds_per_chunk=0)
    for pair in (None, "python"):
        with pytest.raises(ValueError, match=r"pair must be a Pair, such as load_pair\('python'\)"):
            generate(pair, [[1]], 4)


def test_keywords_that_do_not_exist_are_named():
    for door in (stream, generate_many):
        with pytest.raises(
            TypeError, match="unexpected keyword 'foo'.* are method, sampling, .*drafter, require_exact"
        ):
            door(counting_pair(), ["a"], foo=3)
    with pytest.raises(ValueError, match="prompts times num_samples must be an integer .*got 5000000"):
        generate_many(counting_pair(), ["a"], 4, num_samples=5_000_000)


def test_sizes_are_bounded():
    with pytest.raises(ValueError, match="1000000000 rows of 128 slots need .* GB"):
        generate(table_pair(), [[1]], 4, num_samples=10**9)
    with pytest.raises(ValueError, match="K .*>= 1.*got 0"):
        ModelDrafter(CountingLM(), 0)
    with pytest.raises(ValueError, match="return_log_probs must be True or False; got 'no'"):
        generate(table_pair(), [[1]], 4, return_log_probs="no")
    with pytest.raises(ValueError, match="target_params are not those of TransformerLM.*AttributeError"):
        generate(Pair(target=TransformerLM(tiny()), target_params="x"), [[1]], 4, draft_length=0)
    for K in (0, "4", None):
        with pytest.raises(ValueError, match=f"K .*>= 1.*got {K!r}"):
            NgramDrafter(K)


def test_the_draft_may_have_fewer_positions():
    pair = Pair(target=CountingLM(max_positions=None), target_params=(), draft=CountingLM(), draft_params=())
    with pytest.raises(ValueError, match="more than the draft's 64 positions"):
        generate(pair, [[1]], 64)
    assert len(generate(pair, [[1]], 64, draft_length=0)[0].tokens) == 64


def test_the_last_position_can_be_used():
    """The limit is the user's: scratch slots for the draft come on top."""
    config = tiny(vocab_size=BYTES, max_positions=40)
    model = TransformerLM(config)
    params = drawn_params(model)
    pair = Pair(target=model, target_params=params, draft=model, draft_params=params)
    rows = [generate(pair, [[1, 2, 3, 4]], 36, draft_length=K)[0].tokens for K in (0, 7)]
    assert len(rows[0]) == 36 and rows[0] == rows[1]


def test_padding_stays_within_the_positions_of_the_model():
    """Also a prompt whose bucket would be longer than the model."""
    seen = []

    @dataclasses.dataclass(frozen=True)
    class Short(CountingLM):
        max_positions: int | None = 70

        def __call__(self, weights, tokens_BT, start_B, cache, *, hidden_layers=()):
            seen.append(tokens_BT.shape[1])
            return super().__call__(weights, tokens_BT, start_B, cache)

    pair = Pair(target=Short(), target_params=())
    assert generate(pair, [list(range(1, 67))], 4, draft_length=0)[0].tokens == [67, 68, 69, 70]
    assert max(seen) == 70


def test_numpy_integers_are_integers():
    options = dict(draft_length=np.int64(2), num_samples=np.int32(2), stop=[np.int64(101)], prompt_ids=np.arange(1))
    rows = generate(counting_pair(), [np.array([97, 98])], np.array([9]), **options)
    assert [row.text for row in rows] == ["cd", "cd"] and rows[0].finish == "stop"


@pytest.mark.parametrize("side", ["target", "draft"])
def test_logits_of_another_width_are_refused(side):
    """A model that returns fewer logits than it has tokens would make the missing ones follow no distribution."""
    pair = dataclasses.replace(table_pair(), **{f"{side}_params": random_table(5, 12)[..., :9]})
    with pytest.raises(ValueError, match=f"{side}.* vocabulary of 12.* width 9"):
        generate(pair, [[1]], 4)


# Logits that are none, and numbers of other widths.


def test_ids_that_the_tokenizer_does_not_have_are_never_emitted():
    """A vocabulary padded to a round number: its last ids are excluded from target and draft."""

    class Short(ByteTokenizer):
        vocab_size = 7
        eos_id = None

    for options in (dict(sampling=chain(temperature(3.0))), dict()):
        rows = generate(table_pair(tokenizer=Short()), [[1]], 100, num_samples=4, **options)
        assert max(max(row.tokens) for row in rows) < 7
        rows = generate(table_pair(), [[1]], 100, num_samples=4, sampling=chain(temperature(3.0)))
        assert max(max(row.tokens) for row in rows) >= 7, "the control"


def test_logits_that_become_nan_end_the_row():
    """Nothing fluent is made of them; other rows go on, and a draft that fails costs only acceptance."""
    broken = random_table(3, 12).at[:, :, 5].set(jnp.nan)  # after token 5
    pair = dataclasses.replace(table_pair(), target_params=broken)
    rows = generate(pair, [[1, 5], [1]], 200, sampling=chain(temperature(1.0)), num_samples=3)
    for row in rows[:3]:
        assert (row.finish, row.tokens, row.stats.rounds) == ("invalid", [], 0)
    for row in rows[3:]:
        assert row.finish == "invalid" and len(row.tokens) > 0 and row.stats.emitted == len(row.tokens)
    pair = dataclasses.replace(table_pair(), draft_params=broken)
    (row,) = generate(pair, [[1, 5]], 50, sampling=chain(temperature(1.0)))
    assert row.finish == "length" and row.stats.drafted < 4 * row.stats.rounds


@pytest.mark.parametrize("spoiler", [jnp.inf, -jnp.inf, jnp.nan])
def test_logits_that_are_no_distribution_end_the_row(spoiler):
    pair = dataclasses.replace(table_pair(), target_params=jnp.full((13, 13, 13, 12), spoiler))
    (row,) = generate(pair, [[1]], 5, sampling=chain(temperature(1.0)))
    assert (row.finish, row.tokens) == ("invalid", [])


@pytest.mark.parametrize("rule", [TokenRule(), BlockRule()])
@pytest.mark.parametrize("spoiled_after", [1, 5])
def test_a_draft_whose_distribution_is_nan_biases_nothing(rule, spoiled_after):
    """The draft ends before it: nothing is accepted on the strength of a distribution that is none."""
    vocab_size = 4
    table = random_table(6, vocab_size, scale=1.5)
    spoiled = near(table, 7, 0.5)
    spoiled = spoiled.at[:, :, 1].set(jnp.nan) if spoiled_after == 1 else spoiled * jnp.nan
    pair = Pair(target=TableLM(4), target_params=table, draft=TableLM(4), draft_params=spoiled)
    rows = generate(pair, [[2, 1, 3]], 2, sampling=chain(), rule=rule, num_samples=20_000)
    distribution = joint_distribution(table, chain(), [2, 1, 3], 2)
    assert p_value([(np.array([row.tokens for row in rows]), distribution)], powered=False) > FALSE_ALARM


def test_sixty_four_bit_logits_keep_their_log_probs():
    with jax.enable_x64(True):
        pair = Pair(target=TableLM(12), target_params=np.asarray(random_table(3, 12), np.float64))
        pair = dataclasses.replace(pair, target_params=jnp.asarray(pair.target_params))
        (row,) = generate(pair, [[1]], 4, draft_length=0, return_log_probs=True)
    assert len(row.log_probs) == 4 and max(row.log_probs) < 0


def test_log_probs_of_narrow_logits_are_wide():
    """A model that returns bfloat16 logits is verified, and reported, in float32."""

    @dataclasses.dataclass(frozen=True)
    class Narrow(TableLM):
        def __call__(self, *args, **kwargs):
            output = super().__call__(*args, **kwargs)
            return dataclasses.replace(output, logits_BTV=output.logits_BTV.astype(jnp.bfloat16))

    table = random_table(3, 12)
    pair = Pair(target=Narrow(12), target_params=table)
    (row,) = generate(pair, [[1, 2, 3]], 1, draft_length=0, return_log_probs=True)
    expected = jax.nn.log_softmax(table[1, 2, 3].astype(jnp.bfloat16).astype(jnp.float32))
    np.testing.assert_allclose(row.log_probs[0], expected[row.tokens[0]], rtol=1e-6)


def test_numbers_of_a_pair_without_drafter_are_plain():
    row = generate(counting_pair(), ["a"], 5, drafter=NoDrafter(), rule=TokenRule())[0]
    assert row.stats.rounds == 5 and row.stats.reached == () and np.isnan(row.stats.acceptance_rate)
    assert generate(counting_pair(), ["a"], 5, sampling=chain(temperature(0.0), top_p(0.5)))[0].text == "bcdef"

"""Arguments that the Python interface accepts, or refuses before compilation; invalid logits."""

import dataclasses
import functools

import jax.numpy as jnp
import numpy as np
import pytest

from specsamp import (
    Adaptive,
    BlockRule,
    Method,
    ModelDrafter,
    NgramDrafter,
    Pair,
    TokenRule,
    TransformerLM,
    chain,
    generate,
    generate_many,
    stream,
    temperature,
)
from specsamp.models.config import tiny
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
from support.refusals import refusal, refused_arguments, refused_calls
from support.weights import drawn_params


class WithoutHash(CountingLM):
    __hash__ = None


class Untraceable(CountingLM):
    def __call__(self, *args, **kwargs):
        raise AssertionError("was traced")

    prepare = __call__


def ask(**change):
    """Raises the error that `generate` and `stream` share for an argument, before tracing."""
    pair = Pair(
        target=Untraceable(),
        target_params=(),
        draft=Untraceable(),
        draft_params=(),
        tokenizer=ByteTokenizer(),
    )
    said = []
    for door in (generate, stream):
        with pytest.raises(ValueError) as refused:
            door(pair, **dict(prompts=["a"], max_new_tokens=8) | change)
        said.append(str(refused.value))
    assert said[0] == said[1]
    raise refused.value


def test_the_draft_may_have_fewer_positions():
    pair = Pair(
        target=CountingLM(max_positions=None), target_params=(), draft=CountingLM(), draft_params=()
    )
    with refusal("more than the draft's 64 positions"):
        generate(pair, [[1]], 64)
    assert len(generate(pair, [[1]], 64, draft_length=0)[0].tokens) == 64


def test_the_last_position_can_be_used():
    """The positions of the model bound the text alone: scratch slots for drafts are additional."""
    config = tiny(vocab_size=BYTES, max_positions=40)
    model = TransformerLM(config)
    params = drawn_params(model)
    pair = Pair(target=model, target_params=params, draft=model, draft_params=params)
    rows = [generate(pair, [[1, 2, 3, 4]], 36, draft_length=K)[0].tokens for K in (0, 7)]
    assert len(rows[0]) == 36 and rows[0] == rows[1]


def test_padding_stays_within_the_positions_of_the_model():
    """A prompt fits even if its bucket is longer than the model's positions."""
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
    options = dict(
        draft_length=np.int64(2),
        num_samples=np.int32(2),
        stop=[np.int64(101)],
        prompt_ids=np.arange(1),
    )
    rows = generate(counting_pair(), [np.array([97, 98])], np.array([9]), **options)
    assert [row.text for row in rows] == ["cd", "cd"] and rows[0].finish == "stop"


@pytest.mark.parametrize("side", ["target", "draft"])
def test_logits_of_another_width_are_refused(side):
    """Tokens without a logit would follow no distribution."""
    pair = dataclasses.replace(table_pair(), **{f"{side}_params": random_table(5, 12)[..., :9]})
    with refusal(f"{side}.* vocabulary of 12.* width 9"):
        generate(pair, [[1]], 4)


# Padded vocabularies, and logits that are no distribution.


def test_ids_unknown_to_the_tokenizer_are_not_emitted():
    """The padding at the end of a vocabulary is excluded from target and draft."""

    class Short(ByteTokenizer):
        vocab_size = 7
        eos_id = None

    for options in (dict(sampling=chain(temperature(3.0))), dict()):
        rows = generate(table_pair(tokenizer=Short()), [[1]], 100, num_samples=4, **options)
        assert max(max(row.tokens) for row in rows) < 7
        rows = generate(table_pair(), [[1]], 100, num_samples=4, sampling=chain(temperature(3.0)))
        assert max(max(row.tokens) for row in rows) >= 7, "the control"


def test_logits_that_become_nan_end_the_row():
    """No token is drawn from NaN; other rows continue, and NaN in a draft only costs acceptance."""
    broken = random_table(3, 12).at[:, :, 5].set(jnp.nan)  # NaN after token 5
    pair = dataclasses.replace(table_pair(), target_params=broken)
    rows = generate(pair, [[1, 5], [1]], 200, sampling=chain(temperature(1.0)), num_samples=3)
    for row in rows[:3]:
        assert (row.finish, row.tokens, row.stats.rounds) == ("invalid", [], 0)
    for row in rows[3:]:
        assert row.finish == "invalid"
        assert len(row.tokens) > 0
        assert row.stats.emitted == len(row.tokens)
    pair = dataclasses.replace(table_pair(), draft_params=broken)
    (row,) = generate(pair, [[1, 5]], 50, sampling=chain(temperature(1.0)))
    assert row.finish == "length" and row.stats.drafted < 4 * row.stats.rounds


@pytest.mark.parametrize("spoiler", [jnp.inf, -jnp.inf, jnp.nan])
def test_logits_that_are_no_distribution_end_the_row(spoiler):
    pair = dataclasses.replace(table_pair(), target_params=jnp.full((13, 13, 13, 12), spoiler))
    (row,) = generate(pair, [[1]], 5, sampling=chain(temperature(1.0)))
    assert (row.finish, row.tokens) == ("invalid", [])


@pytest.mark.slow
@pytest.mark.parametrize("rule, spoiled_after", [(BlockRule(), 1), (TokenRule(), 5)])
def test_a_draft_whose_distribution_is_nan_biases_nothing(rule, spoiled_after):
    """A draft ends before a distribution of NaN, so that no token is verified against it."""
    vocab_size = 4
    table = random_table(6, vocab_size, scale=1.5)
    spoiled = near(table, 7, 0.5)
    spoiled = spoiled.at[:, :, 1].set(jnp.nan) if spoiled_after == 1 else spoiled * jnp.nan
    pair = Pair(target=TableLM(4), target_params=table, draft=TableLM(4), draft_params=spoiled)
    rows = generate(pair, [[2, 1, 3]], 2, sampling=chain(), rule=rule, num_samples=10_000)
    distribution = joint_distribution(table, chain(), [2, 1, 3], 2)
    assert (
        p_value([(np.array([row.tokens for row in rows]), distribution)], powered=False)
        > FALSE_ALARM
    )


make_pair = functools.partial(Pair, target=CountingLM(), target_params=())

test_refused_pairs = refused_arguments(
    make_pair,
    {
        "tokenizer has 257 tokens.* 200": dict(
            target=CountingLM(vocab_size=200), tokenizer=ByteTokenizer()
        ),
        "without draft_params": dict(draft=CountingLM()),
        "target must be a LanguageModel, .* got <object": dict(target=object()),
        "the target must be hashable": dict(target=WithoutHash()),
        "the draft must be a .*, .* got 'python'": dict(draft="python", draft_params=()),
        "the tokenizer must be an object such as .* got 'gpt2'": dict(tokenizer="gpt2"),
        "shards must be a DataShards": dict(shards=None),
        "the head must be a Head, such as config.head": dict(head="eagle", draft_params=()),
    },
)

test_refused_options = refused_arguments(
    ask,
    {
        "no prompts": dict(prompts=[]),
        "drafter must be a Drafter, .* got None": dict(method=Method(drafter=None)),
        "adaptive must be an .* got 3": dict(method=Method(drafter=NgramDrafter(2), adaptive=3)),
        "the method's adaptive drafts up to 4 tokens, its drafter K = 2": dict(
            method=Method(
                drafter=NgramDrafter(2), adaptive=Adaptive(lengths=(1, 4), costs_ms=(1, 2))
            )
        ),
        "require_exact must be True or False; got 'no'": dict(require_exact="no"),
        "prompt_ids must be a list; got .7.": dict(prompt_ids={7}),
        "prompts must be a list of prompts.*got {'a': 1}": dict(prompts={"a": 1}),
        "prompt 0 is bytes: give a text": dict(prompts=[b"ab"]),
        "prompt 1: bytes have no chat template": dict(prompts=["a", [{"role": "user"}]]),
        "prompt 0: leave out complete": dict(prompts=[{"messages": [], "complete": True}]),
        "prompt 1 is not valid Unicode": dict(prompts=["a", "\ud800"]),
        r"write \[prompt\]": dict(prompts="text"),
        "prompt 0 must be .* or a list of messages; got 1": dict(prompts=[1, 2]),
        r"prompt 0\[0\] must be an integer .* got 1.7": dict(prompts=[[1.7]]),
        "prompt 1 is empty": dict(prompts=["a", ""]),
        r"prompt 0\[1\] must be an integer >= 0 and below 257; got 300": dict(prompts=[[1, 300]]),
        "together 65, more than the target's 64 positions": dict(max_new_tokens=64),
        "max_new_tokens must be an integer >= 1 .* got 0": dict(max_new_tokens=0),
        "2 max_new_tokens for 1 prompts": dict(max_new_tokens=[1, 2]),
        "seed must be an integer >= 0": dict(seed=-1),
        r"prompt_ids\[0\] must be an integer": dict(prompt_ids=[0.5]),
        "stop must be a list": dict(stop=3),
        "sampling must be a warp": dict(sampling=0.8),
        "drafter must be a Drafter": dict(drafter=NgramDrafter),
        "0 decodes autoregressively.*got -1": dict(draft_length=-1),
        "does not fit the target's 64 positions": dict(draft_length=64),
        "K must be .* below 1025; got 100000": dict(draft_length=10**5),
        "draft_length 4 differs from the drafter's K = 2": dict(
            drafter=NgramDrafter(2), draft_length=4
        ),
        "draft vocabulary 8 != target vocabulary 257": dict(
            drafter=ModelDrafter(CountingLM(vocab_size=8), 2)
        ),
        "is not the pair's draft": dict(drafter=ModelDrafter(CountingLM(stumbles_at=3), 2)),
        "a stop id must be an integer >= 0 and below 257; got 257": dict(stop=[257]),
        "a stop text is empty": dict(stop=[""]),
        "a stop text has 1001 characters: at most 1000": dict(stop=["a" * 1001]),
        "the stop text .* is not valid Unicode": dict(stop=["a\ud800"]),
        r"write \[stop\]": dict(stop="a"),
        "num_samples must be an integer >= 1 .* got 0": dict(num_samples=0),
        "2 prompt_ids for 1 prompts": dict(prompt_ids=[1, 2]),
        r"shape \(2,\) for 1 prompts": dict(sampling=temperature([0.5, 1.0])),
        "rule must be a Rule, such as TokenRule": dict(rule="token"),
    },
)

ALONE = make_pair()

test_refused_generations = refused_calls(
    {
        "the pair has no draft model": lambda: generate(ALONE, [[1]], 4),
        "needs a tokenizer in the pair": lambda: generate(ALONE, ["a"], 4, draft_length=0),
        "rounds_per_chunk must be": lambda: stream(ALONE, [[1]], 4, rounds_per_chunk=0),
        r"pair must be a Pair, .*load_pair\('python'\)": lambda: generate(None, [[1]], 4),
        "pair must be a Pair, .*got 'python'": lambda: generate("python", [[1]], 4),
        "unexpected keyword 'foo'.* are method, sampling, .*drafter, require_exact": lambda: stream(
            counting_pair(), ["a"], foo=3
        ),
        "unexpected keyword 'bar'.* are method": lambda: generate_many(
            counting_pair(), ["a"], bar=3
        ),
        "prompts times num_samples must be an integer .*got 5000000": lambda: generate_many(
            counting_pair(), ["a"], 4, num_samples=5_000_000
        ),
        "1000000000 rows of 128 slots need .* GB": lambda: generate(
            table_pair(), [[1]], 4, num_samples=10**9
        ),
        "return_log_probs must be one of False, True, sampled; got 'no'": lambda: generate(
            table_pair(), [[1]], 4, return_log_probs="no"
        ),
        "target_params are not those of TransformerLM.*AttributeError": lambda: generate(
            Pair(target=TransformerLM(tiny()), target_params="x"), [[1]], 4, draft_length=0
        ),
        "K .*>= 1.*got 0": lambda: ModelDrafter(CountingLM(), 0),
    }
)

"""The Python interface: what it returns, how rows end, and what it refuses before compiling."""

import dataclasses
import pathlib
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fakes import TableLM, joint_law, near, p_value, random_table

import specsamp
from specsamp import NgramDrafter, Pair, TokenRule, chain, generate, stream, temperature, top_p
from specsamp.decoding.drafters import ModelDrafter, NoDrafter
from specsamp.models.config import tiny
from specsamp.models.transformer import TransformerLM
from specsamp.pretrained.tokenizer import ByteTokenizer

V = 257
REPOSITORY = pathlib.Path(specsamp.__file__).parent.parent


@dataclasses.dataclass(frozen=True)
class CountingLM:
    """Writes the successor of its last token: a -> b -> c ...; draws nothing."""

    vocab_size: int = V
    max_positions: int | None = 64
    stumbles_at: int = -1  # predicts this token's successor wrongly

    def prepare(self, params, slots):
        return params

    def init_cache(self, batch, slots):
        return jnp.zeros((batch, 1))

    def __call__(self, weights, tokens_BT, start_B, cache, *, hidden_layers=()):
        step = jnp.where(tokens_BT == self.stumbles_at, 2, 1)
        logits_BTV = 20.0 * jax.nn.one_hot((tokens_BT + step) % self.vocab_size, self.vocab_size)
        return specsamp.Output(logits_BTV=logits_BTV, cache=cache)


def counting_pair(**draft):
    return Pair(
        target=CountingLM(), target_params=(), draft=CountingLM(**draft), draft_params=(), tokenizer=ByteTokenizer()
    )


def test_text_tokens_statistics_and_reason():
    """'abc' goes on d, e, f ...; a perfect draft fills every round."""
    first, second = generate(counting_pair(), ["abc", "x"], [10, 3], draft_length=4)
    assert (first.text, first.finish, first.prompt_index) == ("defghijklm", "length", 0)
    assert first.tokens == list(b"defghijklm")
    assert (first.stats.rounds, first.stats.emitted, first.stats.emitted_per_round) == (2, 10, 5)
    assert first.stats.acceptance_rate == 1 and first.stats.accepted_counts == (0, 0, 0, 0, 2)
    assert first.from_draft == [True, True, True, True, False] * 2
    # The budget of 3 cut a block of 5: three drafted tokens were emitted and count, nothing else does.
    assert (second.text, second.stats.emitted, second.stats.accepted) == ("yz{", 3, 3)
    assert second.stats.reached == (1, 1, 1, 0) and second.stats.drafted == 3


def test_stop_token_inside_a_block():
    """The peers' vector: block [10, 11, STOP, 20, 21], budget 5 -> [10, 11, STOP], 'stop'."""
    (row,) = generate(counting_pair(), ["c"], 5, draft_length=4, stop=["f"])
    assert (row.tokens, row.text, row.finish) == (list(b"def"), "de", "stop")
    assert row.stats.accepted == 3 and row.stats.drafted == 3


def test_stop_token_as_the_last_of_the_budget_is_a_stop():
    (row,) = generate(counting_pair(), ["c"], 3, draft_length=4, stop=["f"])
    assert row.finish == "stop"


def test_stop_token_in_the_prompt_does_not_stop():
    (row,) = generate(counting_pair(), ["f"], 3, draft_length=4, stop=["f"])
    assert row.text == "ghi"


def test_end_of_text_is_the_default_stop():
    row = generate(counting_pair(), [[250]], 20)[0]
    assert row.finish == "stop" and row.tokens[-1] == 256


def test_a_stumbling_draft_is_corrected():
    """The draft skips 'e' after 'd'; the target's correction is not marked as drafted."""
    (row,) = generate(counting_pair(stumbles_at=ord("d")), ["a"], 7, draft_length=3)
    assert row.text == "bcdefgh"
    assert row.from_draft[:4] == [True, True, True, False]
    (row,) = generate(counting_pair(stumbles_at=ord("d")), ["b"], 6, draft_length=3)
    assert row.text == "cdefgh" and row.from_draft[:3] == [True, True, False]
    assert row.stats.acceptance_by_position[2] < 1 == row.stats.acceptance_by_position[0]


@pytest.mark.parametrize("K", [0, 1, 2, 7, 16])
def test_any_draft_length(K):
    assert generate(counting_pair(), ["a", "abc"], 12, draft_length=K)[1].text == "defghijklmno"


def test_prompt_lookup_copies_and_continues_a_period():
    """After 'abcabc' the n-gram drafter proposes the period for all of its K tokens."""
    table = jnp.full((4, 4, 4, 3), -20.0)
    for a, b in ((0, 1), (1, 2), (2, 0)):
        table = table.at[:, :, a, b].set(20.0)
    pair = Pair(target=TableLM(3), target_params=table)
    (row,) = generate(pair, [[0, 1, 2, 0, 1, 2]], 18, drafter=NgramDrafter(8))
    assert row.tokens == [0, 1, 2] * 6 and row.stats.rounds == 2
    (row,) = generate(pair, [[0]], 18, drafter=NgramDrafter(8))
    assert row.tokens == [1, 2, 0] * 6 and row.stats.accepted_counts[0] == 3, "nothing to look up at first"


@pytest.mark.parametrize("max_ngram, expected", [(1, 4), (2, 5), (3, 6)])
def test_longer_matches_win_over_recent_ones(max_ngram, expected):
    """Context 0 1 2 6 | 9 1 2 5 | 9 8 2 4 | 0 1 2: what followed depends on how much must agree."""
    from specsamp.decoding.types import Weights

    context = [0, 1, 2, 6, 9, 1, 2, 5, 9, 8, 2, 4, 0, 1, 2]
    tokens = jnp.asarray([context + [7] * 5])
    draft, _, _ = NgramDrafter(2, max_ngram=max_ngram).propose(
        Weights(target=None), (), tokens, jnp.array([len(context)]), None, None
    )
    assert draft.tokens_BK[0, 0] == expected and draft.num_drafted_B[0] == 2


def test_no_match_drafts_nothing():
    from specsamp.decoding.types import Weights

    tokens = jnp.asarray([[0, 1, 2, 3, 3, 3], [5, 0, 0, 0, 0, 0]])
    draft, _, _ = NgramDrafter(3).propose(Weights(target=None), (), tokens, jnp.array([4, 1]), None, None)
    assert draft.num_drafted_B.tolist() == [0, 0]


def test_several_samples_from_one_prefill():
    table = random_table(3, 12)
    pair = Pair(target=TableLM(12), target_params=table, draft=TableLM(12), draft_params=near(table, 4, 0.5))
    rows = generate(pair, [[1], [2, 3]], 12, sampling=chain(temperature(1.0)), num_samples=4)
    assert [(r.prompt_index, r.sample_index) for r in rows] == [(p, s) for p in (0, 1) for s in range(4)]
    assert len({tuple(r.tokens) for r in rows}) == 8
    again = generate(pair, [[1], [2, 3]], 12, sampling=chain(temperature(1.0)), num_samples=2)
    assert [r.tokens for r in again] == [rows[i].tokens for i in (0, 1, 4, 5)], "more samples change none"


def test_streamed_text_is_cut_at_whole_characters():
    """Half of a multi-byte character is held back until it is complete."""

    class Written(ByteTokenizer):
        """'é' is two tokens of the counting model's alphabet."""

        def decode(self, tokens):
            return bytes({ord("d"): 0xC3, ord("e"): 0xA9}.get(t, t) for t in tokens).decode("utf-8", errors="replace")

    pair = dataclasses.replace(counting_pair(), tokenizer=Written())
    chunks = list(stream(pair, ["ab"], 4, draft_length=0, rounds_per_chunk=1))
    assert [c.text for c in chunks] == ["c", "", "é", "f"]
    assert [c.finish for c in chunks] == [None, None, None, "length"]


def test_pairs_that_do_not_belong_together():
    small = CountingLM(vocab_size=200)
    with pytest.raises(ValueError, match="draft vocabulary 200 != target vocabulary 257: first difference at id 200"):
        Pair(target=CountingLM(), target_params=(), draft=small, draft_params=())
    with pytest.raises(ValueError, match="tokenizer has 257 tokens but the target's vocabulary only 200"):
        Pair(target=small, target_params=(), tokenizer=ByteTokenizer())

    class Other(ByteTokenizer):
        def token(self, index):
            return "X" if index == 31 else super().token(index)

    with pytest.raises(ValueError, match="first difference at id 31, 'X' in the draft"):
        Pair(target=CountingLM(), target_params=(), tokenizer=ByteTokenizer(), draft_tokenizer=Other())


@pytest.mark.parametrize(
    "change, message",
    [
        (dict(prompts=[]), "no prompts"),
        (dict(prompts="text"), r"write \[prompt\]"),
        (dict(prompts=[1, 2]), "prompt 0 must be a text or a list of token ids; got 1"),
        (dict(prompts=[[1.7]]), r"prompt 0\[0\] must be an integer .* got 1.7"),
        (dict(prompts=["a", ""]), "prompt 1 is empty"),
        (dict(prompts=[[1, 300]]), r"prompt 0\[1\] must be an integer >= 0 and below 257; got 300"),
        (dict(prompts=[[1, -2]]), r"prompt 0\[1\] must be .* got -2"),
        (dict(max_new_tokens=64), "together 65, more than the target's 64 positions"),
        (dict(max_new_tokens=0), "max_new_tokens must be an integer >= 1 .* got 0"),
        (dict(max_new_tokens=[1, 2]), "2 max_new_tokens for 1 prompts"),
        (dict(max_new_tokens=2**31 - 1), "more than the target's 64 positions"),
        (dict(max_new_tokens=2**32 + 5), "max_new_tokens must be an integer"),
        (dict(seed=-1), "seed must be an integer >= 0"),
        (dict(seed=2**32), "seed must be .* below 4294967296"),
        (dict(prompt_ids=[0.5]), r"prompt_ids\[0\] must be an integer"),
        (dict(stop=3), "stop must be a list"),
        (dict(sampling=0.8), "sampling must be a warp"),
        (dict(sampling=temperature), "sampling must be a warp"),
        (dict(rule=TokenRule), "rule must be a rule"),
        (dict(drafter=NgramDrafter), "drafter must be a drafter"),
        (dict(draft_length=-1), r"0 decodes autoregressively.*got -1"),
        (dict(draft_length=2.5), "got 2.5"),
        (dict(draft_length=True), "got True"),
        (dict(stop=[3.5]), "a stop id must be .* got 3.5"),
        (dict(drafter=NgramDrafter(2), draft_length=4), "draft_length 4 exceeds the drafter's K = 2"),
        (dict(drafter=NgramDrafter(4), draft_length=2), "differs from the drafter's K = 4"),
        (dict(drafter=ModelDrafter(CountingLM(vocab_size=8), 2)), "draft vocabulary 8 != target vocabulary 257"),
        (dict(stop=[257]), "a stop id must be an integer >= 0 and below 257; got 257"),
        (dict(stop=[-1]), "a stop id must be .* got -1"),
        (dict(stop=["ab"]), "'ab' is not one token"),
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

        prepare = init_cache = __call__

    pair = Pair(
        target=Untraceable(), target_params=(), draft=Untraceable(), draft_params=(), tokenizer=ByteTokenizer()
    )
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
    with pytest.raises(ValueError, match="without draft_params"):
        Pair(target=CountingLM(), target_params=(), draft=CountingLM())
    with pytest.raises(ValueError, match="rounds_per_chunk must be an integer >= 1"):
        stream(alone, [[1]], 4, rounds_per_chunk=0)


def test_the_draft_may_have_fewer_positions():
    pair = Pair(target=CountingLM(max_positions=None), target_params=(), draft=CountingLM(), draft_params=())
    with pytest.raises(ValueError, match="more than the draft's 64 positions"):
        generate(pair, [[1]], 64)
    assert len(generate(pair, [[1]], 64, draft_length=0)[0].tokens) == 64


def test_the_last_position_can_be_used():
    """The limit is the user's: scratch slots for the draft come on top."""
    config = tiny(vocab_size=V, max_positions=40)
    model = TransformerLM(config)
    params = model.init(jax.random.key(0))
    pair = Pair(target=model, target_params=params, draft=model, draft_params=params)
    rows = [generate(pair, [[1, 2, 3, 4]], 36, draft_length=K)[0].tokens for K in (0, 7)]
    assert len(rows[0]) == 36 and rows[0] == rows[1]


def test_compilation_cache_lies_where_it_says(monkeypatch, tmp_path):
    configured = jax.config.jax_compilation_cache_dir, jax.config.jax_enable_compilation_cache
    try:
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
        jax.config.update("jax_enable_compilation_cache", True)
        jax.config.update("jax_compilation_cache_dir", None)
        assert specsamp.use_compilation_cache() == str(tmp_path / "specsamp" / "xla")
        assert jax.config.jax_compilation_cache_dir == str(tmp_path / "specsamp" / "xla")
        jax.config.update("jax_compilation_cache_dir", str(tmp_path / "mine"))
        assert specsamp.use_compilation_cache() == str(tmp_path / "mine"), "a user's choice stands"
        jax.config.update("jax_enable_compilation_cache", False)
        assert specsamp.use_compilation_cache() is None
    finally:
        jax.config.update("jax_compilation_cache_dir", configured[0])
        jax.config.update("jax_enable_compilation_cache", configured[1])


def test_the_readme_example_of_ones_own_model_and_drafter_runs():
    """The block after 'Bring your own' is at most about thirty lines, and does what it says."""
    readme = (REPOSITORY / "README.md").read_text()
    (code,) = re.findall(r"## Bring your own.*?```python\n(.*?)```", readme, re.DOTALL)
    assert len(code.splitlines()) <= 36  # thirty without imports and blank lines
    scope = {}
    exec(code, scope)
    assert scope["completion"].tokens == scope["plain"].tokens and len(scope["plain"].tokens) > 0
    assert scope["completion"].stats.accepted > 0


def test_numpy_integers_are_integers():
    options = dict(draft_length=np.int64(2), num_samples=np.int32(2), stop=[np.int64(101)], prompt_ids=np.arange(1))
    rows = generate(counting_pair(), [np.array([97, 98])], np.array([9]), **options)
    assert [row.text for row in rows] == ["cd", "cd"] and rows[0].finish == "stop"


def test_numbers_of_a_pair_without_drafter_are_plain():
    row = generate(counting_pair(), ["a"], 5, drafter=NoDrafter(), rule=TokenRule())[0]
    assert row.stats.rounds == 5 and row.stats.reached == () and np.isnan(row.stats.acceptance_rate)
    assert generate(counting_pair(), ["a"], 5, sampling=chain(temperature(0.0), top_p(0.5)))[0].text == "bcdef"


def table_pair(**options):
    table = random_table(3, 12)
    return Pair(target=TableLM(12), target_params=table, draft=TableLM(12), draft_params=near(table, 4, 0.5), **options)


@pytest.mark.parametrize("side", ["target", "draft"])
def test_logits_of_another_width_are_refused(side):
    """A model that returns fewer logits than it has tokens would make the missing ones follow no law."""
    pair = dataclasses.replace(table_pair(), **{f"{side}_params": random_table(5, 12)[..., :9]})
    with pytest.raises(ValueError, match=f"the {side} has a vocabulary of 12 but returned logits of width 9"):
        generate(pair, [[1]], 4)


def test_within_buckets_nothing_is_compiled_again():
    """Prompts of 17 to 24 tokens and budgets of 25 to 32 share a program; other numbers, seeds and stops too."""
    from specsamp.decoding.loop import Loop

    pair = table_pair()
    run = lambda length, budget, value, seed, stop: generate(
        pair, [[1] * length], budget, sampling=chain(temperature(value), top_p(0.9)), seed=seed, stop=stop
    )
    run(17, 25, 0.5, 0, [])
    compiled = Loop.run._cache_size(), Loop.prefill._cache_size()
    prepared = dict(pair._prepared)
    for length, budget, value, seed, stop in ((24, 32, 0.0, 1, [3]), (20, 25, 2.0, 2**32 - 1, [1, 2, 3, 4, 5])):
        run(length, budget, value, seed, stop)
    assert (Loop.run._cache_size(), Loop.prefill._cache_size()) == compiled
    assert pair._prepared == prepared
    run(25, 25, 0.5, 0, [])
    assert Loop.prefill._cache_size() == compiled[1] + 1, "the control: another bucket"


@pytest.mark.parametrize("size, bucket", [(1, 16), (16, 16), (17, 24), (24, 24), (25, 32), (1025, 1536), (2048, 2048)])
def test_buckets_waste_at_most_half(size, bucket):
    from specsamp.decoding.generate import _bucket

    assert _bucket(size) == bucket


def test_weights_share_memory_with_parameters_and_are_kept():
    """What `prepare` need not change costs nothing twice."""
    model = TransformerLM(tiny(vocab_size=V, positions="rotary"))
    params = model.init(jax.random.key(0))
    pair = Pair(target=model, target_params=params)
    few, many = pair.weights(NoDrafter(), 128), pair.weights(NoDrafter(), 256)
    assert pair.weights(NoDrafter(), 128) is few and few.draft is None
    for weights in (few, many):
        for ours, theirs in zip(jax.tree.leaves(weights.target), jax.tree.leaves(params), strict=True):
            assert ours.unsafe_buffer_pointer() == theirs.unsafe_buffer_pointer()
    pair.weights(NgramDrafter(2), 128)
    assert pair.weights(NgramDrafter(2), 128).target is few.target
    for slots in range(384, 1280, 128):
        pair.weights(NoDrafter(), slots)
    assert len(pair._prepared) <= 4


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


def test_lossy_parts_show_in_the_result():
    @dataclasses.dataclass(frozen=True)
    class Lossy(TokenRule):
        exact = False

    assert generate(table_pair(), [[1]], 4)[0].exact
    assert not generate(table_pair(), [[1]], 4, rule=Lossy())[0].exact


@pytest.mark.parametrize("K", [0, 3])
@pytest.mark.parametrize("rule", [TokenRule(), specsamp.BlockRule(), specsamp.CoupledRule()])
def test_sixty_four_bits_change_no_type(rule, K):
    """With 64-bit types enabled the carry of the loop keeps its own."""
    with jax.enable_x64(True):
        for drafter in (None, NgramDrafter(3)) if K else (None,):
            rows = generate(
                table_pair(), [[1], [2, 3, 2]], 12, rule=rule, sampling=chain(temperature(0.9)), drafter=drafter,
                draft_length=K, return_log_probs=True,
            )  # fmt: skip
            assert all(len(row.tokens) == 12 for row in rows)


def test_log_probs_of_narrow_logits_are_wide():
    """A model that returns bfloat16 logits is judged, and reported, in float32."""

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


def test_a_drafter_is_given_weights_of_its_own_making():
    """`prepare` is handed the pair's draft_params and the number of slots, once."""
    calls = []

    @dataclasses.dataclass(frozen=True)
    class Own(NgramDrafter):
        def prepare(self, params, slots):
            calls.append((params, slots))
            return jnp.zeros(slots)

        def propose(self, weights, state, tokens_BS, lengths_B, cache, sample):
            assert weights.draft.shape[0] == tokens_BS.shape[1]
            return super().propose(weights, state, tokens_BS, lengths_B, cache, sample)

    pair = Pair(target=TableLM(12), target_params=random_table(3, 12), draft_params="mine")
    for _ in range(2):
        generate(pair, [[1]], 8, drafter=Own(K=2))
    assert calls == [("mine", 128)]


def test_objects_that_are_no_models_are_refused():
    with pytest.raises(ValueError, match="the target is no LanguageModel: .* has no vocab_size, max_positions, prepare"):
        Pair(target=object(), target_params=())

    class Unhashable(CountingLM):
        __hash__ = None

    with pytest.raises(ValueError, match="the target must be hashable"):
        Pair(target=Unhashable(), target_params=())
    with pytest.raises(ValueError, match="is not the pair's draft"):
        generate(counting_pair(), ["a"], 4, drafter=ModelDrafter(CountingLM(stumbles_at=3), 2))
    with pytest.raises(ValueError, match="K and window must be at least 1; got 0"):
        ModelDrafter(CountingLM(), 0)
    with pytest.raises(ValueError, match="K must be at least 1; got 0"):
        NgramDrafter(0)


@pytest.mark.parametrize("rule", [TokenRule(), specsamp.BlockRule()])
@pytest.mark.parametrize("spoiled_after", [1, 5])
def test_a_draft_whose_law_is_nan_biases_nothing(rule, spoiled_after):
    """The draft ends before it: nothing is accepted on the strength of a law that is none."""
    vocab_size = 4
    table = random_table(6, vocab_size, scale=1.5)
    spoiled = near(table, 7, 0.5)
    spoiled = spoiled.at[:, :, 1].set(jnp.nan) if spoiled_after == 1 else spoiled * jnp.nan
    pair = Pair(target=TableLM(4), target_params=table, draft=TableLM(4), draft_params=spoiled)
    rows = generate(pair, [[2, 1, 3]], 2, sampling=chain(), rule=rule, num_samples=60_000)
    law = joint_law(table, chain(), [2, 1, 3], 2)
    assert p_value([(np.array([row.tokens for row in rows]), law)], powered=False) > 1e-6


@pytest.mark.parametrize("spoiler", [jnp.inf, -jnp.inf, jnp.nan])
def test_logits_that_are_no_law_end_the_row(spoiler):
    pair = dataclasses.replace(table_pair(), target_params=jnp.full((13, 13, 13, 12), spoiler))
    (row,) = generate(pair, [[1]], 5, sampling=chain(temperature(1.0)))
    assert (row.finish, row.tokens) == ("invalid", [])


def test_sixty_four_bit_logits_keep_their_log_probs():
    with jax.enable_x64(True):
        pair = Pair(target=TableLM(12), target_params=np.asarray(random_table(3, 12), np.float64))
        pair = dataclasses.replace(pair, target_params=jnp.asarray(pair.target_params))
        (row,) = generate(pair, [[1]], 4, draft_length=0, return_log_probs=True)
    assert len(row.log_probs) == 4 and max(row.log_probs) < 0


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

"""The Python interface: completions, their ends, compilation, and the weights that it keeps."""

import dataclasses
import pathlib
import re

import jax
import jax.numpy as jnp

import specsamp
from specsamp import (
    BlockRule,
    Method,
    NgramDrafter,
    NoDrafter,
    Pair,
    TransformerLM,
    chain,
    generate,
    stream,
    temperature,
    top_p,
)
from specsamp.models.config import tiny
from support.byte_tokenizer import ByteTokenizer
from support.fakes import BYTES, TableLM, compiled_programs, counting_pair, random_table, table_pair
from support.refusals import refusal
from support.weights import drawn_params

REPOSITORY = pathlib.Path(specsamp.__file__).parent.parent


def test_text_tokens_statistics_and_reason():
    """'abc' continues with d, e, f ...; a perfect draft fills every round."""
    first, second = generate(counting_pair(), ["abc", "x"], [10, 3], draft_length=4)
    assert (first.text, first.finish, first.prompt_index) == ("defghijklm", "length", 0)
    assert first.tokens == list(b"defghijklm")
    assert (first.stats.rounds, first.stats.emitted, first.stats.emitted_per_round) == (2, 10, 5)
    assert first.stats.acceptance_rate == 1 and first.stats.accepted_counts == (0, 0, 0, 0, 2)
    assert first.from_draft == [True, True, True, True, False] * 2
    # The budget of 3 cuts a block of 5: only the three emitted tokens count, all drafted.
    assert (second.text, second.stats.emitted, second.stats.accepted) == ("yz{", 3, 3)
    assert second.stats.reached == (1, 1, 1, 0) and second.stats.drafted == 3


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


def test_streamed_text_is_cut_at_whole_characters():
    """A chunk holds back half a character until it is complete."""

    class Written(ByteTokenizer):
        """Decodes 'd' and 'e' as the two bytes of 'é'."""

        def token_bytes(self, token, before=None):
            return bytes([{ord("d"): 0xC3, ord("e"): 0xA9}.get(token, token)])

    pair = dataclasses.replace(counting_pair(), tokenizer=Written())
    chunks = list(stream(pair, ["ab"], 4, draft_length=0, rounds_per_chunk=1))
    assert [c.text for c in chunks] == ["c", "", "é", "f"]
    assert [c.finish for c in chunks] == [None, None, None, "length"]


def test_compilation_cache_is_in_the_reported_folder(monkeypatch, tmp_path):
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


def test_readme_example_of_an_own_model_runs():
    readme = (REPOSITORY / "README.md").read_text()
    (code,) = re.findall(r"## Bring your own.*?```python\n(.*?)```", readme, re.DOTALL)
    scope = {}
    exec(code, scope)
    assert scope["completion"].tokens == scope["plain"].tokens and len(scope["plain"].tokens) > 0
    assert scope["completion"].stats.accepted > 0


def test_within_buckets_nothing_is_compiled_again():
    """Prompts of 17 to 24 tokens and budgets of 25 to 32 share a program; temperature, seed and
    stops may differ.
    """
    pair = table_pair()

    def run(length, budget, value, seed, stop):
        return generate(
            pair,
            [[1] * length],
            budget,
            sampling=chain(temperature(value), top_p(0.9)),
            seed=seed,
            stop=stop,
        )

    run(17, 25, 0.5, 0, [])
    compiled = compiled_programs()
    prepared = dict(pair._prepared), dict(pair._fitted)
    for length, budget, value, seed, stop in (
        (24, 32, 0.0, 1, [3]),
        (20, 25, 2.0, 2**32 - 1, [1, 2, 3, 4, 5]),
    ):
        run(length, budget, value, seed, stop)
    assert compiled_programs() == compiled
    assert (pair._prepared, pair._fitted) == prepared
    run(25, 25, 0.5, 0, [])
    assert compiled_programs()[1] == compiled[1] + 1, "the control: another bucket"


def test_method_equals_its_keywords():
    pair = table_pair()
    decoding = dict(drafter=NgramDrafter(2), rule=BlockRule(), sampling=temperature(0.7))
    told = generate(pair, [[1, 2, 1]], 9, **decoding)
    assert generate(pair, [[1, 2, 1]], 9, method=Method(**decoding)) == told
    assert told != generate(pair, [[1, 2, 1]], 9, method=Method(drafter=NgramDrafter(2))), (
        "the control: greedy"
    )
    with refusal("method and rule, drafter were given"):
        generate(pair, [[1]], rule=BlockRule(), drafter=NgramDrafter(2), method=Method(**decoding))
    with refusal("method must be a Method.*got 4"):
        generate(pair, [[1]], method=4)


def test_weights_share_memory_with_parameters_and_are_kept():
    """Parameters that `prepare` does not change share their memory with the weights."""
    model = TransformerLM(tiny(vocab_size=BYTES, positions="rotary"))
    params = drawn_params(model)
    pair = Pair(target=model, target_params=params)
    few = pair.weights(NoDrafter(), 128)
    many = pair.weights(NoDrafter(), 256)
    assert pair.weights(NoDrafter(), 128) is few and few.draft is None
    for weights in (few, many):
        for ours, theirs in zip(
            jax.tree.leaves(weights.target), jax.tree.leaves(params), strict=True
        ):
            assert ours.unsafe_buffer_pointer() == theirs.unsafe_buffer_pointer()
    pair.weights(NgramDrafter(2), 128)
    assert pair.weights(NgramDrafter(2), 128).target is few.target
    for slots in range(384, 1280, 128):
        pair.weights(NoDrafter(), slots)
    assert len(pair._fitted) <= 4


def test_drafter_gets_its_own_prepared_weights():
    """`prepare` gets the pair's draft_params, `fit_slots` its result and the slots, each once."""
    calls = []

    @dataclasses.dataclass(frozen=True)
    class Own(NgramDrafter):
        def prepare(self, params):
            calls.append(params)
            return "prepared"

        def fit_slots(self, weights, slots):
            calls.append((weights, slots))
            return jnp.zeros(slots)

        def propose(self, weights, state, prefix, cache, sample):
            assert weights.draft.shape[0] == prefix.tokens_BS.shape[1]
            return super().propose(weights, state, prefix, cache, sample)

    pair = Pair(target=TableLM(12), target_params=random_table(3, 12), draft_params="mine")
    for _ in range(2):
        generate(pair, [[1]], 8, drafter=Own(K=2))
    assert calls == ["mine", ("prepared", 128)]

"""Grammars: texts match them, and have the enumerated distribution of masked sampling."""

import dataclasses
import functools
import gc
import itertools
import queue

import numpy as np
import pytest
import tokenizers

from specsamp import (
    ModelDrafter,
    ModelTree,
    RecursiveRule,
    SamplingRequest,
    TokenRule,
    TreeShape,
    chain,
    generate,
    generate_many,
    temperature,
)
from specsamp.checkpoints.tokenizer import JsonTokenizer
from specsamp.decoding.method import make_method
from specsamp.mesh.layout import make_mesh
from specsamp.mesh.sharded import shard
from specsamp.sampling import grammar as module
from specsamp.sampling.grammar import FREE, Follow, grammar
from specsamp.sampling.warp import register_warp
from specsamp.serving.answer import Unmet
from specsamp.serving.openai_replies import Reply
from specsamp.serving.openai_requests import read_request
from specsamp.serving.request_warps import make_warp
from specsamp.serving.service import Service
from support import extras
from support.fakes import FALSE_ALARM, TableLM, counting_pair, joint_distribution, table_loop
from support.loop_distributions import NEAR, PROMPTS, TARGET, V, distribution_test
from support.refusals import refusal
from support.services import Caller, running, submit

pytestmark = extras.needs("llguidance")

END = V  # the end token, which the models do not have


def tokenizer_of(pieces, end):
    model = tokenizers.models.BPE(
        vocab={piece: index for index, piece in enumerate(pieces)}, merges=[]
    )
    made = tokenizers.Tokenizer(model)
    made.add_special_tokens([end])
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = tokenizers.decoders.ByteLevel()
    return JsonTokenizer.from_tokenizer(made, end)


LETTERS = tokenizer_of("abc", "<end>")
PATTERN = "(a[bc]|b[ab]|c)*"


def allowed(text):
    """Returns flags of the letters that the pattern's automaton allows next."""
    begun = None
    for token in text:
        begun = token if begun is None and token != 2 else None
    return {None: [1, 1, 1], 0: [0, 1, 1], 1: [1, 1, 0]}[begun]


def masked(logits, prompt, text):
    return np.where(allowed(text), logits, -np.inf)


@functools.cache
def expected(length=3):
    return [
        joint_distribution(TARGET, chain(temperature(1.2)), prompt, length, masked)
        for prompt in PROMPTS
    ]


def letters():
    return chain(grammar(LETTERS, "regex", PATTERN, ends=[END]), temperature(1.2))


DRAFTED = table_loop(TokenRule(), ModelDrafter(TableLM(V), 2))
TREE = table_loop(RecursiveRule(), ModelTree(TableLM(V), tree=TreeShape((0, 0, 1, 1))))


@pytest.mark.parametrize("loop", extras.slow_but([DRAFTED, TREE], DRAFTED))
def test_texts_have_the_distribution_of_masked_sampling(loop):
    """The mask of a drafted position depends on the drafted tokens before it."""
    found = distribution_test(loop, NEAR, letters(), length=3, expected=expected())
    assert found > FALSE_ALARM


@register_warp
class ForgetsDrafts(Follow):
    """The control: a state that ignores tokens."""

    def advance(self, state, tokens_B):
        return state


@pytest.mark.slow
def test_grammar_that_forgets_drafts_is_caught():
    forgetful = chain(ForgetsDrafts(letters().warps[0].value), temperature(1.2))
    few = dict(length=3, samples=50_000, powered=False)
    assert distribution_test(DRAFTED, NEAR, forgetful, expected=expected(), **few) < FALSE_ALARM


def test_dropped_matcher_is_made_again(monkeypatch):
    texts, numbers = module._Texts(), []
    several = [], [0], [0, 1], [0, 1, 1], [1, 0], [2, 2, 0]
    monkeypatch.setattr(module, "MOST_MATCHERS", 2)
    monkeypatch.setattr(module, "_TEXTS", texts)
    start = int(grammar(LETTERS, "regex", PATTERN, ends=[END]).value)
    for text in several:
        state = start
        for token in text:
            (state,) = texts.after([state], [token])
        numbers.append(int(state))
        assert len(texts._matchers) <= 2
    for number, text in zip(numbers, several):
        (word,) = texts.masks([number], 1).ravel()
        assert [int(word) >> token & 1 for token in range(V)] == allowed(text)
    (refused,) = texts.after([numbers[1]], [0])
    assert refused == FREE and texts.masks([refused], 1).all()
    texts.released.append(start)
    texts.after([0], [0])
    assert not texts._texts
    assert not texts._matchers
    assert texts.after([numbers[2]], [0]).tolist() == [FREE]


def test_numbers_are_used_again_where_they_are_free(monkeypatch):
    texts = module._Texts()
    texts._numbers = itertools.count(module.LAST - 1)
    monkeypatch.setattr(module, "_TEXTS", texts)
    first = int(grammar(LETTERS, "regex", PATTERN, ends=[END]).value)
    after = texts.after([first, first], [0, 1]).tolist()
    assert (first, after) == (module.LAST, [1, 2]), "all are int32, and none is FREE"
    texts._numbers = itertools.count(module.LAST - 1)
    assert texts.after([first], [2]).tolist() == [3]


def test_any_token_may_end_a_text():
    """End tokens are allowed where the grammar may end, and only there."""
    follow = grammar(LETTERS, "regex", "ab", ends=[2, END])
    texts, bits = module._TEXTS, []
    state = [int(follow.value)]
    for token in (0, 1, None):
        bits.append([int(texts.masks(state, 1)[0, 0]) >> each & 1 for each in range(8)])
        state = state if token is None else texts.after(state, [token])
    assert bits == [[1, 0, 0, 0, 0, 0, 0, 0], [0, 1, 0, 0, 0, 0, 0, 0], [0, 0, 1, 1, 1, 0, 0, 0]]


@pytest.mark.parametrize(
    "kind, source, ends, message",
    [
        ("xml", "a", [3], "kind must be one of json_schema, regex, lark; got 'xml'"),
        ("regex", "a", [4], r"ends\[0\] must be an integer >= 0 and below 4; got 4"),
        ("regex", "a", [], "needs a token that ends its texts"),
        ("regex", "(", [3], "regex is not understood: "),
        ("regex", 3, [3], "regex must be a text or a schema of at most 16384 characters; got 3"),
        (
            "regex",
            "a" * 20_000,
            [3],
            "regex must be a text or a schema of at most 16384 characters; got 'aaaa",
        ),
        ("json_schema", {"type": "strin"}, [3], "json_schema is not understood: .*strin"),
        ("lark", "start: start", [3], "lark allows no text, or is too large: no token goes on"),
        ("json_schema", {"$ref": "#"}, [3], "json_schema allows no text, or is too large"),
    ],
)
def test_a_bad_grammar_is_one_line(kind, source, ends, message):
    with refusal(message):
        grammar(LETTERS, kind, source, ends=ends)


PRINTABLE = [*range(33, 127), *range(161, 173), *range(174, 256)]
OTHERS = iter(range(256, 512))
BYTES = tokenizer_of(
    [chr(byte if byte in PRINTABLE else next(OTHERS)) for byte in range(256)], "<end>"
)


def serve(pair, **options):
    method = make_method(pair, draft_length=2, sampling=make_warp({"temperature": 0}))
    return Service(pair, method, **options)


def ask(service, text, **options):
    """Returns the text and the finish of a request."""
    ((_, finish, written),) = Caller(service, [text], 12, **options).wait()
    return written, finish


def test_requests_bring_grammars_and_give_them_back():
    """A later request has no grammar; the model counts letters unless a grammar prevents it."""
    pair = dataclasses.replace(
        counting_pair(stumbles_at=ord("e"), max_positions=None), tokenizer=BYTES
    )
    service = serve(pair, rows=2, context=40, has_grammars=True)
    gc.collect()  # drops grammars of earlier tests
    module._TEXTS.after([FREE], [0])
    held = len(module._TEXTS._texts)
    with running(service):
        assert ask(service, "a", grammar=("regex", "bcd[egx]{3}!")) == ("bcdeee!", "stop")
        schema = {"enum": ["bc", "bd"]}
        assert ask(service, "a", grammar=("json_schema", schema)) == ('"bc"', "stop")
        long = dict(grammar=("regex", "bc"), min_tokens=6)
        assert ask(service, "a", **long) == ("bc", "stop"), "nothing else is allowed"
        with refusal("a text cannot follow its grammar: parser error: Too many items", Unmet):
            ask(service, "a", grammar=("lark", 'start: "b" start'))
        with refusal("regex is not understood"):
            submit(service, ["a"], 4, deliver=print, grammar=("regex", "["))
        with refusal("needs a token that ends its texts"):
            submit(service, ["a"], 4, deliver=print, ignore_eos=True, grammar=("regex", "a"))
        assert ask(service, "a") == ("bcdefghijklm", "length"), (
            "and nobody holds the requests before it"
        )
    gc.collect()
    module._TEXTS.after([FREE], [0])
    assert len(module._TEXTS._texts) == held


@pytest.mark.parametrize("choice", ["required", "auto"])
@pytest.mark.parametrize("streams", extras.slow_but([False, True], False))
def test_required_tool_call_is_written(choice, streams):
    pair = dataclasses.replace(counting_pair(), tokenizer=BYTES)
    service = serve(pair, rows=1, context=60, has_grammars=True)
    schema = {
        "properties": {"x": {"enum": ["bc"]}},
        "required": ["x"],
        "additionalProperties": False,
    }
    tools = [{"type": "function", "function": {"name": "f", "parameters": schema}}]
    document = {
        "messages": [{"role": "user", "content": "a"}],
        "tools": tools,
        "tool_choice": choice,
    }
    asked = read_request(document | {"stream": streams}, is_chat=True, model="m")
    chunks, shown = queue.SimpleQueue(), []
    with running(service):
        answer = submit(
            service, ["a"], 48, deliver=chunks.put, grammar=asked.grammar, is_streamed=streams
        )
        reply = Reply(asked, answer, "m", exact=True)
        while not reply.is_complete:
            shown += filter(None, [reply.chunk(chunks.get(timeout=300))])
    choices = [one["choices"][0] for one in shown] if streams else reply.whole()["choices"]
    message = choices[-1]["delta" if streams else "message"]
    finish = choices[-1]["finish_reason"]
    calls = [call["function"] for call in message.get("tool_calls", ())]
    if choice == "auto":
        assert finish == "length" and not calls and len(choices) > 2 * streams
    else:
        assert (finish, calls) == ("tool_calls", [{"name": "f", "arguments": '{"x": "bc"}'}])
        assert not message.get("content") and len(choices) == 1


@pytest.mark.slow
def test_grammar_lives_as_long_as_its_queue():
    pair = dataclasses.replace(
        counting_pair(stumbles_at=ord("e"), max_positions=None), tokenizer=BYTES
    )
    cold = make_warp({"temperature": 0})
    asked = dict(prompts=["a"], max_new_tokens=12, sampling=cold, grammar=("regex", "bcd[egx]{3}!"))
    work = generate_many(pair, [SamplingRequest(**asked)], sampling=cold, draft_length=2)
    gc.collect()
    (completion,) = work
    assert completion.text == "bcdeee!"


def test_grammars_are_refused_where_unsupported():
    pair = dataclasses.replace(counting_pair(), tokenizer=BYTES)
    service = serve(pair, rows=2, context=40)
    with refusal("grammars are not served here: start the server with --grammars"):
        submit(service, ["a"], 4, deliver=print, grammar=("regex", "a"))
    wide = shard(pair, make_mesh(8, 1))
    with refusal("grammars are served on one device: leave out --grammars"):
        serve(wide, has_grammars=True)
    follow = grammar(BYTES, "regex", "a", ends=[256])
    with refusal("a grammar asks the host for every token, .* decode on one device"):
        generate(wide, ["a"] * 8, 4, sampling=chain(follow))
    with refusal("a log cannot distinguish grammars: leave out log, or the grammar"):
        generate_many(pair, ["a"], 4, sampling=chain(follow), log="never.jsonl")
    with refusal("a grammar needs a pair with a tokenizer.json; got ByteTokenizer"):
        grammar(counting_pair().tokenizer, "regex", "a", ends=[256])

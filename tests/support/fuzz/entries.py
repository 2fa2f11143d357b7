"""The entry points: each decodes a stream of requests, and compares texts with requests alone."""

import contextlib
import dataclasses
import http.client
import json
import pathlib
import tempfile
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from specsamp import (
    Conversation,
    CoupledRule,
    FirstCome,
    ShortestFirst,
    chain,
    generate,
    generate_many,
    stream,
    temperature,
)
from specsamp.decoding.engine import Engine
from specsamp.decoding.method import make_method
from specsamp.serving import batch as batch_module
from specsamp.serving import sizes
from specsamp.serving.answer import Failed
from specsamp.serving.request_warps import make_warp
from specsamp.serving.service import Service
from support.fuzz.streams import Different, asks, replay
from support.services import running, serving
from support.services import submit as submit_request

SLICES = 2000  # more than any stream takes


def check(stream, ask, tokens, finish=None, rounds=None, begins=None):
    """Raises `Different` unless a text equals the text of its request alone.

    Sampled texts depend on adaptive lengths, except under the coupled rule: they are decoded again
    with the recorded lengths.
    """
    setting = stream.setting
    expected = ask.tokens
    if depends_on_lengths(setting, ask):
        if begins is None:
            return
        expected = replay(setting, ask, begins)
        finish = None
        rounds = None
    if tuple(tokens) != expected:
        raise Different(f"{setting.name}: {list(tokens)} instead of {list(expected)}\n  of {ask}")
    if finish not in (None, ask.finish):
        raise Different(f"{setting.name}: ends by {finish} instead of {ask.finish}\n  of {ask}")
    if rounds is not None and ask.rounds is not None and rounds != ask.rounds:
        raise Different(f"{setting.name}: {rounds} rounds instead of {ask.rounds}\n  of {ask}")


def depends_on_lengths(setting, ask):
    """Returns whether the text of a request depends on adaptive draft lengths."""
    return setting.adapts and ask.heat > 0 and not isinstance(setting.rule, CoupledRule)


def of_call(stream, num_samples=1):
    """Returns the pair of one call, its requests and its arguments."""
    found = asks(
        stream,
        lambda number: (stream.seed, 3 * number + 1, 0),
        one_stop=True,
        num_samples=num_samples,
    )
    prompts = found[::num_samples]
    pair, options = stream.setting.decoding
    arguments = dict(
        prompts=[list(ask.prompt) for ask in prompts],
        max_new_tokens=[ask.budget for ask in prompts],
        seed=stream.seed,
        prompt_ids=[ask.address[1] for ask in prompts],
        num_samples=num_samples,
        sampling=chain(temperature(np.array([ask.heat for ask in prompts], np.float32))),
        stop=[
            *found[0].stop_ids,
            *found[0].stop_texts,
            *([] if pair.tokenizer is None else [pair.tokenizer.eos_id]),
        ],
        **options,
    )
    return pair, found, arguments


@contextlib.contextmanager
def recorded_rounds():
    """Yields a mapping from the address of each text decoded inside to the starts of its rounds."""
    begins, create, read = {}, Engine.create.__func__, Engine.text

    def create_keeping(cls, *arguments, **options):
        return create(cls, *arguments, **options | {"keep_rounds": True})

    def read_recorded(engine, state, place, request):
        text = read(engine, state, place, request)
        emitted = slice(len(request.prompt), len(request.prompt) + len(text.tokens))
        address = request.seed, request.prompt_id, request.sample_index
        begins[address] = state.rounds_BS[place, emitted].tolist()
        return text

    Engine.create = classmethod(create_keeping)
    Engine.text = read_recorded
    try:
        yield begins
    finally:
        Engine.create, Engine.text = classmethod(create), read


def compare(stream, found, completions, begins, num_samples=1):
    """Compares the completions of a call, in any order."""
    if len(completions) != len(found):
        raise Different(f"{stream.setting.name}: {len(completions)} completions of {len(found)}")
    for one in completions:
        ask = found[one.prompt_index * num_samples + one.sample_index]
        check(stream, ask, one.tokens, one.finish, one.stats.rounds, begins[ask.address])


def queue(stream):
    """Decodes with `generate_many`."""
    num_samples = 1 + stream.turn % 2
    pair, found, arguments = of_call(stream, num_samples)
    with recorded_rounds() as begins:
        compare(
            stream,
            found,
            list(generate_many(pair, rows=stream.rows, order=order_of(stream), **arguments)),
            begins,
            num_samples,
        )


def log(stream):
    """Decodes with `generate_many` and a log: a run ends, its last line is cut, a second
    continues.
    """
    pair, found, arguments = of_call(stream)
    with tempfile.TemporaryDirectory() as folder, recorded_rounds() as begins:
        path = pathlib.Path(folder, "log.jsonl")
        first = generate_many(pair, rows=stream.rows, log=path, **arguments)
        for _ in range(stream.turn % (len(found) + 1)):
            next(first)
        first.close()
        whole = path.read_bytes() if path.exists() else b""
        path.write_bytes(whole[: len(whole) - stream.turn % 40])
        second = list(generate_many(pair, rows=1 + stream.turn % 3, log=path, **arguments))
        compare(stream, found, second, begins)


def batch(stream):
    """Decodes with `generate`."""
    pair, found, arguments = of_call(stream)
    with recorded_rounds() as begins:
        compare(stream, found, generate(pair, **arguments), begins)


def streamed(stream_):
    """Decodes with `stream`; the pieces of a text join to the whole."""
    pair, found, arguments = of_call(stream_)
    texts, tokens, ends = {}, {}, {}
    for chunk in stream(pair, rounds_per_chunk=1 + stream_.turn % 3, **arguments):
        texts[chunk.prompt_index] = texts.get(chunk.prompt_index, "") + (chunk.text or "")
        tokens[chunk.prompt_index] = tokens.get(chunk.prompt_index, []) + chunk.tokens
        ends[chunk.prompt_index] = chunk.finish
    for index, ask in enumerate(found):
        whole = tokens[index]
        if ask.stop_texts and ask.finish == "stop":
            whole = whole[: len(ask.tokens)]  # a stop text is found a few tokens later
        check(stream_, ask, whole, ends[index])
        if texts[index] != (ask.text or ""):
            raise Different(
                f"{stream_.setting.name}: pieces {texts[index]!r} of {ask.text!r}\n  of {ask}"
            )


def conversation(stream):
    """Decodes with `Conversation`: each request is a turn, and some turns are abandoned."""
    pair, options = stream.setting.decoding
    is_sampled = stream.drawn[0].is_sampled
    alike = tuple(dataclasses.replace(one, is_sampled=is_sampled) for one in stream.drawn)
    stream = dataclasses.replace(stream, drawn=alike)
    found = asks(stream, lambda number: (stream.seed, number, 0), one_stop=True)
    with recorded_rounds() as begins:
        talk = Conversation(
            pair,
            max_tokens=stream.setting.slots,
            seed=stream.seed,
            stop=list(found[0].stop_ids),
            sampling=chain(temperature(found[0].heat)),
            **options,
        )
        for ask in found:
            tokens = []
            for count, chunk in enumerate(
                talk.stream(list(ask.prompt), ask.budget, rounds_per_chunk=2)
            ):
                tokens += chunk.tokens
                if count == ask.drawn.leaves:
                    break
            else:
                check(
                    stream, ask, tokens, chunk.finish, chunk.stats.rounds, begins.get(ask.address)
                )
                continue
            check_beginning(stream, ask, tokens)


def check_beginning(stream, ask, tokens):
    """Compares the tokens of an abandoned request with the beginning of its text."""
    depends = depends_on_lengths(stream.setting, ask)
    if not depends and tuple(tokens) != ask.tokens[: len(tokens)]:
        raise Different(
            f"{stream.setting.name}: begins with {tokens} instead of {list(ask.tokens)}\n  of {ask}"
        )


def order_of(stream):
    """Returns an order; for even turns, one that preempts for any shorter text."""
    if stream.turn % 2:
        return FirstCome()
    return ShortestFirst(predictor=lambda request: request.max_new_tokens, aging=0, worth=0)


def make_service(setting, rows, order=FirstCome()):
    pair, options = setting.decoding
    method = make_method(pair, sampling=make_warp({}), **options)
    return Service(
        pair,
        method,
        rows=rows,
        context=setting.context,
        max_waiting=64,
        rounds_per_slice=2,
        in_background=False,
        order=order,
    )


@contextlib.contextmanager
def small_sizes():
    """Makes a batch grow from 128 slots, and shrink soon."""
    smallest = batch_module.SMALLEST_SLOTS
    patience = sizes.PATIENCE
    batch_module.SMALLEST_SLOTS, sizes.PATIENCE = 128, 2
    try:
        yield
    finally:
        batch_module.SMALLEST_SLOTS = smallest
        sizes.PATIENCE = patience


def service(stream):
    """Decodes with `Service`, a slice at a time; requests arrive and are cancelled in between."""
    with small_sizes():
        run_service(stream, make_service(stream.setting, stream.rows, order_of(stream)))


def run_service(stream, service):
    setting = stream.setting
    has_lengths = has_own_lengths(setting)
    found = asks(
        stream, lambda number: (stream.seed + number, 0, number % 2), own_lengths=has_lengths
    )
    chunks = {number: [] for number in range(len(found))}
    answers = {}
    with recorded_rounds() as begins:
        for turn in range(SLICES):
            for number, ask in enumerate(found):
                if (
                    ask.drawn.arrives == turn
                    or number not in answers
                    and not service.unfinished
                    and turn > 8
                ):
                    if number not in answers:
                        answers[number] = submit(service, ask, chunks[number].append)
                is_due = (
                    ask.drawn.leaves is not None and turn == ask.drawn.arrives + ask.drawn.leaves
                )
                if number in answers and is_due:
                    answers[number].cancel()
            if service.unfinished:
                service._wait()
                service._step()
            elif len(answers) == len(found):
                break
        else:
            raise Different(f"{setting.name}: not all requests have ended after {SLICES} slices")
    for number, ask in enumerate(found):
        got = [
            chunk
            for chunk in chunks[number]
            if getattr(chunk, "sample_index", None) in (None, ask.address[2])
        ]
        failed = next((chunk for chunk in got if isinstance(chunk, Failed)), None)
        if failed is not None:
            raise Different(f"{setting.name}: {failed}\n  of {ask}")
        tokens = sum((chunk.tokens for chunk in got), [])
        if got and got[-1].finish is not None:
            check(stream, ask, tokens, got[-1].finish, got[-1].stats.rounds, begins[ask.address])
        elif answers[number].is_over:
            check_beginning(stream, ask, tokens)
        else:
            raise Different(f"{setting.name}: no end\n  of {ask}")


def has_own_lengths(setting):
    _, options = setting.decoding
    return not setting.adapts and getattr(options["drafter"], "depth", None) is None


def submit(service, ask, deliver):
    seed, _, sample = ask.address
    return submit_request(
        service,
        [list(ask.prompt)],
        ask.budget,
        deliver=deliver,
        sampling=make_warp({"temperature": ask.heat}),
        seed=seed,
        stop=ask.stop_texts,
        stop_ids=ask.stop_ids,
        draft_length=ask.draft_length,
        num_samples=sample + 1,
        is_streamed=ask.drawn.tokens % 2 == 0,
        client=str(ask.drawn.tokens % 3),
        priority=ask.drawn.tokens % 2,
    )


def endpoint(stream):
    """Decodes with the HTTP endpoint, all requests at once."""
    with small_sizes():
        service = make_service(stream.setting, stream.rows)
    found = asks(stream, lambda number: (stream.seed + number, 0, 0), own_lengths=True)
    with running(service), serving(service) as server, ThreadPoolExecutor(len(found)) as threads:
        replies = list(threads.map(lambda ask: post_completion(server, ask), found))
    for ask, (text, finish) in zip(found, replies):
        if (text, finish) != (ask.text, ask.finish):
            raise Different(f"{text!r}, {finish} instead of {ask.text!r}, {ask.finish}\n  of {ask}")


def post_completion(server, ask):
    """Returns text and finish; the pieces of a streamed text are joined."""
    body = dict(
        model="bytes",
        prompt=list(ask.prompt),
        max_tokens=ask.budget,
        temperature=ask.heat,
        seed=ask.address[0],
        stop=list(ask.stop_texts),
        stop_token_ids=list(ask.stop_ids),
        stream=ask.drawn.tokens % 2 == 0,
    )
    if ask.draft_length is not None:
        body["draft_length"] = ask.draft_length
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=120)
    with contextlib.closing(connection):
        connection.request(
            "POST", "/v1/completions", json.dumps(body), {"content-type": "application/json"}
        )
        reply = connection.getresponse().read().decode()
    if not body["stream"]:
        (choice,) = json.loads(reply)["choices"]
        return choice["text"], choice["finish_reason"]
    lines = [
        line.removeprefix("data: ") for line in reply.splitlines() if line.startswith("data: {")
    ]
    choices = [choice for line in lines for choice in json.loads(line)["choices"]]
    return "".join(choice["text"] for choice in choices), choices[-1]["finish_reason"]


ENTRIES = {
    "queue": queue,
    "log": log,
    "batch": batch,
    "stream": streamed,
    "conversation": conversation,
    "service": service,
    "endpoint": endpoint,
}

"""Streams of requests, drawn by Hypothesis, and the text of each request alone."""

import dataclasses
import functools

import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np

from specsamp import CoupledRule, NoDrafter, chain, temperature
from specsamp.decoding.engine import Engine
from specsamp.decoding.method import make_method
from specsamp.decoding.request import make_requests


class Different(AssertionError):
    """A text differs from the text of its request alone."""


BORDERS = (1, 2, 3, 15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 128, 129)


@dataclasses.dataclass(frozen=True)
class Drawn:
    """The fields of a request that Hypothesis draws.

    Attributes:
      parent: the earlier request that its prompt begins like, counted back; 0: none.
      shared: tokens of the parent's prompt and text, at most.
      fresh: further tokens, at most as many as fit, from the random numbers of ``tokens``.
      stop: the place of a token of its text that ends it, or of a character if ``stops_at_text``;
        None: the budget does.
      arrives: slices before it arrives.
      leaves: slices after which it is cancelled; None: never.
    """

    parent: int
    shared: int
    fresh: int
    tokens: int
    budget: int
    is_sampled: bool
    stop: int | None
    stops_at_text: bool
    sample: int
    draft_length: int | None
    arrives: int
    leaves: int | None


def lengths(most):
    """Returns lengths from 1, often next to a border, and often nearly the largest."""
    borders = [length for length in BORDERS if length <= most]
    return st.one_of(
        st.integers(1, most), st.sampled_from(borders), st.integers(max(1, most - 4), most)
    )


def requests(setting):
    return st.builds(
        Drawn,
        parent=st.integers(0, 4),
        shared=st.one_of(
            lengths(setting.most_prompt),
            st.integers(setting.most_prompt // 4, setting.most_prompt // 2),
        ),
        fresh=lengths(setting.most_prompt),
        tokens=st.integers(0, 2**16),
        budget=lengths(setting.most_budget),
        is_sampled=st.booleans(),
        stop=st.one_of(st.none(), st.none(), st.integers(0, setting.most_budget)),
        stops_at_text=st.booleans(),
        sample=st.integers(0, 1),
        draft_length=st.one_of(st.none(), st.integers(0, 3)),
        arrives=st.one_of(st.integers(0, 2), st.integers(0, 24)),
        leaves=st.one_of(st.none(), st.none(), st.integers(0, 4)),
    )


@dataclasses.dataclass(frozen=True)
class Stream:
    """Requests of one setting.

    Attributes:
      seed: of the call; requests of a service have seeds of their own.
      rows: number of rows of the batch.
      turn: a number that sets the choices of an entry point, for example the cut of a log.
    """

    setting: object
    seed: int
    rows: int
    turn: int
    drawn: tuple[Drawn, ...]


def streams(settings):
    """Returns streams of all settings; in half of them, texts that begin together end together."""

    def of(setting):
        return st.builds(
            Stream,
            setting=st.just(setting),
            seed=st.integers(0, 2**40),
            rows=st.sampled_from((1, 3)),
            turn=st.integers(0, 2**16),
            drawn=st.tuples(st.booleans(), st.lists(requests(setting), min_size=1, max_size=8)).map(
                _even
            ),
        )

    return st.sampled_from(settings).flatmap(of)


def _even(drawn):
    """Returns requests, which have equal budgets and no stops if the first of ``drawn`` is true."""
    is_even, requests = drawn
    if not is_even:
        return tuple(requests)
    return tuple(dataclasses.replace(one, budget=requests[0].budget, stop=None) for one in requests)


@dataclasses.dataclass(frozen=True)
class Ask:
    """A request, and its text alone.

    Attributes:
      address: seed, prompt id and sample.
      tokens, finish: of the text alone, cut at its stop and budget.
      text: of these tokens, before the stop; None without a tokenizer.
      rounds: of this text; None: they depend on other rows.
    """

    drawn: Drawn
    prompt: tuple[int, ...]
    budget: int
    heat: float
    address: tuple[int, int, int]
    draft_length: int | None
    stop_ids: tuple[int, ...]
    stop_texts: tuple[str, ...]
    tokens: tuple[int, ...]
    finish: str
    text: str | None
    rounds: int | None


def asks(stream, address, *, own_lengths=False, one_stop=False, num_samples=1):
    """Returns the requests of a stream with their texts.

    Args:
      address: returns the seed, prompt id and sample of a request by its number.
      own_lengths: whether each request has its own draft length.
      one_stop: whether all requests have the stop token of the first.
      num_samples: of each prompt; every sample is a request.
    """
    setting = stream.setting
    made, common = [], None
    for number, drawn in enumerate(stream.drawn):
        prompt = _prompt(setting, drawn, made)
        heat = 1.0 if drawn.is_sampled else 0.0
        length = drawn.draft_length if own_lengths else None
        for sample in range(num_samples):
            seed, prompt_id, first_sample = address(number)
            place = seed, prompt_id, first_sample + sample
            whole, begins = alone(setting, prompt, heat, place, length)
            if one_stop:
                common = _stops(setting, drawn, whole) if common is None else common
            stops = common if one_stop else _stops(setting, drawn, whole)
            made.append(_ask(setting, drawn, prompt, heat, place, length, stops, whole, begins))
    return made


def _prompt(setting, drawn, made):
    """Returns tokens that begin like an earlier prompt and its text."""
    before = ()
    if 0 < drawn.parent <= len(made):
        parent = made[-drawn.parent]
        before = (*parent.prompt, *parent.tokens)[: min(drawn.shared, setting.most_prompt - 1)]
    count = max(1, min(drawn.fresh, setting.most_prompt - len(before)))
    vocab_size = min(setting.pair.target.vocab_size, 256)
    fresh = np.random.default_rng(drawn.tokens).integers(0, vocab_size, count).tolist()
    return (*before, *fresh)


def _stops(setting, drawn, whole):
    """Returns the stop tokens and stop texts of a request: a part of its text."""
    if drawn.stop is None:
        return (), ()
    tokenizer = setting.pair.tokenizer
    if tokenizer is not None and drawn.stops_at_text:
        text = tokenizer.decode(whole)[drawn.stop :][: 1 + drawn.tokens % 3]
        return (), ((text,) if text and "\N{REPLACEMENT CHARACTER}" not in text else ())
    return (whole[min(drawn.stop, len(whole) - 1)],), ()


def _ask(setting, drawn, prompt, heat, place, length, stops, whole, begins):
    tokenizer = setting.pair.tokenizer
    ends = set(stops[0]) | (set() if tokenizer is None else {tokenizer.eos_id})
    budget = min(drawn.budget, setting.most_budget)
    tokens = whole[:budget]
    stopped = next((at + 1 for at, token in enumerate(tokens) if token in ends), None)
    tokens = tokens[:stopped]
    text = (
        None if tokenizer is None else tokenizer.decode(tokens if stopped is None else tokens[:-1])
    )
    for stop in stops[1]:
        if stop in text:
            text = text[: text.index(stop)]
            stopped = next(
                count
                for count in range(len(tokens) + 1)
                if stop in tokenizer.decode(tokens[:count])
            )
            tokens = tokens[:stopped]
    rounds = None if setting.adapts else sum(begin > 0 for begin in begins[: len(tokens)])
    return Ask(
        drawn=drawn,
        prompt=prompt,
        budget=budget,
        heat=heat,
        address=place,
        draft_length=length,
        stop_ids=stops[0],
        stop_texts=stops[1],
        tokens=tuple(tokens),
        finish="length" if stopped is None else "stop",
        text=text,
        rounds=rounds,
    )


@functools.lru_cache(2**16)
def alone(setting, prompt, heat, address, draft_length):
    """Returns the tokens of the largest budget after a prompt alone, and the starts of its rounds.

    Greedy texts, and all texts under the coupled rule, are also compared with plain decoding.
    """
    tokens, begins = _decode(setting, setting.drafter, prompt, heat, address, draft_length)
    if heat == 0 or isinstance(setting.rule, CoupledRule):
        plain, _ = _decode(setting, NoDrafter(), prompt, heat, address, None)
        if tokens != plain:
            raise Different(f"alone, {setting.name}: {tokens} instead of {plain} after {prompt}")
    return tokens, begins


def _decode(setting, drafter, prompt, heat, address, draft_length):
    engine, request, state = _begin(
        setting, drafter, prompt, setting.most_budget, heat, address, draft_length
    )
    state = engine.run(state)
    (text,) = engine.take(state, [request])
    emitted = slice(len(prompt), len(prompt) + len(text.tokens))
    return tuple(text.tokens), tuple(jax.device_get(state.rounds_BS)[0, emitted].tolist())


def _begin(setting, drafter, prompt, budget, heat, address, draft_length=None):
    """Returns an engine, a request, and the state after prefill of the request alone."""
    engine, method = _engine(
        setting.pair, drafter, setting.rule, setting.slots, setting.most_budget
    )
    seed, prompt_id, sample = address
    method = dataclasses.replace(method, sampling=chain(temperature(heat)))
    (request,) = make_requests(
        setting.pair, method, [list(prompt)], budget, seed=seed, prompt_ids=[prompt_id], stop=[]
    )
    request = dataclasses.replace(request, sample_index=sample, draft_length=draft_length)
    return engine, request, engine.prefill([request], width=setting.most_prompt)


@functools.cache
def _engine(pair, drafter, rule, slots, budget):
    method = make_method(pair, drafter=drafter, rule=rule, sampling=chain(temperature(1.0)))
    (request,) = make_requests(pair, method, [[0]], budget)
    engine = Engine.create(pair, method, [request], slots=2 * slots, keep_rounds=True)
    return dataclasses.replace(
        engine, own_lengths=engine.loop.depth == engine.loop.drafter.K
    ), method


def replay(setting, ask, begins):
    """Returns the tokens of a request alone, with draft lengths as recorded in ``begins``."""
    engine, request, state = _begin(
        setting, setting.drafter, ask.prompt, ask.budget, ask.heat, ask.address
    )
    for begin in begins:
        if begin:
            lengths_B = jnp.full_like(state.request.draft_lengths_B, begin - 1)
            state = dataclasses.replace(
                state, request=dataclasses.replace(state.request, draft_lengths_B=lengths_B)
            )
            state = engine.run(state, 1)
    (text,) = engine.take(state, [request])
    return tuple(text.tokens[: len(begins)])

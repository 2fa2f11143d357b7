"""From a configuration to objects. Beyond this file there is no ConfigDict and no choice by name."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
from ml_collections import ConfigDict

from specsamp.analysis.decoder import Workload
from specsamp.decoding.drafters import ModelDrafter, NgramDrafter, NoDrafter
from specsamp.decoding.generate import decode_window
from specsamp.decoding.pair import Pair
from specsamp.decoding.types import Drafter, Rule
from specsamp.models import config as models
from specsamp.models.transformer import TransformerLM
from specsamp.pretrained.pair import load_pair, load_prompts
from specsamp.sampling.rules import BlockRule, CoupledRule, TokenRule
from specsamp.sampling.warp import Warp, chain, greedy, min_p, temperature, top_k, top_p

PRESETS = {
    preset.__name__: preset
    for preset in (models.chinchilla_70b, models.draft_4b, models.target_38m, models.draft_1m, models.tiny)
}
RULES = {"token": TokenRule, "block": BlockRule, "coupled": CoupledRule}
DRAFTERS = {
    "model": lambda pair, length: ModelDrafter(pair.draft, length, decode_window()),
    "ngram": lambda pair, length: NgramDrafter(K=length),
    "none": lambda pair, length: NoDrafter(),
}


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class Experiment:
    """What a configuration such as configs/random_pair.py describes."""

    pair: Pair
    pair_name: str | None  # None: random parameters
    drafter: Drafter
    rule: Rule
    sampling: Warp
    workload: Workload


def build(config: ConfigDict, prompts: Sequence[str] = ()) -> Experiment:
    """Loads the pair, or makes one with random parameters, and checks every field.

    Args:
      prompts: to decode, for a pair with a tokenizer; default the ones that come with it.

    Raises:
      ValueError: an unknown name or a number out of range; the message says which, and what is known.
      FileNotFoundError: there is no such pair.
    """
    rule = _choose("rule", config.rule, RULES)()
    _choose("drafter", config.drafter, DRAFTERS)  # before models are made
    sampling = make_sampling(config.sampling)
    workload = Workload(**{name: config[name] for name in _WORKLOAD})
    if config.draft_length < 0:
        raise ValueError(f"draft_length must be >= 0; got {config.draft_length}")
    name = config.get("pair")
    if name is None:
        pair = random_pair(make_model(config.target), make_model(config.draft), config.seed)
    else:
        pair = load_pair(name)
        workload = with_prompts(workload, pair, prompts or load_prompts(name))
    drafter = make_drafter(config.drafter, pair, config.draft_length)
    return Experiment(
        pair=pair, pair_name=name, drafter=drafter, rule=rule, sampling=sampling, workload=workload
    )  # fmt: skip


_WORKLOAD = ("batch", "prompt_length", "max_new_tokens", "repeats", "seed")


def with_prompts(workload: Workload, pair: Pair, prompts: Sequence[str]) -> Workload:
    tokens = tuple(tuple(pair.tokenizer.encode(prompt)) for prompt in prompts)
    longest = max(map(len, tokens))
    return dataclasses.replace(workload, prompts=tokens, prompt_length=max(workload.prompt_length, longest))


def make_model(fields: ConfigDict) -> TransformerLM:
    changes = {name: value for name, value in fields.items() if name != "preset" and value is not None}
    return TransformerLM.here(_choose("preset", fields.preset, PRESETS)(**changes))


def make_drafter(name: str, pair: Pair, draft_length: int) -> Drafter:
    make = _choose("drafter", name, DRAFTERS)
    return make(pair, draft_length) if draft_length else NoDrafter()


def make_sampling(fields: ConfigDict) -> Warp:
    """The warp; fields that are off (temperature 0 apart, which is greedy) are left out of it."""
    if fields.temperature == 0:
        return greedy()
    filters = [make(fields[name]) for name, make, off in _FILTERS if fields[name] != off]
    return chain(temperature(fields.temperature), *filters)


_FILTERS = (("top_k", top_k, 0), ("top_p", top_p, 1.0), ("min_p", min_p, 0.0))


def headline(experiment: Experiment) -> str:
    """Three lines on what is about to run."""
    pair, work = experiment.pair, experiment.workload
    count = lambda model: f"{models.human_count(model.config.num_parameters)} parameters"
    device = jax.devices()[0]
    random = (
        "The weights are random: a round takes as long as a trained pair's, but acceptance and speedup mean nothing."
    )
    return (
        f"target {count(pair.target)}, draft {count(pair.draft)}, V = {pair.target.vocab_size}, "
        f"{pair.target.config.dtype}, {device.platform} ({device.device_kind})\n"
        f"{type(experiment.drafter).__name__} K = {experiment.drafter.K}, {type(experiment.rule).__name__}, "
        f"batch {work.batch}, {work.prompt_length} + {work.max_new_tokens} tokens, {work.repeats} repeats\n"
        + (random if experiment.pair_name is None else f"the pair {experiment.pair_name!r}, {len(work.prompts)} prompts")
    )


def random_pair(target: TransformerLM, draft: TransformerLM, seed: int) -> Pair:
    target_key, draft_key = jax.random.split(jax.random.key(seed, impl="threefry2x32"))
    with jax.disable_jit(False):  # nobody debugs how random numbers are made
        params = [jax.jit(model.init)(key) for model, key in ((target, target_key), (draft, draft_key))]
    return Pair(target=target, target_params=params[0], draft=draft, draft_params=params[1])


def _choose(what: str, name: str, known: Mapping[str, Callable]) -> Any:
    if name not in known:
        raise ValueError(f"no {what} {name!r}: choose one of {', '.join(known)}")
    return known[name]

"""What a user may get wrong, found before anything is compiled: every message names the value and the fix."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import numpy as np

from specsamp.decoding.drafters import ModelDrafter, NoDrafter
from specsamp.decoding.pair import Pair
from specsamp.decoding.types import Drafter, Rule

DEFAULT_DRAFT_LENGTH = 4

Prompt = str | Sequence[int]


def integer(name: str, value: Any, least: int, limit: int = 2**31) -> int:
    """``value`` as an int in [least, limit); NumPy integers pass, booleans and fractions do not."""
    try:
        number = operator.index(value)
    except TypeError:
        number = None
    if number is None or isinstance(value, (bool, np.bool_)) or not least <= number < limit:
        raise ValueError(f"{name} must be an integer >= {least} and below {limit}; got {value!r}")
    return number


def integers(name: str, values: Any, least: int, limit: int = 2**31) -> list[int]:
    """Each of ``values``, as `integer` gives it."""
    if isinstance(values, str) or not hasattr(values, "__len__"):
        raise ValueError(f"{name} must be a list; got {values!r}")
    return [integer(f"{name}[{i}]", value, least, limit) for i, value in enumerate(values)]


def choose_rule(rule: Rule) -> Rule:
    if isinstance(rule, type) or not callable(getattr(rule, "verify", None)):
        raise ValueError(f"rule must be a rule such as TokenRule() or BlockRule(); got {rule!r}")
    return rule


def choose_drafter(pair: Pair, draft_length: int | None, drafter: Drafter | None, window: int) -> Drafter:
    """The drafter that a call means: its own, none, or the pair's draft model."""
    if draft_length is not None:
        draft_length = integer('draft_length (0 decodes autoregressively; or "auto")', draft_length, 0)
    if drafter is None:
        if draft_length == 0:
            return NoDrafter()
        if pair.draft is None:
            raise ValueError(
                "the pair has no draft model: give one, or drafter=NgramDrafter(K=4), or draft_length=0 to decode "
                "autoregressively"
            )
        return ModelDrafter(pair.draft, draft_length or DEFAULT_DRAFT_LENGTH, window)
    if isinstance(drafter, type) or not callable(getattr(drafter, "propose", None)):
        raise ValueError(f"drafter must be a drafter such as NgramDrafter(K=4); got {drafter!r}")
    try:
        hash(drafter)
    except TypeError as error:
        raise ValueError("the drafter must be hashable, such as a frozen dataclass without arrays") from error
    K = integer("the drafter's K", drafter.K, 0)
    if draft_length is not None and draft_length > K:
        raise ValueError(f"draft_length {draft_length} exceeds the drafter's K = {K}: make the drafter with a larger K")
    if draft_length not in (None, K):
        raise ValueError(
            f"draft_length {draft_length} differs from the drafter's K = {K}: leave draft_length out, or make the "
            "drafter with that K"
        )
    if isinstance(drafter, ModelDrafter):
        if drafter.model.vocab_size != pair.target.vocab_size:
            raise ValueError(
                f"draft vocabulary {drafter.model.vocab_size} != target vocabulary {pair.target.vocab_size}"
            )
        if pair.draft_params is None:
            raise ValueError("a ModelDrafter needs the pair's draft_params")
        if pair.draft not in (None, drafter.model):
            raise ValueError(
                f"the drafter's model is not the pair's draft, whose parameters it would get: {drafter.model!r} and "
                f"{pair.draft!r}; make the pair with the model that drafts"
            )
    return drafter


def encode(pair: Pair, prompts: Sequence[Prompt]) -> list[list[int]]:
    """Token ids of every prompt."""
    if isinstance(prompts, str) or not hasattr(prompts, "__len__"):
        raise ValueError(f"prompts must be a list of prompts; for one, write [prompt]; got {prompts!r}")
    if len(prompts) == 0:
        raise ValueError("no prompts were given")
    token_lists = []
    for index, prompt in enumerate(prompts):
        if isinstance(prompt, str):
            if pair.tokenizer is None:
                raise ValueError("a text prompt needs a tokenizer in the pair; otherwise give lists of token ids")
            tokens = pair.tokenizer.encode(prompt) if prompt else []
        else:
            if not hasattr(prompt, "__len__"):
                raise ValueError(f"prompt {index} must be a text or a list of token ids; got {prompt!r}")
            tokens = list(prompt)
        if len(tokens) == 0:
            raise ValueError(f"prompt {index} is empty: give at least one token, such as a beginning-of-text token")
        token_lists.append(integers(f"prompt {index}", tokens, 0, pair.target.vocab_size))
    return token_lists


def limits(pair: Pair, drafter: Drafter, lengths: Sequence[int], max_new_tokens: int | Sequence[int]) -> list[int]:
    """The length at which each prompt's budget ends."""
    if hasattr(max_new_tokens, "__len__"):
        budgets = integers("max_new_tokens", max_new_tokens, 1)
        if len(budgets) != len(lengths):
            raise ValueError(f"{len(budgets)} max_new_tokens for {len(lengths)} prompts: give one, or one per prompt")
    else:
        budgets = [integer("max_new_tokens", max_new_tokens, 1)] * len(lengths)
    models = {"target": pair.target}
    if isinstance(drafter, ModelDrafter):
        models["draft"] = drafter.model
    for name, model in models.items():
        for index, (length, budget) in enumerate(zip(lengths, budgets)):
            if model.max_positions is not None and length + budget > model.max_positions:
                raise ValueError(
                    f"prompt {index} has {length} tokens and a budget of {budget}, together {length + budget}, more "
                    f"than the {name}'s {model.max_positions} positions: shorten the prompt or lower max_new_tokens"
                )
    return [integer("prompt and max_new_tokens together", n + m, 1) for n, m in zip(lengths, budgets)]


def stop_ids(pair: Pair, stop: Sequence[int | str] | None) -> frozenset[int]:
    """The ids of the stop tokens; the pair's by default, or the tokenizer's end of text."""
    if stop is None and pair.stop is not None:
        return frozenset(integers("the pair's stop", pair.stop, 0, pair.target.vocab_size))
    if stop is None:
        eos = None if pair.tokenizer is None else pair.tokenizer.eos_id
        return frozenset() if eos is None else frozenset([eos])
    if isinstance(stop, str) or not hasattr(stop, "__len__"):
        raise ValueError(f"stop must be a list; for one, write [stop]; got {stop!r}")
    ids = []
    for entry in stop:
        if isinstance(entry, str):
            if pair.tokenizer is None:
                raise ValueError(f"the stop text {entry!r} needs a tokenizer in the pair; give token ids")
            token = pair.tokenizer.token_id(entry)
            if token is None:
                raise ValueError(f"the stop text {entry!r} is not one token; stop on a single token instead")
            entry = token
        ids.append(integer("a stop id", entry, 0, pair.target.vocab_size))
    return frozenset(ids)

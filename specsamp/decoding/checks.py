"""Checks what a user may get wrong, before anything is compiled: every message names the value and the fix."""

from __future__ import annotations

import functools
import math
import os
from collections.abc import Mapping, Sequence, Set

import jax

from specsamp import validate
from specsamp.decoding.adaptive import Adaptive
from specsamp.decoding.drafter import Drafter, with_length
from specsamp.decoding.drafters import FeatureDrafter, ModelDrafter, NoDrafter
from specsamp.decoding.loop import Loop, decode_window
from specsamp.decoding.method import Method
from specsamp.decoding.pair import Pair
from specsamp.decoding.stops import Stops
from specsamp.models.interface import LanguageModel
from specsamp.sampling.rules import Rule
from specsamp.sampling.warp import Warp, greedy

DEFAULT_DRAFT_LENGTH = 4
MAX_DRAFT_LENGTH = 1024  # every step of a draft is traced or looped over, and scoring holds its logits

TOKEN_BYTES = 9  # per slot of a row: the token, whether it was drafted, its log-probability

Prompt = str | Sequence[int] | Sequence[Mapping[str, str]]  # a text, token ids, or the messages of a conversation


def make_method(
    pair: Pair,
    *,
    draft_length: int | Adaptive | None,
    drafter: Drafter | None,
    rule: Rule,
    sampling: Warp | None,
    draft_sampling: Warp | None,
    require_exact: bool = False,
) -> Method:
    """Returns the method that a call of `generate` means; arguments as there.

    Raises:
      ValueError: the drafter or the rule is none, or lossy where that was ruled out, or the pair has not what the drafter
        needs.
    """
    if not isinstance(pair, Pair):
        raise ValueError(f"pair must be a Pair, such as load_pair('python'); got {pair!r}")
    if isinstance(rule, type) or not callable(getattr(rule, "verify", None)):
        raise ValueError(f"rule must be a rule such as TokenRule() or BlockRule(); got {rule!r}")
    if not callable(getattr(rule, "sample", None)):
        raise ValueError(f"the rule has no sample(): it must say how drafted tokens are drawn; got {rule!r}")
    if not isinstance(getattr(rule, "metered", None), bool):
        raise ValueError(
            f"the rule must set metered: True if its verdicts have a meter, else False (most rules); got {rule!r}"
        )
    adaptive = draft_length if isinstance(draft_length, Adaptive) else None
    drafter = choose_drafter(pair, draft_length if adaptive is None else adaptive.K, drafter)
    if adaptive is not None:
        check_lengths(drafter, adaptive.lengths)
    if require_exact:
        check_exact(rule, drafter)
    return Method(
        drafter=drafter,
        rule=rule,
        sampling=greedy() if sampling is None else sampling,
        draft_sampling=draft_sampling,
        adaptive=adaptive,
    )


def check_exact(rule: Rule, drafter: Drafter | None = None) -> None:
    """Raises ValueError if a rule or a drafter is lossy, for those who demand exactness."""
    for part in (rule, drafter):
        if part is not None and not part.exact:
            raise ValueError(
                f"exactness is required, but {part!r} is lossy: take TokenRule() or BlockRule() and a lossless drafter, "
                "or leave require_exact out"
            )


def check_lengths(drafter: Drafter, lengths: Sequence[int]) -> None:
    """Raises ValueError unless a drafter can draft each of some numbers of tokens."""
    for K in lengths:
        try:
            is_able = with_length(drafter, K).K == K
        except (TypeError, ValueError):
            is_able = False
        if not is_able:
            raise ValueError(
                f"{type(drafter).__name__} cannot draft {K} tokens: make K a field of a frozen dataclass, "
                "override DrafterHooks.of_length, or give one draft length"
            )


def choose_drafter(pair: Pair, draft_length: int | None, drafter: Drafter | None) -> Drafter:
    """Returns the drafter that a call means: its own, none, or the pair's draft model."""
    if draft_length == "auto":
        raise ValueError(
            'draft_length="auto" is not taken any more: call specsamp.analysis.draft_length.choose_draft_length(pair, '
            "prompts), which measures and says why, and pass its answer"
        )
    if draft_length is not None:
        draft_length = validate.integer("draft_length (0 decodes autoregressively)", draft_length, 0)
    if drafter is None:
        if draft_length == 0:
            return NoDrafter()
        most = None if pair.head is None else pair.head.config.max_tokens
        drafter = default_drafter(pair, draft_length or min(DEFAULT_DRAFT_LENGTH, most or DEFAULT_DRAFT_LENGTH))
    if not isinstance(drafter, Drafter):
        raise ValueError(f"drafter must be derived from specsamp.Drafter, such as NgramDrafter(K=4); got {drafter!r}")
    try:
        hash(drafter)
    except TypeError as error:
        raise ValueError("the drafter must be hashable, such as a frozen dataclass without arrays") from error
    K = validate.integer("the drafter's K", drafter.K, 0)
    if draft_length is not None and draft_length > K:
        raise ValueError(f"draft_length {draft_length} exceeds the drafter's K = {K}: make the drafter with a larger K")
    if draft_length not in (None, K):
        raise ValueError(
            f"draft_length {draft_length} differs from the drafter's K = {K}: leave draft_length out, or make the "
            "drafter with that K"
        )
    for name, positions in (("target", pair.target.max_positions), ("draft", drafter.max_positions)):
        if positions is not None and K >= positions:
            raise ValueError(f"K = {K} does not fit the {name}'s {positions} positions: draft fewer tokens per round")
    if K > MAX_DRAFT_LENGTH:
        raise ValueError(f"K = {K} is more than {MAX_DRAFT_LENGTH}: draft fewer tokens per round")
    drafter.check(pair.target, pair.draft, pair.draft_params)
    return drafter


def default_drafter(pair: Pair, K: int) -> Drafter:
    """Returns the drafter of the pair's draft model, or of its head, for the platform at hand."""
    if pair.head is not None:
        return FeatureDrafter(pair.target, pair.head, K, decode_window())
    if pair.draft is None:
        raise ValueError(
            "the pair has no draft model: give one, or drafter=NgramDrafter(K=4), or draft_length=0 to decode "
            "autoregressively"
        )
    return ModelDrafter(pair.draft, K, decode_window())


def encode(pair: Pair, prompts: Sequence[Prompt]) -> list[list[int]]:
    """Returns the token ids of every prompt."""
    if isinstance(prompts, (str, bytes, Mapping, Set)) or not hasattr(prompts, "__len__"):
        raise ValueError(f"prompts must be a list of prompts; for one, write [prompt]; got {prompts!r}")
    if len(prompts) == 0:
        raise ValueError("no prompts were given")
    token_lists = []
    for index, prompt in enumerate(prompts):
        if isinstance(prompt, str):
            if pair.tokenizer is None:
                raise ValueError("a text prompt needs a tokenizer in the pair; otherwise give lists of token ids")
            try:
                prompt.encode()
            except UnicodeEncodeError as error:
                raise ValueError(f"prompt {index} is no valid Unicode: {error}") from error
            tokens = pair.tokenizer.encode(prompt) if prompt else []
        else:
            if isinstance(prompt, (bytes, bytearray)):
                raise ValueError(f"prompt {index} is bytes: give a text (bytes.decode()) or a list of token ids")
            if isinstance(prompt, (Mapping, Set)) or not hasattr(prompt, "__len__"):
                raise ValueError(
                    f"prompt {index} must be a text, a list of token ids or a list of messages; got {prompt!r}"
                )
            is_conversation = len(prompt) > 0 and isinstance(prompt[0], Mapping)
            if is_conversation and pair.tokenizer is None:
                raise ValueError("a conversation needs a tokenizer in the pair; otherwise give lists of token ids")
            tokens = pair.tokenizer.encode_chat(prompt) if is_conversation else list(prompt)
        if len(tokens) == 0:
            raise ValueError(f"prompt {index} is empty: give at least one token, such as a beginning-of-text token")
        token_lists.append(validate.integers(f"prompt {index}", tokens, 0, pair.target.vocab_size))
    return token_lists


def limits(pair: Pair, drafter: Drafter, lengths: Sequence[int], max_new_tokens: int | Sequence[int]) -> list[int]:
    """Returns the length at which each prompt's budget ends."""
    if hasattr(max_new_tokens, "__len__") and not isinstance(max_new_tokens, str):
        budgets = validate.integers("max_new_tokens", max_new_tokens, 1)
        if len(budgets) != len(lengths):
            raise ValueError(f"{len(budgets)} max_new_tokens for {len(lengths)} prompts: give one, or one per prompt")
    else:
        budgets = [validate.integer("max_new_tokens", max_new_tokens, 1)] * len(lengths)
    for name, positions in (("target", pair.target.max_positions), ("draft", drafter.max_positions)):
        for index, (length, budget) in enumerate(zip(lengths, budgets)):
            if positions is not None and length + budget > positions:
                raise ValueError(
                    f"prompt {index} has {length} tokens and a budget of {budget}, together {length + budget}, more "
                    f"than the {name}'s {positions} positions: shorten the prompt or lower max_new_tokens"
                )
    return [validate.integer("prompt and max_new_tokens together", n + m, 1) for n, m in zip(lengths, budgets)]


def memory(loop: Loop, *, rows: int, slots: int) -> None:
    """Refuses more rows than memory can hold the caches of.

    Raises:
      ValueError: with both sizes, before anything is allocated.
    """
    needed = _cache_bytes(loop.target, loop.drafter, rows, slots) + rows * slots * TOKEN_BYTES
    available = _memory_of_devices()
    if available is not None and needed > available:
        raise ValueError(
            f"{rows} rows of {slots} slots need {needed / 1e9:.1f} GB for caches and tokens, more than the "
            f"{available / 1e9:.1f} GB there are: ask for fewer prompts or samples at a time, or fewer tokens"
        )


@functools.lru_cache(64)  # large models take tens of milliseconds to trace
def _cache_bytes(target: LanguageModel, drafter: Drafter, rows: int, slots: int) -> int:
    shapes = jax.eval_shape(lambda: (target.init_cache(rows, slots), drafter.init(rows, slots)))
    return sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in jax.tree.leaves(shapes))


def _memory_of_devices() -> int | None:
    """Returns the bytes of all devices together, or of the host if they are its CPUs; None: unknown."""
    devices = jax.devices()
    if devices[0].platform == "cpu":
        try:
            return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") * jax.process_count()
        except (ValueError, OSError, AttributeError):
            return None
    limit = (jax.local_devices()[0].memory_stats() or {}).get("bytes_limit")
    return None if limit is None else limit * len(devices)


def stops(pair: Pair, stop: Sequence[int | str] | None) -> Stops:
    """Returns what ends texts; the pair's stop tokens by default, or the tokenizer's end of text.

    A string ends a text wherever it is written, in whatever tokens. One that is never written, such as the name of a
    special token, stands for the token.
    """
    if stop is None and pair.stop is not None:
        return Stops(frozenset(validate.integers("the pair's stop", pair.stop, 0, pair.target.vocab_size)))
    if stop is None:
        eos = None if pair.tokenizer is None else pair.tokenizer.eos_id
        return Stops() if eos is None else Stops(frozenset([eos]))
    if isinstance(stop, str) or not hasattr(stop, "__len__"):
        raise ValueError(f"stop must be a list; for one, write [stop]; got {stop!r}")
    ids, texts = [], []
    for entry in stop:
        if not isinstance(entry, str):
            ids.append(validate.integer("a stop id", entry, 0, pair.target.vocab_size))
            continue
        if pair.tokenizer is None:
            raise ValueError(f"the stop text {entry!r} needs a tokenizer in the pair; give token ids")
        if not entry:
            raise ValueError("a stop text is empty: it would end every text before it began; leave it out")
        token = pair.tokenizer.token_id(entry)
        written = "" if token is None else pair.tokenizer.decode([token])
        if token is None or entry in written:
            texts.append(entry)
        if token is not None and (entry not in written or entry == written):  # it ends the row without a delay
            ids.append(validate.integer("a stop id", token, 0, pair.target.vocab_size))
    return Stops(frozenset(ids), tuple(texts))

"""Drafters by the word that a configuration names them with."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from ml_collections import ConfigDict

from launch.lib.config import choose
from specsamp.decoding.adaptive import Adaptive, Confidence, Entropy
from specsamp.decoding.checks import check_lengths, integer
from specsamp.decoding.drafter import Drafter
from specsamp.decoding.drafters import (
    BeamDrafter,
    ChoosingDrafter,
    EarlyExitDrafter,
    FeatureDrafter,
    ModelDrafter,
    NgramDrafter,
    NoDrafter,
    VotingDrafter,
)
from specsamp.decoding.loop import decode_window
from specsamp.models.heads import FeatureHead
from specsamp.models.interface import LanguageModel


@dataclasses.dataclass(frozen=True, kw_only=True)
class Word:
    """Meaning of a word: commands ask it, and do not compare words.

    Attributes:
      make: returns the drafter, of the configuration, the target, the pair's draft model or head, and K.
      draft: what the pair must hold beside its target: a "model", a "head", or nothing.
      name: returns what results call the drafter; None: the word.
      drafts: False: it decodes plainly, whatever K is.
      planned: forecasts from shapes know it.
      compiled: compile reports know it.
      inside: it drafts with the target's first layers, ``exit_layer`` of them.
    """

    make: Callable[[ConfigDict, LanguageModel, LanguageModel | FeatureHead | None, int], Drafter]
    draft: str | None = None
    name: Callable[[ConfigDict], str] | None = None
    drafts: bool = True
    planned: bool = False
    compiled: bool = False
    inside: bool = False


def _beam(config: ConfigDict, target: LanguageModel, draft: LanguageModel | FeatureHead | None, K: int) -> Drafter:
    return BeamDrafter(draft, K, decode_window(), beams=integer("beams", config.beams, 1))


def _head(config: ConfigDict, target: LanguageModel, draft: LanguageModel | FeatureHead | None, K: int) -> Drafter:
    if not isinstance(draft, FeatureHead):
        raise ValueError("drafter = 'head', but the pair has none: --config=configs/hf.py:TARGET,HEAD reads one")
    return FeatureDrafter(target, draft, K, decode_window())


def lookup_and_model(draft: LanguageModel, K: int) -> tuple[Drafter, ...]:
    """Returns prompt lookup, which costs nothing, and the draft model: the drafters that vote, or are chosen from."""
    return NgramDrafter(K=K), ModelDrafter(draft, K, decode_window())


def _exit_name(config: ConfigDict) -> str:
    return f"early_exit {integer('exit_layer', config.exit_layer, 1)}"


DRAFTERS = {
    "model": Word(
        make=lambda config, target, draft, K: ModelDrafter(draft, K, decode_window()),
        draft="model",
        planned=True,
        compiled=True,
    ),
    "beam": Word(make=_beam, draft="model", name=lambda config: f"beam {config.beams}"),
    "head": Word(make=_head, draft="head", compiled=True),
    "early_exit": Word(
        make=lambda config, target, draft, K: EarlyExitDrafter(target, config.exit_layer, K, decode_window()),
        name=_exit_name,
        planned=True,
        compiled=True,
        inside=True,
    ),
    "ngram": Word(make=lambda config, target, draft, K: NgramDrafter(K=K)),
    "chosen": Word(make=lambda config, target, draft, K: ChoosingDrafter(lookup_and_model(draft, K)), draft="model"),
    "voting": Word(make=lambda config, target, draft, K: VotingDrafter(lookup_and_model(draft, K)), draft="model"),
    "none": Word(make=lambda config, target, draft, K: NoDrafter(), drafts=False),
}


def word_of(config: ConfigDict) -> Word:
    """Returns what ``config.drafter`` means; raises ValueError for an unknown word."""
    return choose("drafter", config.drafter, DRAFTERS)


def make_drafter(
    config: ConfigDict,
    target: LanguageModel,
    draft: LanguageModel | FeatureHead | None,
    draft_length: int | None = None,
) -> Drafter:
    """Returns the drafter that ``config`` names, or none for K = 0.

    Args:
      draft_length: K; None: the configuration's.

    Raises:
      ValueError: an unknown word, or a field that does not fit the target.
    """
    word = word_of(config)
    draft_length = config.draft_length if draft_length is None else draft_length
    return word.make(config, target, draft, draft_length) if draft_length else NoDrafter()


STOPS = {"none": lambda least: None, "entropy": Entropy, "confidence": Confidence}


def make_adaptive(config: ConfigDict, drafter: Drafter) -> Adaptive | None:
    """Returns the draft length that ``config.adaptive`` describes for a drafter; None: it is always the drafter's K.

    Raises:
      ValueError: an unknown word, a number out of range, or lengths that the drafter does not have.
    """
    fields = config.get("adaptive")
    if fields is None or drafter.K == 0:
        return None
    stop = choose("adaptive.stop", fields.stop, STOPS)(fields.least)
    if stop is None and not fields.lengths:
        return None
    adaptive = Adaptive(
        lengths=fields.lengths or (drafter.K,),
        costs_ms=fields.costs_ms or None,
        stop=stop,
        usual=fields.usual,
        acceptance=fields.acceptance,
    )
    if adaptive.most != drafter.K:
        raise ValueError(f"adaptive.lengths end with {adaptive.most}, but draft_length is {drafter.K}: make them equal")
    check_lengths(drafter, adaptive.lengths)
    return adaptive


def drafter_name(config: ConfigDict) -> str:
    """Returns what results call the drafter: its word, and the layer that it leaves the target after."""
    word = word_of(config)
    return config.drafter if word.name is None else word.name(config)

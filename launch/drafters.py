"""Drafters by the word that a configuration names them with."""

from __future__ import annotations

from ml_collections import ConfigDict

from shapes import choose
from specsamp.decoding.checks import integer
from specsamp.decoding.drafter import Drafter
from specsamp.decoding.drafters import EarlyExitDrafter, FeatureDrafter, ModelDrafter, NgramDrafter, NoDrafter
from specsamp.decoding.loop import decode_window
from specsamp.models.heads import FeatureHead
from specsamp.models.interface import LanguageModel

DRAFTERS = {
    "model": lambda config, target, draft, K: ModelDrafter(draft, K, decode_window()),
    "head": lambda config, target, draft, K: FeatureDrafter(target, _require_head(draft), K, decode_window()),
    "early_exit": lambda config, target, draft, K: EarlyExitDrafter(target, config.exit_layer, K, decode_window()),
    "ngram": lambda config, target, draft, K: NgramDrafter(K=K),
    "none": lambda config, target, draft, K: NoDrafter(),
}


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
    make = choose("drafter", config.drafter, DRAFTERS)
    draft_length = config.draft_length if draft_length is None else draft_length
    return make(config, target, draft, draft_length) if draft_length else NoDrafter()


def _require_head(draft: LanguageModel | FeatureHead | None) -> FeatureHead:
    if not isinstance(draft, FeatureHead):
        raise ValueError("drafter = 'head', but the pair has none: --config=configs/hf.py:TARGET,HEAD reads one")
    return draft


def drafter_name(config: ConfigDict) -> str:
    """Returns what results call the drafter: its word, and the layer that it leaves the target after."""
    choose("drafter", config.drafter, DRAFTERS)
    if config.drafter == "early_exit":
        return f"early_exit {integer('exit_layer', config.exit_layer, 1)}"
    return config.drafter

"""Exact speculative sampling for large language models in JAX.

from specsamp import Pair, generate, chain, temperature, top_p

A name is imported when it is first used, so that a program pays only for what it needs.
"""

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:  # the same names for editors and type checkers; a test compares the two lists
    from specsamp.checkpoints.pair import load_pair
    from specsamp.compilation_cache import use_compilation_cache
    from specsamp.decoding.adaptive import Adaptive, Confidence, Entropy, Stop
    from specsamp.decoding.drafter import Drafter
    from specsamp.decoding.drafters import (
        ChoosingDrafter,
        EarlyExitDrafter,
        EarlyExitTree,
        FeatureDrafter,
        FeatureTree,
        GrowingFeatureTree,
        GrowingModelTree,
        Growth,
        ModelDrafter,
        ModelTree,
        NgramDrafter,
        NgramTree,
        NoDrafter,
        TranslatingDrafter,
    )
    from specsamp.decoding.generate import generate, stream
    from specsamp.decoding.loop import Loop
    from specsamp.decoding.method import Method
    from specsamp.decoding.pair import Pair
    from specsamp.decoding.results import Chunk, Completion, RowStats
    from specsamp.decoding.trees import TreeShape
    from specsamp.models.config import TransformerConfig
    from specsamp.models.interface import LanguageModel, Output
    from specsamp.models.transformer import TransformerLM
    from specsamp.sampling.coupled import CoupledRule
    from specsamp.sampling.lossy import EARS, Bounded, Lenience, Typical
    from specsamp.sampling.penalties import ban, bias, penalties
    from specsamp.sampling.rejection import BlockRule, TokenRule
    from specsamp.sampling.rules import Draft, Verdict
    from specsamp.sampling.trees import KSeqRule, RecursiveRule, TraversalRule
    from specsamp.sampling.warp import chain, greedy, min_p, temperature, top_k, top_p
    from specsamp.serving.generate_many import generate_many
    from specsamp.serving.log import CompletionLog

_NAMES = {
    "specsamp.checkpoints.pair": ("load_pair",),
    "specsamp.compilation_cache": ("use_compilation_cache",),
    "specsamp.decoding.adaptive": ("Adaptive", "Confidence", "Entropy", "Stop"),
    "specsamp.decoding.drafter": ("Drafter",),
    "specsamp.decoding.drafters": (
        "ChoosingDrafter",
        "EarlyExitDrafter",
        "EarlyExitTree",
        "FeatureDrafter",
        "FeatureTree",
        "GrowingFeatureTree",
        "GrowingModelTree",
        "Growth",
        "ModelDrafter",
        "ModelTree",
        "NgramDrafter",
        "NgramTree",
        "NoDrafter",
        "TranslatingDrafter",
    ),
    "specsamp.decoding.generate": ("generate", "stream"),
    "specsamp.decoding.loop": ("Loop",),
    "specsamp.decoding.method": ("Method",),
    "specsamp.decoding.pair": ("Pair",),
    "specsamp.decoding.results": ("Chunk", "Completion", "RowStats"),
    "specsamp.decoding.trees": ("TreeShape",),
    "specsamp.models.config": ("TransformerConfig",),
    "specsamp.models.interface": ("LanguageModel", "Output"),
    "specsamp.models.transformer": ("TransformerLM",),
    "specsamp.sampling.coupled": ("CoupledRule",),
    "specsamp.sampling.lossy": ("EARS", "Bounded", "Lenience", "Typical"),
    "specsamp.sampling.penalties": ("ban", "bias", "penalties"),
    "specsamp.sampling.rejection": ("BlockRule", "TokenRule"),
    "specsamp.sampling.rules": ("Draft", "Verdict"),
    "specsamp.sampling.trees": ("KSeqRule", "RecursiveRule", "TraversalRule"),
    "specsamp.sampling.warp": ("chain", "greedy", "min_p", "temperature", "top_k", "top_p"),
    "specsamp.serving.generate_many": ("generate_many",),
    "specsamp.serving.log": ("CompletionLog",),
}
_HOMES = {name: module for module, names in _NAMES.items() for name in names}
__all__ = sorted(_HOMES)


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'specsamp' has no attribute {name!r}")
    value = globals()[name] = getattr(importlib.import_module(_HOMES[name]), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES})

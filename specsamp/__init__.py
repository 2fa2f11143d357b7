"""Exact speculative sampling for large language models in JAX.

from specsamp import Pair, generate, chain, temperature, top_p
"""

__version__ = "0.1.0"

from specsamp.checkpoints.pair import load_pair
from specsamp.decoding.adaptive import Adaptive, Confidence, Entropy, Stop
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
from specsamp.decoding.generate import generate, stream, use_compilation_cache
from specsamp.decoding.loop import Loop
from specsamp.decoding.method import Method
from specsamp.decoding.pair import Pair
from specsamp.decoding.results import Chunk, Completion, RowStats
from specsamp.models.config import TransformerConfig
from specsamp.models.interface import LanguageModel, Output
from specsamp.models.transformer import TransformerLM
from specsamp.sampling.coupled import CoupledRule
from specsamp.sampling.lossy import EARS, Bounded, JointThreshold, Lenience, Typical
from specsamp.sampling.penalties import ban, bias, penalties
from specsamp.sampling.rejection import BlockRule, TokenRule
from specsamp.sampling.rules import Draft, Verdict
from specsamp.sampling.warp import chain, greedy, min_p, temperature, top_k, top_p
from specsamp.serving.generate_many import generate_many
from specsamp.serving.log import CompletionLog
from specsamp.serving.schedule import FirstCome, ShortestFirst

__all__ = [
    "EARS",
    "Adaptive",
    "BeamDrafter",
    "BlockRule",
    "Bounded",
    "ChoosingDrafter",
    "Chunk",
    "Completion",
    "CompletionLog",
    "Confidence",
    "CoupledRule",
    "Draft",
    "Drafter",
    "EarlyExitDrafter",
    "Entropy",
    "FeatureDrafter",
    "FirstCome",
    "JointThreshold",
    "LanguageModel",
    "Lenience",
    "Loop",
    "Method",
    "ModelDrafter",
    "NgramDrafter",
    "NoDrafter",
    "Output",
    "Pair",
    "RowStats",
    "ShortestFirst",
    "Stop",
    "TokenRule",
    "TransformerConfig",
    "TransformerLM",
    "Typical",
    "Verdict",
    "VotingDrafter",
    "ban",
    "bias",
    "chain",
    "generate",
    "generate_many",
    "greedy",
    "load_pair",
    "min_p",
    "penalties",
    "stream",
    "temperature",
    "top_k",
    "top_p",
    "use_compilation_cache",
]

"""The drafters: none, a draft model or its beam search, a model of another tokenizer, prompt
lookup, early exit, heads, several drafters, token trees.
"""

from specsamp.decoding.drafter import NoDrafter
from specsamp.decoding.drafters.assistant import AssistantDrafter
from specsamp.decoding.drafters.beam import BeamDrafter
from specsamp.decoding.drafters.block_head import BlockDrafter
from specsamp.decoding.drafters.collective import ChoosingDrafter, VotingDrafter
from specsamp.decoding.drafters.early_exit import EarlyExitDrafter
from specsamp.decoding.drafters.feature import FeatureDrafter
from specsamp.decoding.drafters.model import ModelDrafter
from specsamp.decoding.drafters.modules import ModuleDrafter
from specsamp.decoding.drafters.ngram import NgramDrafter
from specsamp.decoding.drafters.parallel import ParallelDrafter
from specsamp.decoding.drafters.translating import TranslatingDrafter
from specsamp.decoding.drafters.tree import (
    BlockTree,
    EarlyExitTree,
    FeatureTree,
    ModelTree,
    NgramTree,
)
from specsamp.decoding.drafters.window import WindowDrafter

"""The drafters: none, a draft model, a model of another tokenizer, prompt lookup, early exit, heads, token trees."""

from specsamp.decoding.drafter import NoDrafter as NoDrafter
from specsamp.decoding.drafters.block_head import BlockDrafter as BlockDrafter
from specsamp.decoding.drafters.early_exit import EarlyExitDrafter as EarlyExitDrafter
from specsamp.decoding.drafters.feature import FeatureDrafter as FeatureDrafter
from specsamp.decoding.drafters.model import ModelDrafter as ModelDrafter
from specsamp.decoding.drafters.ngram import NgramDrafter as NgramDrafter
from specsamp.decoding.drafters.parallel import ParallelDrafter as ParallelDrafter
from specsamp.decoding.drafters.translating import TranslatingDrafter as TranslatingDrafter
from specsamp.decoding.drafters.tree import (
    BlockTree as BlockTree,
)
from specsamp.decoding.drafters.tree import (
    EarlyExitTree as EarlyExitTree,
)
from specsamp.decoding.drafters.tree import (
    FeatureTree as FeatureTree,
)
from specsamp.decoding.drafters.tree import (
    ModelTree as ModelTree,
)
from specsamp.decoding.drafters.tree import (
    NgramTree as NgramTree,
)

"""Ways to propose tokens: nothing, a draft model, the context itself, the target's first layers, a head inside it."""

from specsamp.decoding.drafters.early_exit import EarlyExitDrafter
from specsamp.decoding.drafters.feature import FeatureDrafter
from specsamp.decoding.drafters.model import ModelDrafter
from specsamp.decoding.drafters.ngram import NgramDrafter
from specsamp.decoding.drafters.none import NoDrafter

__all__ = ["EarlyExitDrafter", "FeatureDrafter", "ModelDrafter", "NgramDrafter", "NoDrafter"]

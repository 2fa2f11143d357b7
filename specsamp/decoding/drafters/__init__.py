"""Ways to propose tokens: nothing, a draft model, a head inside the target, the context itself."""

from specsamp.decoding.drafters.feature import FeatureDrafter
from specsamp.decoding.drafters.model import ModelDrafter
from specsamp.decoding.drafters.ngram import NgramDrafter
from specsamp.decoding.drafters.none import NoDrafter

__all__ = ["FeatureDrafter", "ModelDrafter", "NgramDrafter", "NoDrafter"]

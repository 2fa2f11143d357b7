"""Ways to propose tokens: nothing, a draft model, the context itself."""

from specsamp.decoding.drafters.model import ModelDrafter
from specsamp.decoding.drafters.ngram import NgramDrafter
from specsamp.decoding.drafters.none import NoDrafter

__all__ = ["ModelDrafter", "NgramDrafter", "NoDrafter"]

"""Enumerates the outputs of sampling code, which runs unchanged: every random number that it draws becomes a branch.

    law = distribution(lambda: tuple(their_generate(prompt)))      # {tokens: probability}

The code runs once per path, and the probabilities of all paths sum to one. A uniform is an interval that comparisons cut; a
monotone function of it (a log, a quotient) is known by its inverse; the argmax of a race, of Gumbel or exponential noise,
is a categorical choice, and so are ``multinomial`` and ``choice``. If a path raises, its output is the exception.

Draws of torch (if it has been imported), NumPy and ``random`` are replaced while code runs. For JAX, see `interpret`.
"""

from specsamp.evaluation.enumeration.jaxpr import interpret
from specsamp.evaluation.enumeration.law import Law, Raised, distribution, joint, law_distance
from specsamp.evaluation.enumeration.noise import Outside

__all__ = ["Law", "Outside", "Raised", "distribution", "interpret", "joint", "law_distance"]

"""Subjects of audits."""

from specsamp.decoding.method import Method
from specsamp.evaluation.audit.subject import Subject


def subject_of(pair, prompts, *, max_new_tokens=64, seed=0, **decoding):
    """Returns a pair with prompts and a method of these fields."""
    return Subject(pair=pair, prompts=prompts, method=Method(**decoding), max_new_tokens=max_new_tokens, seed=seed)

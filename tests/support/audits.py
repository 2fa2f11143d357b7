"""Subjects of audits."""

from specsamp import Method, ModelDrafter, Pair, chain, temperature, top_p
from specsamp.evaluation.audit.subject import Subject
from support.fakes import TableLM, near, random_table

V, K = 8, 3
TARGET = random_table(10, V)
NEAR, FAR = near(TARGET, 11, 0.4), random_table(12, V)
PROMPTS = [[0], [1, 2, 3], [4, 5, 6, 7, 0, 1, 2], [3, 3], [5, 1], [6, 1, 4, 4, 0]]
RARE = 1e-6  # chance of a false alarm in a single check


def subject_of(pair, prompts, *, max_new_tokens=64, seed=0, **decoding):
    """Returns a pair with prompts and a method of these fields."""
    return Subject(
        pair=pair,
        prompts=prompts,
        method=Method(**decoding),
        max_new_tokens=max_new_tokens,
        seed=seed,
    )


def table_subject(model=TableLM(V), *, target=TARGET, draft=NEAR, **changes):
    """Returns a pair of tables with prompts and a method; ``changes`` go to `subject_of`."""
    draft_model = TableLM(model.vocab_size)
    pair = Pair(target=model, target_params=target, draft=draft_model, draft_params=draft)
    nucleus = chain(temperature(0.8), top_p(0.9))
    settings = {
        "drafter": ModelDrafter(draft_model, K),
        "sampling": nucleus,
        "max_new_tokens": 24,
    } | changes
    return subject_of(pair=pair, prompts=PROMPTS, **settings)

"""Target, drafts and prompts whose distributions are tested through the loop, and the test."""

import jax.numpy as jnp
import numpy as np

from specsamp import Adaptive, Entropy, TokenRule, chain, min_p, temperature, top_p
from support.fakes import (
    decode,
    joint_distribution,
    near,
    p_value,
    random_table,
    samples_for,
    table_loop,
)

V = 3
TARGET = random_table(0, V)
NEAR = near(TARGET, 1, 0.5)
FAR = random_table(2, V)
PROMPTS = [[0], [2, 0, 1, 1]]  # lengths 1 and 4 in one batch
FULL = chain()
NUCLEUS = chain(temperature(0.8), top_p(0.9))
LIKELY = chain(temperature(0.8), min_p(0.1))
# In a few rounds, rows draft one token, two, or pause and try again: all widths, and catching up.
RESTLESS = Adaptive(
    lengths=(0, 2),
    costs_ms=(1, 2.0),
    acceptance=0.6,
    trust=0.1,
    decay=0.5,
    margin=0,
    pause=1,
    stop=Entropy(0.62),
)


def distribution_test(
    loop,
    draft,
    sampling,
    *,
    target=TARGET,
    length=4,
    prompts=PROMPTS,
    samples=None,
    powered=True,
    expected=None,
    **options,
):
    """Returns the p-value of ``length`` tokens of every prompt, by default of as many samples as
    its power requires.

    Rows have budgets of their own. ``target``: weights of the loop's target, in any form.
    ``expected``: the distribution of each prompt; default: of ``sampling``.
    """
    distributions = expected or [
        joint_distribution(TARGET, sampling, prompt, length) for prompt in prompts
    ]
    samples = samples or max(
        samples_for(np.count_nonzero(distribution) - 1, len(distributions))
        for distribution in distributions
    )
    budgets = [length + i % 3 for i in range(len(prompts))]
    run = decode(loop, target, draft, prompts, budgets, sampling, samples=samples, **options)
    emitted = run.emitted(length).reshape(len(prompts), samples, length)
    return p_value(list(zip(emitted, distributions)), powered)


def first_token(drafter, target, draft, *, rule=TokenRule(), parts=0, adaptive=None):
    """Returns the shares of token 0 as first token and of accepted drafts.

    The target and the draft, or each of its ``parts``, give two tokens these probabilities.
    """
    target, draft = (
        jnp.broadcast_to(jnp.log(jnp.asarray(probs)), (3, 3, 3, 2)) for probs in (target, draft)
    )
    loop = table_loop(rule, drafter, vocab_size=2)
    run = decode(
        loop, target, (draft,) * parts or draft, [[0]], 1, FULL, samples=40_000, adaptive=adaptive
    )
    return 1 - run.emitted(1).mean(), float(run.state.stats.accepted_BT[:, 1].mean())


def cut_at_stop(run, distribution, stop):
    """Returns samples and distribution of texts cut after ``stop``, both padded with ``stop``."""
    length = distribution.ndim
    lengths = np.asarray(run.state.lengths_B) - run.prompt_lengths
    emitted = np.where(np.arange(length)[None, :] < lengths[:, None], run.emitted(length), stop)
    cut = np.zeros_like(distribution)
    for sequence in np.ndindex(distribution.shape):
        kept = sequence[: sequence.index(stop) + 1] if stop in sequence else sequence
        cut[kept + (stop,) * (length - len(kept))] += distribution[sequence]
    return emitted, cut

"""Makes what an audit checks: the pair of a configuration, and some of its prompts."""

import dataclasses

from launch.lib.experiment import Experiment
from specsamp.evaluation.audit import Subject


def make_subject(experiment: Experiment, count: int) -> Subject:
    """Returns the pair with its method, and up to ``count`` prompts, its own or random ones."""
    work = experiment.workload
    prompts = work.prompts
    if not prompts:  # several lengths, as texts would have
        rows, _ = dataclasses.replace(work, batch=count).rows(0, experiment.pair.target.vocab_size)
        lengths = [work.prompt_length - i % (work.prompt_length // 2 + 1) for i in range(count)]
        prompts = [row[:length] for row, length in zip(rows, lengths, strict=True)]
    count = min(count, len(prompts))
    return Subject(
        pair=experiment.pair,
        prompts=[prompts[i * len(prompts) // count] for i in range(count)],
        method=experiment.method,
        max_new_tokens=work.max_new_tokens,
        seed=work.seed,
    )

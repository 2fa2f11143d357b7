"""Makes what an audit checks: the pair of a configuration, and some of its prompts."""

import dataclasses

from launch.lib.experiment import Experiment
from launch.lib.fields import ExperimentConfig
from specsamp.evaluation.audit import Subject


def make_subject(config: ExperimentConfig, experiment: Experiment, count: int) -> Subject:
    """Returns the pair with the settings of the configuration, and up to ``count`` prompts, its own
    or random ones.
    """
    work = experiment.workload
    prompts = work.prompts
    if not prompts:  # several lengths, as texts would have
        rows, _ = dataclasses.replace(work, batch=count).rows(0, experiment.pair.target.vocab_size)
        lengths = [work.prompt_length - i % (work.prompt_length // 2 + 1) for i in range(count)]
        prompts = [row[:length] for row, length in zip(rows, lengths, strict=True)]
    chosen = (
        [prompts[i * len(prompts) // count] for i in range(count)]
        if len(prompts) > count
        else prompts
    )
    return Subject(
        pair=experiment.pair,
        prompts=chosen,
        method=config.make_method(experiment.pair),
        max_new_tokens=work.max_new_tokens,
        seed=work.seed,
    )

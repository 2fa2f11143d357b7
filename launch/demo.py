"""Speculative decoding in a minute: the same greedy tokens, sampled ones with their origin, and what it costs.

    bash launch/demo.sh
    JAX_DISABLE_JIT=1 python launch/demo.py --config=configs/random_pair.py:tiny
"""

import os
import sys

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")  # before JAX: only errors of the runtime

import jax
import jax.numpy as jnp
import numpy as np
from absl import app, flags, logging
from ml_collections import config_flags
from rich.console import Console
from rich.text import Text

from experiment import Experiment, build, headline
from specsamp import Completion, chain, generate, temperature, use_compilation_cache
from specsamp.analysis import report
from specsamp.analysis.benchmark import benchmark
from specsamp.sampling.warp import Warp

_CONFIG = config_flags.DEFINE_config_file("config", "configs/random_pair.py:small", lock_config=True)
_PLAIN = flags.DEFINE_bool("plain", False, "Print tables as plain text.")

NUM_PROMPTS = 4


def main(argv: list[str]) -> None:
    if len(argv) > 1:
        raise app.UsageError(f"unexpected argument {argv[1]!r}")
    logging.set_verbosity(logging.ERROR)
    console = Console(no_color=_PLAIN.value, highlight=False)
    try:
        experiment = build(_CONFIG.value)
    except ValueError as error:
        sys.exit(f"--config: {error}")
    console.print(headline(experiment))
    console.print(f"compiled programs are kept in {use_compilation_cache()}", style="dim", soft_wrap=True)
    prompts = make_prompts(experiment)
    compare_greedy(experiment, prompts, console)
    show_sampled(experiment, prompts, console)
    if jax.config.jax_disable_jit:
        console.print("\nJAX_DISABLE_JIT is set, nothing is compiled: the timings are left out.")
        return
    with console.status("starting") as status:
        result = benchmark(
            experiment.pair, experiment.drafter, experiment.rule, experiment.sampling, experiment.workload,
            status.update,
        )  # fmt: skip
    report.show(report.result_tables(result), console, _PLAIN.value)


def make_prompts(experiment: Experiment) -> list[list[int]]:
    """Random tokens, every prompt of another length."""
    work = experiment.workload
    random = np.random.default_rng(work.seed)
    lengths = [max(1, work.prompt_length * (i + 1) // NUM_PROMPTS) for i in range(NUM_PROMPTS)]
    return [random.integers(0, experiment.pair.target.vocab_size, length).tolist() for length in lengths]


def compare_greedy(experiment: Experiment, prompts: list[list[int]], console: Console) -> None:
    """Greedy decoding has one right answer: with and without a draft the tokens must be equal."""
    arguments = dict(max_new_tokens=experiment.workload.max_new_tokens, sampling=sampling_at(experiment, 0.0))
    with console.status("greedy, with and without a draft"):
        plain = generate(experiment.pair, prompts, draft_length=0, **arguments)
        drafted = generate(experiment.pair, prompts, drafter=experiment.drafter, rule=experiment.rule, **arguments)
    gaps = [first_gap(experiment, prompt, a, b) for prompt, a, b in zip(prompts, plain, drafted, strict=True)]
    equal = gaps.count(None)
    tokens = sum(len(completion.tokens) for completion in plain)
    console.print(
        f"\ngreedy, speculative = autoregressive: {equal} of {len(gaps)} prompts, {tokens} tokens",
        style="bold green" if equal == len(gaps) else "bold red",
    )
    for index, gap in enumerate(gaps):
        if gap is not None:
            console.print(f"prompt {index}: {gap}")


def sampling_at(experiment: Experiment, value: float) -> Warp:
    """The experiment's sampling, or greedy for 0: numbers are data, so both run the same program."""
    return chain(temperature(value), experiment.sampling)


def first_gap(experiment: Experiment, prompt: list[int], one: Completion, other: Completion) -> str | None:
    """Where two completions part, and by how little the target prefers one token there."""
    if one.tokens == other.tokens:
        return None
    index = next(i for i, (a, b) in enumerate(zip(one.tokens, other.tokens)) if a != b)
    tokens = jnp.asarray([prompt + one.tokens[:index]])
    logits_V = experiment.pair.target.forward(experiment.pair.target_params, tokens).logits_BTV[0, -1]
    gap = float(logits_V[one.tokens[index]] - logits_V[other.tokens[index]])
    return f"tokens differ from number {index} on, where their logits are {gap:.1e} apart (rounding: below 1e-4)"


def show_sampled(experiment: Experiment, prompts: list[list[int]], console: Console) -> None:
    """One mark per token: drafted and accepted, or the target's own."""
    with console.status("sampling"):
        completions = generate(
            experiment.pair, prompts, experiment.workload.max_new_tokens, sampling=sampling_at(experiment, 1.0),
            drafter=experiment.drafter, rule=experiment.rule, seed=experiment.workload.seed,
        )  # fmt: skip
    console.print("\nsampled: ", Text("█ drafted and accepted", style="green"), "  ░ the target's own", sep="")
    for prompt, completion in zip(prompts, completions, strict=True):
        marks = Text().join(Text("█", style="green") if drafted else Text("░") for drafted in completion.from_draft)
        stats = completion.stats
        console.print(f"{len(prompt):3} + {stats.emitted} tokens in {stats.rounds} rounds:")
        console.print(marks)


if __name__ == "__main__":
    app.run(main)

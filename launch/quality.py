"""Counts how many completions of a pair are Python that parses, up to where the budget cut them.

    python launch/quality.py --config=configs/trained_pair.py --output=runs/quality.json

With --output, the counts of each prompt are written as soon as they are known. A run that was interrupted goes on when
the same command is given again, with any number of processes; another configuration, pair or number of completions is
refused.

Exit status: 0, all completions are counted; 2, the configuration or the output cannot be used (stderr says why).
"""

import zlib
from collections.abc import Callable
from typing import Any

import jax
from absl import flags
from ml_collections import ConfigDict

import entry
from config_file import ConfigFlag
from experiment import Experiment, build, config_replica, headline
from specsamp import generate
from specsamp.analysis import report
from specsamp.analysis.grid import Results, check_output
from specsamp.evaluation.python_syntax import parses
from specsamp.mesh.distributed import Replica, gather_objects

_CONFIG = ConfigFlag("configs/trained_pair.py")
_COMPLETIONS = flags.DEFINE_integer(
    "completions",
    200,
    "Number of completions, rounded up so that every prompt has the same number.",
    lower_bound=1,
)
_ROWS = flags.DEFINE_integer(
    "rows",
    64,
    "Completions that are decoded together, at most, and written together. Use fewer where their caches do not fit in "
    "memory. A prompt's completions are never divided.",
    lower_bound=1,
)
_OUTPUT = entry.define_output()


def main() -> None:
    console = entry.make_console()
    config = _CONFIG.value
    entry.check_output(_OUTPUT.value)
    check_output(_OUTPUT.value, known_identity(config))
    for name in ("draft_temperature", "synthetic_acceptance"):
        if config.get(name) is not None:
            raise ValueError(f"config.{name} = {config[name]} would not be heeded: leave it out")
    if config.get("chat"):
        raise ValueError("chat = True, but answers to messages are no files of Python: set --config.chat=false")
    replica = config_replica(config)
    experiment = build(config, mesh=None if replica.mesh.size == 1 else replica.mesh)
    if experiment.pair.tokenizer is None:
        raise ValueError("--config names a pair without a tokenizer, which writes no text: give another pair")
    num_prompts = len(experiment.workload.prompts)
    per_prompt = -(-_COMPLETIONS.value // num_prompts)
    results = Results.open(
        _OUTPUT.value,
        identity_of(config, experiment, per_prompt),
        say=lambda text: console.print(text, style="yellow", soft_wrap=True),
    )
    console.print(headline(experiment, task=f"{per_prompt} completions of each of {num_prompts} prompts"))
    if results.cells:
        told = (
            f"{len(results.cells)} of {num_prompts} prompts are in {_OUTPUT.value} already and are not completed again"
        )
        console.print(told, soft_wrap=True, markup=False)
    kept = "nothing is kept without --output"
    if _OUTPUT.value:
        kept = f"what was counted is kept in {_OUTPUT.value}, and the same command goes on"
    with entry.keeps(kept), entry.progress(console, "completing") as say:
        complete(config, experiment, replica, per_prompt, results, say)
    found = summary(config, results, experiment, per_prompt)
    console.print(f"{found['parse']} of {found['completions']} completions parse: {found['share']:.1%}")
    if _OUTPUT.value:
        console.print(f"\nwritten to {_OUTPUT.value}", soft_wrap=True)


def known_identity(config: ConfigDict) -> dict[str, Any]:
    """Returns what all counts of a file share, as far as it is known before a pair is read.

    The mesh is left out: it does not change what is drawn.
    """
    device = jax.devices()[0]
    return {
        "config": {name: value for name, value in config.to_dict().items() if name != "mesh"},
        "device": {"platform": device.platform, "kind": device.device_kind},
        "jax": jax.__version__,
    }


def identity_of(config: ConfigDict, experiment: Experiment, per_prompt: int) -> dict[str, Any]:
    """Returns what all counts of a file share."""
    return {
        "weights": experiment.weights,
        "prompts_crc32": zlib.crc32(repr(experiment.workload.prompts).encode()),
        "completions_per_prompt": per_prompt,
        **known_identity(config),
    }


def summary(config: ConfigDict, results: Results, experiment: Experiment, per_prompt: int) -> dict[str, Any]:
    """Returns what the file says in front of its cells: the counts so far, null for prompts that are missing."""
    found = [results.find({"prompt": i}) for i in range(len(experiment.workload.prompts))]
    counts = [cell and cell["result"] for cell in found]
    completions, parse = per_prompt * sum(map(bool, found)), sum(count or 0 for count in counts)
    return {
        "command": entry.command(),
        "environment": report.environment(),
        "config": config.to_dict(),
        "completions": completions,
        "parse": parse,
        "share": parse / max(completions, 1),
        "parse_by_prompt": counts,
        "completions_per_prompt": per_prompt,
    }


def complete(
    config: ConfigDict,
    experiment: Experiment,
    replica: Replica,
    per_prompt: int,
    results: Results,
    say: Callable[[str], None],
) -> None:
    """Completes the prompts that ``results`` does not hold yet, some at a time, and writes their counts.

    Every process must call it, and all take part in every step: the first of them writes for all.
    """
    pair, work = experiment.pair, experiment.workload
    prompts = [pair.tokenizer.decode(prompt) for prompt in work.prompts]
    missing = [i for i in range(len(prompts)) if results.find({"prompt": i}) is None]
    missing = gather_objects(missing)[0]  # the first process has read the file
    together = max(_ROWS.value // per_prompt, 1) * replica.count
    for start in range(0, len(missing), together):
        say(f"{len(prompts) - len(missing) + start} of {len(prompts)} prompts are completed")
        step = missing[start : start + together]
        places = replica.share(len(step))
        mine = [step[place] for place in places]
        completions = mine and generate(
            pair,
            [prompts[i] for i in mine],
            work.max_new_tokens,
            sampling=experiment.sampling,
            drafter=experiment.drafter,
            rule=experiment.rule,
            num_samples=per_prompt,
            seed=work.seed,
            prompt_ids=mine,
        )
        counts = [0] * len(mine)
        for one in completions:
            prompt = prompts[mine[one.prompt_index]]
            counts[one.prompt_index] += parses(prompt, one.text, ended=one.finish == "stop")
        for i, count in zip(step, replica.gather(places, counts, len(step)), strict=True):
            results.document["cells"].append({"key": {"prompt": i}, "result": count})
        results.add(results.cells[-1], summary(config, results, experiment, per_prompt))


if __name__ == "__main__":
    entry.run(main, _CONFIG)

"""How many completions of a pair are Python, up to where the budget cut them.

    python launch/quality.py --config=configs/trained_pair.py --output=notebooks/results/python_pair_quality.json
"""

import os
import shlex
import sys

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")  # before JAX: only errors of the runtime

from absl import app, flags, logging
from ml_collections import config_flags
from rich.console import Console

from experiment import build, headline
from specsamp import generate
from specsamp.analysis import report
from specsamp.evaluation.python_syntax import parses

_CONFIG = config_flags.DEFINE_config_file("config", "configs/trained_pair.py", lock_config=True)
_COMPLETIONS = flags.DEFINE_integer("completions", 200, "How many, in equal parts for every prompt.")
_OUTPUT = flags.DEFINE_string("output", None, "Where to write the result as JSON; nothing is written by default.")


def main(argv: list[str]) -> None:
    if len(argv) > 1:
        raise app.UsageError(f"unexpected argument {argv[1]!r}")
    logging.set_verbosity(logging.ERROR)
    console = Console(highlight=False)
    try:
        experiment = build(_CONFIG.value)
    except (ValueError, FileNotFoundError) as error:
        sys.exit(f"--config: {error}")
    console.print(headline(experiment))
    pair, work = experiment.pair, experiment.workload
    if pair.tokenizer is None:
        sys.exit("--config: a pair without a tokenizer writes no text")
    prompts = [pair.tokenizer.decode(prompt) for prompt in work.prompts]
    with console.status("completing"):
        completions = generate(
            pair, prompts, work.max_new_tokens, sampling=experiment.sampling, drafter=experiment.drafter,
            rule=experiment.rule, num_samples=-(-_COMPLETIONS.value // len(prompts)), seed=work.seed,
        )  # fmt: skip
    good = [parses(prompts[c.prompt_index], c.text, ended=c.finish == "stop") for c in completions]
    by_prompt = [0] * len(prompts)
    for completion, is_python in zip(completions, good, strict=True):
        by_prompt[completion.prompt_index] += is_python
    share = sum(good) / len(good)
    console.print(f"{sum(good)} of {len(good)} completions parse: {share:.1%}")
    if _OUTPUT.value:
        document = {
            "command": shlex.join(["python", *sys.argv]), "environment": report.environment(),
            "config": _CONFIG.value.to_dict(), "completions": len(good), "parse": sum(good), "share": share,
            "parse_by_prompt": by_prompt, "completions_per_prompt": len(good) // len(prompts),
        }  # fmt: skip
        report.write_json(_OUTPUT.value, document)
        console.print(f"written to {_OUTPUT.value}", soft_wrap=True)


if __name__ == "__main__":
    app.run(main)

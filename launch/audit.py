"""Checks that a pair writes the texts of its target alone, and prints which errors the checks would
have detected.

    python launch/audit.py --config=configs/trained_pair.py
    python launch/audit.py --config=configs/hf.py:qwen-3b --config.rule=block --prompts=mine.txt \\
        --output=audit.json
    python launch/audit.py --config=configs/random_pair.py:tiny --detect=0.1 \\
        --checks=greedy,distribution
    python launch/audit.py --engine=http://127.0.0.1:8000/v1 --reference=http://127.0.0.1:8001/v1 \\
        --prompts=mine.txt

The last form audits any engine with OpenAI's completions. It compares samples with samples of the
same engine without speculation, or, without --reference, with the log-probabilities that the engine
returns. These must be of the sampled distribution: if the engine returns them unwarped, set
temperature 1. --request has fields of the request.

The checks compute in float32: weights of another dtype are kept twice, once in float32.

The last line names the errors that would have been detected, and is in capitals if there are too
few texts for --detect: then give more prompts, or a larger --config.max_new_tokens. A lossy rule
fails if samples show that the total variation over the counted cells exceeds its budget, such as
bounded:0.01:ears:1.0; without a budget it is refused.

Exit status: 0, all checks passed; 1, a check failed; 2, the audit is impossible (stderr has the
reason).
"""

import dataclasses
import json

from absl import flags
from rich.console import Console

from launch.lib import entry
from launch.lib.cells import read_prompts
from launch.lib.experiment import build, headline
from launch.lib.fields import ExperimentFlag
from launch.lib.subject import make_subject
from specsamp import use_compilation_cache
from specsamp.analysis import report
from specsamp.evaluation.audit import CHECKS, Settings, Status, audit, audit_table
from specsamp.evaluation.audit.endpoints import RemoteEngine, compare_endpoints

_CONFIG = ExperimentFlag("configs/trained_pair.py")
_CHECKS = flags.DEFINE_list(
    "checks", list(CHECKS), f"Checks to run, separated by commas: any of {', '.join(CHECKS)}."
)
_DETECT = flags.DEFINE_float(
    "detect",
    0.05,
    "Total-variation error of the sampled distribution that must be detected with a probability "
    "of 99%: any error between the counted cells, and errors that favour or avoid the draft's "
    "preferred tokens. It determines the number of samples: half the error needs four times as "
    "many.",
)
_FALSE_ALARM = flags.DEFINE_float(
    "false_alarm", 1e-4, "Largest probability that a correct pair fails the audit."
)
_COUNT = flags.DEFINE_integer(
    "prompt_count",
    16,
    "Number of prompts that are decoded, evenly spaced among those given.",
    lower_bound=1,
)
_DISTRIBUTION_PROMPTS = flags.DEFINE_integer(
    "distribution_prompts",
    4,
    "Number of these prompts after which pairs of tokens are sampled and counted.",
)
_ROWS = flags.DEFINE_integer(
    "rows", 128, "Samples that are drawn together. Use fewer if their caches do not fit in memory."
)
_PROMPTS = entry.define("prompts")
_ENGINE = flags.DEFINE_string(
    "engine", None, "Audit the speculative engine of this endpoint, such as http://HOST:8000/v1."
)
_REFERENCE = flags.DEFINE_string(
    "reference", None, "Endpoint of the same engine without speculation."
)
_REQUEST = flags.DEFINE_string(
    "request", "{}", 'Fields of each request: \'{"model": "mine", "temperature": 0.8}\'.'
)
_OUTPUT = entry.define("output")

FAILED = 1


def main() -> int:
    console = entry.make_console()
    entry.check_goes_with({"reference": ["engine"], "request": ["engine"]})
    if _ENGINE.value is not None:
        return audit_engine(console)
    config = _CONFIG.read(["batch", "repeats"], "give --rows and --prompt_count")
    entry.check_result(_OUTPUT.value)
    settings = Settings(
        checks=tuple(_CHECKS.value),
        detect=_DETECT.value,
        false_alarm=_FALSE_ALARM.value,
        distribution_prompts=_DISTRIBUTION_PROMPTS.value,
        rows=_ROWS.value,
    )
    use_compilation_cache()
    experiment = build(config, read_prompts(_PROMPTS.value), all_fields=True)
    subject = make_subject(experiment, _COUNT.value)
    console.print(headline(experiment))
    with entry.progress(console, "starting") as say:
        found = audit(subject, settings, progress=say)
    entry.show([audit_table(report.as_json(found.checks), claims=True)], console)
    console.print(found.summary, style="bold green" if found.passed else "bold red")
    document = {
        "config": config.recorded,
        "pair": experiment.pair_name,
        "passed": found.passed,
        "summary": found.summary,
        **dataclasses.asdict(found),
    }
    entry.write_result(_OUTPUT.value, document, console)
    return 0 if found.passed else FAILED


def audit_engine(console: Console) -> int:
    """Audits an engine by its endpoint."""
    why = "--engine audits samples of an endpoint"
    entry.refuse_flags(["checks", "rows", "prompt_count"], why)
    _CONFIG.refuse(why)
    settings = Settings(
        detect=_DETECT.value,
        false_alarm=_FALSE_ALARM.value,
        distribution_prompts=_DISTRIBUTION_PROMPTS.value,
    )
    entry.check_result(_OUTPUT.value)
    for flag in (_ENGINE, _REFERENCE):
        if flag.value is not None and not flag.value.startswith(("http://", "https://")):
            raise ValueError(
                f"--{flag.name}={flag.value} is no address such as http://HOST:8000/v1"
            )
    try:
        fields = dict(json.loads(_REQUEST.value))
    except (ValueError, TypeError) as error:
        raise ValueError(
            f'--request={_REQUEST.value} must be a JSON object, such as {{"temperature": 0.8}}'
        ) from error
    prompts = read_prompts(_PROMPTS.value)[: settings.distribution_prompts]
    if not prompts:
        raise ValueError(
            "--engine needs --prompts: texts after which the next tokens are uncertain"
        )
    if not all(isinstance(prompt, str) for prompt in prompts):
        raise ValueError(f"--prompts={_PROMPTS.value}: --engine takes texts, not conversations")
    reference = _REFERENCE.value and RemoteEngine(_REFERENCE.value, fields)
    engine = RemoteEngine(_ENGINE.value, fields if reference else {"logprobs": 0} | fields)
    with entry.progress(console, "starting") as say:
        check = compare_endpoints(
            engine,
            reference,
            prompts,
            detect=settings.detect,
            level=settings.false_alarm,
            progress=say,
        )
    entry.show([audit_table(report.as_json([check]), claims=True)], console)
    passed = check.verdict is Status.PASSED
    document = {
        "engine": _ENGINE.value,
        "reference": _REFERENCE.value,
        "prompts": prompts,
        "request": fields,
        "passed": passed,
        "check": check,
    }
    entry.write_result(_OUTPUT.value, document, console)
    return 0 if passed else FAILED


if __name__ == "__main__":
    entry.run(main, _CONFIG)

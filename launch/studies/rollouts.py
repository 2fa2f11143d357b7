"""Measures what happens to a draft while its target learns from rewards, with a draft that stays and one that learns.

    python launch/study.py rollouts --workdir=runs/rollouts --output=runs/python_rollouts.json

The shipped target learns to write Python that parses and ends its statement within the budget. Each cell is a run with the
same seeds: the draft model or the head, as it was or distilled on the texts of each step. A run that was killed goes on.
The audit's test of the sampled distribution is run with the first and the last policy. --dtype=bfloat16 shows how far
log-probabilities of the sampler and of the trainer are apart there.
"""

import dataclasses
import itertools
import pathlib
from collections.abc import Callable
from typing import Any

import numpy as np

from launch.lib.study import Document, Option, Published, Study, answers
from specsamp import Pair, chain, load_pair, temperature
from specsamp.analysis.report import Table
from specsamp.checkpoints.trained_pair import load_prompts
from specsamp.decoding.method import make_method
from specsamp.decoding.request import Prompt
from specsamp.decoding.results import Completion
from specsamp.evaluation.audit import Settings, Subject, audit
from specsamp.evaluation.coding_tasks import parses
from specsamp.models.transformer import TransformerLM
from specsamp.training.feature_heads import TrainHead
from specsamp.training.rollouts import RolloutConfig, learn
from specsamp.training.run_folder import read_metrics
from specsamp.training.trainer import TrainConfig
from specsamp.training.training_task import TrainModel

PAIR, K, PROMPTS, GROUP, TOKENS, ENDS = "python", 3, 2, 8, 48, 0.1
SERIES = ("reward", "acceptance", "tokens_per_round", "log_prob_gap", "seconds_sampling", "seconds_learning")


def reward(prompt: Prompt, text: Completion) -> float:
    """Returns half a point for Python that parses, and half for a statement that ends within the budget."""
    lines = text.text.split("\n")[1:]
    return 0.5 * parses(prompt, text.text) + 0.5 * any(line and not line[0].isspace() for line in lines[:-1])


def audited(pair: Pair, options: Any) -> dict[str, Any]:
    """Returns what the audit's test of the sampled distribution finds."""
    method = make_method(pair, draft_length=K, sampling=chain(temperature(1.0)))
    prompts = [pair.tokenizer.encode(prompt) for prompt in load_prompts(PAIR)[:4]]
    subject = Subject(pair=pair, prompts=prompts, method=method, max_new_tokens=TOKENS)
    found = audit(subject, Settings(checks=("distribution",), detect=options.detect))
    return {"passed": found.passed, "summary": found.summary}


def measure(options: Any, key: dict, say: Callable[[str], None]) -> dict[str, Any]:
    """Returns series of what the policy steps measured, and audits of the first and the last policy."""
    is_head = key["draft"] == "head"
    pair = load_pair(PAIR, draft=key["draft"], dtype=options.dtype)
    task = TrainModel(pair.draft, pair.target) if not is_head else None
    if is_head:
        target = TransformerLM(pair.target.config)
        task = TrainHead(head=pair.head, target=target, objective="forward_kl", test_steps=K, decay=0.8)
    fields = dict(steps=options.steps, batch=PROMPTS * GROUP, microbatches=2, warmup_steps=0, weight_decay=0.0)
    config = RolloutConfig(
        policy=TrainConfig(**fields, learning_rate=options.learning_rate),
        draft=TrainConfig(**fields, learning_rate=3e-4) if key["learns"] else None,
        group=GROUP,
        max_new_tokens=TOKENS,
    )
    folder = pathlib.Path(options.workdir, f"{key['draft']}_{'learns' if key['learns'] else 'stays'}")
    task = task if key["learns"] else None
    learned = learn(pair, load_prompts(PAIR), reward, config, folder, draft_task=task, draft_length=K)
    records = read_metrics(folder / "metrics.jsonl")
    found = {name: [record[name] for record in records] for name in SERIES}
    if not options.detect:
        return found
    draft_params = pair.draft_params if learned.draft is None else dict(pair.draft_params) | learned.draft.params
    last = dataclasses.replace(pair, target_params=learned.policy.params, draft_params=draft_params)
    return found | {"audits": [audited(pair, options), audited(last, options)]}


def table(*documents: Document) -> Table:
    """Returns a row for each draft: means of the first and of the last tenth of the steps."""
    rows = []
    for key, result in itertools.chain(*map(answers, documents)):
        count = max(int(ENDS * len(result["reward"])), 1)
        sampling, learning = (sum(result[f"seconds_{name}"]) for name in ("sampling", "learning"))
        row = {"draft": f"{key['draft']}, {'learns' if key['learns'] else 'stays'}"}
        for name in SERIES[:3]:
            first, last = np.mean(result[name][:count]), np.mean(result[name][-count:])
            row[name.replace("_", " ")] = f"{first:.2f} to {last:.2f}"
        row["time in rollouts"] = f"{sampling / (sampling + learning):.0%}"
        rows.append(
            row | {"audits": " and ".join("passed" if one["passed"] else "FAILED" for one in result.get("audits", ()))}
        )
    return Table.of("Drafts of a policy that learns: first and last tenth of the steps", rows)


STUDY = Study(
    question="What is accepted of a draft while its target learns from rewards?",
    options={
        "workdir": Option("runs/rollouts", "Keep the runs in this folder."),
        "steps": Option(200, "Policy steps of each run.", least=1),
        "learning_rate": Option(2e-5, "The policy's."),
        "dtype": Option("float32", "Decode in this dtype.", choices=("float32", "bfloat16")),
        "detect": Option(0.1, "The error that the audits must detect; 0: no audits.", least=0),
    },
    cells=lambda options: [
        {"draft": draft, "learns": learns} for draft in ("head", "model") for learns in (True, False)
    ],
    identity=lambda options: {name: getattr(options, name) for name in ("steps", "learning_rate", "dtype", "detect")},
    measure=measure,
    tables={"rollouts": Published(["python_rollouts", "python_rollouts_head"], table)},
    shown=lambda options: ["rollouts"],
)

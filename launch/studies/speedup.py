"""Measures the speedup of a trained pair over draft lengths and rules, and how much of what theory allows it is.

    python launch/study.py speedup --config=configs/trained_pair.py --output=runs/python_pair_speedup.json

Greedy and with temperature 0.8, top-p 0.95. Every rule and K takes turns with plain decoding of the same prompts. What
theory allows follows from the measured acceptance rate and the measured times of the calls (`Result.allowed_speedup` of
`specsamp.analysis.benchmark`); the file also holds the same with the measured tokens per round.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import jax

from launch.lib.rules import RULES
from launch.lib.study import Document, Option, Published, Study
from launch.studies.speedup_tables import DISTRIBUTIONS, draw, headline, summary
from specsamp.analysis.benchmark import Result, benchmark
from specsamp.analysis.grid import words
from specsamp.analysis.report import Table
from specsamp.analysis.tables import ratio
from specsamp.analysis.workload import Quartiles
from specsamp.decoding.method import Method


def prepare(options) -> None:
    """Refuses a configuration without a drafter."""
    if not options.config.word.drafts:
        raise ValueError("--config.drafter: without a drafter there is no curve")


def measure(options, key, say) -> dict[str, Any]:
    """Measures every rule and K with every distribution."""
    pair, work = options.experiment.pair, options.experiment.workload
    work = dataclasses.replace(work, repeats=work.repeats * options.passes)
    curves = {}
    for name, sampling in DISTRIBUTIONS.items():
        results = []
        for rule in ("token", "block"):
            jax.clear_caches()  # Linux allows a process 65,530 mappings, and a program takes several
            for K in options.draft_length:
                say(f"{name}, {rule} rule, K = {K}")
                drafter = options.config.make_drafter(pair.target, pair.draft_or_head, K)
                method = Method(drafter=drafter, rule=RULES[rule](), sampling=sampling.warp())
                results.append((rule, benchmark(pair, method, work)))
        curves[name] = {
            "ms_per_token": Quartiles.of([result.autoregressive.ms_per_token.median for _, result in results]),
            "points": [point_of(rule, result) for rule, result in results],
            "prompts": work.repeats,
            "same_tokens": min(result.same_tokens for _, result in results) if name == "greedy" else None,
        }
    return {"curves": curves}


def point_of(rule: str, result: Result) -> dict[str, Any]:
    """Returns what was measured of a rule and a K, and how much of what theory allows it is, for which phases are timed."""
    split, allowed, K = result.split, result.allowed_speedup, result.speculative.draft_length
    if split is None or allowed is None:
        raise ValueError("the phases of a round were not timed, so theory has no costs: see JAX_DISABLE_JIT, or memory")
    return {
        "rule": rule,
        "draft_length": K,
        "speedup": result.speedup,
        "ms_per_token": result.speculative.ms_per_token,
        "acceptance": result.acceptance,
        "costs": {
            "target_step": split.step.ms.median,
            "draft_call": split.draft_model.ms.median / K,
            "score": split.score.ms.median,
        },
        "efficiency": result.overall_speedup / allowed,
    }


def best_of(points: Sequence[Mapping[str, Any]], rule: str) -> Mapping[str, Any]:
    """Returns the point of a rule with the largest speedup."""
    return max((point for point in points if point["rule"] == rule), key=lambda point: point["speedup"]["median"])


def table(document: Document) -> Table:
    """Returns the speedup of every rule and K, and how much of it theory allows; the best of each rule is bold."""
    rows = []
    for name, curve in document["curves"].items():
        for point in curve["points"]:
            rule, K, costs = point["rule"], point["draft_length"], point["costs"]
            mark = "**" * (point is best_of(curve["points"], rule))
            row = {
                "": f"{mark}{words(name)}, {rule} rule, K = {K}{mark}",
                "alone, ms per token": f"{curve['ms_per_token']['median']:.2f}",
                "with the draft": f"{point['ms_per_token']['median']:.2f}",
                "speedup": f"{mark}{ratio(point['speedup'])}{mark}",
                "acceptance": f"{point['acceptance']['rate']:.3f}",
                "tokens per round": f"{point['acceptance']['emitted_per_round']:.2f}",
                "draft call, in steps": f"{costs['draft_call'] / costs['target_step']:.3f}",
                "scoring, in steps": f"{costs['score'] / costs['target_step']:.2f}",
                "of what theory allows": f"{point['efficiency']:.0%}",
            }
            rows.append(row)
    return Table.of("Speedup by draft length and rule", rows)


STUDY = Study(
    question="How fast is the pair by draft length and rule, and how much of what theory allows is that?",
    config="configs/trained_pair.py",
    options={
        "draft_length": Option((1, 2, 3, 4, 5, 6, 7, 8), "Draft lengths K to measure.", least=1),
        "passes": Option(3, "How often each side decodes every prompt.", least=1),
    },
    prepare=prepare,
    measure=measure,
    tables={
        "speedup": Published(["python_pair_speedup"], table),
        "headline": Published(
            ["python_pair_machine", "python_pair_speedup", "python_pair_grid", "compile_slices"], headline
        ),
        "summary": Published(
            ["python_pair_speedup", "python_pair_grid", "python_pair_audit", "python_pair_agreement", "compile_slices"],
            summary,
        ),
    },
    figures={"speedup_by_length": Published(["python_pair_speedup", "python_pair_grid"], draw)},
)

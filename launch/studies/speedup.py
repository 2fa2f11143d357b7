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

from configs import trained_pair
from launch.lib.fields import SamplingFields
from launch.lib.rules import RULES
from launch.lib.study import Document, Key, Option, Published, Study, answers, cpu_of, law
from launch.studies.compile_tables import forecast
from specsamp.analysis.benchmark import Result, benchmark
from specsamp.analysis.figures import BLUE, VERMILLION, axes_of
from specsamp.analysis.grid import words
from specsamp.analysis.report import Table
from specsamp.analysis.tables import ratio
from specsamp.analysis.workload import Quartiles
from specsamp.decoding.method import Method
from specsamp.models.config import TransformerConfig
from specsamp.tpu import calibration
from specsamp.tpu.pair_report import faster

DISTRIBUTIONS = {
    "greedy": SamplingFields(temperature=0.0, top_p=0.95),
    "temperature 0.8, top-p 0.95": SamplingFields(temperature=0.8, top_p=0.95),
}
DRAFT_LENGTH = trained_pair.get_config().draft_length


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
    """Returns what was measured of a rule and a K, and how much of what theory allows it is, for which calls are timed."""
    split, allowed, K = result.split, result.allowed_speedup, result.speculative.draft_length
    if split is None or allowed is None:
        raise ValueError("the calls of a round were not timed, so theory has no costs: see JAX_DISABLE_JIT, or memory")
    return {
        "rule": rule,
        "draft_length": K,
        "speedup": result.speedup,
        "ms_per_token": result.speculative.ms_per_token,
        "acceptance": result.acceptance,
        "costs": {
            "target_step": split.step.ms.median,
            "draft_call": split.draft.ms.median / K,
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


def headline(chosen: Document, speedup: Document, grid: Document, slices: Document) -> Table:
    """Returns the numbers of the first screen of the main README.

    Args:
      chosen: cells with the draft length that was chosen for the machine.
      speedup, grid: measurements with the draft length of the configuration, on another machine.
    """
    sizes = " + ".join(f"{streamed(speedup['models'][side]) / 1e6:.1f}M" for side in ("target", "draft"))
    rows = []
    for key, result in answers(chosen):
        turns = chosen["cells"][0]["workload"]["repeats"]
        where = f"{sizes} parameters, float32, batch 1, {cpu_of(chosen)}, {turns} turns over 20 prompts"
        if key["temperature"] == 0:
            where += f"; greedy tokens equal in {result['same_tokens']} of {turns}"
        length = f"K = {key['draft_length']} as chosen for this machine, {key['rule']} rule"
        rows.append((f"**{ratio(result['speedup'])}**", f"measured: {law(key)}, {length}; {where}"))
    for (name, curve), sampling in zip(speedup["curves"].items(), DISTRIBUTIONS.values(), strict=True):
        where = f"{sizes} parameters, float32, batch 1, {cpu_of(speedup)}, {curve['prompts']} prompts"
        if curve["same_tokens"]:
            where += f"; greedy tokens equal on {curve['same_tokens']} of {curve['prompts']} prompts"
        gain = spread(key_of(sampling, "model", DRAFT_LENGTH, 1), speedup, grid)
        rows.append((f"**{gain}**", f"measured: {words(name)}, K = {DRAFT_LENGTH}, token rule; {where}"))
    gain = faster(calibration.band_ratio(*forecast(slices, "v4:2x2x4", 1)))
    where = "70B + 4B (Chinchilla), K = 4, acceptance 0.8, bfloat16, batch 1, 16 TPU v4 chips"
    rows.append((f"**{gain}**", f"forecast from a compiler estimate, nothing ran: {where}"))
    return Table(title="In short", header=("speedup over plain decoding", "conditions"), rows=rows)


def summary(speedup: Document, grid: Document, audit: Document, agreement: Document, slices: Document) -> Table:
    """Returns the table of further results of the main README."""
    (greedy, sampled), rows = DISTRIBUTIONS.values(), []
    for name, key in (
        ("shipped pair", key_of(greedy, "model", 4, 4)),
        ("shipped pair", key_of(sampled, "model", 4, 4)),
        ("shipped target, prompt lookup", key_of(greedy, "ngram", 4, 4)),
    ):
        where = f"{name}, {law(key)}, K = {key['draft_length']}, batch {key['batch']}"
        rows.append((where, cpu_of(speedup), spread(key, speedup, grid)))
    passed = sum(check["verdict"] == "passed" for check in audit["checks"])
    rows.append(("audit of the shipped pair", cpu_of(audit), f"{passed} of {len(audit['checks'])} checks passed"))
    worst = [cell["result"]["worst_error"] for cell in agreement["cells"]]
    rows.append((f"forecast ms per token, worst error of {len(worst)} curves", cpu_of(agreement), f"{max(worst):.1%}"))
    for topology, batch in (("v4:2x2x4", 8), ("v5e:4x4", 1), ("v6e:4x4", 32)):
        where = f"16 TPU {topology.partition(':')[0]}, compiler estimate"
        gain = faster(calibration.band_ratio(*forecast(slices, topology, batch)))
        rows.append((f"70B + 4B, K = 4, acceptance 0.8, batch {batch}", where, gain))
    return Table(title="Results", header=("what", "where", "result"), rows=rows, left=3)


def key_of(sampling: SamplingFields, drafter: str, draft_length: int, batch: int) -> Key:
    """Returns the key that a cell of launch/benchmark.py has with the token rule."""
    key = {"draft_length": draft_length, "drafter": drafter, "rule": "token", "batch": batch}
    return key | dataclasses.asdict(sampling) | {"draft_temperature": None}


def measured(document: Document) -> list[tuple[Key, Mapping[str, float]]]:
    """Returns the key and the speedup of each setting in a file of cells, or of this study."""
    if "cells" in document:
        return [(cell["key"], cell["result"]["speedup"]) for cell in document["cells"] if "result" in cell]
    drafter, batch, found = document["config"]["drafter"], document["config"]["batch"], []
    for name, curve in document["curves"].items():
        for point in curve["points"]:
            key = key_of(DISTRIBUTIONS[name], drafter, point["draft_length"], batch)
            found.append((key | {"rule": point["rule"]}, point["speedup"]))
    return found


def spread(key: Key, *documents: Document) -> str:
    """Returns the median speedups of a setting in several measurements, with the outermost quartiles; "" without any."""
    found = [speedup for document in documents for other, speedup in measured(document) if other == key]
    if len(found) < 2:
        return ratio(found[0]) if found else ""
    low, high = (of(speedup["median"] for speedup in found) for of in (min, max))
    lower, upper = min(speedup["lower"] for speedup in found), max(speedup["upper"] for speedup in found)
    return f"{low:.2f}x to {high:.2f}x ({lower:.2f} to {upper:.2f})"


def draw(*documents: Document) -> Any:
    """Draws speedup by draft length for greedy and sampled text: a curve with quartiles for each measurement."""
    figure, axes = axes_of(2, "K, drafted tokens per round", sharey=True)
    for axis, (name, sampling) in zip(axes, DISTRIBUTIONS.items(), strict=True):
        for number, (document, colour) in enumerate(zip(documents, (BLUE, VERMILLION), strict=True), 1):
            at = {
                key["draft_length"]: speedup
                for key, speedup in measured(document)
                if key == key_of(sampling, "model", key["draft_length"], 1)
            }
            lengths = sorted(at)
            middle, low, high = ([at[length][edge] for length in lengths] for edge in ("median", "lower", "upper"))
            axis.plot(lengths, middle, marker="o", markersize=3, color=colour, label=f"measurement {number}")
            axis.fill_between(lengths, low, high, color=colour, alpha=0.15, linewidth=0)
        axis.axhline(1, color="black", linewidth=0.8)
        axis.set_title(words(name), fontsize=10)
    axes[0].set(ylabel="speedup over plain decoding", ylim=(0, None))
    axes[0].legend(fontsize=7, frameon=False)
    return figure


def streamed(model: Mapping[str, Any]) -> int:
    """Returns the parameters that a call streams; tables of n-grams are only looked up."""
    known = {field.name for field in dataclasses.fields(TransformerConfig)}  # older files have fields that are gone
    config = TransformerConfig(**{name: value for name, value in model.items() if name in known})
    return config.num_parameters - config.num_ngram_tables * config.ngram_rows * config.width


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

"""Shows the speedups of the shipped pair as the main README has them: by draft length, in all measurements.

The curves of `python_pair_speedup.json` are a dated record; `launch/benchmark.py --grid` measures such cells.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

from launch.lib.fields import SamplingFields
from launch.lib.study import Document, Key, Published, Study, answers, cpu_of
from launch.studies.compile_tables import forecast
from specsamp.analysis.figures import BLUE, VERMILLION, axes_of
from specsamp.analysis.grid import distribution_of
from specsamp.analysis.report import Table
from specsamp.analysis.tables import ratio
from specsamp.models.config import TransformerConfig
from specsamp.tpu import calibration
from specsamp.tpu.pair_report import faster

DISTRIBUTIONS = {
    "greedy": SamplingFields(temperature=0.0, top_p=0.95),
    "temperature 0.8, top-p 0.95": SamplingFields(temperature=0.8, top_p=0.95),
}


def headline(slices: Document, *chosen: Document) -> Table:
    """Returns the numbers of the first screen of the main README.

    Args:
      slices: compiled programs of the paper's pair.
      chosen: cells of several machines, each with the draft length that was chosen for the machine.
    """
    rows = []
    for document in chosen:
        models, turns = document["identity"]["models"], document["cells"][0]["workload"]["repeats"]
        sizes = " + ".join(f"{streamed(models[side]) / 1e6:.1f}M" for side in ("target", "draft"))
        products = "kernel for few rows" if document["identity"].get("few_rows") else "XLA's products"
        for key, result in answers(document):
            where = (
                f"{sizes} parameters, float32, batch 1, {cpu_of(document)}, {products}, {turns} turns over 20 prompts"
            )
            if key["temperature"] == 0:
                where += f"; greedy tokens equal in {result['same_tokens']} of {turns}"
            length = f"K = {key['draft_length']} as chosen for this machine, {key['rule']} rule"
            rows.append((f"**{ratio(result['speedup'])}**", f"measured: {distribution_of(key)}, {length}; {where}"))
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
        where = f"{name}, {distribution_of(key)}, K = {key['draft_length']}, batch {key['batch']}"
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
    for axis, sampling in zip(axes, DISTRIBUTIONS.values(), strict=True):
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
        axis.set_title(distribution_of(dataclasses.asdict(sampling)), fontsize=10)
    axes[0].set(ylabel="speedup over plain decoding", ylim=(0, None))
    axes[0].legend(fontsize=7, frameon=False)
    return figure


def streamed(model: Mapping[str, Any]) -> int:
    """Returns the parameters that a call streams; tables of n-grams are only looked up."""
    known = {field.name for field in dataclasses.fields(TransformerConfig)}  # older files have fields that are gone
    config = TransformerConfig(**{name: value for name, value in model.items() if name in known})
    return config.num_parameters - config.num_ngram_tables * config.ngram_rows * config.width


STUDY = Study(
    question="How fast is the shipped pair by draft length, in all measurements?",
    tables={
        "headline": Published(
            ["compile_slices", "python_pair_machine", "python_pair_machine_xla", "python_pair_machine_avx512"], headline
        ),
        "summary": Published(
            ["python_pair_speedup", "python_pair_grid", "python_pair_audit", "python_pair_agreement", "compile_slices"],
            summary,
        ),
    },
    figures={"speedup_by_length": Published(["python_pair_speedup", "python_pair_grid"], draw)},
)

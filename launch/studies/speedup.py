"""Shows the results that the main README has; `launch/benchmark.py --grid` measures such speedups of the shipped pair."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from launch.lib.study import Document, Published, Study, answers, cpu_of, law
from launch.studies.compile_tables import forecast
from specsamp.analysis.report import Table
from specsamp.analysis.tables import ratio
from specsamp.models.config import TransformerConfig
from specsamp.tpu import calibration
from specsamp.tpu.pair_report import faster

# Of the further results: what drafts, and the cell's key.
OF_THE_GRID = (
    ("shipped pair", {"drafter": "model", "temperature": 0.0}),
    ("shipped pair", {"drafter": "model", "temperature": 0.8}),
    ("shipped target, prompt lookup", {"drafter": "ngram", "temperature": 0.0}),
)


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
            rows.append((f"**{ratio(result['speedup'])}**", f"measured: {law(key)}, {length}; {where}"))
    gain = faster(calibration.band_ratio(*forecast(slices, "v4:2x2x4", 1)))
    where = "70B + 4B (Chinchilla), K = 4, acceptance 0.8, bfloat16, batch 1, 16 TPU v4 chips"
    rows.append((f"**{gain}**", f"forecast from a compiler estimate, nothing ran: {where}"))
    return Table(title="In short", header=("speedup over plain decoding", "conditions"), rows=rows)


def summary(grid: Document, audit: Document, agreement: Document, slices: Document) -> Table:
    """Returns the table of further results of the main README."""
    rows = []
    for name, wanted in OF_THE_GRID:
        wanted = {"draft_length": 4, "batch": 4, "rule": "token"} | wanted
        key, result = next(cell for cell in answers(grid) if wanted.items() <= cell[0].items())
        where = f"{name}, {law(key)}, K = {key['draft_length']}, batch {key['batch']}"
        rows.append((where, cpu_of(grid), ratio(result["speedup"])))
    passed = sum(check["verdict"] == "passed" for check in audit["checks"])
    rows.append(("audit of the shipped pair", cpu_of(audit), f"{passed} of {len(audit['checks'])} checks passed"))
    worst = [cell["result"]["worst_error"] for cell in agreement["cells"]]
    rows.append((f"forecast ms per token, worst error of {len(worst)} curves", cpu_of(agreement), f"{max(worst):.1%}"))
    for topology, batch in (("v4:2x2x4", 8), ("v5e:4x4", 1), ("v6e:4x4", 32)):
        where = f"16 TPU {topology.partition(':')[0]}, compiler estimate"
        gain = faster(calibration.band_ratio(*forecast(slices, topology, batch)))
        rows.append((f"70B + 4B, K = 4, acceptance 0.8, batch {batch}", where, gain))
    return Table(title="Results", header=("what", "where", "result"), rows=rows, left=3)


def streamed(model: Mapping[str, Any]) -> int:
    """Returns the parameters that a call streams; tables of n-grams are only looked up."""
    known = {field.name for field in dataclasses.fields(TransformerConfig)}  # older files have fields that are gone
    config = TransformerConfig(**{name: value for name, value in model.items() if name in known})
    return config.num_parameters - config.num_ngram_tables * config.ngram_rows * config.width


STUDY = Study(
    question="What does the main README say?",
    tables={
        "headline": Published(
            ["compile_slices", "python_pair_machine", "python_pair_machine_xla", "python_pair_machine_avx512"], headline
        ),
        "summary": Published(
            ["python_pair_grid", "python_pair_audit", "python_pair_agreement", "compile_slices"], summary
        ),
    },
)

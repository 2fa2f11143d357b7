"""Makes the two tables of numbers of the main README.md; see results_readme.py."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

from launch.lib.experiment import looked_up_parameters
from launch.studies import results_tables as measured
from launch.studies.compile_tables import forecast
from launch.studies.results_tables import Documents, table
from specsamp.models.config import TransformerConfig
from specsamp.tpu import calibration
from specsamp.tpu.tables import faster


def headline(documents: Documents) -> str:
    """Returns the three numbers of the first screen."""
    speedup = documents["python_pair_speedup"]
    parts = [f"{_streamed(speedup['models'][side]) / 1e6:.1f}M" for side in ("target", "draft")]
    sizes, cores = " + ".join(parts), speedup["environment"]["cores"]
    rows = []
    for setting, point, curve in _best(documents):
        same = f"; greedy tokens equal on {curve['same_tokens']} of {curve['prompts']} prompts" * bool(
            curve["same_tokens"]
        )
        where = f"{sizes} parameters, float32, batch {speedup['config']['batch']}, {cores} CPU cores, {curve['prompts']} prompts"
        rows.append((f"**{point['speedup']['median']:.2f}x**", f"measured: {setting}, token rule; {where}{same}"))
    alone, drafted = forecast(documents["compile_slices"], "v4:2x2x4", 1)
    where = "70B + 4B (Chinchilla), K = 4, acceptance 0.8, bfloat16, batch 1, 16 TPU v4 chips"
    rows.append(
        (f"**{faster(calibration.ratio(alone, drafted))}**", f"forecast from a compiler estimate, nothing ran: {where}")
    )
    return table(("speedup over plain decoding", "conditions"), rows)


def summary(documents: Documents) -> str:
    """Returns the table of results, ten rows."""
    cpu = f"{documents['python_pair_speedup']['environment']['cores']} CPU cores"
    rows = [
        (f"shipped pair, {setting}, batch 1", cpu, measured.ratio(point["speedup"]))
        for setting, point, _ in _best(documents)
    ]
    for cell in measured.best_cells(documents):
        key = cell["key"]
        if (key["rule"], key["temperature"], key["batch"]) == ("token", 0.0, 4):
            drafter = {"model": "shipped pair", "ngram": "shipped target, prompt lookup"}[key["drafter"]]
            ratio = measured.ratio(cell["result"]["speedup"])
            rows.append((f"{drafter}, greedy, K = {key['draft_length']}, batch 4", cpu, ratio))
    checks = documents["python_pair_audit"]["checks"]
    passed = sum(check["verdict"] == "passed" for check in checks)
    rows.append(("audit of the shipped pair", cpu, f"{passed} of {len(checks)} checks passed"))
    curves = documents["python_pair_agreement"]["cells"]
    worst = max(cell["result"]["worst_error"] for cell in curves)
    rows.append((f"forecast ms per token, worst error of {len(curves)} curves", cpu, f"{worst:.1%}"))
    for topology, batch in (("v4:2x2x4", 1), ("v4:2x2x4", 8), ("v5e:4x4", 1), ("v6e:4x4", 32)):
        alone, drafted = forecast(documents["compile_slices"], topology, batch)
        where = f"16 TPU {topology.partition(':')[0]}, compiler estimate"
        rows.append(
            (f"70B + 4B, K = 4, acceptance 0.8, batch {batch}", where, faster(calibration.ratio(alone, drafted)))
        )
    return table(("what", "where", "result"), rows)


def _best(documents: Documents) -> Iterator[tuple[str, dict, dict]]:
    """Yields setting, point and curve of the best K of the token rule: greedy and sampled."""
    document = documents["python_pair_speedup"]
    for name, best in document["best_draft_length"].items():
        curve, K = document["curves"][name], best["token"]
        point = next(p for p in curve["points"] if (p["rule"], p["draft_length"]) == ("token", K))
        yield f"{measured.words(name)}, K = {K}", point, curve


def _streamed(model: Mapping[str, Any]) -> int:
    """Returns the parameters that a call streams; tables of n-grams are only looked up."""
    known = {field.name for field in dataclasses.fields(TransformerConfig)}  # older files have fields that are gone
    config = TransformerConfig(**{name: value for name, value in model.items() if name in known})
    return config.num_parameters - looked_up_parameters(config)

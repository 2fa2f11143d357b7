"""Makes the tables of notebooks/results/README.md that the TPU's compiler answers; see results_tables.py."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from results_tables import EMITTED, Documents, band, table
from specsamp.tpu.calibration import MEASUREMENTS, ROUNDS_MS
from specsamp.tpu.topology import parse

GIB = 2**30
COUNTED = ("streaming_ms", "cycles_ms")


def chinchilla(documents: Documents) -> str:
    """Returns the programs of the paper's pair on 16 TPU v4 chips."""
    document = documents["compile_chinchilla_v4"]
    report = document["report"]
    chip, _ = parse(report["topology"])
    known = {m.name: m.milliseconds for m in MEASUREMENTS}
    published = {"draft step": known["draft 4B"], "target step": known["Chinchilla 70B"], "round": ROUNDS_MS[4]}
    shown = {"draft step": "draft, one token", "target step": "target, one token", "score": "target, 5 tokens"}
    rows = []
    for program in report["programs"]:
        name = program["name"]
        if name not in (*shown, "round"):
            continue
        least, likely, most = document["calibrated_ms"][name]
        rows.append(
            (
                shown.get(name, "a round"),
                f"{program['hbm_bytes'] / 1e9:.2f}",
                f"{program['hbm_bytes'] / program['floor_bytes']:.3f}",
                f"{program['memory']['temporaries'] / 1e6:.0f}",
                f"{program['hbm_bytes'] / chip.hbm_bytes_per_second * 1e3:.2f}",
                f"{program['cycles'] / chip.clock_hz * 1e3:.2f}",
                sum(program["collectives"].values()),
                band(likely, (least, most), 1),
                published.get(name, ""),
            )
        )
    header = ("", "HBM traffic per chip, GB", "over the floor", "temporaries, MB", "streaming, ms", "cycles, ms")
    return table((*header, "serial collectives", "calibrated, ms", "published, ms"), rows)


def shapes(documents: Documents) -> str:
    """Returns a step of drafts of 4B parameters, by their shape and the chips."""
    cells = {(c["name"]["shape"], c["name"]["chips"]): c for c in documents["compile_shapes"]["cells"]}
    names, chips = [list(dict.fromkeys(key[i] for key in cells)) for i in (0, 1)]
    rows = [(name, *(_calibrated(cells[name, count], 1) for count in chips)) for name in names]
    return table(("a step, ms (calibrated)", *(f"{n} chip{'s' * (n > 1)}" for n in chips)), rows)


def _calibrated(facts: Mapping[str, Any], digits: int) -> str:
    return band(facts["calibrated_ms"], facts["calibrated_band_ms"], digits)


def weights(documents: Documents) -> str:
    """Returns what int8 weights and fewer kv heads save, alone and with a draft."""
    cells = {tuple(c["name"].values()): c for c in documents["compile_weights"]["cells"]}
    kinds = {64: "64 (Chinchilla)", 8: "8 (grouped)", 1: "1 (multi-query)"}
    rows = []
    for heads, kind in kinds.items():
        for dtype in ("bfloat16", "int8"):
            row = [f"{kind}, {dtype}"]
            for batch in (1, 16):
                cell = cells[dtype, heads, batch]
                alone, drafted = cell["ms_per_token"], cell["ms_per_token_drafted"]
                row += [band(one["likely"], one["band"], 2) for one in (alone, drafted)]
                row.append(f"{alone['likely'] / drafted['likely']:.1f}x")
            rows.append(row)
    sides = [f"{'batch ' + str(batch)}: {side}" for batch in (1, 16) for side in ("alone", "with the draft", "speedup")]
    return table(("kv heads, weights", *sides), rows)


def forecast(cell: Mapping[str, Any]) -> tuple[float, float]:
    """Returns milliseconds per token alone and with the draft at an acceptance rate of 0.8: top-p, token rule, K = 4."""
    programs, batch = cell["programs"], cell["name"]["batch"]
    alone, drafted = programs["target step"], programs["round, top-p, token"]
    return alone["calibrated_ms"] / batch, drafted["calibrated_ms"] / EMITTED / batch


def slices(documents: Documents) -> str:
    """Returns the paper's pair on four slices, by batch."""
    rows = []
    for cell in documents["compile_slices"]["cells"]:
        topology, batch, programs = cell["name"]["topology"], cell["name"]["batch"], cell["programs"]
        step, score, drafted = (programs[name] for name in ("target step", "score", "round, top-p, token"))
        capacity = parse(topology)[0].hbm_bytes / GIB
        if not drafted["fits"]:
            rows.append((topology, batch, f"does not fit: {drafted['why']}", *[""] * 5))
            continue
        alone, together = forecast(cell)
        edges = [
            [edge / tokens / batch for edge in one["calibrated_band_ms"]]
            for one, tokens in ((step, 1), (drafted, EMITTED))
        ]
        rows.append(
            (
                topology,
                batch,
                f"{drafted['memory_bytes'] / GIB:.1f} of {capacity:.0f}",
                f"{step['over_floor']:.2f}",
                f"{score['over_floor']:.2f}",
                band(alone, edges[0], 2),
                band(together, edges[1], 2),
                f"{alone / together:.1f}x",
            )
        )
    header = ("chips", "batch", "memory, GiB", "step, over the floor", "scoring, over the floor")
    return table((*header, "alone, ms per token", "with the draft", "speedup"), rows)


def scoring(documents: Documents) -> str:
    """Returns what a call for more tokens takes, over a step."""
    cells = {(c["name"]["topology"], c["name"]["tokens"]): c for c in documents["compile_scoring"]["cells"]}
    tokens, rows = (5, 9, 17, 33, 65, 129), []
    for topology in dict.fromkeys(key[0] for key in cells):
        step = cells[topology, 2]["calibrated_ms"]
        ridge = round(cells[topology, 2]["ridge_tokens"])
        over = [f"{cells[topology, n]['calibrated_ms'] / step:.2f}" for n in tokens]
        rows.append((topology, *over, f"{cells[topology, ridge]['calibrated_ms'] / step:.1f} ({ridge})"))
    header = ("one call, over a step of two tokens", *(f"{n} tokens" for n in tokens), "at the ridge (tokens)")
    return table(header, rows)


def public_pairs(documents: Documents) -> str:
    """Returns two public pairs on TPU v5e."""
    rows = []
    for name, label in (("qwen_3b", "Qwen2.5 3B + 0.5B"), ("llama_70b", "Llama 3.1 70B + 3.2 1B")):
        document = documents[f"compile_{name}_v5e"]
        report, times = document["report"], document["calibrated_ms"]
        programs = {program["name"]: program for program in report["programs"]}
        over = [f"{programs[n]['hbm_bytes'] / programs[n]['floor_bytes']:.3f}" for n in ("target step", "score")]
        needed = dict(programs["round"]["memory"])
        capacity = needed.pop("capacity")
        chips = 1
        for size in parse(report["topology"])[1]:
            chips *= size
        (low, alone, high), (fast, drafted, slow) = times["target step"], times["round"]
        rows.append(
            (
                label,
                f"{chips} v5e",
                f"{sum(needed.values()) / GIB:.1f} of {capacity / GIB:.0f}",
                *over,
                band(alone, (low, high), 1),
                band(drafted, (fast, slow), 1),
                band(drafted / EMITTED, (fast / EMITTED, slow / EMITTED), 1),
            )
        )
    header = ("", "chips", "memory, GiB", "step, over the floor", "scoring, over the floor", "alone, ms per token")
    return table((*header, "a round, ms", "ms per token at acceptance 0.8"), rows)


def variants(documents: Documents) -> str:
    """Returns the traffic and the cycles of each way to write the same work."""
    rows = []
    for cell in documents["compile_variants"]["cells"]:
        name = cell["name"]
        times = [f"{cell[part]:.2f}" for part in COUNTED]
        rows.append((name["question"], name["form"], f"{cell['hbm_bytes'] / 1e6:,.0f}", *times, cell["copies"]))
    return table(("question", "form", "HBM traffic per chip, MB", "streaming, ms", "cycles, ms", "copies"), rows)

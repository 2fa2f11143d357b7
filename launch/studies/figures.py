"""Shows committed results: tables of the pages and of the main README, and figure 1 of Chen et al.
with our curves.

    python launch/study.py figures --results=notebooks/results --figures=runs

Our curves are lines, with quartiles; the points are those of Chen et al. (arXiv 2302.01318).
Nothing is measured here.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from launch.lib.evaluation_tables import quality
from launch.lib.study import Document, Published, Study, answers, cpu_of
from specsamp import TransformerConfig, TransformerLM
from specsamp.analysis import grid
from specsamp.analysis.acceptance import expected_tokens
from specsamp.analysis.figures import COLOURS, STYLES
from specsamp.analysis.grid import distribution_of
from specsamp.analysis.report import Table, as_json
from specsamp.analysis.tables import grid_table, ratio
from specsamp.evaluation.audit import audit_table
from specsamp.evaluation.harness import tabulate
from specsamp.tpu import calibration
from specsamp.tpu.calibration import Band
from specsamp.tpu.pair_report import GIB, Report, faster

TOKENS = 128  # whose time the paper shows
ACCEPTANCE = 0.8  # of forecasts
EMITTED = expected_tokens(ACCEPTANCE, 4)  # tokens of a round of K = 4
COMPILED = (
    "smollm2_v5e",
    "qwen_3b_v5e",
    "qwen_30b_a3b_v5e",
    "llama_8b_eagle3_v5e",
    "qwen_8b_dspark_v7x",
    "qwen_8b_dspark_v7x_batch_8",
    "qwen_8b_dspark_v7x_batch_32",
    "qwen3_5_9b_v5e",
    "qwen3_next_v5e",
    "gpt_oss_20b_v5e",
    "gemma_27b_v5e",
    "llama_70b_v5e",
    "llama_70b_v5e_batch_8",
    "llama_70b_int8_v5e",
)


# Figure 1 of the paper, read off to about 2%: Chinchilla 70B and 4B, 16 TPU v4, batch 1, K = 0 to
# 7.
PAPER_MS = {  # for `TOKENS` tokens
    "HumanEval": (1805, 1108, 875, 777, 735, 710, 697, 675),
    "XSum": (1805, 1197, 993, 935, 943, 965, 990, 1002),
}
PAPER_EMITTED = {  # tokens per round over K + 1
    "HumanEval": (1, 0.945, 0.887, 0.838, 0.797, 0.752, 0.712, 0.677),
    "XSum": (1, 0.875, 0.78, 0.695, 0.618, 0.553, 0.50, 0.455),
}
PAPER_ROUND_MS = (14.1, 16.3, 18.2, 20.3, 22.8, 25.0, 27.1, 28.5)


def drafted(document: Document) -> list[Mapping[str, Any]]:
    """Returns the measured cells of batch 1 with a draft model, by draft length; drafts at the
    target's temperature.
    """
    wanted = {"rule": "token", "drafter": "model", "draft_temperature": None}
    cells = grid.chosen(document["cells"], batch=1, **wanted)
    return sorted(
        (cell for cell in cells if cell["key"]["draft_length"]),
        key=lambda cell: cell["key"]["draft_length"],
    )


def draw_paper(document: Document) -> Any:
    """Draws the three panels of figure 1: our cells of batch 1 as lines, and the published points.

    Each value is divided by that of the plain decoding that took turns with it, since cells are
    measured minutes apart.
    """
    from matplotlib.figure import Figure  # no window, no global state

    groups: dict[str, list[Mapping[str, Any]]] = {}
    for cell in drafted(document):
        groups.setdefault(distribution_of(cell["key"]), []).append(cell)
    if not groups:
        raise ValueError(
            "no curve: no distribution has a draft model at batch 1 under the token rule"
        )
    figure = Figure(figsize=(12.6, 3.6), layout="constrained")
    total, share, rounds = figure.subplots(1, 3)
    for number, (name, group) in enumerate(groups.items()):
        look = {"color": COLOURS[number % len(COLOURS)], "linestyle": STYLES[number % len(STYLES)]}
        lengths, results = [0], [cell["result"] for cell in group]
        lengths += [cell["key"]["draft_length"] for cell in group]
        plain_ms = TOKENS * results[0]["autoregressive"]["ms_per_token"]["median"]
        middle, low, high = (
            [1, *(1 / result["speedup"][edge] for result in results)]
            for edge in ("median", "upper", "lower")
        )
        emitted = [result["acceptance"]["emitted_per_round"] for result in results]
        paces = [
            result["speculative"]["ms_per_round"]["median"]
            / result["autoregressive"]["ms_per_round"]["median"]
            for result in results
        ]
        total.plot(lengths, middle, **look, label=f"{name} ({plain_ms:.0f} ms at K = 0)")
        total.fill_between(
            lengths, low, high, color=look["color"], alpha=0.1, linewidth=0, zorder=0
        )
        shares = [tokens / (K + 1) for K, tokens in zip(lengths, [1, *emitted])]
        share.plot(lengths, shares, **look, label=name)
        rounds.plot(lengths, [1, *paces], **look, label=name)
    for marker, (task, ms) in zip("os", PAPER_MS.items()):
        mark_paper(total, ms, marker, f", {task} ({ms[0]} ms)")
        mark_paper(share, PAPER_EMITTED[task], marker, f", {task}")
    mark_paper(rounds, PAPER_ROUND_MS, "o", f" ({PAPER_ROUND_MS[0]} ms)")
    titles = (f"time for {TOKENS} tokens", "tokens emitted per round", "time of a round")
    labels = ("over plain decoding", "over K + 1", "over a plain round")
    for axis, title, label in zip(figure.axes, titles, labels):
        axis.set_title(title, fontsize=10)
        axis.set(xlabel="K, drafted tokens per round", ylabel=label, ylim=(0, None))
        axis.spines[["top", "right"]].set_visible(False)
        axis.legend(fontsize=7, frameon=False)
    return figure


def mark_paper(axis: Any, values: Sequence[float], marker: str, of: str) -> None:
    """Draws points of the paper, over the value of plain decoding."""
    points = [value / values[0] for value in values]
    look = {"color": "black", "linestyle": "none", "markersize": 4, "zorder": 0}
    axis.plot(points, marker=marker, label=f"Chen et al.{of}", **look)


def trained(pair: Document) -> Table:
    """Returns the training of both models of the pair, and their loss on held-out text."""
    rows = []
    for side in ("target", "draft"):
        run, held_out = pair["provenance"][side], pair["provenance"]["held_out"]["float32"][side]
        acceptance = held_out.get("acceptance (temperature 1)")
        rows.append(
            {
                "": side,
                "steps": run["step"],
                "rows a step": run["config"]["recipe"]["batch"],
                "minutes of training": f"{run['last_metrics']['training_seconds'] / 60:.0f}",
                "held-out loss, nats per token": f"{held_out['loss']:.2f}",
                "acceptance at T = 1": "" if acceptance is None else f"{acceptance:.3f}",
            }
        )
    return Table.of("Training of the shipped pair", rows)


# Of the further results: what drafts, and the cell's key.
OF_THE_GRID = (
    ("shipped pair", {"drafter": "model", "temperature": 0.0}),
    ("shipped pair", {"drafter": "model", "temperature": 0.8}),
    ("shipped target, prompt lookup", {"drafter": "ngram", "temperature": 0.0}),
)


def headline(paper: Document, *measured: Document) -> Table:
    """Returns the numbers of the first screen of the main README.

    Args:
      paper: compiled programs of the paper's pair.
      measured: cells of several machines.
    """
    rows = []
    for document in measured:
        identity, turns = document["identity"], document["cells"][0]["workload"]["repeats"]
        place = f"one {identity['device']['kind']}"
        if identity["device"]["platform"] == "cpu":
            few_rows = "kernel for few rows" if identity.get("few_rows") else "XLA's products"
            place = f"{cpu_of(document)}, {few_rows}"
        for cell in grid.chosen(document["cells"]):
            key, result = cell["key"], cell["result"]
            is_lookup = key["drafter"] == "ngram"
            models = [identity["models"][side] for side in ("target", "draft")[: 2 - is_lookup]]
            sizes = " + ".join(f"{streamed(model) / 1e6:.1f}M" for model in models)
            where = f"{sizes} parameters, float32, batch 1, {place}, {turns} turns over 20 prompts"
            if key["temperature"] == 0:
                where += f"; greedy tokens equal in {result['same_tokens']} of {turns}"
            draft = [distribution_of(key), *["prompt lookup"] * is_lookup]
            if key["draft_temperature"] is not None:
                draft.append(f"draft at T = {key['draft_temperature']:g}")
            length = f"K = {key['draft_length']}"
            if "draft_length=machine" in cell["command"]:
                length += " as chosen for this machine"
            conditions = ", ".join([*draft, length, f"{key['rule']} rule"])
            rows.append((f"**{ratio(result['speedup'])}**", f"measured: {conditions}; {where}"))
    report = Report.from_json(paper["report"])
    step, round_ = report.calibrated_ms("target step"), report.calibrated_ms("round")
    gain = faster(calibration.band_ratio(step, round_ / EMITTED))
    where = "70B + 4B (Chinchilla), K = 4, acceptance 0.8, bfloat16, batch 1, 16 TPU v4 chips"
    rows.append((f"**{gain}**", f"forecast from a compiler estimate, nothing ran: {where}"))
    return Table(title="In short", header=("speedup over plain decoding", "conditions"), rows=rows)


def drafters(*documents: Document) -> Table:
    """Returns the cells of batch 1 with four drafted tokens under the token rule, by temperature;
    drafts at the target's.
    """
    wanted = {"draft_length": 4, "batch": 1, "rule": "token", "draft_temperature": None}
    cells = [cell for one in documents for cell in grid.chosen(one["cells"], **wanted)]
    cells.sort(key=lambda cell: cell["key"]["temperature"])
    return grid_table("Drafters of the shipped target", cells)


def summary(grid: Document, audit: Document) -> Table:
    """Returns the table of further results of the shipped pair."""
    rows = []
    for name, wanted in OF_THE_GRID:
        wanted = {"draft_length": 4, "batch": 4, "rule": "token"} | wanted
        key, result = next(cell for cell in answers(grid) if wanted.items() <= cell[0].items())
        where = f"{name}, {distribution_of(key)}, K = {key['draft_length']}, batch {key['batch']}"
        rows.append((where, cpu_of(grid), ratio(result["speedup"])))
    passed = sum(check["verdict"] == "passed" for check in audit["checks"])
    checks = f"{passed} of {len(audit['checks'])} checks passed"
    rows.append(("audit of the shipped pair", cpu_of(audit), checks))
    return Table(title="Results", header=("what", "where", "result"), rows=rows, left=3)


def streamed(model: Mapping[str, Any]) -> int:
    """Returns the parameters that a call streams; tables of n-grams are only looked up."""
    # Older files have fields that are gone.
    known = {field.name for field in dataclasses.fields(TransformerConfig)}
    config = TransformerConfig(**{name: value for name, value in model.items() if name in known})
    return (
        TransformerLM(config).num_parameters
        - config.num_ngram_tables * config.ngram_rows * config.width
    )


def compiled(*documents: Document) -> Table:
    """Returns what was compiled of public pairs, and forecasts at an acceptance of 0.8."""
    rows = []
    for document in documents:
        report, config = Report.from_json(document["report"]), document["config"]
        target, draft = (
            config["hugging_face"][name].rpartition("/")[2] for name in ("target", "draft")
        )
        step, round_ = (report[name] for name in ("target step", "round"))
        alone = report.calibrated_ms("target step")
        together = report.calibrated_ms("round")
        emitted = expected_tokens(ACCEPTANCE, report.draft_length)
        rows.append(
            (
                f"{target} + {document.get('head') or draft}"
                + (", int8" if config["int8"]["weights"] != "none" else ""),
                str(report.draft_length),
                str(report.batch),
                report.topology,
                f"{round_.memory.total / GIB:.1f}",
                f"{step.lower_bound_ms(report.chip):.2f}",
                f"{round_.lower_bound_ms(report.chip):.2f}",
                f"{step.over_floor:.3f}",
                f"{report['score'].over_floor:.3f}",
                str(alone),
                str(together),
                str(together / emitted / report.batch),
                faster(calibration.band_ratio(alone, together / emitted)),
            )
        )
    header = ("pair", "K", "batch", "slice", "memory, GiB", "step, at least", "round, at least")
    header += ("step, over the floor", "scoring, over the floor", "a step, ms", "a round, ms")
    header += ("ms per token", "speedup")
    return Table(title="Public pairs", header=header, rows=rows)


def learning(*documents: Document) -> Table:
    """Returns the held-out acceptance of drafts by step of their training and drafted token; of a
    draft model, one for all.
    """
    rows = []
    for document in documents:
        for found in document["held_out"]:
            rows.append({"draft": document["draft"], "steps": str(found["step"])})
            for k in range(1, 5):
                share = found.get(f"acceptance/position_{k} (temperature 1)")
                share = found.get("acceptance (temperature 1)") if k == 1 and not share else share
                rows[-1][f"drafted token {k}"] = f"{share:.3f}" if share else ""
    return Table.of("Held-out acceptance at T = 1", rows)


def domains(compiled_head: Document, *documents: Document) -> Table:
    """Returns the acceptance of the first drafted token, tokens per round, and speedup of each
    exact method, the ratio of times per token, by domain; of a head also the speedup of rounds that
    were compiled for a chip. The blocks of the evaluations are domains, and tasks without
    categories.
    """
    rows: dict[str, dict[str, str]] = {}
    report = Report.from_json(compiled_head["report"])
    step, round_ = report.calibrated_ms("target step"), report.calibrated_ms("round")
    for document in documents:
        config = document["identity"]["config"]
        draft = config["hugging_face"]["draft"] or ""
        of_report = draft == compiled_head["config"]["hugging_face"]["draft"]
        for block in dict.fromkeys(cell["key"]["block"] for cell in document["cells"]):
            of_domain = [cell for cell in document["cells"] if cell["key"]["block"] == block]
            domain = document["identity"]["task"]["name"] if block == "1 of 1" else block
            row = rows.setdefault(domain, {"domain": domain})
            for one in as_json(tabulate(of_domain, "plain")):
                if one["counts"]["drafted"] and one["exact"]:
                    drafter, _, length = one["name"].partition(", ")[2].partition(", ")
                    emitted = one["counts"]["emitted_per_round"]
                    found = [
                        f"{one['counts']['by_position'][0]:.2f}",
                        f"{emitted:.2f}",
                        f"{one['speedups'][0]:.2f}x",
                    ]
                    if of_report and length == f"K = {report.draft_length}" and drafter == "head":
                        found.append(faster(calibration.band_ratio(step, round_ / emitted)))
                    if drafter != "ngram":
                        drafter = draft.rpartition("/")[2]
                    row[f"{drafter}, {length}"] = "; ".join(found)
    temperature = config["sampling"]["temperature"]
    title = f"T = {temperature:g}: acceptance of the first token; tokens per round; speedups"
    return Table.of(title, list(rows.values()))


def int8_ratio(row: Document) -> float:
    """Returns the time of a layer in int8 over that in bfloat16."""
    return max(row["int8"].values()) / max(row["bfloat16"].values())


def int8_table(*documents: Document) -> Table:
    """Returns the microseconds of a layer, and their ratio."""
    rows = []
    for document in documents:
        for row in document["rows"]:
            shown = {"": f"{document['options']['topology']}, batch {row['batch']}"}
            for name in ("bfloat16", "int8"):
                shown |= {f"{name}, {part[:-3]}": f"{us:.1f}" for part, us in row[name].items()}
            rows.append(shown | {"int8 / bfloat16": f"{int8_ratio(row):.2f}"})
    return Table.of("Microseconds of a layer (compiler estimate)", rows)


def windows_table(document: Document) -> Table:
    """Returns the times of plain steps, and of rounds in plain steps."""
    rows: dict[str, dict[str, str]] = {}
    steps: dict[str, Band] = {}
    for (topology, slots, batch, drafter), ms in (
        (key.values(), answer["calibrated_ms"]) for key, answer in answers(document)
    ):
        place = f"{topology}, {slots // 1024}k slots, batch {batch}"
        row = rows.setdefault(place, {"": place, "a step, ms": "does not fit"})
        if "target step" in ms:
            steps[place] = Band(**ms["target step"])
            row["a step, ms"] = str(steps[place])
        if "round" in ms:
            slower = calibration.band_ratio(Band(**ms["round"]), steps[place])
            row[f"a round over a step, {drafter}"] = faster(slower)
    note = "K = 4, 4 sinks and the last 500 tokens; compiler estimates"
    return Table.of("Rounds of Llama 3.1 8B at long contexts", list(rows.values()), note=note)


def rounds_table(document: Document) -> Table:
    """Returns tokens per round, by drafter and temperature."""
    shown: dict[str, dict[str, str]] = {}
    for row in document["rows"]:
        line = shown.setdefault(row["drafter"], {"drafts from": row["drafter"]})
        line[f"T = {row['temperature']:g}"] = f"{row['tokens'] / row['rounds']:.2f}"
    return Table.of("Tokens per round", list(shown.values()))


def domain_files(sampling: str) -> list[str]:
    """Returns the names of the evaluations of each draft on each task."""
    return [
        f"smollm2_{task}{draft}{sampling}"
        for draft in ("", "_block", "_draft")
        for task in ("domains", "gsm8k")
    ]


STUDY = Study(
    question=(
        "How do our curves compare with those of the paper, and what did the commands measure?"
    ),
    tables={
        "headline": Published(
            ["compile_chinchilla_v4", "python_pair_machine", "python_pair_h100"], headline
        ),
        "summary": Published(["python_pair_grid", "python_pair_audit"], summary),
        "compiled": Published([f"compile_{name}" for name in COMPILED], compiled),
        "learning": Published(["smollm2_head", "smollm2_block", "smollm2_draft"], learning),
        "domains": Published(["compile_smollm2_v5e", *domain_files("_greedy")], domains),
        "domains_sampled": Published(["compile_smollm2_v5e", *domain_files("")], domains),
        "pair": Published(["pair"], trained),
        "grid": Published(
            ["python_pair_grid"],
            lambda grid: grid_table("Best draft lengths", grid["cells"], best=True),
        ),
        "drafters": Published(
            ["python_pair_grid", "python_drafters_head", "python_drafters_block"], drafters
        ),
        "python_window": Published(
            ["python_window"], lambda one: grid_table("A window", one["cells"])
        ),
        "int8_time": Published(["compile_int8_v4", "compile_int8_v5e"], int8_table),
        "windows": Published(["compile_windows"], windows_table),
        "rollouts": Published(["python_ngram_rollouts"], rounds_table),
        "audit": Published(["python_pair_audit"], lambda audit: audit_table(audit["checks"])),
        "quality": Published(["python_pair_tasks"], lambda found: quality(found["evaluation"])),
        "humaneval": Published(
            ["python_pair_humaneval"], lambda found: quality(found["evaluation"])
        ),
    },
    figures={"figure_1": Published(["python_pair_grid"], draw_paper)},
)

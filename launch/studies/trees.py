"""Compares token trees with chains at equal scored tokens: tokens per round, and milliseconds.

    python launch/study.py trees --output=runs/python_trees.json

Shapes are the best for the pair `python` (`specsamp.analysis.tree_shape`), by acceptance by rank from stars: trees of one
level, which are measured first. Each way decodes in turn with plain decoding, after the same prompts.
"""

import dataclasses
import functools
import operator
from typing import Any

from launch.lib.rules import make_rule
from launch.lib.study import Document, Key, Option, Published, Say, Study, answers
from specsamp import chain, generate, temperature, top_p
from specsamp.analysis.benchmark import benchmark
from specsamp.analysis.report import Table
from specsamp.analysis.tables import ratio
from specsamp.analysis.tree_shape import best_shape, ranks_of_stars
from specsamp.decoding.drafters import ModelDrafter, ModelTree
from specsamp.decoding.loop import decode_window
from specsamp.decoding.method import Method
from specsamp.decoding.trees import TreeShape

CHOSEN, DRAWN = "recursive:top", "recursive"
STARS = {CHOSEN: (0.63, 0.77, 0.81, 0.82), DRAWN: (0.75, 0.83, 0.86, 0.87)}  # acceptance of 1 to 4 children
RULES = {"token": None, "block": None, CHOSEN: CHOSEN, DRAWN: DRAWN, "traversal": DRAWN}
DEPTH, BATCHES = 6, (1, 4)  # a level is a call of the draft


def cells(options: Any) -> list[Key]:
    """Returns chains and trees, then the stars."""
    ways = [(nodes, batch, rule) for nodes in options.nodes for batch in BATCHES for rule in RULES]
    stars = [{"rule": rule, "star": size} for rule in STARS for size in (1, 2, 3, 4)]
    return [{"rule": rule, "nodes": nodes, "batch": batch} for nodes, batch, rule in ways] + stars


def measure(options: Any, key: Key, say: Say) -> dict[str, Any]:
    """Decodes with a chain or a tree and plainly, in turn; with a star, it counts what is accepted."""
    pair, stars, rule = options.experiment.pair, STARS.get(RULES[key["rule"]]), make_rule(key["rule"])
    work = dataclasses.replace(options.experiment.workload, batch=key.get("batch", 1), repeats=options.repeats)
    sampling = chain(temperature(0.8), top_p(0.95))
    if "star" in key:
        drafter = ModelTree(pair.draft, decode_window(), tree=TreeShape((0,) * key["star"]))
        method = Method(drafter=drafter, rule=rule, sampling=sampling)
        texts = generate(pair, work.prompts[: options.repeats], work.max_new_tokens, method=method)
        return {**key, "acceptance": functools.reduce(operator.add, (text.stats for text in texts)).acceptance_rate}
    shape, drafter = TreeShape(tuple(range(key["nodes"]))), ModelDrafter(pair.draft, key["nodes"], decode_window())
    if stars is not None:
        shape = best_shape(ranks_of_stars(stars), key["nodes"] + 1, DEPTH)
        drafter = ModelTree(pair.draft, decode_window(), tree=shape)
    found = benchmark(pair, Method(drafter=drafter, rule=rule, sampling=sampling), work, say)
    tokens, ms = found.acceptance.emitted_per_round, found.speculative.ms_per_round
    return {**key, "parents": shape.parents, "tokens_per_round": tokens, "ms_per_round": ms, "speedup": found.speedup}


def table(document: Document) -> Table:
    """Returns a row for each way to decode; the note has the stars."""
    found = [result for _, result in answers(document)]
    rows = [
        (
            str(cell["nodes"]),
            str(cell["batch"]),
            cell["rule"] if RULES[cell["rule"]] else f"chain, {cell['rule']}",
            str(TreeShape(cell["parents"]).depth),
            f"{cell['tokens_per_round']:.2f}",
            f"{cell['ms_per_round']['median']:.1f}",
            ratio(cell["speedup"]),
        )
        for cell in found
        if "nodes" in cell
    ]
    stars = [f"{cell['rule']} {cell['star']}: {cell['acceptance']:.3f}" for cell in found if "star" in cell]
    header = ("nodes", "batch", "rule", "depth", "tokens per round", "ms per round", "speedup over plain")
    return Table(
        title="Trees and chains, T = 0.8, top-p 0.95",
        header=header,
        rows=rows,
        note=f"Stars accept {', '.join(stars)}.",
    )


STUDY = Study(
    question="Do token trees pay, beside chains of as many scored tokens?",
    config="configs/trained_pair.py",
    options={
        "nodes": Option((4, 8, 16), "Nodes of the trees, and tokens of the chains.", least=1),
        "repeats": Option(8, "Repeats of each way; each has other prompts.", least=1),
    },
    cells=cells,
    identity=lambda options: {"repeats": options.repeats},
    measure=measure,
    tables={"trees": Published(["python_trees"], table)},
)

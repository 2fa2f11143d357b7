"""Compares token trees with chains at equal scored tokens: tokens per round, and milliseconds.

    python launch/study.py trees --output=runs/python_trees.json

Shapes are the best for the pair `python` (`specsamp.analysis.tree_shape`), by acceptance by rank from stars: trees of one
level, which --stars=4 measures. All ways decode in turn with plain decoding, after the same prompts.
"""

import dataclasses
from typing import Any

import numpy as np

from launch.lib.rules import make_rule
from launch.lib.study import Document, Key, Option, Published, Say, Study, answers
from specsamp import chain, generate, temperature, top_p
from specsamp.analysis.report import Table
from specsamp.analysis.tables import ratio
from specsamp.analysis.tree_shape import best_shape, ranks_of_stars
from specsamp.analysis.workload import Quartiles, decode_in_turns, decoders
from specsamp.decoding.drafters import ModelDrafter, ModelTree, NoDrafter
from specsamp.decoding.loop import decode_window
from specsamp.decoding.method import Method
from specsamp.decoding.pair import Pair
from specsamp.decoding.trees import TreeShape

CHOSEN, DRAWN = "recursive:top", "recursive"
STARS = {CHOSEN: (0.63, 0.77, 0.81, 0.82), DRAWN: (0.75, 0.83, 0.86, 0.87)}  # acceptance of 1 to 4 children
RULES = {"token": None, "block": None, CHOSEN: CHOSEN, DRAWN: DRAWN, "traversal": DRAWN}
DEPTH = 6  # a level is a call of the draft


def cells(options: Any) -> list[Key]:
    """Returns comparisons by batch and nodes, then the stars."""
    sizes = [{"nodes": nodes, "batch": batch} for batch in options.batches for nodes in options.nodes]
    return sizes + [{"rule": rule, "star": size} for rule in STARS for size in range(1, options.stars + 1)]


def method(pair: Pair, rule: str, shape: TreeShape | None) -> Method:
    """Returns the way to decode with a tree, or with a chain of as many tokens; None: plainly."""
    drafter = NoDrafter()
    if shape is not None:
        is_tree, window = rule in STARS or RULES[rule], decode_window()
        drafter = ModelTree(pair.draft, window, tree=shape) if is_tree else ModelDrafter(pair.draft, shape.K, window)
    return Method(drafter=drafter, rule=make_rule(rule), sampling=chain(temperature(0.8), top_p(0.95)))


def measure(options: Any, key: Key, say: Say) -> Any:
    """Decodes in all ways, in turn; with a star, it counts what is accepted."""
    pair = options.experiment.pair
    work = dataclasses.replace(options.experiment.workload, batch=key.get("batch", 1), repeats=options.repeats)
    if "star" in key:
        star = method(pair, key["rule"], TreeShape((0,) * key["star"]))
        texts = generate(pair, work.prompts[: options.repeats], work.max_new_tokens, method=star)
        return {**key, "acceptance": sum(text.stats for text in texts).acceptance_rate}
    chained, ways = TreeShape(tuple(range(key["nodes"]))), {"plain": method(pair, "token", None)}
    for rule, stars in RULES.items():
        shape = best_shape(ranks_of_stars(STARS[stars]), key["nodes"] + 1, DEPTH) if stars else chained
        ways[rule] = method(pair, rule, shape)
    found = decode_in_turns(decoders(pair, ways, work), options.repeats, say)
    plain = np.array([timing.loop_seconds for timing in found.pop("plain")])
    measured = []
    for rule, timings in found.items():
        stats, seconds = sum(each.stats for each in timings), [each.loop_seconds for each in timings]
        ms = Quartiles.of(np.array(seconds) * 1e3 / [each.rounds for each in timings])
        shape = getattr(ways[rule].drafter, "tree", chained)
        times = {"ms_per_round": ms, "speedup": Quartiles.of(plain / np.array(seconds))}
        measured.append({"rule": rule, "parents": shape.parents, "tokens_per_round": stats.emitted_per_round, **times})
    return {**key, "ways": measured}


def table(*documents: Document) -> Table:
    """Returns a row for each way to decode; the note has the stars."""
    found = [result for document in documents for _, result in answers(document)]
    rows = [
        (
            str(cell["nodes"]),
            str(cell["batch"]),
            way["rule"] if RULES[way["rule"]] else f"chain, {way['rule']}",
            str(TreeShape(way["parents"]).depth),
            f"{way['tokens_per_round']:.2f}",
            f"{way['ms_per_round']['median']:.1f}",
            ratio(way["speedup"]),
        )
        for cell in found
        for way in cell.get("ways", ())
    ]
    stars = [f"star {cell['star']} of {cell['rule']}: {cell['acceptance']:.3f}" for cell in found if "star" in cell]
    header = ("nodes", "batch", "rule", "depth", "tokens per round", "ms per round", "speedup over plain")
    return Table(title="Trees and chains, T = 0.8, top-p 0.95", header=header, rows=rows, note="; ".join(stars))


STUDY = Study(
    question="Do token trees pay, beside chains of as many scored tokens?",
    config="configs/trained_pair.py",
    options={
        "nodes": Option((4, 8, 16), "Nodes of the trees, and tokens of the chains.", least=1),
        "batches": Option((1, 4), "Rows that are decoded together.", least=1),
        "stars": Option(0, "Count, too, what stars of up to so many children accept.", least=0),
        "repeats": Option(8, "Repeats of each way; each has other prompts.", least=1),
    },
    cells=cells,
    identity=lambda options: {"repeats": options.repeats},
    measure=measure,
    shown=lambda options: ["python_trees"],
    tables={"python_trees": Published(["python_trees", "python_trees_16"], table)},
)

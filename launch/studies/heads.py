"""Measures a trained head on held-out text, and shows what its training gained: tokens seen against acceptance.

    python launch/study.py heads --run=runs/head --pair=python --output=runs/python_head.json

A run that began with another head (``--config.init``) goes on with that one's curve.

Acceptance at position i is that of a token of the head's own distribution after i - 1 drafted tokens, where these are the
text's: what the target would accept, summed over the vocabulary, with nothing drawn. The pair's draft model, which
drafts every position alike, is measured beside it.
"""

from __future__ import annotations

from typing import Any

import jax

from launch.lib.study import Document, Option, Published, Study
from specsamp.analysis.grid import words
from specsamp.analysis.report import Table
from specsamp.checkpoints.pair import fingerprint, load_pair
from specsamp.models.transformer import TransformerLM
from specsamp.training.data import held_out_windows, read_corpus, standard_library
from specsamp.training.eagle import TrainHead
from specsamp.training.evaluate import COMPARED_DISTRIBUTIONS, evaluate
from specsamp.training.run import history, without_paths
from specsamp.training.source import open_trained_head
from specsamp.training.task import Distill

BATCH = 8


def measure(options, key, say) -> dict[str, Any]:
    """Measures the head and the pair's draft model on the same held-out windows."""
    if options.run is None:
        raise ValueError("--run: name the folder of the head's training run")
    trained, pair = open_trained_head(options.run), load_pair(options.pair, draft="head")
    drafting = load_pair(options.pair)
    config = trained.run_config()
    data = config["data"]
    how = {name: data[name] for name in ("pattern", "exclude", "held_out")}
    corpus = read_corpus(data["folder"] or standard_library(), **how)
    rows = held_out_windows(corpus, pair.tokenizer, data["length"], options.windows)
    target = TransformerLM(pair.target.config)
    say("measuring on held-out text")
    most = pair.head.config.max_tokens or options.positions
    task = TrainHead(head=pair.head, target=target, test_steps=min(most, options.positions))
    trainable = jax.eval_shape(task.init, jax.random.key(0))
    params = {name: leaf for name, leaf in pair.draft_params.items() if name in trainable}
    teacher = task.teacher(pair.target_params, pair.draft_params.get("draft_ids"))
    head = evaluate(task, params, teacher, rows, BATCH, warps=COMPARED_DISTRIBUTIONS)
    model = Distill(TransformerLM(drafting.draft.config), target)
    draft = evaluate(model, drafting.draft_params, pair.target_params, rows, BATCH, warps=COMPARED_DISTRIBUTIONS)
    return {
        "pair": options.pair,
        "weights": fingerprint(options.pair, "head"),
        "head": pair.head.config,
        "training": {"config": without_paths(config), "step": trained.step},
        "curve": history(trained.folder, trained.step)["curve"],
        "held_out": {"files": len(corpus.held_out), "windows": len(rows), "head": head, "draft_model": draft},
    }


def table(document: Document) -> Table:
    """Returns acceptance by position: of the head as exported, of the draft model, and of the head on the way."""

    def cells(measured: Document, warp: str) -> list[str]:
        """Returns acceptance at each position that was measured."""
        names = sorted(name for name in measured if name.startswith("acceptance/position_"))
        return [f"{measured[name]:.3f}" for name in names if name.endswith(f"({warp})")]

    held_out, rows = document["held_out"], []
    *on_the_way, last = document["curve"]
    for warp in ("temperature 1", "temperature 0.8, top-p 0.95"):
        found, beside = cells(held_out["head"], warp), held_out["draft_model"][f"acceptance ({warp})"]
        rows.append((f"head, {words(warp)}", f"{last['tokens']:,}", *found))
        rows.append((f"draft model, {words(warp)}", "", *[f"{beside:.3f}"] * len(found)))
    for point in on_the_way:
        then = cells(point, "temperature 1")
        rows.append(("head, T = 1, on the way", f"{point['tokens']:,}", *then, *[""] * (len(found) - len(then))))
    header = ("", "tokens seen", *(f"position {i + 1}" for i in range(len(found))))
    return Table(title="Acceptance by position", header=header, rows=rows)


STUDY = Study(
    question="What is a trained head accepted, by position and by the tokens that it has seen?",
    options={
        "run": Option(None, "The folder of the head's training run; it must be given."),
        "pair": Option("python", "The pair whose head was exported from it, by name or folder."),
        "positions": Option(5, "Measure so many positions of a draft.", least=1),
        "windows": Option(64, "Measure on so many held-out windows.", least=1),
    },
    measure=measure,
    tables={"head": Published(["python_head"], table)},
)

"""Measures a trained head on held-out text, and shows what its training gained: tokens seen against acceptance.

    python launch/studies/head_training.py --run=runs/head --pair=python --output=runs/python_head.json

A run that began with another head (``--config.init``) goes on with that one's curve.

Acceptance at position i is that of a token of the head's own distribution after i - 1 drafted tokens, where these are the
text's: what the target would accept, summed over the vocabulary, with nothing drawn. The pair's draft model, which
drafts every position alike, is measured beside it.
"""

import jax
from absl import flags

from launch.lib import entry
from specsamp.analysis.report import Table
from specsamp.checkpoints.pair import fingerprint, load_pair
from specsamp.models.transformer import TransformerLM
from specsamp.training.data import held_out_windows, read_corpus, standard_library
from specsamp.training.eagle import TrainHead
from specsamp.training.evaluate import COMPARED_DISTRIBUTIONS, evaluate
from specsamp.training.run import history, without_paths
from specsamp.training.source import open_trained_head
from specsamp.training.task import Distill

_RUN = flags.DEFINE_string("run", None, "The folder of the head's training run.", required=True)
_PAIR = flags.DEFINE_string("pair", "python", "The pair whose head was exported from it, by name or folder.")
_POSITIONS = flags.DEFINE_integer("positions", 5, "Measure so many positions of a draft.", lower_bound=1)
_WINDOWS = flags.DEFINE_integer("windows", 64, "Measure on so many held-out windows.", lower_bound=1)
_OUTPUT = entry.define_output()

BATCH = 8


def main() -> None:
    console = entry.make_console()
    entry.check_output(_OUTPUT.value)
    trained, pair = open_trained_head(_RUN.value), load_pair(_PAIR.value, draft="head", check_fit=False)
    drafting = load_pair(_PAIR.value)
    config = trained.provenance["config"]
    data = config["data"]
    how = {name: data[name] for name in ("pattern", "exclude", "held_out")}
    corpus = read_corpus(data["folder"] or standard_library(), **how)
    rows = held_out_windows(corpus, pair.tokenizer, data["length"], _WINDOWS.value)
    target = TransformerLM(pair.target.config)
    with entry.progress(console, "measuring on held-out text"):
        most = pair.head.config.max_tokens or _POSITIONS.value
        task = TrainHead(head=pair.head, target=target, test_steps=min(most, _POSITIONS.value))
        params = {name: leaf for name, leaf in pair.draft_params.items() if name in trainable(task)}
        teacher = task.teacher(pair.target_params, pair.draft_params.get("draft_ids"))
        head = evaluate(task, params, teacher, rows, BATCH, warps=COMPARED_DISTRIBUTIONS)
        model = Distill(TransformerLM(drafting.draft.config), target)
        draft = evaluate(model, drafting.draft_params, pair.target_params, rows, BATCH, warps=COMPARED_DISTRIBUTIONS)
    curve = history(trained.folder, trained.step)["curve"]
    document = {
        "pair": _PAIR.value,
        "weights": fingerprint(_PAIR.value, "head"),
        "head": pair.head.config,
        "training": {"config": without_paths(config), "step": trained.step},
        "curve": curve,
        "held_out": {"files": len(corpus.held_out), "windows": len(rows), "head": head, "draft_model": draft},
    }
    entry.show([table(curve, head, draft)], console)
    entry.write_result(_OUTPUT.value, document, console)


def trainable(task: TrainHead) -> dict:
    """Returns the shapes of what a task trains."""
    return jax.eval_shape(task.init, jax.random.key(0))


def table(curve: list[dict], head: dict, draft: dict) -> Table:
    """Returns acceptance by position at temperature 1: while it was trained, as it is, and of the draft model."""
    columns = range(1, _POSITIONS.value + 1)

    def cells(measured: dict) -> list[str]:
        values = [measured.get(f"acceptance/position_{i} (temperature 1)") for i in columns]
        return ["" if value is None else f"{value:.3f}" for value in values]

    rows = [(f"{point['tokens']:,} tokens", *cells(point)) for point in curve]
    rows.append(("as exported", *cells(head)))
    rows.append(("draft model", *[f"{draft['acceptance (temperature 1)']:.3f}"] * len(columns)))
    return Table(title="Acceptance by position", header=("", *map(str, columns)), rows=rows)


if __name__ == "__main__":
    entry.run(main)

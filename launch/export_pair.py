"""Makes a pair of two training runs: stores both models as int8, and measures what that costs them.

python launch/export_pair.py --target=runs/target --draft=runs/draft --output=runs/my_pair
"""

import json
import pathlib

from absl import flags
from rich.console import Console

from launch.lib import entry
from specsamp import storage
from specsamp.analysis import report
from specsamp.checkpoints.pair import load_pair, save_pair
from specsamp.training import run
from specsamp.training.data import Corpus, held_out_windows, read_corpus, standard_library
from specsamp.training.evaluate import COMPARED_DISTRIBUTIONS, evaluate
from specsamp.training.source import open_trained
from specsamp.training.task import Distill, Pretrain

_TARGET = flags.DEFINE_string("target", None, "The folder of the target's training run.", required=True)
_DRAFT = flags.DEFINE_string(
    "draft", None, "The folder of the draft's training run, distilled from --target.", required=True
)
_OUTPUT = entry.define_output("The folder to write the pair to.", required=True)

MOST_PROMPTS, PROMPT_CHARACTERS = 20, 240


def main() -> None:
    console = entry.make_console()
    if _OUTPUT.value.startswith(storage.BUCKETS):
        raise ValueError(f"--output must be a local folder, to be copied from there; got {_OUTPUT.value}")
    with entry.reading(f"the JSON of {_TARGET.value} or {_DRAFT.value}"):
        export(_TARGET.value, _DRAFT.value, pathlib.Path(_OUTPUT.value).expanduser(), console)


def export(target_run: str, draft_run: str, output: pathlib.Path, console: Console) -> None:
    """Writes and measures a pair.

    Raises:
      FileNotFoundError: a run has no checkpoint.
      ValueError: the runs do not belong together, or the text that they were trained on is another one now.
    """
    target, draft = open_trained(target_run), open_trained(draft_run)
    if "data" not in target.provenance["config"]:
        raise ValueError(
            f"{target_run} was converted from a public checkpoint and stays as it is: launch/export_hugging_face.py "
            f"--run={draft_run} gives a draft that configs/hf.py takes beside it"
        )
    if "target" not in draft.provenance["config"]:
        raise ValueError(f"{draft_run} is no run of a draft: it was not distilled from a target")
    tokenizer_json = (target.folder / "tokenizer.json").read_text(encoding="utf-8")
    if tokenizer_json != (draft.folder / "tokenizer.json").read_text(encoding="utf-8"):
        raise ValueError(f"{target_run} and {draft_run} have different tokenizers: train the draft from this target")
    asked = draft.made_from("target")["sha256"]
    if asked != target.identity["sha256"]:
        raise ValueError(
            f"{draft_run} was distilled from another target (or an earlier step of it) than {target_run} holds"
        )
    data = target.provenance["config"]["data"]
    how = {name: data[name] for name in ("pattern", "exclude", "held_out")}
    corpus = read_corpus(data["folder"] or standard_library(), **how)
    run.check_same(target_run, "corpus", corpus.describe())
    provenance = {
        side: {
            "config": run.without_paths(trained.provenance["config"]),
            "corpus": trained.made_from("corpus"),
            "step": trained.step,
            "last_metrics": run.last_metrics(trained.folder, trained.step),
        }
        for side, trained in (("target", target), ("draft", draft))
    }

    def save():
        return save_pair(
            output,
            target=(target.config, target.params),
            draft=(draft.config, draft.params),
            tokenizer_json=tokenizer_json,
            provenance=provenance,
            eos=target.provenance["config"]["data"]["eos"],
        )

    save()
    stored = load_pair(output.absolute())
    rows = held_out_windows(corpus, stored.tokenizer, data["length"], data["held_out_windows"])
    models = {side: trained.model_in("float32") for side, trained in (("target", target), ("draft", draft))}

    def measure(target_params, draft_params):
        return {
            "target": evaluate(Pretrain(models["target"]), target_params, None, rows, 16),
            "draft": evaluate(
                Distill(models["draft"], models["target"]),
                draft_params,
                target_params,
                rows,
                16,
                warps=COMPARED_DISTRIBUTIONS,
            ),
        }

    with entry.progress(console, "measuring on held-out text"):
        measured = {
            "float32": measure(target.params, draft.params),
            "int8": measure(stored.target_params, stored.draft_params),
        }
    write_prompts(output / "prompts.json", corpus)
    provenance |= {"held_out": measured, "held_out_windows": len(rows), "exported": report.environment()}
    save()
    size = sum(path.stat().st_size for path in output.iterdir())
    console.print(json.dumps(measured, indent=1))
    console.print(f"{output}: {size / 1e6:.1f} MB")


def write_prompts(path: pathlib.Path, corpus: Corpus) -> None:
    """Writes the beginnings of held-out files as prompts, unless there are prompts already: those may have been chosen.

    Prompts end without their line break, which is one token with the indentation that follows.
    """
    if path.exists():
        return

    def beginning(text):
        return text[: max(text.rfind("\n", 0, PROMPT_CHARACTERS), 1)].rstrip()

    texts = {name: beginning(text) for name, text in corpus.held_out.items() if isinstance(text, str)}
    prompts = [{"file": name, "line": 1, "text": text} for name, text in texts.items() if text]  # not of blank lines
    storage.write_json(path, {"source": "held-out files", "prompts": prompts[:MOST_PROMPTS]})


if __name__ == "__main__":
    entry.run(main)

"""Writes a pair, a head or a model to a folder, from which other commands and programs read it.

    python launch/export.py --target=runs/target --draft=runs/draft --output=runs/my_pair
    python launch/export.py --run=runs/head --output=runs/my_pair/head  # a head, for its pair
    python launch/export.py --run=runs/target --output=exported/target  # a model, for transformers
    python launch/export.py --pair=python --output=exported/target      # the target of a pair
    python launch/export.py --checkpoint=meta-llama/Llama-3.1-8B --output=gs://BUCKET/llama-8b
    python launch/export.py --checkpoint=meta-llama/Llama-3.1-70B --output=gs://BUCKET/llama-70b \\
        --model=16 --distributed

A pair stores both models in int8; the command measures the cost of this on held-out text and prints
it.

An EAGLE-3 head is written in the format of speculators, which other engines read; a Medusa head
with its authors' tensor names, and an MTP module with MiMo's tensor names. `load_pair(...,
draft="head")` finds the head in the folder ``head`` of its pair.

A model becomes a folder that Hugging Face transformers loads. A public checkpoint becomes an Orbax
folder, from which every device of any mesh reads only its part:
`--config=configs/hf.py:gs://BUCKET/llama-70b,gs://BUCKET/llama-1b`. With --model=N its parameters
are split over N devices between reading and writing; by default they are on one device.
"""

import functools
import json
import pathlib
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from absl import flags
from rich.console import Console

from launch.lib import entry
from specsamp import TransformerLM, machine, storage
from specsamp.checkpoints import export
from specsamp.checkpoints.chat import read_chat_template
from specsamp.checkpoints.head_export import describe_head, write_head
from specsamp.checkpoints.hugging_face import open_checkpoint, read_params, write_converted
from specsamp.checkpoints.tokenizer import JsonTokenizer
from specsamp.checkpoints.trained_pair import load_pair, pair_folder, save_pair
from specsamp.mesh.layout import Layout, make_mesh
from specsamp.mesh.sharded import shard_model
from specsamp.models.config import DTYPES
from specsamp.training import run_folder
from specsamp.training.data import Corpus, held_out_windows, read_corpus, standard_library
from specsamp.training.held_out import evaluate
from specsamp.training.source import Source, open_trained
from specsamp.training.training_task import TrainModel

_TARGET = flags.DEFINE_string(
    "target", None, "Make a pair: the folder of the target's training run."
)
_DRAFT = flags.DEFINE_string(
    "draft", None, "The folder of the draft's training run, distilled from --target."
)
_RUN = flags.DEFINE_string(
    "run", None, "Write the model or the head of a training run: its folder."
)
_VERIFIER = flags.DEFINE_string(
    "verifier",
    None,
    "Name the target of a head in its files, for other programs: its id of the hub.",
)
_PAIR = flags.DEFINE_string("pair", None, "Write the target of a pair: the pair's name or folder.")
_CHECKPOINT = flags.DEFINE_string(
    "checkpoint",
    None,
    "Convert a public checkpoint: a folder, a gs:// folder or the id of a model of the hub.",
)
_OUTPUT = flags.DEFINE_string(
    "output",
    None,
    "The folder to write, local or gs://; that of a pair must be local.",
    required=True,
)
_INT8 = flags.DEFINE_bool(
    "int8", False, "Convert matrices of --checkpoint to int8, which only this project reads."
)
_DTYPE = flags.DEFINE_enum(
    "dtype", "bfloat16", DTYPES, "The dtype of the parameters of --checkpoint."
)
_MODEL = flags.DEFINE_integer(
    "model", 1, "The number of devices that one copy of --checkpoint is split over.", 1
)

FORMS = ("target", "run", "pair", "checkpoint")
GOES_WITH = {
    "draft": ("target",),
    "verifier": ("run",),
    **dict.fromkeys(("int8", "dtype", "model"), ("checkpoint",)),
}
# Files that mark a folder, and what it then holds.
MARKS = {
    "run.json": "a training run or a converted checkpoint",
    "checkpoints/0": "part of an interrupted conversion",
    "pair.json": "a pair",
    "config.json": "a model or a head",
}
OF_PAIR = ("acceptance.json", "head", "block")  # that were made for the pair in a folder
EXPORTED = "training.json"  # beside a model or a head that was exported here
MOST_PROMPTS, PROMPT_CHARACTERS = 20, 240


def main() -> None:
    console = entry.make_console()
    if sum(flags.FLAGS[name].value is not None for name in FORMS) != 1 or (
        _TARGET.value and not _DRAFT.value
    ):
        raise ValueError("give one of --run, --pair and --checkpoint, or --target and --draft")
    entry.check_goes_with(GOES_WITH)
    if _TARGET.value:
        if _OUTPUT.value.startswith(storage.BUCKETS):
            raise ValueError(
                f"--output must be a local folder, to be copied from there; got {_OUTPUT.value}"
            )
        check_folder("pair.json")
        for name in OF_PAIR:
            if (storage.place(_OUTPUT.value) / name).exists():
                raise ValueError(
                    f"--output={_OUTPUT.value} holds {name} of an earlier pair: remove it, or "
                    "choose another folder"
                )
        with entry.reading(f"the JSON of {_TARGET.value} or {_DRAFT.value}"):
            export_pair(
                _TARGET.value, _DRAFT.value, pathlib.Path(_OUTPUT.value).expanduser(), console
            )
        return
    if _CHECKPOINT.value:
        convert(console)
    elif _RUN.value and "head" in run_folder.read_config(_RUN.value):
        export_head(console)
    elif _VERIFIER.value:
        raise ValueError(
            f"--verifier={_VERIFIER.value} names the target of a head; {_RUN.value} is no run of a "
            "head"
        )
    else:
        export_model()
    console.print(f"written to {_OUTPUT.value}")


def check_folder(*own: str) -> None:
    """Raises ValueError if --output holds something whose files this export would replace.

    Args:
      own: the mark of an earlier export of the same kind, which is replaced.
    """
    place = storage.place(_OUTPUT.value)
    for name, content in MARKS.items():
        if name not in own and (place / name).exists():
            raise ValueError(
                f"--output={_OUTPUT.value} holds {content} ({name}): choose another folder, "
                "or remove it"
            )


def check_exported() -> None:
    """Checks the folder of a model or a head, which may hold one that was exported here."""
    if (storage.place(_OUTPUT.value) / EXPORTED).exists():
        check_folder("config.json")
    else:
        check_folder()


def open_model_run(folder: str) -> Source:
    """Opens the model of a training run; refuses a converted checkpoint."""
    trained = open_trained(folder)
    if "data" not in trained.provenance["config"]:
        raise ValueError(
            f"{folder} was converted from a public checkpoint: use the checkpoint itself"
        )
    return trained


def export_pair(target_run: str, draft_run: str, output: pathlib.Path, console: Console) -> None:
    """Writes and measures a pair; refuses runs of different pairs, and runs whose texts have
    changed.
    """
    target, draft = open_model_run(target_run), open_model_run(draft_run)
    if "target" not in draft.provenance["config"]:
        raise ValueError(f"{draft_run} is no run of a draft: it was not distilled from a target")
    if draft.made_from("target")["sha256"] != target.identity["sha256"]:
        raise ValueError(
            f"{draft_run} was distilled from another target than {target_run}, or an earlier step "
            "of it: distil again"
        )
    data = target.provenance["config"]["data"]
    how = {name: data[name] for name in ("pattern", "exclude", "held_out")}
    corpus = read_corpus(data["folder"] or standard_library(), **how)
    run_folder.check_same(target_run, "corpus", corpus.describe())
    tokenizer = tokenizer_of(target)
    rows = held_out_windows(corpus, tokenizer, data["length"], data["held_out_windows"])
    save = functools.partial(
        save_pair,
        output,
        target=(target.config, target.params),
        draft=(draft.config, draft.params),
        tokenizer_json=tokenizer.to_json(),
        eos=data["eos"],
    )
    provenance = {"target": provenance_of(target), "draft": provenance_of(draft)}
    save(provenance=provenance)
    stored = load_pair(output.absolute())
    alone = TrainModel(target.model_in("float32"))
    distilled = TrainModel(draft.model_in("float32"), target.model_in("float32"))
    params = {
        "float32": (target.params, draft.params),
        "int8": (stored.target_params, stored.draft_params),
    }
    with entry.progress(console, "measuring on held-out text"):
        measured = {
            name: {
                "target": evaluate(alone, of_target, None, rows, 16),
                "draft": evaluate(distilled, of_draft, of_target, rows, 16),
            }
            for name, (of_target, of_draft) in params.items()
        }
    write_prompts(output / "prompts.json", corpus, tokenizer)
    provenance |= {
        "held_out": measured,
        "held_out_windows": len(rows),
        "exported": machine.environment(),
    }
    save(provenance=provenance)
    console.print(json.dumps(measured, indent=1))
    console.print(f"{output}: {sum(path.stat().st_size for path in output.iterdir()) / 1e6:.1f} MB")


def tokenizer_of(trained: Source) -> JsonTokenizer:
    """Returns the tokenizer of a run, with the chat template of the tokenizer that it was given."""
    data = trained.provenance["config"]["data"]
    given = data["tokenizer"] and storage.place(data["tokenizer"]).parent
    chat = read_chat_template(given) if given else None
    # The tokenizer of a public target has another end of text, which its draft does not need.
    is_public = "name" in trained.provenance.get("target", {})
    eos = None if is_public else data["eos"]
    return JsonTokenizer(trained.folder / "tokenizer.json", eos, chat=chat)


def provenance_of(trained: Source) -> dict:
    """Returns the record of a training run."""
    return {
        "config": run_folder.without_paths(trained.provenance["config"]),
        "corpus": trained.made_from("corpus"),
        "step": trained.step,
        "last_metrics": run_folder.last_metrics(trained.folder, trained.step),
    }


def write_prompts(path: pathlib.Path, corpus: Corpus, tokenizer: JsonTokenizer) -> None:
    """Writes the beginnings of held-out files as prompts, each once, unless there are prompts
    already or the files have none; of a sequence of integers, its first one.

    Prompts end without a line break, since a line break and the following indentation are one
    token.
    """
    if path.exists():
        return
    beginnings: dict[str, str] = {}
    for name, text in corpus.held_out.items():
        beginning = ""
        if type(text) is str:  # no conversation
            beginning = text[: max(text.rfind("\n", 0, PROMPT_CHARACTERS), 1)].rstrip()
        elif isinstance(text, np.ndarray):
            first = f"{tokenizer.token(tokenizer.eos_id)} {text[0]}"
            is_written_so = tokenizer.encode(first) == [tokenizer.eos_id, text[0]]
            beginning = first if is_written_so else ""
        if beginning:
            beginnings.setdefault(beginning, name)
    prompts = [{"file": name, "line": 1, "text": text} for text, name in beginnings.items()]
    if prompts:
        storage.write_json(path, {"source": "held-out files", "prompts": prompts[:MOST_PROMPTS]})


def export_head(console: Console) -> None:
    """Writes the head of --run, its matrices in bfloat16 like public heads."""
    check_exported()
    entry.check_output(f"{_OUTPUT.value}/config.json")
    trained = open_trained(_RUN.value, is_head=True)
    with entry.reading(f"{_RUN.value}/run.json"):
        config, target = trained.provenance["config"], trained.made_from("target")
        name = _VERIFIER.value or target.get("name") or config["target"].rstrip("/").split("/")[-1]
        params = jax.tree.map(
            lambda x: x if x.dtype == np.int32 else x.astype(jnp.bfloat16), trained.params
        )
        head, K = trained.config.head(), config["test_time"]["test_steps"]
        describe_head(head.config, name, K)  # refused before anything is written
        write_provenance(provenance_of(trained) | {"target": target})
        write_head(_OUTPUT.value, head, params, target_name=name, K=K)
    console.print(
        f"{sum(leaf.nbytes for leaf in jax.tree.leaves(params)) / 1e6:.1f} MB, of step "
        f"{trained.step}"
    )


def export_model() -> None:
    """Writes the model of --run, or the target of --pair, in the format of transformers."""
    check_exported()
    if _PAIR.value:
        pair = load_pair(_PAIR.value)
        made_by = storage.read_json(pair_folder(_PAIR.value) / "pair.json").get("provenance") or {}
        config, params, tokenizer = pair.target.config, pair.target_params, pair.tokenizer
    else:
        trained = open_model_run(_RUN.value)
        config, params = trained.config, trained.params
        with entry.reading(f"{_RUN.value}/run.json"):
            tokenizer, made_by = tokenizer_of(trained), provenance_of(trained)
    export.describe_model(config, None)  # refused before anything is written
    write_provenance(made_by)
    export.export(_OUTPUT.value, config, params, tokenizer)


def write_provenance(made_by: Any) -> None:
    """Writes the record of the training of an exported model or head.

    It marks the export, and comes first: the command may be repeated after a kill.
    """
    storage.write_json(storage.place(_OUTPUT.value) / EXPORTED, made_by)


def convert(console: Console) -> None:
    """Writes --checkpoint as a folder that any mesh reads without conversion."""
    mesh = make_mesh(model=_MODEL.value)
    check_folder()
    entry.check_output(f"{_OUTPUT.value}/config.json")
    weight_dtype = "int8" if _INT8.value else None
    checkpoint = open_checkpoint(_CHECKPOINT.value, dtype=_DTYPE.value, weight_dtype=weight_dtype)
    if checkpoint.is_converted:
        raise ValueError(f"{_CHECKPOINT.value} is converted already")
    model = TransformerLM(checkpoint.config)
    console.print(f"{model.num_parameters:,} parameters, {weight_dtype or _DTYPE.value}")
    if _MODEL.value > 1:
        model = shard_model(model, Layout.tensor_parallel(mesh))
    start = time.perf_counter()
    with entry.keeps(f"delete {_OUTPUT.value} before you start again, it may hold a part"):
        params = read_params(checkpoint, model, entry.weights_progress(console))
        with entry.progress(console, "writing"):
            write_converted(checkpoint, params, _OUTPUT.value)
    console.print(f"read and written in {time.perf_counter() - start:.0f} s")


if __name__ == "__main__":
    entry.run(main)

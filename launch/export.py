"""Writes a pair, a head or a model in the form in which it is read; what is given says which.

    python launch/export.py --target=runs/target --draft=runs/draft --output=runs/my_pair   # a pair of two runs
    python launch/export.py --run=runs/head --output=runs/my_pair/head                      # a head, for its pair
    python launch/export.py --run=runs/target --output=exported/target                      # a model, for transformers
    python launch/export.py --pair=python --side=target --output=exported/target            # the same of a pair
    python launch/export.py --checkpoint=meta-llama/Llama-3.1-8B --output=gs://BUCKET/llama-8b
    python launch/export.py --checkpoint=meta-llama/Llama-3.1-70B --output=gs://BUCKET/llama-70b --model=16 \\
        --distributed

A pair stores both models in int8; what that costs them on held-out text is measured and printed.

A head is written in the layout of speculators (EAGLE-3), or with its authors' names in safetensors (Medusa). An MTP module
has no public layout of its own and gets the names of MiMo's. Engines that read the layout of speculators read the first;
the others are read here, and have been tried in no other engine. In the folder ``head`` of its target's pair,
`load_pair(..., draft="head")` finds it. training.json says how it was trained; no reader asks for it.

A model becomes a folder that Hugging Face transformers loads. A public checkpoint becomes an Orbax folder, of which every
device of any mesh reads just its part: `--config=configs/hf.py:gs://BUCKET/llama-70b,gs://BUCKET/llama-1b`. With --model=N
its parameters are split over N devices between reading and writing; without it one device holds them.
"""

import json
import pathlib
import time

import jax
import jax.numpy as jnp
import numpy as np
from absl import flags
from rich.console import Console

from launch.lib import entry
from specsamp import machine, storage
from specsamp.checkpoints import export
from specsamp.checkpoints.head_export import write_head
from specsamp.checkpoints.hugging_face import open_checkpoint, read_params, write_converted
from specsamp.checkpoints.pair import load_pair, save_pair
from specsamp.checkpoints.tokenizer import JsonTokenizer
from specsamp.mesh.layout import Layout, make_mesh
from specsamp.mesh.sharded import shard_model
from specsamp.models.config import DTYPES
from specsamp.models.heads import FeatureHead
from specsamp.models.transformer import TransformerLM
from specsamp.text_format import human_count
from specsamp.training import run
from specsamp.training.data import Corpus, held_out_windows, read_corpus, standard_library
from specsamp.training.evaluate import COMPARED_DISTRIBUTIONS, evaluate
from specsamp.training.source import Source, open_trained, open_trained_head
from specsamp.training.task import Distill, Pretrain

_TARGET = flags.DEFINE_string("target", None, "Make a pair: the folder of the target's training run.")
_DRAFT = flags.DEFINE_string("draft", None, "The folder of the draft's training run, distilled from --target.")
_RUN = flags.DEFINE_string("run", None, "Write the model or the head of a training run: its folder.")
_PAIR = flags.DEFINE_string("pair", None, "Write a model of a pair: the pair's name or folder.")
_CHECKPOINT = flags.DEFINE_string(
    "checkpoint", None, "Convert a public checkpoint: a folder, a gs:// folder or the id of a model of the hub."
)
_OUTPUT = flags.DEFINE_string(
    "output", None, "The folder to write, local or gs://; that of a pair must be local.", required=True
)
_SIDE = flags.DEFINE_enum("side", "target", ("target", "draft"), "Which model of --pair is written.")
_INT8 = flags.DEFINE_bool("int8", False, "Convert matrices of --checkpoint to int8, which only this project reads.")
_TARGET_NAME = flags.DEFINE_string(
    "target_name",
    None,
    "Where readers of a head find its target: a folder or an id of the hub. Default: as in its run.",
)
_K = flags.DEFINE_integer(
    "K", None, "Tokens per round that readers of a head are told to draft. Default: the steps it was trained with.", 1
)
_DTYPE = flags.DEFINE_enum("dtype", "bfloat16", DTYPES, "The dtype of the parameters of --checkpoint.")
_MODEL = flags.DEFINE_integer(
    "model", 1, "The number of devices that one copy of --checkpoint is split over.", lower_bound=1
)

HEEDED = {  # by what is exported: the flags that go with it
    "target": ("draft",),
    "run": ("target_name", "K"),
    "pair": ("side",),
    "checkpoint": ("int8", "dtype", "model"),
}
MOST_PROMPTS, PROMPT_CHARACTERS = 20, 240


def main() -> None:
    console = entry.make_console(soft_wrap=True, markup=False)
    given = [name for name in HEEDED if flags.FLAGS[name].value is not None]
    if len(given) != 1 or (_TARGET.value and not _DRAFT.value):
        raise ValueError("give one of --run, --pair and --checkpoint, or --target and --draft")
    check_heeded(f"--{given[0]}", HEEDED[given[0]])
    if _TARGET.value:
        if _OUTPUT.value.startswith(storage.BUCKETS):
            raise ValueError(f"--output must be a local folder, to be copied from there; got {_OUTPUT.value}")
        with entry.reading(f"the JSON of {_TARGET.value} or {_DRAFT.value}"):
            export_pair(_TARGET.value, _DRAFT.value, pathlib.Path(_OUTPUT.value).expanduser(), console)
    elif _CHECKPOINT.value:
        convert(console)
    elif _RUN.value and "head" in run.read_config(_RUN.value):
        export_head(console)
    else:
        export_model(console)


def check_heeded(what: str, heeded: tuple[str, ...]) -> None:
    """Refuses flags that go with something else."""
    for name in sorted({other for others in HEEDED.values() for other in others} - {*heeded}):
        if flags.FLAGS[name].present:
            raise ValueError(f"--{name} would not be heeded with {what}: leave it out")


def export_pair(target_run: str, draft_run: str, output: pathlib.Path, console: Console) -> None:
    """Writes and measures a pair.

    Raises:
      FileNotFoundError: a run has no checkpoint.
      ValueError: the runs do not belong together, or the text that they were trained on is another one now.
    """
    target, draft = open_trained(target_run), open_trained(draft_run)
    if "data" not in target.provenance["config"]:
        raise ValueError(
            f"{target_run} was converted from a public checkpoint and stays as it is: launch/export.py --run={draft_run} "
            "gives a draft that configs/hf.py takes beside it"
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
    provenance = {"target": provenance_of(target), "draft": provenance_of(draft)}
    models = {"target": (target.config, target.params), "draft": (draft.config, draft.params)}
    save_pair(output, **models, tokenizer_json=tokenizer_json, provenance=provenance, eos=data["eos"])
    stored = load_pair(output.absolute())
    rows = held_out_windows(corpus, stored.tokenizer, data["length"], data["held_out_windows"])
    alone, beside = Pretrain(target.model_in("float32")), target.model_in("float32")
    distilled = Distill(draft.model_in("float32"), beside)

    def measure(target_params, draft_params):
        told = evaluate(distilled, draft_params, target_params, rows, 16, warps=COMPARED_DISTRIBUTIONS)
        return {"target": evaluate(alone, target_params, None, rows, 16), "draft": told}

    with entry.progress(console, "measuring on held-out text"):
        measured = {
            "float32": measure(target.params, draft.params),
            "int8": measure(stored.target_params, stored.draft_params),
        }
    write_prompts(output / "prompts.json", corpus)
    provenance |= {"held_out": measured, "held_out_windows": len(rows), "exported": machine.environment()}
    save_pair(output, **models, tokenizer_json=tokenizer_json, provenance=provenance, eos=data["eos"])
    size = sum(path.stat().st_size for path in output.iterdir())
    console.print(json.dumps(measured, indent=1))
    console.print(f"{output}: {size / 1e6:.1f} MB")


def provenance_of(trained: Source) -> dict:
    """Returns how a model was trained."""
    return {
        "config": run.without_paths(trained.provenance["config"]),
        "corpus": trained.made_from("corpus"),
        "step": trained.step,
        "last_metrics": run.last_metrics(trained.folder, trained.step),
    }


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


def export_head(console: Console) -> None:
    """Writes the head of --run, its matrices in bfloat16 as public ones are."""
    check_heeded("the run of a head", ("target_name", "K"))
    entry.check_output(f"{_OUTPUT.value}/config.json")
    place = storage.place(_OUTPUT.value)
    if (place / "config.json").exists() and not (place / "training.json").exists():
        raise ValueError(
            f"{_OUTPUT.value} holds a model or a head that was not exported here: give a folder of its own"
        )
    trained = open_trained_head(_RUN.value)
    with entry.reading(f"{_RUN.value}/run.json"):
        config, target = trained.provenance["config"], trained.made_from("target")
        name = _TARGET_NAME.value or target.get("name") or config["target"].rstrip("/").split("/")[-1]
        params = jax.tree.map(lambda x: x if x.dtype == np.int32 else x.astype(jnp.bfloat16), trained.params)
        K = _K.value or config["test_time"]["test_steps"]
        write_head(_OUTPUT.value, FeatureHead(trained.config), params, target_name=name, K=K)
        told = provenance_of(trained) | {"target": target} | run.history(trained.folder, trained.step)
        storage.write_json(place / "training.json", told)
    written = sum(leaf.nbytes for leaf in jax.tree.leaves(params))
    console.print(f"{_OUTPUT.value}: {written / 1e6:.1f} MB, of step {trained.step}")


def export_model(console: Console) -> None:
    """Writes the model of --run, or one of --pair, as transformers loads it."""
    if _PAIR.value:
        pair = load_pair(_PAIR.value)
        model, params = (
            (pair.target, pair.target_params) if _SIDE.value == "target" else (pair.draft, pair.draft_params)
        )
        config, tokenizer = model.config, pair.tokenizer
    else:
        check_heeded("the run of a model", ())
        trained = open_trained(_RUN.value)
        config, params = trained.config, trained.params
        if "data" not in trained.provenance["config"]:
            raise ValueError(f"--run={_RUN.value} was converted from a public checkpoint: export that one's folder")
        with entry.reading(f"{_RUN.value}/run.json"):
            eos = trained.provenance["config"]["data"]["eos"]
        tokenizer = JsonTokenizer(trained.folder / "tokenizer.json", eos=eos)
    export.export(_OUTPUT.value, config, params, tokenizer)
    console.print(f"written to {_OUTPUT.value}")


def convert(console: Console) -> None:
    """Writes --checkpoint as a folder that loads straight onto any mesh."""
    output = storage.place(_OUTPUT.value)
    if (output / "run.json").exists():
        raise ValueError(f"--output={_OUTPUT.value} holds a model already: choose another folder")
    if (output / "checkpoints" / "0").exists():
        raise ValueError(
            f"--output={_OUTPUT.value} holds parameters of a conversion that did not end: delete the folder, or "
            "choose another"
        )
    entry.check_output(f"{_OUTPUT.value}/config.json")
    weight_dtype = "int8" if _INT8.value else None
    checkpoint = open_checkpoint(_CHECKPOINT.value, dtype=_DTYPE.value, weight_dtype=weight_dtype)
    if checkpoint.is_converted:
        raise ValueError(f"{_CHECKPOINT.value} is converted already")
    model = TransformerLM(checkpoint.config)
    if _MODEL.value > 1:
        model = shard_model(model, Layout.tensor_parallel(make_mesh(jax.device_count() // _MODEL.value, _MODEL.value)))
    console.print(f"{human_count(checkpoint.config.num_parameters)} parameters, {weight_dtype or _DTYPE.value}")
    start = time.perf_counter()
    unfinished = f"delete {_OUTPUT.value} before you start again, it may hold a part"
    with entry.keeps(unfinished), entry.progress(console, "reading") as say:

        def show(name, done, total):
            return say(f"read {done / 1e9:.1f} of {total / 1e9:.1f} GB, {name}")

        params = read_params(checkpoint, model, show)
        say("writing")
        write_converted(checkpoint, params, _OUTPUT.value)
    console.print(f"{_OUTPUT.value}: written in {time.perf_counter() - start:.0f} s")


if __name__ == "__main__":
    entry.run(main)

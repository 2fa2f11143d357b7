"""Compares drafts that were trained together with their target with drafts that were trained after it, at equal compute.

    python launch/study.py together --tiny=yes --steps=1000 --output=runs/python_together.json

Each cell trains (launch/train.py; runs that are done are read) and then decodes held-out prompts. A target gets the same
steps in every way. What is trained after it gets the compute that training together takes beyond the target. Counted are six
operations a token for each parameter that is trained and two for each that is only read, as if both losses shared the
target's call. A module that is trained afterwards learns from the target's distribution, one that is trained with it from text.
"""

import pathlib
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import jax

from configs import python_pair
from launch.lib.config import CHECKOUT
from launch.lib.study import Document, Option, Published, Study, answers, law
from specsamp import Pair, chain, generate, temperature, top_p
from specsamp.analysis.report import Table
from specsamp.checkpoints.tokenizer import JsonTokenizer
from specsamp.checkpoints.trained_pair import load_prompts
from specsamp.models.config import TransformerConfig
from specsamp.models.transformer import TransformerLM
from specsamp.training.run_folder import last_metrics
from specsamp.training.source import make_head, open_trained

K, TOKENS = 3, 128
SAMPLING = ({"temperature": 0.0, "top_p": 1.0}, {"temperature": 0.8, "top_p": 0.95})
WAYS = {  # the kind of configuration, whether with its target, its fields, and whose compute it gets
    "draft model after": ("draft", False, {}, "draft"),
    "draft model together": ("draft", True, {}, "draft"),
    "draft model together pulled 0.3": ("draft", True, {"together.pull": 0.3}, "draft"),
    "draft model after, as long as MTP": ("draft", False, {}, "mtp"),
    "MTP after": ("mtp", False, {}, "mtp"),
    "MTP together": ("mtp", True, {}, "mtp"),
    "three MTP modules after": ("mtp", False, {"head.num_modules": 3}, "mtp"),
    "three MTP modules together": ("mtp", True, {"head.num_modules": 3}, "mtp"),
}


def operations(kind: str) -> int:
    """Returns how many parameters a token is multiplied with in a training step of a draft, a head or a target."""
    config = python_pair.get_config(kind)
    model, is_head = TransformerConfig(**config.model), "head" in config
    made = make_head(model, config.head, target_layers=2, target_width=model.width) if is_head else TransformerLM(model)
    shapes = jax.eval_shape(made.init, jax.random.key(0))
    count = sum(leaf.size for name, part in shapes.items() if "ngram" not in name for leaf in jax.tree.leaves(part))
    # Each step of a head's test computes logits too, and runs one module.
    return config.test_time.test_steps * (count + model.vocab_size * model.width) if is_head else count


def train(kind: str, folder: pathlib.Path, options: Any, fields: dict[str, Any]) -> pathlib.Path:
    """Trains a run, or goes on with it, unless it is done; returns its folder."""
    last = folder / "draft" if kind.endswith(("mtp_target", "draft_target")) else folder
    if (last / "checkpoints" / str(fields["train.steps"])).exists():
        return folder
    fields = {
        "train.batch": 16,
        "train.warmup_steps": min(python_pair.get_config(kind).train.warmup_steps, fields["train.steps"] // 4),
        "data.folder": options.texts,
        "intervals.evaluate": 500,
        **fields,
    }
    words = [f"--config=configs/python_pair.py:{kind}", f"--workdir={folder}"]
    words += [f"--config.{name}={value}" for name, value in fields.items()]
    subprocess.run([sys.executable, CHECKOUT / "launch/train.py", *words], check=True, cwd=CHECKOUT)
    return folder


def measure(options: Any, key: dict, say: Callable[[str], None]) -> dict[str, Any]:
    """Trains in one way with one seed; returns the target's loss, the compute, and tokens per round."""
    (kind, together, fields, paid), seed = WAYS[key["way"]], {"train.seed": key["seed"]}
    is_head, small = kind == "mtp", "tiny_" if options.tiny else ""
    kind, paid, alone = small + kind, small + paid, small + "target"
    place = pathlib.Path(options.runs).absolute() / f"{small}{key['seed']}"
    run, extra = place / key["way"].replace(" ", "_"), operations(paid) / operations(alone)
    if together:
        logged = train(f"{kind}_target", run, options, fields | seed | {"train.steps": int(options.steps)})
        folders = run / "target", run / "draft"
    else:
        logged = train(alone, place / "target", options, seed | {"train.steps": int(options.steps)})
        steps = round(int(options.steps) * extra / (1 / 3 + operations(kind) / operations(alone)))
        after = {"target": logged, "generated.rows": 0, "train.steps": steps}
        folders = logged, train(kind, run, options, after | fields | seed)
    target, draft = open_trained(folders[0]), open_trained(folders[1], is_head=is_head)
    fields = {"head": draft.config.head()} if is_head else {"draft": draft.model_in("float32")}
    fields |= {"tokenizer": JsonTokenizer(folders[0] / "tokenizer.json", eos="<eos>"), "draft_params": draft.params}
    pair = Pair(target=target.model_in("float32"), target_params=target.params, **fields)
    per_round = []
    for one in SAMPLING:
        sampling = chain(temperature(one["temperature"]), top_p(one["top_p"]))
        done = generate(pair, load_prompts("python"), TOKENS, draft_length=K, sampling=sampling, num_samples=4)
        stats = sum(completion.stats for completion in done)
        per_round.append(stats.emitted / stats.rounds)
    found = {"loss": last_metrics(logged, int(options.steps))["held_out/loss"], "compute": 1 + extra}
    return found | {"tokens_per_round": per_round}


def table(document: Document) -> Table:
    """Returns a row for each way, with the mean and the range over seeds."""
    rows = []
    for way in dict.fromkeys(key["way"] for key, _ in answers(document)):
        results = [result for key, result in answers(document) if key["way"] == way]
        numbers = zip(*([one["loss"], *one["tokens_per_round"]] for one in results))
        told = [f"{sum(each) / len(each):.3f} ({min(each):.3f} to {max(each):.3f})" for each in numbers]
        rows.append((way, f"{results[0]['compute']:.2f}", *told))
    header = ("trained", "compute", "target's loss", *(f"tokens per round, {law(one)}" for one in SAMPLING))
    note = "means (ranges over seeds); compute: 1 trains the target alone; losses on held-out text"
    return Table(title="Trained together, or after the target", header=header, rows=rows, note=note)


STUDY = Study(
    question="Is a draft better that was trained together with its target?",
    cells=lambda options: [{"way": way, "seed": int(seed)} for seed in options.seeds for way in WAYS],
    identity=lambda options: {
        "steps": int(options.steps),
        "tiny": bool(options.tiny),
        "K": K,
        "max_new_tokens": TOKENS,
    },
    measure=measure,
    tables={"together": Published(["python_together"], table)},
    options={
        "tiny": Option("", "Train the tiny kinds of the configuration."),
        "runs": Option("runs/together", "The folder of the training runs; another for other texts."),
        "texts": Option("", "The folder of texts to train on; empty: the standard library of this Python."),
        "steps": Option("1500", "Steps of every target."),
        "seeds": Option(("0", "1", "2"), "Seeds of the trainings."),
    },
)

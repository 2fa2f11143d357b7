"""Pre-trains a target, also one that drafts itself, or distils a draft or a head; started again, it goes on where it was.

python launch/train.py --config=configs/python_pair.py:target --workdir=runs/target
python launch/train.py --config=configs/python_pair.py:draft --workdir=runs/draft --config.target=runs/target
python launch/train.py --config=configs/python_pair.py:layer_skip --workdir=runs/layer_skip --config.init=runs/target
python launch/train.py --config=configs/python_pair.py:head --workdir=runs/head --config.target=python
python launch/train.py --config=configs/python_pair.py:medusa --workdir=runs/medusa --config.target=python
"""

import dataclasses
import os
from typing import Any

import jax
import numpy as np
from absl import flags
from etils import epath
from jax.experimental import multihost_utils
from jax.sharding import Mesh
from ml_collections import ConfigDict
from rich.console import Console

import entry
from config_file import ConfigFlag, require
from specsamp import storage
from specsamp.checkpoints.chat import read_chat_template
from specsamp.checkpoints.params import check_shapes
from specsamp.checkpoints.tokenizer import JsonTokenizer
from specsamp.mesh import distributed
from specsamp.mesh.layout import make_mesh
from specsamp.models.config import TransformerConfig
from specsamp.models.heads import DRAFT_IDS
from specsamp.models.transformer import TransformerLM
from specsamp.sampling.warp import Warp, chain, temperature, top_p
from specsamp.text_format import human_count
from specsamp.training import run
from specsamp.training.data import (
    Corpus,
    Mixture,
    Windows,
    held_out_windows,
    read_corpus,
    standard_library,
    token_stream,
    train_tokenizer,
)
from specsamp.training.eagle import TrainHead, most_frequent
from specsamp.training.evaluate import COMPARED_DISTRIBUTIONS
from specsamp.training.generated import complete_windows
from specsamp.training.layerskip import LayerSkip
from specsamp.training.log import Progress
from specsamp.training.task import Distill, Pretrain, Task
from specsamp.training.trainer import Intervals, TrainConfig, check_devices, train

_CONFIG = ConfigFlag("configs/python_pair.py:tiny_target")
_WORKDIR = flags.DEFINE_string(
    "workdir", None, "Keep the run in this folder, local or gs://; one that is there is resumed.", required=True
)


def main() -> None:
    require(_CONFIG.value, ("data", "model", "train", "intervals", "mesh", "compute_dtype"), "training")
    folder = storage.place(_WORKDIR.value)
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"--workdir={_WORKDIR.value} is a file: name a folder")
    with entry.keeps(f"the same command goes on at the last checkpoint in {_WORKDIR.value}"):
        start(_CONFIG.value, folder, entry.make_console())


def start(config: ConfigDict, folder: epath.Path, console: Console) -> None:
    """Checks all that can be wrong before it writes anything, then trains."""
    run.check_run(folder, config.to_dict(), changeable=("intervals", "mesh"))
    train_config, intervals, model = TrainConfig(**config.train), Intervals(**config.intervals), make_model(config)
    if config.get("target") == "":
        raise ValueError(
            "a draft is distilled from a target: give --config.target, the folder of its training or a pair"
        )
    target = run.open_target(config.target) if "target" in config else None
    first = open_first(config, target) if config.get("init") else None
    task = make_task(config, model, target)
    data = config.data
    corpus = read_corpus(
        data.folder or standard_library(), pattern=data.pattern, exclude=data.exclude, held_out=data.held_out
    )
    made_from = {"corpus": corpus.describe()} | (
        {} if target is None else {"target": target.describe() | sizes_of(target)}
    )
    for name, description in made_from.items():
        run.check_same(folder, name, description)
    if target is not None:
        check_split(config.data.held_out, corpus, target)
    tokenizer = make_tokenizer(config, folder, corpus, target or first)
    if tokenizer.vocab_size > model.vocab_size:
        raise ValueError(
            f"the tokenizer has {tokenizer.vocab_size} tokens, the model a vocabulary of {model.vocab_size}"
        )
    windows = Windows(token_stream(corpus.train.values(), tokenizer), data.length, train_config.seed)
    held_out = held_out_windows(corpus, tokenizer, data.length, data.held_out_windows)
    check_all_processes(folder, config, corpus, tokenizer)
    mesh = train_mesh(config)
    check_devices(train_config, held_out, mesh)
    check_length(config, model, target)
    check_generated(config, target)
    first_params = None if first is None else check_first(config, first, corpus, tokenizer, task)
    teacher_params = make_teacher(config, task, target, windows, first)
    if "head" in config and first is not None:
        say_what_it_was_trained_for(config, first, target, console)
    if entry.is_first():
        run.open_run(folder, config.to_dict(), tokenizer.to_json(), **made_from)
        if "head" in config and config.head.get("draft_vocab_size"):
            run.write_array(folder / run.IDS, np.asarray(teacher_params[DRAFT_IDS]))
        if "head" in config and first is not None and not (folder / run.BEFORE).exists():
            storage.write_json(folder / run.BEFORE, run.history(config.init))
    epochs = train_config.steps * train_config.batch * data.length / len(windows.stream)
    console.print(
        f"{human_count(count_parameters(task))} parameters, {len(corpus.train)} files, "
        f"{len(windows.stream):,} tokens ({len(corpus.skipped)} files skipped), {epochs:.2f} epochs"
    )
    rows = None if target is None else target_rows(config, folder, target, windows, console)
    batches = Mixture(windows, rows, config.generated.share, train_config.seed) if rows is not None else windows
    train(
        task,
        train_config,
        batches,
        folder,
        held_out=held_out,
        teacher_params=teacher_params,
        intervals=intervals,
        console=console,
        params=first_params,
        warps=COMPARED_DISTRIBUTIONS if task.drafts else None,
        mesh=mesh,
    )


def make_task(config: ConfigDict, model: TransformerLM, target: run.TrainedModel | None) -> Task:
    """Returns what is trained: a head or a draft of ``target``, a target that drafts itself, or a target alone."""
    if "head" in config:
        head = run.make_head(model.config, config.head, **sizes_of(target))
        beside = target.model_in(config.compute_dtype)
        return TrainHead(head=head, target=beside, objective=config.objective, **config.test_time)
    if target is not None:
        return Distill(model, target.model_in(config.compute_dtype), config.objective, config.text_share)
    if "layer_skip" in config:
        return LayerSkip(model=model, steps=config.train.steps, from_scratch=not config.init, **config.layer_skip)
    return Pretrain(model)


def make_teacher(
    config: ConfigDict,
    task: Task,
    target: run.TrainedModel | None,
    windows: Windows,
    first: run.TrainedModel | None = None,
) -> Any:
    """Returns what the task looks at and does not train; a reduced vocabulary is that of the most frequent tokens."""
    if "head" not in config:
        return None if target is None else target.params
    size = config.head.get("draft_vocab_size")
    ids_U = None
    if size:  # of a head that training begins with, each row of its output is that of one of its own ids
        ids_U = (
            most_frequent(windows.stream, task.target.vocab_size, size) if first is None else first.params[DRAFT_IDS]
        )
        ids_U = np.asarray(ids_U)
    return task.teacher(target.params, ids_U)


def open_first(config: ConfigDict, target: run.TrainedModel | None) -> run.TrainedModel:
    """Reads what training begins with: a run of the same kind, a head that was exported or published, a pair's target."""
    if "head" in config:
        return run.open_first_head(config.init, target.config)
    return run.open_target(config.init) if target is None else run.open_trained(config.init)


def sizes_of(target: run.TrainedModel) -> dict[str, int]:
    """Returns what a head must know of its target."""
    return {"target_layers": target.config.num_layers, "target_width": target.config.width}


def count_parameters(task: Task) -> int:
    return sum(leaf.size for leaf in jax.tree.leaves(jax.eval_shape(task.init, jax.random.key(0))))


def check_all_processes(folder: epath.Path, config: ConfigDict, corpus: Corpus, tokenizer: JsonTokenizer) -> None:
    """Checks that processes which train together see one folder, and read the same text in the same tokens.

    Raises:
      ValueError: on every process, with what differs.
    """
    if jax.process_count() == 1:
        return
    facts = {"configuration": config.to_json(), "corpus": corpus.describe()["sha256"], "tokenizer": tokenizer.to_json()}
    theirs = distributed.gather_objects(facts)
    different = [name for name in facts if len({other[name] for other in theirs}) > 1]
    if different:
        raise ValueError(
            f"the processes differ in {', '.join(different)}: give all the same command, and hosts with another Python "
            "a --config.data.folder of their own copy of the text"
        )
    word = distributed.from_first(lambda: os.urandom(8).hex())
    if entry.is_first():
        storage.write(folder / "seen_by_all", word)
    multihost_utils.sync_global_devices("a word in the folder")
    seen = (folder / "seen_by_all").exists() and (folder / "seen_by_all").read_text() == word
    if not all(distributed.gather_objects(seen)):
        raise ValueError(f"{folder} is not the same folder for all processes: give a gs:// path, or a shared disk")


def train_mesh(config: ConfigDict) -> Mesh:
    """Returns the mesh: ``config.mesh.model`` devices hold one copy of the model together, the others other rows."""
    model = config.mesh.model
    if model < 1 or jax.device_count() % model:
        raise ValueError(f"mesh.model {model} does not divide the {jax.device_count()} devices")
    return make_mesh(jax.device_count() // model, model)


def make_model(config: ConfigDict) -> TransformerLM:
    return TransformerLM(TransformerConfig(**config.model, dtype=config.compute_dtype))


def make_tokenizer(
    config: ConfigDict, folder: epath.Path, corpus: Corpus, parent: run.TrainedModel | None
) -> JsonTokenizer:
    """Returns the run's own tokenizer if it has one, else that of the model it is made from, a given or a new one.

    Its chat template is that of the model it is made from, or lies beside the given one.
    """
    given = [folder / "tokenizer.json", parent and parent.folder / "tokenizer.json", config.data.tokenizer]
    chats = (read_chat_template(storage.place(path).parent) for path in filter(None, given[1:]))
    chat = next(filter(None, chats), None)
    for path in filter(None, given):
        if path != given[0] or path.exists():
            return JsonTokenizer(path, config.data.eos, chat=chat)
    if not all(isinstance(text, str) for text in corpus.train.values()):
        raise ValueError(
            "conversations take a tokenizer with a chat template: give data.tokenizer, or a target to train from"
        )
    trained = train_tokenizer(corpus.train.values(), config.model.vocab_size, config.data.eos)
    return JsonTokenizer.from_tokenizer(trained, config.data.eos)


def check_split(held_out: float, corpus: Corpus, other: run.TrainedModel) -> None:
    """Checks that neither of two models which are made from each other has read what the other is judged by.

    Raises:
      ValueError: both were given the same files, with another share of them held out.
    """
    theirs = other.run_config().get("data")  # none: a converted public checkpoint
    if theirs is None or theirs["held_out"] == held_out or other.made_from("corpus")["sha256"] != corpus.digest:
        return
    raise ValueError(
        f"data.held_out {held_out} is not the {theirs['held_out']} of {other.folder}, on the same files: one would be "
        f"judged by text that the other has read. Give --config.data.held_out={theirs['held_out']}"
    )


def check_length(config: ConfigDict, model: TransformerLM, target: run.TrainedModel | None) -> None:
    """Refuses windows that a model has no positions for: learned ones would silently repeat their last.

    Raises:
      ValueError: with both numbers.
    """
    models = {"model": model.config} | ({} if target is None else {"target": target.config})
    for name, shape in models.items():
        if config.data.length > shape.max_positions:
            raise ValueError(
                f"data.length {config.data.length} is more than the {name}'s {shape.max_positions} positions"
            )


def check_generated(config: ConfigDict, target: run.TrainedModel | None) -> None:
    """Refuses numbers of generated text that make none: now, not after the hours in which the target writes.

    Raises:
      ValueError: with the number, and what it may be.
    """
    fields, length = config.get("generated"), config.data.length
    if target is None or not fields.rows or not fields.share:
        return
    ranges = {"rows": (1, np.inf), "batch": (1, np.inf), "share": (0, 1), "greedy_share": (0, 1)}
    for name, (least, most) in (ranges | {"prompt_length": (1, length)}).items():
        if not least <= fields[name] <= most:
            raise ValueError(f"generated.{name} must be in [{least}, {most}]; got {fields[name]}")
    generated_sampling(fields)
    if length + 1 > target.config.max_positions:
        raise ValueError(
            f"to write windows of data.length {length} + 1 tokens the target has too few positions, "
            f"{target.config.max_positions}: shorten them, or set generated.rows to 0"
        )


def check_first(
    config: ConfigDict, first: run.TrainedModel, corpus: Corpus, tokenizer: JsonTokenizer, task: Task
) -> Any:
    """Returns the parameters of another run, after checking that training can begin with them.

    Raises:
      ValueError: it has read what this run is judged by, or is of another tokenizer or model.
    """
    check_split(config.data.held_out, corpus, first)
    if "head" in config:
        check_same_head(config, first, task)
    own = first.folder / "tokenizer.json"  # a head that was exported has none: its target's is checked
    if own.exists() and JsonTokenizer(own, config.data.eos).to_json() != tokenizer.to_json():
        raise ValueError(f"the model in {config.init} was trained with another tokenizer than this run has")
    shapes = jax.eval_shape(task.init, jax.random.key(0))
    params = {name: leaf for name, leaf in first.params.items() if name in shapes or name != DRAFT_IDS}
    check_shapes(f"the model in {config.init}", params, shapes)
    return params


def check_same_head(config: ConfigDict, first: run.TrainedModel, task: Task) -> None:
    """Checks that a head is read as it was trained: shapes show neither its layers nor where its norms stand.

    Raises:
      ValueError: with the fields that differ.
    """
    here, there = task.head.config, first.config
    different = []
    if type(here) is not type(there):
        different = [f"its kind is {type(there).__name__}, here {type(here).__name__}"]
    for sides in () if different else ((there, here), (there.layer, here.layer)):
        values = {field.name: [getattr(side, field.name) for side in sides] for field in dataclasses.fields(sides[0])}
        different += [
            f"{name} is {old!r}, here {new!r}"
            for name, (old, new) in values.items()
            if old != new and name not in ("layer", "dtype")
        ]
    if different:
        raise ValueError(
            f"the head in {config.init} is another one: {'; '.join(different)}. Set these fields as it has them"
        )


def say_what_it_was_trained_for(
    config: ConfigDict, first: run.TrainedModel, target: run.TrainedModel, console: Console
) -> None:
    """Says where a head that training begins with was trained for another target, or nobody knows for which."""
    try:
        trained_for = first.made_from("target")["sha256"]
    except (KeyError, FileNotFoundError):
        trained_for = None
    if trained_for != target.describe()["sha256"]:
        known = "for another target" if trained_for else "for a target that its folder does not name"
        console.print(f"the head in {config.init} was trained {known}", style="yellow", markup=False, soft_wrap=True)


def target_rows(config: ConfigDict, folder: epath.Path, target, windows: Windows, console: Console):
    """Returns windows that the target completed; they are kept part by part, so a killed run goes on where it was."""
    fields = config.generated
    if not fields.rows or not fields.share:
        return None
    rows = windows.batch(0, fields.rows)
    progress = Progress(len(rows), data_tokens(config), 0, console)
    paths = {first: folder / "generated" / f"{first}.npy" for first in range(0, len(rows), fields.batch)}
    for number, (first, path) in enumerate(paths.items()):
        if number % jax.process_count() == jax.process_index() and not path.exists():
            part = complete_windows(
                target.model_in(config.compute_dtype),
                target.params,
                rows[first : first + fields.batch],
                prompt_length=fields.prompt_length,
                seed=config.train.seed,
                batch=fields.batch,
                first_id=first,
                sampling=generated_sampling(fields),
            )
            run.write_array(path, part)
        progress.report(min(first + fields.batch, len(rows)))
    if jax.process_count() > 1:
        multihost_utils.sync_global_devices("generated text")
    return np.concatenate([run.read_array(path) for path in paths.values()])


def data_tokens(config: ConfigDict) -> int:
    """Returns how many tokens the target writes into a window."""
    return config.data.length + 1 - config.generated.prompt_length


def generated_sampling(fields: ConfigDict) -> Warp:
    """Returns the distribution that the target writes a batch of rows with."""
    return chain(temperature(mixed_temperatures(fields)), top_p(fields.top_p))


def mixed_temperatures(fields: ConfigDict) -> list[float]:
    """Returns a temperature for each row of a batch: the first ones are greedy."""
    greedy = round(fields.greedy_share * fields.batch)
    return [0.0] * greedy + [fields.temperature] * (fields.batch - greedy)


if __name__ == "__main__":
    entry.run(main, _CONFIG)

"""Trains a target (also with early exits), distils a draft or a head, or trains both together; a
run is resumed.

python launch/train.py --config=configs/python_pair.py:target --workdir=runs/target
python launch/train.py --config=configs/python_pair.py:draft --workdir=runs/draft \\
    --config.target=runs/target
python launch/train.py --config=configs/python_pair.py:layer_skip --workdir=runs/layer_skip \\
    --config.init=runs/target
python launch/train.py --config=configs/python_pair.py:head --workdir=runs/head \\
    --config.target=python
python launch/train.py --config=configs/python_pair.py:mtp_target --workdir=runs/together

A run of both has two runs in its folder for other commands, `runs/together/target` and
`runs/together/draft`.
"""

import contextlib
import dataclasses
import os
from typing import Any

import jax
import numpy as np
from absl import flags
from etils import epath
from flax.traverse_util import flatten_dict
from jax.sharding import Mesh
from rich.console import Console

from launch.lib import entry
from launch.lib.config import ConfigFlag
from launch.lib.training import TrainingConfig
from specsamp import TransformerConfig, TransformerLM, storage
from specsamp.checkpoints.chat import read_chat_template
from specsamp.checkpoints.export import describe_model
from specsamp.checkpoints.head_export import describe_head
from specsamp.checkpoints.orbax import Checkpoints
from specsamp.checkpoints.params import check_shapes, init_shapes
from specsamp.checkpoints.public_heads import check_embedding
from specsamp.checkpoints.tokenizer import JsonTokenizer
from specsamp.decoding.data_shards import DATA
from specsamp.jax_names import multihost_utils
from specsamp.mesh import distributed
from specsamp.mesh.layout import make_mesh
from specsamp.models.dflash import BlockHead
from specsamp.models.heads import DRAFT_IDS, HeadConfig
from specsamp.training import run_folder, source
from specsamp.training.block_heads import TrainBlock
from specsamp.training.data import (
    Corpus,
    Mixture,
    Windows,
    held_out_windows,
    integer_tokenizer,
    read_corpus,
    standard_library,
    token_stream,
    train_tokenizer,
)
from specsamp.training.feature_heads import TrainHead, most_frequent
from specsamp.training.generated import kept_windows
from specsamp.training.layerskip import LayerSkip
from specsamp.training.run_folder import Progress
from specsamp.training.source import Source
from specsamp.training.together import DRAFT, TARGET, TrainTogether
from specsamp.training.trainer import TrainState, check_rows, train
from specsamp.training.training_task import Task, TrainModel

_CONFIG = ConfigFlag("configs/python_pair.py:tiny_target", TrainingConfig)
_WORKDIR = flags.DEFINE_string(
    "workdir",
    None,
    "Keep the run in this folder, local or gs://; an existing run is resumed.",
    required=True,
)


def main() -> None:
    config = _CONFIG.value
    folder = storage.place(_WORKDIR.value)
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"--workdir={_WORKDIR.value} is a file: name a folder")
    alone = storage.locked(folder, wait=False) if entry.is_first() else contextlib.nullcontext()
    with entry.keeps(f"the same command goes on at the last checkpoint in {_WORKDIR.value}"), alone:
        run_training(config, folder, entry.make_console())


def run_training(config: TrainingConfig, folder: epath.Path, console: Console) -> None:
    """Makes all checks before writing anything, then trains."""
    train_config, data = config.train, config.data
    mesh = make_mesh(model=config.mesh.model)  # devices of the data axis read other rows
    target = None if config.target is None else find_target(config, mesh, console)
    if target is not None and target.public:
        take = source.draft_fields if config.head is None else source.layer_fields
        config = config.turned({"model": take(dict(config.model), target.config)})
    run_folder.check_run(folder, config.recorded, changeable=("intervals", "mesh"))
    if (
        config.together is not None
        and (folder / TARGET).exists()
        and not (folder / "checkpoints").exists()
    ):
        raise ValueError(
            f"{folder} holds target and draft of an earlier training: begin in another --workdir"
        )
    model, is_head = make_model(config), config.head is not None
    first = open_first(config, target)
    task = make_task(config, model, target)
    corpus = read_corpus(
        data.folder or standard_library(),
        pattern=data.pattern,
        exclude=data.exclude,
        held_out=data.held_out,
    )
    made_from = {"corpus": corpus.describe()}
    run_folder.check_same(folder, "corpus", made_from["corpus"])
    for other in filter(None, (target, first)):
        other.check_split(data.held_out, corpus.digest)
    tokenizer = make_tokenizer(config, folder, corpus, target or first)
    if tokenizer.vocab_size > model.vocab_size:
        raise ValueError(
            f"the tokenizer has {tokenizer.vocab_size} tokens, the model a vocabulary of "
            f"{model.vocab_size}"
        )
    windows = Windows(token_stream(corpus.train, tokenizer), data.length, train_config.seed)
    held_out = held_out_windows(corpus, tokenizer, data.length, data.held_out_windows)
    check_all_processes(folder, corpus)
    check_rows(train_config, held_out, mesh)
    for one in (model, task.drafting.target) if config.together else (model,):
        check_windows(config, one, target, mesh)
    if target is not None:  # a public target's parameters are read here, after all other checks
        made_from["target"] = target.identity | sizes_of(target.config)
        run_folder.check_same(folder, "target", made_from["target"])
    first_params = None if first is None else check_first(config, first, tokenizer, task)
    teacher_params = make_teacher(config, task, target, windows, first)
    if is_head and first is not None:
        if first.provenance.get("target", {}).get("sha256") != target.identity["sha256"]:
            console.print(
                f"the head in {config.init} was trained for another target, or its folder does not "
                "say for which",
                style="yellow",
            )
    if entry.is_first():
        run_folder.open_run(folder, config.recorded, tokenizer.to_json(), **made_from)
        if config.draft_vocab_size:
            run_folder.write_array(folder / run_folder.IDS, np.asarray(teacher_params[DRAFT_IDS]))
    say_sizes(config, task, corpus, windows, console)
    if is_head:
        warn_of_export((task.drafting if config.together else task).head.config, console)
    elif target is not None and target.public:
        warn_of_export(model.config, console)
    state = train(
        task,
        train_config,
        batches_of(config, folder, target, windows, console),
        folder,
        held_out=held_out,
        teacher_params=teacher_params,
        intervals=config.intervals,
        console=console,
        params=first_params,
        mesh=mesh,
    )
    if config.together is not None:
        write_parts(config, folder, state, tokenizer.to_json(), made_from)


def write_parts(
    config: TrainingConfig,
    folder: epath.Path,
    state: TrainState,
    tokenizer_json: str,
    made_from: dict,
) -> None:
    """Writes target and draft that were trained together as a run of each."""
    fields, step = dict(config.recorded), int(state.step)
    of_both = ("data", "train", "intervals", "mesh", "compute_dtype", "together")
    parts = {
        TARGET: {name: fields[name] for name in of_both} | {"model": fields["together"]["model"]},
        DRAFT: fields | {"target": os.fspath(folder / TARGET)},
    }
    for part, recorded in parts.items():
        if entry.is_first():
            run_folder.open_run(folder / part, recorded, tokenizer_json, **made_from)
            storage.write(folder / part / "metrics.jsonl", (folder / "metrics.jsonl").read_text())
        with contextlib.closing(Checkpoints(folder / part / "checkpoints")) as checkpoints:
            if checkpoints.latest != step:
                checkpoints.save(step, params=state.params[part])
        if part == TARGET:
            target = source.open_trained(folder / part)
            made_from = made_from | {"target": target.identity | sizes_of(target.config)}


def open_first(config: TrainingConfig, target: Source | None) -> Source | None:
    """Opens the initial model: a head, a pair's target or a run; for a draft, a run or its target.
    None: random parameters.
    """
    if not config.init:
        return None
    if config.head is None and config.init == config.target:
        return target
    if config.head is not None:
        return source.open_first_head(config.init, target.config)
    return source.open_target(config.init) if target is None else source.open_trained(config.init)


def say_sizes(
    config: TrainingConfig, task: Task, corpus: Corpus, windows: Windows, console: Console
) -> None:
    """Prints the numbers of parameters, files, tokens and epochs."""
    epochs = config.train.steps * config.train.batch * config.data.length / len(windows.stream)
    count = sum(leaf.size for leaf in jax.tree.leaves(init_shapes(task)))
    console.print(
        f"{count:,} parameters, {len(corpus.train)} files, "
        f"{len(windows.stream):,} tokens ({len(corpus.skipped)} files skipped), {epochs:.2f} epochs"
    )


def warn_of_export(config: HeadConfig | TransformerConfig, console: Console) -> None:
    """Prints why no file can describe a head or a draft, if none can, before it is trained."""
    try:
        if isinstance(config, HeadConfig):
            describe_head(config, target_name="", K=1)
        else:
            describe_model(config, eos_id=None)
    except ValueError as error:
        console.print(f"launch/export.py will refuse this draft: {error}", style="yellow")


def check_all_processes(folder: epath.Path, corpus: Corpus) -> None:
    """Raises ValueError unless all processes read the same text and share the folder of the run."""
    if jax.process_count() == 1:
        return
    if len(set(distributed.gather_objects(corpus.describe()["sha256"]))) > 1:
        raise ValueError(
            "the processes read different texts: give --config.data.folder, the same copy on every "
            "host"
        )
    path, word = folder / "seen_by_all", distributed.from_first(lambda: os.urandom(8).hex())
    if entry.is_first():
        storage.write(path, word)
    multihost_utils.sync_global_devices("a word in the folder")
    seen = path.exists() and path.read_text() == word
    if not all(distributed.gather_objects(seen)):
        raise ValueError(
            f"{folder} is not the same folder for all processes: give a gs:// path, or a shared "
            "disk"
        )


def check_windows(
    config: TrainingConfig, model: TransformerLM, target: Source | None, mesh: Mesh
) -> None:
    """Refuses windows that exceed a model's positions, and generated rows that do not divide over
    the mesh.
    """
    length, fields = config.data.length, config.generated
    shapes = {"model": model.config} | ({} if target is None else {"target": target.config})
    for name, shape in shapes.items():
        if length > shape.max_positions:
            raise ValueError(
                f"data.length {length} is more than the {name}'s {shape.max_positions} positions"
            )
    if target is None or fields.is_off:
        return
    if target.mesh is not None and fields.batch % mesh.shape[DATA]:
        raise ValueError(
            f"generated.batch {fields.batch} does not divide over {mesh.shape[DATA]} devices of "
            f"the mesh axis '{DATA}'"
        )
    if length + 1 > target.config.max_positions:
        raise ValueError(
            f"to write windows of data.length {length} + 1 tokens the target has too few "
            f"positions, {target.config.max_positions}: shorten them, or set generated.rows to 0"
        )


def check_first(config: TrainingConfig, first: Source, tokenizer: JsonTokenizer, task: Task) -> Any:
    """Returns the parameters that training begins with: of the target, its first layers."""
    if config.head is not None:  # shapes do not show which layers it reads, nor where its norms are
        if changed := storage.differences(shape_of(first.config), shape_of(task.head.config)):
            raise ValueError(
                f"the head in {config.init} is another one: {'; '.join(changed)}. Set these fields "
                "as it has them"
            )
    shapes = init_shapes(task)
    if config.head is None and config.init == config.target:
        params = {name: leaf for name, leaf in first.params.items() if name in shapes}
        check_shapes(f"the model in {config.init}", params, shapes)
        return params
    # An exported head has no tokenizer: its target's is checked.
    own = first.folder / "tokenizer.json"
    if own.exists() and JsonTokenizer(own).to_json() != tokenizer.to_json():
        raise ValueError(
            f"the model in {config.init} was trained with another tokenizer than this run has"
        )
    params = {
        name: leaf for name, leaf in first.params.items() if name in shapes or name != DRAFT_IDS
    }
    check_shapes(f"the model in {config.init}", params, shapes)
    return params


def shape_of(head: Any) -> dict[str, Any]:
    """Returns the fields of a head and of its layer, without dtypes."""
    fields = flatten_dict(dataclasses.asdict(head) | {"kind": head.kind}, sep=".")
    return {name: value for name, value in fields.items() if not name.endswith("dtype")}


def find_target(config: TrainingConfig, mesh: Mesh, console: Console) -> Source:
    """Opens the target of a draft or a head: a run, a pair, or a public checkpoint."""
    name = config.target
    if name == "":
        raise ValueError(
            "a draft learns from a target: give --config.target, the folder of its training, a "
            "pair, or a public model"
        )
    if source.is_trained_here(name):
        return source.open_target(name)
    try:
        return source.open_public_target(
            name, config.compute_dtype, mesh, entry.weights_progress(console)
        )
    except FileNotFoundError as error:
        raise FileNotFoundError(
            f"no training run at {str(name)!r}, no pair and no public model: {error}"
        ) from error


def make_task(config: TrainingConfig, model: TransformerLM, target: Source | None) -> Task:
    """Returns the training task: a draft or a head, alone or together with its target, or a
    target.
    """
    if config.together is not None:
        together = dict(config.together)
        of_target = TransformerConfig(**together.pop("model"), dtype=config.compute_dtype)
        if config.draft_vocab_size:
            raise ValueError(
                "head.draft_vocab_size must be 0: which tokens are frequent is not known to its "
                "target"
            )
        drafting = make_task(
            config.turned({"together": None}),
            model,
            Source(folder=None, config=of_target, read=None),
        )
        return TrainTogether(drafting=drafting, **together)
    if config.head is not None:
        head = source.make_head(model.config, config.head, **sizes_of(target.config))
        if target.public:
            check_embedding(target.config, head.config, "the head")
        model = target.model_in(config.compute_dtype)
        fields = dict(
            head=head,
            target=model,
            objective=config.objective,
            **dataclasses.asdict(config.test_time),
        )
        if isinstance(head, BlockHead):
            return TrainBlock(**fields)
        if any([fields.pop("anchors"), fields.pop("marginals"), fields.pop("pace") is not None]):
            raise ValueError(
                "test_time.anchors, test_time.marginals and test_time.pace are of block heads; the "
                f"head is {head.config.kind}"
            )
        return TrainHead(**fields)
    if target is not None:
        return TrainModel(model, target.model_in(config.compute_dtype), config.objective)
    if config.layer_skip is not None:
        return LayerSkip(
            model=model, steps=config.train.steps, from_scratch=not config.init, **config.layer_skip
        )
    return TrainModel(model)


def make_teacher(
    config: TrainingConfig,
    task: Task,
    target: Source | None,
    windows: Windows,
    first: Source | None,
) -> Any:
    """Returns the frozen parameters of the task; a reduced vocabulary has the most
    frequent tokens.
    """
    if target is None:
        return None
    ids, size = None, config.draft_vocab_size
    if size and first is not None:
        ids = np.asarray(first.params[DRAFT_IDS])  # the rows of its output are of these ids
    elif size:
        ids = most_frequent(windows.stream, task.target.vocab_size, size)
    return task.teacher(target.params, ids)


def sizes_of(target: TransformerConfig) -> dict[str, int]:
    """Returns the sizes of the target that shape a head."""
    return {"target_layers": target.num_layers, "target_width": target.width}


def make_model(config: TrainingConfig) -> TransformerLM:
    return TransformerLM(TransformerConfig(**config.model, dtype=config.compute_dtype))


def make_tokenizer(
    config: TrainingConfig, folder: epath.Path, corpus: Corpus, parent: Source | None
) -> JsonTokenizer:
    """Returns the run's own tokenizer if it has one, else the tokenizer of its parent model, a
    given or a new one.

    The chat template comes from the parent model, or from the folder of the given tokenizer.

    Raises:
      ValueError: the given tokenizer is not the parent model's, or there is no chat template.
    """
    if parent is not None and (name := config.data.tokenizer):
        of_parent = parent.folder / "tokenizer.json"
        theirs = parent.tokenizer if parent.public else JsonTokenizer(of_parent)
        given = JsonTokenizer(name, rows=parent.config.vocab_size if parent.public else None)
        if given.to_json() != theirs.to_json():
            raise ValueError(
                f"data.tokenizer {name} is not the tokenizer of {parent.folder}, which the run "
                "takes: leave it out"
            )
    if parent is not None and parent.public:
        return parent.tokenizer
    own, eos, vocab_size = folder / "tokenizer.json", config.data.eos, config.model["vocab_size"]
    places = (parent and parent.folder / "tokenizer.json", config.data.tokenizer)
    given = [storage.place(path) for path in places if path]
    if own.exists() or given:
        chats = (read_chat_template(path.parent) for path in given)
        chat = next(filter(None, chats), None)
        return JsonTokenizer(own if own.exists() else given[0], eos, chat=chat)
    texts = corpus.train.values()
    if all(isinstance(text, np.ndarray) for text in texts):
        made = integer_tokenizer(vocab_size, eos)
    elif all(type(text) is str for text in texts):
        made = train_tokenizer(texts, vocab_size, eos)
    else:
        raise ValueError(
            "conversations need a tokenizer with a chat template: give data.tokenizer, or a target "
            "to train from"
        )
    return JsonTokenizer.from_tokenizer(made, eos)


def batches_of(
    config: TrainingConfig,
    folder: epath.Path,
    target: Source | None,
    windows: Windows,
    console: Console,
) -> Windows | Mixture:
    """Returns the windows, mixed with windows that the target completes."""
    fields, seed = config.generated, config.train.seed
    if target is None or fields.is_off:
        return windows
    rows = windows.batch(0, fields.rows)
    progress = Progress(len(rows), config.data.length + 1 - fields.prompt_length, 0, console)
    completed = kept_windows(
        folder / "generated",
        target.writer(config.compute_dtype),
        rows,
        batch=fields.batch,
        report=progress.report,
        prompt_length=fields.prompt_length,
        sampling=fields.sampling,
        seed=seed,
    )
    return Mixture(windows, completed, fields.share, seed)


if __name__ == "__main__":
    entry.run(main, _CONFIG)

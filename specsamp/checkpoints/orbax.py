"""A checkpoint as an Orbax folder: read in place on any mesh, each device its own part, also from a bucket.

config.json, tokenizer.json, ...   as they were, but for what `Checkpoint.config` corrects
run.json                           the shape, so that a draft can be distilled from it like from a run
checkpoints/0/params               what was in the safetensors
"""

from __future__ import annotations

import contextlib
import dataclasses
from typing import Any

import jax
import orbax.checkpoint as ocp
from etils import epath

from specsamp import storage
from specsamp.checkpoints import hugging_face
from specsamp.checkpoints.hugging_face import SMALL_FILES, Checkpoint, Progress, check_same_model
from specsamp.checkpoints.safetensors_io import INDEX
from specsamp.mesh.sharded import ShardedModel, placed_params
from specsamp.models.transformer import TransformerLM
from specsamp.training.run import write_json

GB = 10**9


def write(checkpoint: Checkpoint, params: Any, folder: str) -> None:
    """Writes ``params``, as `read_params` gave them; every process must call it. ``run.json`` comes last.

    Raises:
      ValueError: there are parameters in the folder, perhaps of a conversion that did not end.
    """
    place = storage.place(folder)
    if jax.process_index() == 0:
        for name in SMALL_FILES:
            if (checkpoint.folder / name).exists() and name != INDEX:
                storage.write(place / name, (checkpoint.folder / name).read_bytes())
        if checkpoint.config != checkpoint.described:  # what was found in the tensors cannot be found there again
            content = storage.read_json(checkpoint.folder / "config.json")
            write_json(place / "config.json", content | {"tie_word_embeddings": checkpoint.config.tied})
    with _manager(place, max(leaf.nbytes for leaf in jax.tree.leaves(params))) as manager:
        # Orbax leaves a step that is there as it is, whatever it holds.
        if not manager.save(0, args=ocp.args.Composite(params=ocp.args.StandardSave(params))):
            raise ValueError(f"{place} holds parameters already: delete it, or choose another folder")
        manager.wait_until_finished()
    if jax.process_index() == 0:
        shape = {name: value for name, value in dataclasses.asdict(checkpoint.config).items() if name != "dtype"}
        write_json(place / "run.json", {"model": shape, "converted_from": checkpoint.name})


def read_params(
    checkpoint: Checkpoint, model: TransformerLM | ShardedModel, progress: Progress = lambda *_: None
) -> Any:
    """`specsamp.checkpoints.hugging_face.read_params`, of a checkpoint in either format."""
    if not checkpoint.is_converted:
        return hugging_face.read_params(checkpoint, model, progress)
    check_same_model(checkpoint, model.config)
    wanted = placed_params(model)
    as_float32 = 4 * max(leaf.size for leaf in jax.tree.leaves(wanted))  # the most that was stored
    with _manager(checkpoint.folder, as_float32) as manager:
        try:
            # Not strict: rows of padding are added to the vocabulary.
            items = manager.restore(0, args=ocp.args.Composite(params=ocp.args.StandardRestore(wanted, strict=False)))
        except Exception as error:  # Orbax raises whatever its storage does
            raise ValueError(
                f"{checkpoint.folder} is damaged ({type(error).__name__}: {error}): convert the checkpoint again"
            ) from error
    return items["params"]


def _manager(folder: epath.Path, largest: int) -> contextlib.AbstractContextManager[ocp.CheckpointManager]:
    """With a limit on what is written or read at a time: else every parameter would have a copy in host memory.

    Orbax refuses a parameter that is not smaller than it; ``largest`` is the bytes of the largest.
    """
    limit = largest // GB + 1
    handler = ocp.StandardCheckpointHandler(save_concurrent_gb=limit, restore_concurrent_gb=limit)
    options = ocp.CheckpointManagerOptions(create=True, enable_async_checkpointing=False)
    path = (folder / "checkpoints").absolute()
    return ocp.CheckpointManager(path, options=options, item_handlers={"params": handler})

"""Parameters as an Orbax folder, read in place on any mesh: each device its own part, also from a bucket."""

from __future__ import annotations

import contextlib
from typing import Any

import jax
import orbax.checkpoint as ocp
from etils import epath

GB = 10**9


def save_params(folder: epath.Path, params: Any) -> None:
    """Writes parameters to ``folder/checkpoints/0/params``; every process must call it.

    Raises:
      ValueError: there are parameters in the folder, perhaps of a conversion that did not end.
    """
    with _manager(folder, max(leaf.nbytes for leaf in jax.tree.leaves(params))) as manager:
        # Orbax leaves a step that is there as it is, whatever it holds.
        if not manager.save(0, args=ocp.args.Composite(params=ocp.args.StandardSave(params))):
            raise ValueError(f"{folder} holds parameters already: delete it, or choose another folder")
        manager.wait_until_finished()


def restore_params(folder: epath.Path, shapes: Any) -> Any:
    """Reads parameters in the given shapes, dtypes and shardings; rows of padding, which were not saved, are zero.

    Raises:
      ValueError: the folder is damaged.
    """
    as_float32 = 4 * max(leaf.size for leaf in jax.tree.leaves(shapes))  # the most that was stored
    with _manager(folder, as_float32) as manager:
        try:
            # Not strict: rows of padding are added to the vocabulary.
            items = manager.restore(0, args=ocp.args.Composite(params=ocp.args.StandardRestore(shapes, strict=False)))
        except Exception as error:  # Orbax raises whatever its storage does
            raise ValueError(
                f"{folder} is damaged ({type(error).__name__}: {error}): convert the checkpoint again"
            ) from error
    return items["params"]


def _manager(folder: epath.Path, largest: int) -> contextlib.AbstractContextManager[ocp.CheckpointManager]:
    """Opens the folder, with a limit on the bytes that are written or read at a time.

    Without it every parameter would have a copy in host memory. Orbax refuses a parameter that is not smaller than the
    limit; ``largest`` is the bytes of the largest.
    """
    limit = largest // GB + 1
    handler = ocp.StandardCheckpointHandler(save_concurrent_gb=limit, restore_concurrent_gb=limit)
    options = ocp.CheckpointManagerOptions(create=True, enable_async_checkpointing=False)
    path = (folder / "checkpoints").absolute()
    return ocp.CheckpointManager(path, options=options, item_handlers={"params": handler})

"""Writes and reads Orbax checkpoints of training runs and of converted public checkpoints."""

import contextlib
import os
from typing import Any

import jax
import orbax.checkpoint as ocp

from specsamp import storage
from specsamp.checkpoints.params import WrongShapes, check_shapes

GB = 10**9


def save_params(folder: str | os.PathLike, params: Any) -> None:
    """Writes the parameters of a converted checkpoint; see `Checkpoints.save` for the errors."""
    largest = max(leaf.nbytes for leaf in jax.tree.leaves(params))
    with contextlib.closing(
        Checkpoints(storage.place(folder) / "checkpoints", largest)
    ) as checkpoints:
        checkpoints.save(0, params=params)


def restore_params(folder: str | os.PathLike, shapes: Any) -> Any:
    """Reads the parameters of a converted checkpoint; rows of padding, which were not saved, are
    zero.
    """
    as_float32 = 4 * max(leaf.size for leaf in jax.tree.leaves(shapes))  # the most that was stored
    with contextlib.closing(
        Checkpoints(storage.place(folder) / "checkpoints", as_float32)
    ) as checkpoints:
        return checkpoints.restore(0, padded=True, params=shapes)["params"]


class Checkpoints:
    """Keeps the last two states of a run, saved in the background; each is complete or absent.

    With ``largest``, the number of bytes of the largest array, arrays are copied to host memory one
    at a time.
    """

    def __init__(self, folder: str | os.PathLike, largest: int | None = None):
        options = ocp.CheckpointManagerOptions(max_to_keep=2, create=True)
        # Orbax refuses an array that is not smaller than the limit.
        limits = (
            {}
            if largest is None
            else dict.fromkeys(("save_concurrent_gb", "restore_concurrent_gb"), largest // GB + 1)
        )
        handlers = {name: ocp.StandardCheckpointHandler(**limits) for name in ("params", "rest")}
        self._manager = ocp.CheckpointManager(
            storage.place(folder).absolute(), options=options, item_handlers=handlers
        )
        self._folder = folder

    @property
    def latest(self) -> int | None:
        """Returns the last saved step, or None."""
        return self._manager.latest_step()

    def save(self, step: int, **items: Any) -> None:
        """Saves ``params``, and the ``rest`` of a training state, in the background; every process
        must call it.

        Raises:
          ValueError: the step exists, perhaps of an interrupted conversion; Orbax would not
            overwrite it.
        """
        saved = {name: ocp.args.StandardSave(tree) for name, tree in items.items()}
        if not self._manager.save(step, args=ocp.args.Composite(**saved)):
            raise ValueError(
                f"{self._folder} holds parameters already: delete it, or choose another folder"
            )

    def restore(
        self, step: int | None = None, *, padded: bool = False, **shapes: Any
    ) -> dict[str, Any]:
        """Reads items (``params=``, ``rest=``) in the given shapes, dtypes and shardings.

        Args:
          step: default the latest.
          padded: matrices may have more rows than were saved; the added rows are zero.

        Raises:
          FileNotFoundError: there is no checkpoint.
          ValueError: the checkpoint is damaged, or has other shapes.
        """
        step = self.latest if step is None else step
        if step is None or step not in self._manager.all_steps():
            which = "checkpoint" if step is None else f"checkpoint of step {step}"
            raise FileNotFoundError(
                f"no {which} in {self._folder}: it has steps {sorted(self._manager.all_steps())}"
            )
        place = f"{self._folder}/{step}"
        try:
            saved = self._manager.item_metadata(step)
            for name, tree in shapes.items():
                if saved[name] is None:
                    raise ValueError(f"{name!r} has no metadata")
                have = getattr(saved[name], "tree", saved[name])
                check_shapes(f"the checkpoint {place}/{name}", have, tree, padded=padded)
            items = {
                name: ocp.args.StandardRestore(tree, strict=not padded)
                for name, tree in shapes.items()
            }
            restored = self._manager.restore(step, args=ocp.args.Composite(**items))
        except WrongShapes:
            raise
        except Exception as error:  # Orbax passes on any error of its storage
            raise ValueError(
                f"the checkpoint {place} is damaged ({type(error).__name__}: {error}): "
                "delete that folder to go back to an earlier step, or convert the checkpoint again"
            ) from error
        return {name: restored[name] for name in shapes}

    def close(self) -> None:
        """Closes the folder, after the last save has been written."""
        self._manager.wait_until_finished()
        self._manager.close()

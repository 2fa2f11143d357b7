"""Orbax checkpoints of a training run; errors name the folder and what to do."""

from __future__ import annotations

import os
from typing import Any

import orbax.checkpoint as ocp

from specsamp import storage
from specsamp.checkpoints.params import WrongShapes, check_shapes


class Checkpoints:
    """Keeps the last ``keep`` states of a run, saved in the background; each is complete or absent."""

    def __init__(self, folder: str | os.PathLike, keep: int = 2):
        options = ocp.CheckpointManagerOptions(max_to_keep=keep, create=True)
        handlers = {name: ocp.StandardCheckpointHandler() for name in ("params", "rest")}
        self._manager = ocp.CheckpointManager(storage.place(folder).absolute(), options=options, item_handlers=handlers)
        self._folder = folder

    @property
    def latest(self) -> int | None:
        """The last step that was saved, None without one."""
        return self._manager.latest_step()

    def save(self, step: int, params: Any, rest: Any) -> None:
        """Saves a state in the background.

        Args:
          params: of the model.
          rest: what only a resumed training needs; ``params`` can be read without it.
        """
        items = {"params": ocp.args.StandardSave(params), "rest": ocp.args.StandardSave(rest)}
        self._manager.save(step, args=ocp.args.Composite(**items))

    def restore(self, step: int | None = None, **shapes: Any) -> dict[str, Any]:
        """Reads items (``params=``, ``rest=``) in the given shapes, dtypes and shardings.

        Args:
          step: default: the latest.

        Raises:
          FileNotFoundError: there is no checkpoint.
          ValueError: it is damaged, or of other shapes.
        """
        step = self.latest if step is None else step
        if step is None or step not in self._manager.all_steps():
            which = "checkpoint" if step is None else f"checkpoint of step {step}"
            raise FileNotFoundError(f"no {which} in {self._folder}: it has steps {sorted(self._manager.all_steps())}")
        place = f"{self._folder}/{step}"
        try:
            saved = self._manager.item_metadata(step)
            for name, tree in shapes.items():
                if saved[name] is None:
                    raise ValueError(f"{name!r} has no metadata")
                check_shapes(f"the checkpoint {place}/{name}", getattr(saved[name], "tree", saved[name]), tree)
            items = {name: ocp.args.StandardRestore(tree) for name, tree in shapes.items()}
            restored = self._manager.restore(step, args=ocp.args.Composite(**items))
        except WrongShapes:
            raise
        except Exception as error:  # Orbax raises whatever its storage does
            raise ValueError(
                f"the checkpoint {place} is damaged ({type(error).__name__}: {error}): "
                "delete that folder to go back to an earlier step"
            ) from error
        return {name: restored[name] for name in shapes}

    def close(self) -> None:
        """Closes the folder, after the last save has been written."""
        self._manager.wait_until_finished()
        self._manager.close()

"""Writes a head that was trained here: EAGLE-3's in the layout of speculators, Medusa's with its authors' names.

    python launch/export_head.py --run=runs/head --output=runs/my_pair/head
    python launch/demo.py --config=configs/trained_pair.py:runs/my_pair --config.drafter=head

Engines that read the layout of speculators read the first. Medusa's tensors have its authors' names, in safetensors rather
than in their pickle; an MTP module by itself, for which there is no public layout, gets the names of MiMo's: both are
read here, and have been tried in no other engine. In the folder ``head`` of its target's pair, `load_pair(..., draft="head")`
finds it. training.json, which no reader asks for, says how it was trained.
"""

import jax
import jax.numpy as jnp
import numpy as np
from absl import flags

from launch.lib import entry
from specsamp import storage
from specsamp.checkpoints.head_export import write_head
from specsamp.models.heads import FeatureHead
from specsamp.training.run import history, last_metrics, without_paths
from specsamp.training.source import Source, open_trained_head

_RUN = flags.DEFINE_string("run", None, "The folder of the head's training run.", required=True)
_OUTPUT = entry.define_output("The folder to write, local or gs://.", required=True)
_TARGET_NAME = flags.DEFINE_string(
    "target_name", None, "Where readers find the target: a folder or an id of the hub. Default: as the run names it."
)
_K = flags.DEFINE_integer(
    "K", None, "The tokens per round that readers are told to draft. Default: the steps it was trained with.", 1
)


def main() -> None:
    entry.check_output(f"{_OUTPUT.value}/config.json")
    check_folder(_OUTPUT.value)
    trained = open_trained_head(_RUN.value)
    with entry.reading(f"{_RUN.value}/run.json"):
        written = export(trained, _OUTPUT.value, target_name=_TARGET_NAME.value, K=_K.value)
    print(f"{_OUTPUT.value}: {written / 1e6:.1f} MB, of step {trained.step}")


def check_folder(folder: str) -> None:
    """Refuses to write over anything but a head that was exported.

    Raises:
      ValueError: there is a model, or a head that came from elsewhere.
    """
    place = storage.place(folder)
    if (place / "config.json").exists() and not (place / "training.json").exists():
        raise ValueError(f"{folder} holds a model or a head that was not exported here: give a folder of its own")


def export(trained: Source, folder: str, *, target_name: str | None = None, K: int | None = None) -> int:
    """Writes a head, its matrices in bfloat16 as public ones are; returns the bytes of its tensors.

    Raises:
      ValueError: a kind of head that the layout has not, see `write_head`.
    """
    config = trained.provenance["config"]
    params = jax.tree.map(lambda x: x if x.dtype == np.int32 else x.astype(jnp.bfloat16), trained.params)
    write_head(
        folder,
        FeatureHead(trained.config),
        params,
        target_name=target_name
        or trained.made_from("target").get("name")
        or config["target"].rstrip("/").split("/")[-1],
        K=K or config["test_time"]["test_steps"],
    )
    told = {
        "config": without_paths(config),
        "corpus": trained.made_from("corpus"),
        "target": trained.made_from("target"),
        "step": trained.step,
        "last_metrics": last_metrics(trained.folder, trained.step),
        **history(trained.folder, trained.step),
    }
    storage.write_json(storage.place(folder) / "training.json", told)
    return sum(leaf.nbytes for leaf in jax.tree.leaves(params))


if __name__ == "__main__":
    entry.run(main)

"""Converts a public checkpoint to an Orbax folder, of which every device of any mesh reads just its part.

    python launch/convert.py --checkpoint=meta-llama/Llama-3.1-8B --output=gs://BUCKET/llama-8b
    python launch/convert.py --checkpoint=meta-llama/Llama-3.1-70B --output=gs://BUCKET/llama-70b --model=16 \\
        --distributed
    python launch/benchmark.py --config=configs/hf.py:gs://BUCKET/llama-70b,gs://BUCKET/llama-1b

With --model=N the parameters are split over N devices between reading and writing; without it one device holds them.
"""

import time

import jax
from absl import flags

from launch.lib import entry
from specsamp import storage
from specsamp.checkpoints.hugging_face import open_checkpoint, read_params, write_converted
from specsamp.mesh.layout import Layout, make_mesh
from specsamp.mesh.sharded import shard_model
from specsamp.models.config import DTYPES
from specsamp.models.transformer import TransformerLM
from specsamp.text_format import human_count

_CHECKPOINT = flags.DEFINE_string(
    "checkpoint",
    None,
    "The checkpoint to convert: a folder, a gs:// folder or the id of a model of the hub.",
    required=True,
)
_OUTPUT = entry.define_output("The folder to write, local or gs://.", required=True)
_DTYPE = flags.DEFINE_enum("dtype", "bfloat16", DTYPES, "The dtype of the parameters that are written.")
_WEIGHT_DTYPE = flags.DEFINE_enum(
    "weight_dtype", None, ("int8",), "Quantises matrices while they are read, with a scale for each output channel."
)
_MODEL = flags.DEFINE_integer(
    "model", 1, "The number of devices that one copy of the parameters is split over.", lower_bound=1
)


def main() -> None:
    console = entry.make_console()
    output = storage.place(_OUTPUT.value)
    if (output / "run.json").exists():
        raise ValueError(f"--output={_OUTPUT.value} holds a model already: choose another folder")
    if (output / "checkpoints" / "0").exists():
        raise ValueError(
            f"--output={_OUTPUT.value} holds parameters of a conversion that did not end: delete the folder, or "
            "choose another"
        )
    entry.check_output(f"{_OUTPUT.value}/config.json")
    checkpoint = open_checkpoint(_CHECKPOINT.value, dtype=_DTYPE.value, weight_dtype=_WEIGHT_DTYPE.value)
    if checkpoint.is_converted:
        raise ValueError(f"{_CHECKPOINT.value} is converted already")
    model = TransformerLM(checkpoint.config)
    if _MODEL.value > 1:
        model = shard_model(model, Layout.tensor_parallel(make_mesh(jax.device_count() // _MODEL.value, _MODEL.value)))
    for note in checkpoint.notes:
        console.print(entry.visible(note), markup=False)
    console.print(f"{human_count(checkpoint.config.num_parameters)} parameters, {_WEIGHT_DTYPE.value or _DTYPE.value}")
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

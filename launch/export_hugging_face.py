"""Writes a model that was trained here as a folder that Hugging Face transformers loads.

python launch/export_hugging_face.py --run=runs/target --output=exported/target
python launch/export_hugging_face.py --pair=python --side=target --output=exported/target
"""

from absl import flags

from launch.lib import entry
from specsamp.checkpoints.export import export
from specsamp.checkpoints.pair import load_pair
from specsamp.checkpoints.tokenizer import JsonTokenizer
from specsamp.models.int8 import decode_weights
from specsamp.training.source import open_trained

_RUN = flags.DEFINE_string("run", None, "The folder of a training run, whose last checkpoint is written.")
_PAIR = flags.DEFINE_string(
    "pair", None, "Instead of --run: a pair, by its name or folder, of which --side is written."
)
_SIDE = flags.DEFINE_enum("side", "target", ("target", "draft"), "Which model of --pair is written.")
_INT8 = flags.DEFINE_bool("int8", False, "Writes matrices in int8, for readers of this project alone.")
_OUTPUT = entry.define_output("The folder to write, local or gs://.", required=True)


def main() -> None:
    if (_RUN.value is None) == (_PAIR.value is None):
        raise ValueError("give either --run or --pair")
    if _RUN.value is not None:
        trained = open_trained(_RUN.value)
        config, params = trained.config, trained.params
        if "data" not in trained.provenance["config"]:
            raise ValueError(f"--run={_RUN.value} was converted from a public checkpoint: export that one's folder")
        with entry.reading(f"{_RUN.value}/run.json"):
            eos = trained.provenance["config"]["data"]["eos"]
        tokenizer = JsonTokenizer(trained.folder / "tokenizer.json", eos=eos)
    else:
        pair = load_pair(_PAIR.value)
        model, params, tokenizer = (
            getattr(pair, _SIDE.value),
            getattr(pair, f"{_SIDE.value}_params"),
            pair.tokenizer,
        )
        config = model.config
    if _INT8.value:
        params = decode_weights(params, config.compute_dtype, "int8")
    export(_OUTPUT.value, config, params, tokenizer)
    print(f"written to {_OUTPUT.value}")


if __name__ == "__main__":
    entry.run(main)

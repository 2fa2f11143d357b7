"""Public checkpoints on the command line."""

import jax
import numpy as np
import pytest

from configs import hf
from launch import experiment
from specsamp.checkpoints.export import export
from specsamp.checkpoints.hugging_face import open_checkpoint
from specsamp.checkpoints.tokenizer import EOS, JsonTokenizer
from specsamp.training.data import train_tokenizer
from specsamp.training.run import open_trained
from support.checkpoint_shapes import CONFIG, random_params
from support.run_script import call


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    place = tmp_path_factory.mktemp("public") / "model"
    export(
        place,
        CONFIG,
        random_params(CONFIG),
        JsonTokenizer.from_tokenizer(train_tokenizer(["some text"] * 3, 300), eos=EOS),
    )
    return place


def test_two_names_become_an_experiment(folder, capsys):
    config = hf.get_config(f"{folder},{folder}")
    config.hugging_face.dtype = "float32"
    built = experiment.build(config)
    assert built.pair_name == f"{folder}, {folder}" and len(built.workload.prompts) == len(hf.PROMPTS)
    assert "read 0.0 of 0.0 GB" in capsys.readouterr().err
    assert experiment.build(config, ["other text"]).workload.prompts[0] == tuple(
        built.pair.tokenizer.encode("other text")
    )
    config.hugging_face.draft = str(folder.parent)
    with pytest.raises(FileNotFoundError, match="has no config.json"):
        experiment.build(config)


def test_converting_and_the_ways_it_is_refused(folder, tmp_path):
    done = call("convert", f"--checkpoint={folder}", f"--output={tmp_path / 'orbax'}", "--dtype=float32")
    assert done.returncode == 0, done.stderr
    assert open_checkpoint(tmp_path / "orbax").is_converted
    target = open_trained(tmp_path / "orbax")  # a draft can be distilled from it
    assert target.config == CONFIG and "data" not in target.run_config()
    jax.tree.map(np.testing.assert_array_equal, target.params, random_params(CONFIG))
    assert JsonTokenizer(target.folder / "tokenizer.json", EOS).vocab_size <= CONFIG.vocab_size
    again = call("convert", f"--checkpoint={folder}", f"--output={tmp_path / 'orbax'}")
    assert again.returncode == 2 and "holds a model already: choose another folder" in again.stderr
    export_of_it = call("export_hugging_face", f"--run={tmp_path / 'orbax'}", f"--output={tmp_path / 'back'}")
    assert export_of_it.returncode == 2 and "was converted from a public checkpoint: export" in export_of_it.stderr
    (tmp_path / "orbax" / "run.json").unlink()
    again = call("convert", f"--checkpoint={folder}", f"--output={tmp_path / 'orbax'}")
    assert again.returncode == 2 and "a conversion that did not end: delete the folder" in again.stderr


@pytest.mark.parametrize("content", ["{", "[]", "{}", '{"model": {"wdth": 3}}'])
def test_a_damaged_run_is_one_line(tmp_path, content):
    (tmp_path / "run.json").write_text(content, encoding="utf-8")
    done = call("export_hugging_face", f"--run={tmp_path}", f"--output={tmp_path / 'out'}")
    assert done.returncode == 2 and done.stderr.startswith(f"{tmp_path}/run.json ") and done.stderr.count("\n") == 1
    assert not (tmp_path / "out").exists()


def test_exporting_the_shipped_target(tmp_path):
    done = call("export_hugging_face", "--pair=python", f"--output={tmp_path}")
    assert done.returncode == 0, done.stderr
    checkpoint = open_checkpoint(tmp_path)
    assert checkpoint.tensors and checkpoint.config.activation == "gelu"

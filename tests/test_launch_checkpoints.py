"""Public checkpoints on the command line."""

import json
import shutil

import jax
import numpy as np
import pytest

from configs import hf
from launch.lib import experiment
from launch.lib.config import load_config
from launch.lib.fields import ExperimentConfig
from specsamp.checkpoints.export import export
from specsamp.checkpoints.hugging_face import open_checkpoint
from specsamp.checkpoints.tokenizer import EOS, JsonTokenizer
from specsamp.training.data import train_tokenizer
from specsamp.training.source import open_trained
from support import extras
from support.checkpoint_shapes import CONFIG, random_params, write_random_head
from support.run_script import call, module


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    place = tmp_path_factory.mktemp("public") / "model"
    tokenizer = JsonTokenizer.from_tokenizer(train_tokenizer(["some text"] * 3, 300), eos=EOS)
    export(place, CONFIG, random_params(CONFIG), tokenizer)
    return place


def test_two_names_become_an_experiment(folder, capsys):
    config = ExperimentConfig.from_config_dict(load_config(f"configs/hf.py:{folder},{folder}")).turned(
        {"hugging_face.dtype": "float32"}
    )
    built = experiment.build(config)
    assert built.pair_name == f"{folder}, {folder}" and len(built.workload.prompts) == len(hf.PROMPTS)
    assert "read 0.0 of 0.0 GB" in capsys.readouterr().err
    assert experiment.build(config, ["other text"]).workload.prompts[0] == tuple(
        built.pair.tokenizer.encode("other text")
    )
    with pytest.raises(FileNotFoundError, match="has no config.json"):
        experiment.build(config.turned({"hugging_face.draft": str(folder.parent)}))


@pytest.fixture(scope="module")
def head(tmp_path_factory):
    """Random weights: it fits nothing."""
    return write_random_head(tmp_path_factory.mktemp("public") / "head", "org/head")


def test_a_head_is_checked(folder, head, tmp_path):
    """By a command; what cannot be checked is refused."""
    (tmp_path / "prompts.txt").write_text("some text\nother text\n", encoding="utf-8")
    common = [f"--config=configs/hf.py:{folder},{head}", "--config.hugging_face.dtype=float32", "--plain"]
    common += ["--config.draft_length=2", "--config.sampling.temperature=0", f"--prompts={tmp_path / 'prompts.txt'}"]
    common += ["--config.drafter=head", "--tokens=8", f"--output={tmp_path / 'check.json'}"]
    done = call("doctor", "--look_at=head", *common)
    assert done.returncode == 1, done.stderr
    assert "THE HEAD DOES NOT FIT" in done.stdout
    document = json.loads((tmp_path / "check.json").read_text(encoding="utf-8"))
    assert not document["fits"] and document["drafts"] > 8
    assert 0 <= document["acceptance"] < 0.2
    wrong = call(
        "doctor", "--look_at=head", f"--config=configs/hf.py:{folder},{folder}", "--config.hugging_face.dtype=float32"
    )
    assert wrong.returncode == 2 and "drafter = 'model', and the pair has no head" in wrong.stderr


@extras.needs("jinja2")
def test_commands_say_how_a_head_fits_and_write_prompts_as_conversations(folder, head, tmp_path, capsys):
    target = shutil.copytree(folder, tmp_path / "tuned")
    template = "{% for m in messages %}{{ m.role + ': ' + m.content }}{% endfor %}"
    (target / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}), encoding="utf-8")
    talk = [{"role": "user", "content": "some"}, {"role": "assistant", "content": "text"}]
    (tmp_path / "prompts.json").write_text(json.dumps(["some text", {"messages": talk}]), encoding="utf-8")
    turned = {"hugging_face.dtype": "float32", "drafter": "head", "draft_length": 2, "sampling.temperature": 0}
    config = ExperimentConfig.from_config_dict(load_config(f"configs/hf.py:{target},{head}")).turned(
        turned | {"chat": True}
    )
    built = experiment.build(config, module("benchmark").read_prompts(str(tmp_path / "prompts.json")))
    texts = [built.pair.tokenizer.decode(prompt) for prompt in built.workload.prompts]
    assert texts == ["user: some text", "user: someassistant: text"]
    said = capsys.readouterr().err
    assert "of the head's first tokens are accepted" in said and "THE HEAD DOES NOT FIT" in said


def test_converting_and_the_ways_it_is_refused(folder, tmp_path):
    done = call("export", f"--checkpoint={folder}", f"--output={tmp_path / 'orbax'}", "--dtype=float32")
    assert done.returncode == 0, done.stderr
    assert open_checkpoint(tmp_path / "orbax").is_converted
    target = open_trained(tmp_path / "orbax")  # a draft can be distilled from it
    assert target.config == CONFIG and "data" not in target.provenance["config"]
    jax.tree.map(np.testing.assert_array_equal, target.params, random_params(CONFIG))
    assert JsonTokenizer(target.folder / "tokenizer.json", EOS).vocab_size <= CONFIG.vocab_size
    again = call("export", f"--checkpoint={folder}", f"--output={tmp_path / 'orbax'}")
    assert again.returncode == 2 and "choose another folder" in again.stderr
    export_of_it = call("export", f"--run={tmp_path / 'orbax'}", f"--output={tmp_path / 'back'}")
    assert export_of_it.returncode == 2 and "was converted from a public checkpoint" in export_of_it.stderr
    (tmp_path / "orbax" / "run.json").unlink()
    again = call("export", f"--checkpoint={folder}", f"--output={tmp_path / 'orbax'}")
    assert again.returncode == 2 and "a conversion that did not end" in again.stderr


def test_a_damaged_run_is_one_line(tmp_path):
    (tmp_path / "run.json").write_text('{"model": {"wdth": 3}}', encoding="utf-8")
    done = call("export", f"--run={tmp_path}", f"--output={tmp_path / 'out'}")
    assert done.returncode == 2 and done.stderr.startswith(f"{tmp_path}/run.json ") and done.stderr.count("\n") == 1
    assert not (tmp_path / "out").exists()


def test_exporting_the_shipped_target(tmp_path):
    done = call("export", "--pair=python", f"--output={tmp_path}")
    assert done.returncode == 0, done.stderr
    checkpoint = open_checkpoint(tmp_path)
    assert checkpoint.tensors and checkpoint.config.activation == "gelu"

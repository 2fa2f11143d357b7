"""A small checkpoint in the format of Hugging Face, of several files, with its tokenizer."""

import json
import shutil

import pytest
from safetensors.numpy import load_file, save_file

from specsamp.checkpoints.export import export
from specsamp.checkpoints.safetensors_io import INDEX, SINGLE
from specsamp.checkpoints.tokenizer import EOS, JsonTokenizer
from specsamp.training.data import train_tokenizer
from support.checkpoint_shapes import CONFIG, random_params


@pytest.fixture(scope="session")
def tokenizer():
    return JsonTokenizer.from_tokenizer(
        train_tokenizer(["def f(x): return x  # é, in Python"] * 3, 300), eos=EOS
    )


@pytest.fixture(scope="session")
def params():
    return random_params(CONFIG)


@pytest.fixture(scope="session")
def original(params, tokenizer, tmp_path_factory):
    folder = tmp_path_factory.mktemp("public") / "model"
    export(folder, CONFIG, params, tokenizer)
    divide(folder)
    return folder


def divide(folder):
    """Divides a checkpoint into four files and an index, as in large public checkpoints."""
    tensors, of_tensor = load_file(folder / SINGLE), {}
    (folder / SINGLE).unlink()
    for i in range(4):
        part = {name: tensors[name] for name in list(tensors)[i::4]}
        save_file(part, folder / (file := f"model-0000{i + 1}-of-00004.safetensors"))
        of_tensor |= dict.fromkeys(part, file)
    (folder / INDEX).write_text(json.dumps({"weight_map": of_tensor}))


@pytest.fixture
def saved(original, tmp_path):
    return shutil.copytree(original, tmp_path / "model")

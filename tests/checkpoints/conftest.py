"""A small checkpoint in the format of Hugging Face, of several files, with its tokenizer."""

import shutil

import pytest

from specsamp.checkpoints import export
from specsamp.checkpoints.tokenizer import EOS, JsonTokenizer
from specsamp.training.data import train_tokenizer
from support.checkpoint_shapes import CONFIG, random_params


@pytest.fixture(scope="session")
def tokenizer():
    return JsonTokenizer.from_tokenizer(train_tokenizer(["def f(x): return x  # é, in Python"] * 3, 300), eos=EOS)


@pytest.fixture(scope="session")
def params():
    return random_params(CONFIG)


@pytest.fixture(scope="session")
def original(params, tokenizer, tmp_path_factory):
    folder = tmp_path_factory.mktemp("public") / "model"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(export, "SHARD_BYTES", 60_000)
        export.export(folder, CONFIG, params, tokenizer)
    return folder


@pytest.fixture
def saved(original, tmp_path):
    return shutil.copytree(original, tmp_path / "model")

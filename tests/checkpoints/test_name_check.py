"""Good and bad names of the hub: each bad name has its reason, and no weights are downloaded."""

import dataclasses
import json
import shutil
import sys

import numpy as np
import pytest
from safetensors.numpy import save_file

from specsamp.checkpoints.export import export
from specsamp.checkpoints.public_pair import check_pair
from specsamp.checkpoints.safetensors_io import INDEX
from support import golden, golden_heads
from support.checkpoint_shapes import CONFIG, edit, random_params, write_random_head
from support.run_script import call, refuse, succeed
from support.stand_in_hub import StandInHub

GEMMA = dict(target="some/gemma", draft="some/assistant", is_head=True)
NOT_DENSE = dict(hidden_size_per_layer_input=16)
CHAT = {"chat_template": "{{ messages[0].content }}"}


@pytest.fixture
def hub(original, tokenizer, tmp_path, monkeypatch):
    """Returns a hub with a target of several files, a draft, a head, and a Gemma 4 with its
    assistant.
    """
    hub = StandInHub(tmp_path / "hub", tmp_path / "cache")
    target = shutil.copytree(original, hub.folder / "some/target")
    (target / "tokenizer_config.json").write_text(json.dumps(CHAT))
    smaller = dataclasses.replace(CONFIG, width=16, num_heads=2, num_kv_heads=1, tied=True)
    export(hub.folder / "some/draft", smaller, random_params(smaller), tokenizer)
    write_random_head(hub.folder / "some/head", "some/target")
    write_empty(hub.folder / "some/gemma", **vars(golden.read("gemma4")))
    described, _ = golden_heads.read("gemma4", golden_heads.ASSISTANT.parent)
    write_empty(hub.folder / "some/assistant", **described)
    shutil.copy(original / "tokenizer.json", hub.folder / "some/gemma")
    monkeypatch.setitem(sys.modules, "huggingface_hub", hub)
    return hub


def write_empty(folder, config, shapes, **_):
    """Writes a golden model with zeros, and with 304 tokens instead of 96."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config).replace(": 96,", ": 304,"))
    sizes = {name: [304 if n == 96 else n for n in shape] for name, shape in shapes.items()}
    tensors = {name: np.zeros(shape, np.float32) for name, shape in sizes.items()}
    save_file(tensors, folder / "model.safetensors")


def problems(**fields):
    """Returns the problem, or None, of the target and of its draft or head."""
    given = {"name": "pair", "target": "some/target", "draft": "some/draft"} | fields
    found = list(check_pair(**given))
    assert [one.model for one in found] == [given["target"], given["draft"]]
    return tuple(one.problem for one in found)


def test_known_names_load(hub):
    assert problems(chat=True) == problems(draft="some/head", is_head=True) == (None, None)
    assert problems(target=str(hub.folder / "some/target")) == (None, None)
    assert problems(**GEMMA) == (None, None)
    assert not list(hub.cache.glob("**/*.safetensors"))
    (hub.folder / "some/head/config.json").write_text(
        (hub.folder / "some/head/config.json").read_text().replace("some/target", "some/base-model")
    )
    (_, of_head) = check_pair("pair", "some/target", "some/head", is_head=True)
    assert of_head.problem is None and "was trained for some/base-model" in of_head.notes[0]


def test_names_that_are_not_there_or_not_given(hub):
    assert problems(draft="some/nothing")[1] == "not on the hub, or private: then hf auth login"
    hub.gated.add("some/target")
    target, head = problems(draft="some/head", is_head=True)
    assert target == "gated: accept its licence on its page, then hf auth login"
    assert head.startswith("not checked: a draft is checked against its target")


def test_models_that_do_not_fit(hub):
    target, head = problems(target="some/draft", draft="some/head", is_head=True)
    assert target is None and "the target's width is 16: the head is for another target" in head
    edit(
        hub.folder / "some/draft/config.json",
        lambda content: content.update(architectures=["MambaForCausalLM"]),
    )
    target, draft = problems()
    assert target is None and "MambaForCausalLM" in draft
    edit(hub.folder / "some/gemma/config.json", lambda content: content.update(NOT_DENSE))
    target, head = problems(**GEMMA)
    assert "embeddings per layer (E2B, E4B) are not supported: choose the 12B or 31B" in target
    assert head.startswith("not checked: a draft is checked against its target")
    (hub.folder / "some/target" / INDEX).unlink()
    assert "some/target has neither model.safetensors nor " in problems()[0]


def test_tuned_models_need_a_chat_template(hub):
    (hub.folder / "some/target/tokenizer_config.json").unlink()
    assert problems(chat=True)[0].startswith("no chat template") and problems()[0] is None


def test_doctor_checks_each_public_name(hub, tmp_path):
    output = tmp_path / "names.json"
    done = succeed(
        "doctor",
        "--look_at=names",
        "--pair=some/target,some/draft",
        "--plain",
        f"--output={output}",
    )
    assert "2 names, of which 0 would not load" in done.stdout
    assert [one["problem"] for one in json.loads(output.read_text())["names"]] == [None, None]
    hub.gated.add("some/draft")
    more = ("--pair=some/target,some/head", "--head", "--plain")
    done = call("doctor", "--look_at=names", "--pair=some/target,some/draft", *more)
    assert done.returncode == 1
    printed = " ".join(done.stdout.split())
    assert "4 names, of which 1 would not load" in printed and "some/head" in printed
    assert "gated: accept" in printed


def test_without_a_network_there_is_one_line(hub):
    hub.network = False
    error = refuse("doctor", "--look_at=names")
    assert error.count("\n") == 1
    assert "the hub cannot be reached to look up names (TimeoutError: nobody answers)" in error

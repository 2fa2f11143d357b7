"""launch/train.py trains heads of pairs and public checkpoints; exported, they draft by a word."""

import dataclasses
import io
import json
import shutil

import jax
import numpy as np
import pytest
from rich.console import Console

from configs import hf_head, python_pair
from launch.lib import experiment
from launch.lib.config import load_config
from launch.lib.fields import ExperimentConfig
from launch.lib.training import TrainingConfig
from specsamp import FeatureDrafter, TransformerConfig, generate, load_pair
from specsamp.checkpoints.export import export
from specsamp.checkpoints.hugging_face import open_checkpoint
from specsamp.checkpoints.public_pair import read_pair
from specsamp.mesh.layout import make_mesh
from specsamp.models.mtp import MTPConfig
from specsamp.training.source import draft_fields, layer_fields, open_first_head, open_trained
from support.checkpoint_shapes import CONFIG, random_params
from support.refusals import refusal
from support.run_script import save_public_target, save_tiny_pair, succeed
from support.training import HEAD, metrics, training_config

pytestmark = pytest.mark.filterwarnings("ignore:the load_module:DeprecationWarning")


BLOCK = {"model.num_layers": 2, "head.mask_id": 299, "test_time.anchors": 3, "test_time.chunk": 3}


@pytest.fixture
def pair_folder(tmp_path):
    """Writes a pair with random weights, whose target has two layers, and returns its folder."""
    save_tiny_pair(tmp_path / "pair", ["def f(x):"], num_layers=2)
    return tmp_path / "pair"


def check_acceptance(run):
    """Checks that the last record of a run has the acceptance of three positions."""
    last = metrics(run)[-1]
    for i in (1, 2, 3):
        assert 0 < last[f"held_out/acceptance/position_{i} (temperature 1)"] <= 1


def drafts_as_it_was_trained(pair, run, prompt):
    """Checks a pair's head against its training run, and its greedy text against plain decoding."""
    trained = open_trained(run, is_head=True)
    for ours, theirs in zip(
        jax.tree.leaves(pair.draft_params), jax.tree.leaves(trained.params), strict=True
    ):
        np.testing.assert_allclose(ours, theirs, rtol=2**-8)
    (plain,), (drafted,) = (generate(pair, [prompt], 12, draft_length=K) for K in (0, 3))
    assert plain.tokens == drafted.tokens and drafted.stats.drafted > 0
    return trained


@pytest.mark.slow
def test_head_of_a_pair_trains_exports_drafts(
    train, run_training, texts, tmp_path, pair_folder, monkeypatch
):
    """Greedy text is the target's own, and a tuned head keeps its vocabulary of frequent tokens."""
    fields = HEAD | {
        "target": str(pair_folder),
        "head.draft_vocab_size": 40,
        "head.own_output": True,
    }
    run_training(training_config("tiny_head", texts, fields), "head")
    check_acceptance(tmp_path / "head")
    more = fields | {"init": str(tmp_path / "head"), "train.seed": 1, "generated.rows": 0}
    run_training(training_config("tiny_head", texts, more), "tuned")

    other = more | {"head.norm_before_residual": False, "head.hidden_layers": (1, 0)}
    with refusal(r"hidden_layers was \(0, 1\), is \(1, 0\); .*norm_before_residual was True"):
        run_training(training_config("tiny_head", texts, other), "other")
    elsewhere = tmp_path / "elsewhere"  # texts with other frequent tokens
    elsewhere.mkdir()
    for i in range(12):
        (elsewhere / f"text_{i}.py").write_text("while True: pass  # zzz yyy xxx\n" * 30)
    further = more | {"data.folder": str(elsewhere), "train.steps": 3}
    with monkeypatch.context() as patch:  # draft_ids.npy is written before the first step
        patch.setattr(train, "train", lambda *_, **__: None)
        run_training(training_config("tiny_head", texts, further), "further")
    ids = [np.load(tmp_path / name / "draft_ids.npy").tolist() for name in ("tuned", "further")]
    assert ids[0] == ids[1], "the rows of its output are those of its own tokens"

    with refusal("the pair .* has no head: .*head/config.json is missing", FileNotFoundError):
        load_pair(pair_folder, draft="head")
    arguments = f"--run={tmp_path / 'tuned'}", f"--output={pair_folder / 'head'}"
    done = succeed("export", *arguments)
    assert "MB, of step 4" in done.stdout, done.stderr
    told = json.loads((pair_folder / "head" / "training.json").read_text())
    assert told["config"]["target"] == "pair" and str(tmp_path) not in json.dumps(told)
    pair = load_pair(pair_folder, draft="head")
    trained = drafts_as_it_was_trained(pair, tmp_path / "tuned", "def f(x):")
    assert pair.head.config == dataclasses.replace(trained.config, layer=pair.head.config.layer)

    word = load_config(f"configs/trained_pair.py:{pair_folder}")
    word.update(drafter="head", draft_length=2)
    drafter = experiment.build(ExperimentConfig.from_config_dict(word)).method.drafter
    assert isinstance(drafter, FeatureDrafter) and drafter.K == 2

    with refusal("head is the run of a head, not of a model"):
        open_trained(tmp_path / "head")
    config = training_config("tiny_head", texts, fields | {"head.hidden_layers": (0, 7)})
    with refusal(r"hidden_layers\[\d\] must be .* below 3; got 7"):
        run_training(config, "x")


@pytest.mark.slow
def test_a_block_head_is_trained_by_a_word(run_training, texts, tmp_path, pair_folder):
    """The exported head drafts by a word, and a further training can begin with it."""
    fields = HEAD | {"target": str(pair_folder), "generated.rows": 0} | BLOCK
    run_training(training_config("tiny_dspark", texts, fields), "run")
    check_acceptance(tmp_path / "run")
    succeed("export", f"--run={tmp_path / 'run'}", f"--output={pair_folder / 'block'}")
    pair = load_pair(pair_folder, draft="block")
    drafts_as_it_was_trained(pair, tmp_path / "run", "def f(x):")
    exported = open_first_head(pair_folder / "block", pair.target.config)
    assert exported.step == 4 and exported.config.layer.vocab_size == 300


@pytest.mark.slow
def test_joint_training_becomes_two_runs(train, run_training, texts, tmp_path, monkeypatch):
    """Both runs have the final parameters, also when the training is run again, and other commands
    read them.
    """
    states, original = [], train.train
    monkeypatch.setattr(
        train,
        "train",
        lambda *given, **named: states.append(original(*given, **named)) or states[-1],
    )
    fields = {name: value for name, value in HEAD.items() if not name.startswith("generated")}
    fields |= {"head.num_modules": 3}
    fields |= {
        f"together.model.{name}": value for name, value in (("vocab_size", 300), ("width", 32))
    }
    for _ in range(2):
        run_training(training_config("tiny_mtp_target", texts, fields), "run")
    target, draft = (
        open_trained(tmp_path / "run" / part, is_head=part == "draft")
        for part in ("target", "draft")
    )
    assert target.step == draft.step == 4 and "held_out/loss" in metrics(tmp_path / "run")[-1]
    for part, written in (("target", target), ("draft", draft)):
        jax.tree.map(np.testing.assert_array_equal, written.params, states[-1].params[part])
        assert written.provenance["config"]["together"]["pull"]
    succeed("export", f"--run={tmp_path}/run/draft", f"--output={tmp_path}/exported")
    shutil.rmtree(tmp_path / "run" / "checkpoints")
    with refusal("holds target and draft of an earlier training"):
        run_training(training_config("tiny_mtp_target", texts, fields), "run")


PUBLIC = HEAD | {
    "test_time.test_steps": 3,
    "test_time.chunk": 8,
    "head.draft_vocab_size": 40,
    "head.hidden_layers": (0, 1),
    "mesh.model": 2,
}


@pytest.fixture(scope="module")
def chats(tmp_path_factory):
    """Writes conversations, one per line."""
    folder = tmp_path_factory.mktemp("chats")
    lines = [
        {
            "messages": [
                {"role": "user", "content": f"add {i} to x"},
                {"role": "assistant", "content": f"x + {i}"},
            ]
        }
        for i in range(120)
    ]
    (folder / "chats.jsonl").write_text("\n".join(map(json.dumps, lines)), encoding="utf-8")
    return folder


@pytest.fixture(scope="module")
def public_target(tmp_path_factory):
    return save_public_target(tmp_path_factory.mktemp("public") / "target")


def public_config(target, chats, fields):
    config = hf_head.get_config(str(target))
    of_target = ("model.vocab_size", "model.width", "model.num_layers")
    config.update_from_flattened_dict(
        {name: value for name, value in fields.items() if name not in of_target}
    )
    config.update_from_flattened_dict(
        {"data.folder": fields.get("data.folder", str(chats)), "data.pattern": "*.jsonl"}
    )
    return TrainingConfig.from_config_dict(config)


@pytest.mark.slow
def test_head_of_sharded_public_target_trains(train, run_training, chats, tmp_path, public_target):
    """The head's layer has the sizes of its target; it trains on the target's chats, and its run
    refuses another target.
    """
    target = shutil.copytree(public_target, tmp_path / "target")
    config = public_config(target, chats, PUBLIC | {"model.feedforward_width": 24})
    said = []
    with pytest.MonkeyPatch.context() as patch:
        begin = train.train

        def look(task, *arguments, teacher_params, **others):
            said.append(teacher_params["target"]["layer_0"]["mlp"]["up"].sharding)
            return begin(task, *arguments, teacher_params=teacher_params, **others)

        patch.setattr(train, "train", look)
        run_training(config, "head")
    assert said[0].num_devices == 8 and "model" in said[0].spec
    fields = json.loads((tmp_path / "head" / "run.json").read_text())["model"]
    assert (fields["width"], fields["num_kv_heads"], fields["feedforward_width"]) == (32, 2, 24)
    check_acceptance(tmp_path / "head")
    again = public_config(target, chats, PUBLIC | {"model.feedforward_width": 24})
    # The same training again has nothing left to do.
    run_training(again, "head")

    to = f"--output={tmp_path / 'exported'}"
    succeed("export", f"--run={tmp_path / 'head'}", "--verifier=org/target", to)
    pair = read_pair(str(target), str(tmp_path / "exported"), is_head=True, dtype="float32")
    drafts_as_it_was_trained(pair, tmp_path / "head", [{"role": "user", "content": "add 5 to x"}])

    other = shutil.copytree(target, tmp_path / "other")
    export(other, CONFIG, random_params(CONFIG, 1), open_checkpoint(other).tokenizer)
    with refusal("another configuration: target was .*other"):
        run_training(public_config(other, chats, PUBLIC | {"model.feedforward_width": 24}), "head")
    shutil.rmtree(target)
    shutil.copytree(other, target)
    with refusal("was begun with another target"):
        run_training(again, "head")


@pytest.mark.parametrize(
    "fields, message",
    [
        (
            {"target": "no such name"},
            "no training run at 'no such name', no pair and no public model: no folder",
        ),
        ({"mesh.model": 8}, "'heads' has 4 entries, which do not divide over the 8 devices"),
        (
            {"generated.batch": 6},
            "generated.batch 6 does not divide over 4 devices of the mesh axis 'data'",
        ),
        ({"compute_dtype": "float16"}, "dtype must be one of float32, bfloat16"),
        (
            {"head.own_output": False},
            "a head with a reduced vocabulary needs its own output matrix",
        ),
        ({"test_time.chunk": 5}, "test_time.chunk 5 does not divide data.length 16"),
        ({"data.folder": "nowhere"}, "no folder of texts at nowhere"),
    ],
)
def test_public_target_is_checked_before_reading_weights(
    run_training, chats, tmp_path, public_target, monkeypatch, fields, message
):
    def refuse(*_):
        raise AssertionError("weights were read")

    monkeypatch.setattr("specsamp.training.source.read_params", refuse)
    with refusal(message, (ValueError, FileNotFoundError)):
        config = public_config(fields.get("target", public_target), chats, PUBLIC | fields)
        run_training(config, "run")
    assert not (tmp_path / "run").exists()


def draft_config(target, chats, **fields):
    config = hf_head.get_config(f"{target},draft")
    config.update_from_flattened_dict(
        {
            "data.folder": str(chats),
            "data.length": 16,
            "data.held_out": 0.3,
            "data.held_out_windows": 8,
            "data.eos": "<not the target's>",
            "generated.share": 0.0,
            "generated.prompt_length": 4,
            "model.num_layers": 1,
            "train.steps": 1,
            "train.batch": 8,
            "train.warmup_steps": 0,
        }
        | fields
    )
    return TrainingConfig.from_config_dict(config)


@pytest.mark.slow
def test_draft_of_public_target_begins_with_its_first_layers(
    train, run_training, chats, tmp_path, public_target
):
    """A rate of nearly nothing leaves the parameters that the run began with; exported, the draft
    is read beside its target.
    """
    run_training(draft_config(public_target, chats, **{"train.learning_rate": 1e-9}), "draft")
    expected = random_params(CONFIG)
    found = open_trained(tmp_path / "draft").params
    assert sorted(found) == sorted(set(expected) - {"layer_1"})
    for name, part in found.items():
        for ours, of_target in zip(
            jax.tree.leaves(part), jax.tree.leaves(expected[name]), strict=True
        ):
            np.testing.assert_allclose(ours, of_target, rtol=2**-7, atol=1e-7)
    assert 0 < metrics(tmp_path / "draft")[-1]["held_out/acceptance (temperature 1)"] < 1
    to = f"--output={tmp_path / 'exported'}"
    succeed("export", f"--run={tmp_path / 'draft'}", to)
    pair = read_pair(str(public_target), str(tmp_path / "exported"), dtype="float32")
    (plain,), (drafted,) = (generate(pair, ["add 5 to x"], 12, draft_length=K) for K in (0, 3))
    assert plain.tokens == drafted.tokens and drafted.stats.drafted > 0


def test_draft_of_other_sizes_is_refused(train, run_training, chats, public_target):
    narrow = {"model.feedforward_width": 24}
    with refusal("is of another model: layer_0/mlp/down: .128, 32. there"):
        run_training(draft_config(public_target, chats, **narrow), "narrow")


def test_draft_computes_as_its_target():
    changes = dict(residual_scale=0.4, query_key_norm=True, window=8, global_layers=(1,))
    target = dataclasses.replace(CONFIG, **changes, dtype="bfloat16")
    given = {"num_layers": 1, "feedforward_width": 24, "width": None}
    found = TransformerConfig(**draft_fields(given, target))
    assert found == dataclasses.replace(
        CONFIG, **changes | dict(global_layers=(), num_layers=1, feedforward_width=24)
    )


@pytest.mark.parametrize("kind", python_pair.HEADS)
def test_default_head_of_a_public_target_can_be_exported(train, public_target, kind):
    config = hf_head.get_config(f"{public_target},{kind}")
    if kind != "mtp" and kind != "medusa":
        config.head.hidden_layers = (0, 1)
    if kind == "head":
        config.head.draft_vocab_size = 40
    if kind in python_pair.BLOCKS:
        config.head.mask_id = 299
    config = TrainingConfig.from_config_dict(config)
    target = train.find_target(config, make_mesh(model=1), said := Console(file=io.StringIO()))
    config = config.turned({"model": layer_fields(dict(config.model), target.config)})
    head = train.make_task(config, train.make_model(config), target).head
    train.warn_of_export(head.config, said)
    assert "will refuse" not in said.file.getvalue()
    assert head.config.kind.lower() == {"head": "eagle-3"}.get(kind, kind)


@pytest.mark.parametrize(
    "config",
    [
        MTPConfig(layer=CONFIG, target_layers=2, hidden_layers=(1,), hidden_first=False),
        dataclasses.replace(CONFIG, query_key_norm=True),
    ],
)
def test_draft_that_no_file_describes_is_said(train, config):
    said = Console(file=io.StringIO())
    train.warn_of_export(config, said)
    assert "will refuse this draft" in said.file.getvalue()

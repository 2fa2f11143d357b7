"""launch/train.py and export.py: killed trainings resume, and faults are named before any write."""

import json
import shutil
import types

import numpy as np
import pytest

from launch import export
from launch.lib.training import GeneratedFields
from specsamp.checkpoints.tokenizer import JsonTokenizer
from specsamp.checkpoints.trained_pair import load_pair, load_prompts
from specsamp.training.data import ChatText, Corpus, integer_tokenizer, train_tokenizer
from support.processes import killed_when
from support.refusals import refusal
from support.run_script import flags_of, succeed
from support.training import DRAFT, SMALL, TARGET, metrics, quiet, training_config
from support.weights import shapes_of

# ml_collections loads configurations by a deprecated function of the standard library.
pytestmark = pytest.mark.filterwarnings("ignore:the load_module:DeprecationWarning")


@pytest.mark.slow
def test_killed_training_resumes_and_is_exported(run_training, texts, tmp_path):
    """A training that is killed without cleanup has the losses of an uninterrupted run."""
    target = tmp_path / "target"
    flags = flags_of(TARGET | {"data.folder": texts})
    arguments = ["--config=configs/python_pair.py:tiny_target", f"--workdir={target}", *flags]
    as_here = {"JAX_NUM_CPU_DEVICES": "8", "JAX_DEFAULT_MATMUL_PRECISION": "float32"}
    killed_when(
        lambda: any(record["step"] >= 10 for record in metrics(target)),
        ["launch/train.py", *arguments],
        environment=as_here,
    )
    assert not (target / "checkpoints" / "24").exists()
    done = succeed("train", *arguments)
    assert "resumed at step" in done.stdout

    run_training(
        training_config("tiny_target", texts, TARGET | {"intervals.checkpoint": 24}), "alone"
    )
    assert metrics(target) == metrics(tmp_path / "alone")
    assert [record["step"] for record in metrics(target) if "loss" in record] == list(range(1, 25))

    other = training_config(
        "tiny_draft", texts, DRAFT | {"target": str(target), "data.held_out": 0.2}
    )
    with refusal("data.held_out 0.2 is not the 0.3 of .*target, on the same files"):
        run_training(other, "another_split")
    assert not (tmp_path / "another_split").exists()
    config = training_config("tiny_draft", texts, DRAFT | {"target": str(target)})
    run_training(config, "draft")
    parts = sorted((tmp_path / "draft" / "generated").iterdir())
    assert sum(len(np.load(part)) for part in parts) == 8
    last_part = parts[-1].read_bytes()
    parts[-1].unlink()  # as if killed before it was written
    run_training(config, "draft")
    assert parts[-1].read_bytes() == last_part
    export.export_pair(target, tmp_path / "draft", tmp_path / "pair", quiet())
    pair = load_pair(tmp_path / "pair")
    assert pair.tokenizer.decode(pair.tokenizer.encode("x + 1")) == "x + 1"
    provenance = json.loads((tmp_path / "pair" / "pair.json").read_text())["provenance"]
    assert provenance["target"]["step"] == 24
    assert provenance["draft"]["config"]["target"] == "target"
    for private in (tmp_path, texts.parent):
        assert str(private) not in json.dumps(provenance)
    assert 0 < provenance["held_out"]["int8"]["draft"]["acceptance (temperature 1)"] <= 1
    last = [record for record in metrics(target) if "held_out/loss" in record][-1]
    np.testing.assert_allclose(
        provenance["held_out"]["float32"]["target"]["loss"], last["held_out/loss"], rtol=1e-4
    )

    with refusal("target is no run of a draft: it was not distilled from a target"):
        export.export_pair(target, target, tmp_path / "none", quiet())
    assert not (tmp_path / "none").exists()


@pytest.mark.slow
def test_a_target_is_tuned_to_draft_itself(train, run_training, texts, tmp_path):
    """The training starts from scratch, or from a target's run with its tokenizer; exits are
    measured like drafts.
    """
    fields = TARGET | {"train.steps": 4, "intervals.evaluate": 4, "model.num_layers": 2}
    with refusal("a model of one layer has no earlier exit"):
        run_training(training_config("tiny_layer_skip", texts, SMALL), "one")
    run_training(training_config("tiny_layer_skip", texts, fields), "scratch")
    tuned = training_config("tiny_layer_skip", texts, fields | {"init": str(tmp_path / "scratch")})
    assert not train.make_task(tuned, train.make_model(tuned), None).from_scratch
    run_training(tuned, "tuned")
    tokenizers = [(tmp_path / name / "tokenizer.json").read_text() for name in ("scratch", "tuned")]
    assert tokenizers[0] == tokenizers[1]
    first, then = (metrics(tmp_path / name) for name in ("scratch", "tuned"))
    assert then[0]["text_loss"] < first[0]["text_loss"] - 0.01  # starts from trained parameters
    assert 0 < then[-1]["held_out/acceptance/exit_1 (temperature 1)"] <= 1


def test_pair_prompts_begin_held_out_files(tmp_path):
    """A beginning of blank lines is no prompt: commands that decode a pair's prompts would refuse
    the pair.
    """
    tokenizer = JsonTokenizer.from_tokenizer(integer_tokenizer(9), "<eos>")

    def write(**held_out):
        corpus = Corpus(train={}, held_out=held_out, skipped=(), digest="")
        export.write_prompts(tmp_path / "prompts.json", corpus, tokenizer)

    (tmp_path / "pair.json").write_text("{}")  # marks the folder of a pair
    write(talk=ChatText('{"messages": []}'), many=np.array([9, 1], np.int32))
    with refusal("has no prompts", FileNotFoundError):
        load_prompts(tmp_path)
    write(blank="\n" + "x" * 300, spaces=" " * 300, good="\nx = 1\ny = 2\n")
    assert load_prompts(tmp_path) == ["\nx = 1\ny = 2"]
    write(other="x")
    assert load_prompts(tmp_path) == ["\nx = 1\ny = 2"]  # the old prompts stay
    (tmp_path / "prompts.json").unlink()
    write(one=np.array([4, 1, 2], np.int32), two=np.array([4, 5], np.int32))
    assert load_prompts(tmp_path) == ["<eos> 4"]


def test_export_reads_conversations_by_their_template(tmp_path):
    (tmp_path / "given").mkdir()
    (tmp_path / "given" / "chat_template.jinja").write_text("{{ messages[0].content }}")
    (tmp_path / "tokenizer.json").write_text(integer_tokenizer(9).to_str())
    data = {"tokenizer": str(tmp_path / "given" / "tokenizer.json"), "eos": "<eos>"}
    run = types.SimpleNamespace(folder=tmp_path, provenance={"config": {"data": data}})
    assert export.tokenizer_of(run).chat.source == "{{ messages[0].content }}"
    data["tokenizer"] = ""
    assert export.tokenizer_of(run).chat is None


def test_last_batch_has_its_share_of_greedy_rows():
    fields = {"rows": 80, "share": 1.0, "prompt_length": 4, "temperature": 0.8, "top_p": 1.0}
    written = GeneratedFields(**fields, batch=64, greedy_share=0.25).sampling
    is_greedy_N = np.asarray(written.warps[0].value) == 0
    assert [int(is_greedy_N[:count].sum()) for count in (16, 64)] == [4, 16]


@pytest.mark.parametrize(
    "kind, fields, message",
    [
        ("draft", {"target": "no run"}, "no training run at 'no run'"),
        ("target", {"train.seed": -1}, "train.seed must be .* got -1"),
        ("target", {"data.pattern": "*.txt"}, r"nothing to train on: .*'\*.txt'"),
        (
            "target",
            {"model.vocab_size": 100},
            "the tokenizer has 257 tokens, the model a vocabulary of 100",
        ),
        ("target", {"data.tokenizer": "no.json"}, "no tokenizer at no.json"),
        ("target", {"intervals.log": 0}, "intervals.log must be .* got 0"),
        (
            "target",
            {"model.max_positions": 8},
            "data.length 16 is more than the model's 8 positions",
        ),
    ],
)
def test_invalid_training_is_refused_before_it_begins(
    run_training, texts, tmp_path, kind, fields, message
):
    usual = {"target": TARGET, "draft": DRAFT}[kind]
    with refusal(message, (ValueError, FileNotFoundError)):
        run_training(training_config(f"tiny_{kind}", texts, usual | fields), "run")
    assert not (tmp_path / "run").exists()


def test_a_public_target_accepts_its_own_whole_tokenizer(train, tmp_path):
    made = train_tokenizer(["some text"] * 3, 300, "<eos>")
    rows = made.get_vocab_size()
    path = tmp_path / "tokenizer.json"
    made.add_special_tokens(["<image>"])
    path.write_text(made.to_str())
    parent = types.SimpleNamespace(
        folder=tmp_path,
        public=True,
        config=types.SimpleNamespace(vocab_size=rows),
        tokenizer=JsonTokenizer(path, "<eos>", rows=rows),
    )
    assert parent.tokenizer.left_out == ("<image>",)
    config = types.SimpleNamespace(data=types.SimpleNamespace(tokenizer=str(path)))
    assert train.make_tokenizer(config, tmp_path, None, parent) is parent.tokenizer


@pytest.mark.parametrize(
    "fields, message",
    [
        ({"generated.share": 1.5}, "--config.generated.share must be .*; got 1.5"),
        ({"generated.rows": -1}, "--config.generated.rows must be .*; got -1"),
        ({"generated.batch": 0}, "--config.generated.batch must be .*; got 0"),
        ({"generated.greedy_share": 2.0}, "--config.generated.greedy_share must be .*; got 2.0"),
        (
            {"generated.prompt_length": 17},
            "--config.generated.prompt_length 17 must be at most data.length, 16",
        ),
        ({"generated.top_p": 0.0}, r"top_p must lie in \(0, 1\]"),
        (
            {"data.length": 32, "data.held_out": 0.5},
            "data.length 32 [+] 1 tokens the target has too few positions, 32",
        ),
        (
            {"data.tokenizer": "specsamp/checkpoints/assets/python/tokenizer.json"},
            "data.tokenizer .* is not the tokenizer of .*target",
        ),
        (
            {"objective": "kl"},
            "objective must be one of forward_kl, reverse_kl, total_variation.*got 'kl'",
        ),
        (
            {"init": "other"},
            r"in other is of another model: embedding: \(300, 8\) there, \(300, 16\) wanted",
        ),
    ],
)
def test_distillation_is_checked_before_the_target_writes(
    train, run_training, texts, tmp_path, monkeypatch, fields, message
):
    """A mismatch would otherwise appear only after the target has written texts for an hour."""

    def sized(**sizes):
        return train.make_model(training_config("tiny_target", texts, TARGET | sizes))

    target = sized(**{"model.max_positions": 32})
    other = sized(**{"model.width": 8})
    (tmp_path / "target").mkdir()
    tokenizer = train_tokenizer(["some text"] * 3, 300, "<eos>").to_str()
    (tmp_path / "target" / "tokenizer.json").write_text(tokenizer)

    def trained(folder):
        model = other if folder == "other" else target
        return types.SimpleNamespace(
            folder=tmp_path / "target",
            config=model.config,
            model_in=lambda dtype: model,
            identity={"sha256": "a"},
            params=shapes_of(model),
            check_split=lambda held_out, digest: None,
            public=None,
            mesh=None,
        )

    monkeypatch.setattr(train.source, "open_trained", trained)
    monkeypatch.setattr(train.source, "is_trained_here", lambda name: True)
    with refusal(message):
        run_training(
            training_config("tiny_draft", texts, DRAFT | {"target": "target"} | fields), "run"
        )
    assert not (tmp_path / "run").exists()


def test_run_resumes_only_with_its_configuration(train, run_training, texts, tmp_path, monkeypatch):
    monkeypatch.setattr(train, "train", lambda *_, **__: None)
    mine = tmp_path / "texts"
    shutil.copytree(texts, mine)

    def begin(fields):
        return run_training(training_config("tiny_target", mine, fields), "run")

    begin(TARGET)
    begin(TARGET)
    with refusal("another configuration: train.seed was 0, is 1. Give the old values"):
        begin(TARGET | {"train.seed": 1})
    begin(TARGET | {"intervals.log": 7})
    (mine / "new.py").write_text("x = 1\n")
    with refusal("begun with another corpus: .* now "):
        begin(TARGET)

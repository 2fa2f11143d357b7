"""Configurations become experiments, and the first commands run them."""

import dataclasses
import json
import shutil
import types

import jax
import numpy as np
import pytest

from configs import hf
from launch.lib import experiment
from launch.lib.config import load_config
from launch.lib.fields import ExperimentConfig, PublicNames, SamplingFields, make_model
from launch.lib.rules import make_rule
from specsamp import (
    Adaptive,
    BeamDrafter,
    BlockRule,
    EarlyExitDrafter,
    EarlyExitTree,
    Entropy,
    KSeqRule,
    ModelDrafter,
    ModelTree,
    NgramDrafter,
    NgramTree,
    NoDrafter,
    Pair,
    ParallelDrafter,
    TraversalRule,
    TreeShape,
    VotingDrafter,
    WindowDrafter,
)
from specsamp.checkpoints.hugging_face import open_checkpoint
from specsamp.checkpoints.published import CONFIGS
from specsamp.checkpoints.tokenizer import EOS, JsonTokenizer
from specsamp.evaluation.task import Problem, first_of_each
from specsamp.sampling.warp import Chain, Greedy, MinP, Temperature, TopK
from specsamp.tpu import int8_time
from specsamp.training.source import open_trained
from support import extras
from support.checkpoint_shapes import CONFIG, random_params, write_random_head
from support.refusals import refusal
from support.run_script import (
    TINY_PAIR,
    call,
    module,
    read_cells,
    refuse,
    save_public_target,
    save_tiny_pair,
    succeed,
)

TINY = "configs/random_pair.py:tiny"


def turned(**fields):
    """Returns the tiny pair's configuration with other values, as ``field`` or ``group__field``."""
    point = {name.replace("__", "."): value for name, value in fields.items()}
    return ExperimentConfig.from_config_dict(load_config(TINY)).turned(point)


def test_a_configuration_becomes_objects(monkeypatch):
    def without_params(target, draft, *_, **__):
        return Pair(target=target, target_params={}, draft=draft, draft_params={})

    monkeypatch.setattr(experiment, "bare_pair", without_params)
    config = turned(rule="block", target__num_layers=3, draft_length=2)
    made = experiment.build(config)
    assert made.method.rule == BlockRule()
    assert made.method.drafter == ModelDrafter(made.pair.draft, 2)
    assert made.pair.target.config.num_layers == 3 and made.pair.draft.config.num_layers == 1
    known = {
        "ngram": NgramDrafter(K=2),
        "none": NoDrafter(),
        "early_exit": EarlyExitDrafter(made.pair.target, 1, 2),
    }
    known |= {"window": WindowDrafter(made.pair.target, 2, window=9, sinks=3)}
    known |= {"pard": ParallelDrafter(made.pair.draft, 2, mask_id=7)}
    several = NgramDrafter(2), EarlyExitDrafter(made.pair.target, 1, 2)
    known |= {"beam": BeamDrafter(made.pair.draft, 2)}
    known |= {"voting:ngram:early_exit": VotingDrafter(several)}
    for word, drafter in known.items():
        own = config.turned(
            {"drafter": word, "exit_layer": 1, "mask_id": 7, "window": 9, "sinks": 3}
        )
        assert own.make_drafter(made.pair.target, made.pair.draft) == drafter
        plain = own.turned({"draft_length": 0})
        assert plain.make_drafter(made.pair.target, made.pair.draft) == NoDrafter()
    no_sinks = config.turned({"drafter": "window", "window": 9, "sinks": None})
    assert no_sinks.make_drafter(made.pair.target, None).sinks == 0
    assert made.method.adaptive is None and config.adaptive.make(NoDrafter()) is None
    stopping = config.turned({"adaptive.stop": "entropy", "adaptive.least": 0.5})
    assert stopping.adaptive.make(made.method.drafter) == Adaptive(lengths=(2,), stop=Entropy(0.5))
    choosing = config.turned({"adaptive.lengths": (0, 2), "adaptive.costs_ms": (1.0, 1.5)})
    assert choosing.adaptive.make(made.method.drafter) == Adaptive(
        lengths=(0, 2), costs_ms=(1.0, 1.5)
    )
    with refusal("adaptive.lengths end with 2, but draft_length is 3"):
        choosing.adaptive.make(dataclasses.replace(made.method.drafter, K=3))


def test_trees_by_their_words():
    config = turned(tree=(2, 1), rule="traversal:top")
    target = make_model(config.target)
    draft = make_model(config.draft)
    shape = TreeShape((0, 0, 1, 2))
    made = {
        "model": ModelTree(draft, tree=shape),
        "ngram": NgramTree(tree=shape),
        "early_exit": EarlyExitTree(target, 1, tree=shape),
    }
    for word, drafter in made.items():
        own = config.turned({"drafter": word, "exit_layer": 1})
        assert own.make_drafter(target, draft) == drafter
        assert own.drafter_name.endswith(" tree 2x1")
        assert own.turned({"draft_length": 0}).make_drafter(target, draft) == NoDrafter()
    assert config.acceptance_rule == TraversalRule("top") and make_rule("kseq") == KSeqRule()


def test_sampling_that_is_off_is_left_out():
    fields = SamplingFields(temperature=1.0, top_k=5, top_p=1.0, min_p=0.1)
    assert [type(warp) for warp in fields.warp().warps] == [Temperature, TopK, MinP]
    assert dataclasses.replace(fields, temperature=0.0).warp() == Greedy()
    assert isinstance(SamplingFields(temperature=0.8).warp(), Chain)


def test_slower_int8_is_announced_before_decoding(monkeypatch, capsys):
    monkeypatch.setattr(int8_time, "OVER_BFLOAT16", {"v4": {1: 0.8, 8: 1.3}})

    def told(kind, **fields):
        monkeypatch.setattr(jax, "devices", lambda: [types.SimpleNamespace(device_kind=kind)])
        experiment.say_where_int8_is_slower(turned(**fields))
        return capsys.readouterr().err

    lines = told("TPU v4", batch=20, int8__weights="target").splitlines()
    assert len(lines) == 1 and "at batch 20" in lines[0] and "takes 1.3 times" in lines[0]
    assert told("TPU v4", batch=20) == ""
    assert told("TPU v4", batch=7, int8__caches="target") == ""
    assert told("TPU v5e", batch=20, int8__caches="target") == ""


def test_the_demo_counts_its_prompts():
    fields = ("--config.max_new_tokens=2", "--config.draft_length=1", "--config.sampling.top_p=1.0")
    done = succeed("demo", *TINY_PAIR, "--config.draft.positions=rotary", "--passes=1", *fields)
    assert "greedy, speculative = autoregressive: 3 of 3 prompts, 6 tokens" in done.stdout
    assert "the timings are left out" not in done.stdout


# Public checkpoints.


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_public_target(tmp_path_factory.mktemp("public") / "model", template=None)


def test_two_names_become_an_experiment(folder, capsys, tmp_path):
    config = ExperimentConfig.from_config_dict(
        load_config(f"configs/hf.py:{folder},{folder}")
    ).turned({"hugging_face.dtype": "float32"})
    built = experiment.build(config)
    assert built.pair_name == f"{folder}, {folder}"
    assert len(built.workload.prompts) == len(hf.PROMPTS)
    assert "read 0.0 of 0.0 GB" in capsys.readouterr().err
    texts = {"ids.npy": [[1, 2, 3]], "text.txt": [built.pair.tokenizer.encode("some text")]}
    np.save(tmp_path / "ids.npy", [1, 2, 3])
    (tmp_path / "text.txt").write_text("some text")
    for name, corpus in texts.items():
        looking = config.turned({"drafter": "ngram", "corpus": str(tmp_path / name)})
        drafter = looking.make_method(built.pair).drafter
        assert drafter == NgramDrafter(K=drafter.K, corpus=corpus)
    with refusal("has no config.json", FileNotFoundError):
        experiment.build(config.turned({"hugging_face.draft": str(folder.parent)}))


@pytest.mark.slow
@pytest.mark.parametrize(
    "drafter, flags",
    [
        ("ngram", ("--config.mesh.model=2", "--config.mesh.data=4", "--config.batch=4")),
        ("choosing:ngram:window", ("--config.window=4",)),
    ],
)
def test_a_target_alone_is_read_once_and_decodes(folder, drafter, flags, tmp_path):
    output = tmp_path / "result.json"
    flags += (
        f"--config.drafter={drafter}",
        "--config.repeats=1",
        "--config.max_new_tokens=4",
        f"--output={output}",
    )
    flags += ("--config.hugging_face.dtype=float32", "--plain")
    done = succeed("benchmark", f"--config=configs/hf.py:{folder}", *flags)
    assert "no draft" in done.stdout + done.stderr and done.stderr.count("read 0.0 of 0.0 GB") <= 1
    (cell,) = read_cells(output)
    assert cell["result"]


def test_export_replaces_nothing_of_another_kind(folder, tmp_path):
    save_tiny_pair(tmp_path / "pair", ["def f(x):"])
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "run.json").write_text('{"head": {}}')
    held = {
        folder: "a model or a head (config.json)",
        tmp_path / "pair": "a pair (pair.json)",
        tmp_path / "run": "a training run or a converted checkpoint (run.json)",
    }
    sources = f"--checkpoint={folder}", "--pair=python", f"--run={tmp_path}/run"
    for place, content in held.items():
        before = {path: path.read_bytes() for path in place.rglob("*")}
        for source in sources:
            said = refuse("export", source, f"--output={place}")
            assert f"--output={place} holds {content}: choose another folder" in said
        assert {path: path.read_bytes() for path in place.rglob("*")} == before
    (tmp_path / "pair" / "acceptance.json").write_text("{}")
    for place, content in {
        folder: "a model or a head",
        tmp_path / "pair": "acceptance.json",
    }.items():
        said = refuse("export", "--target=a", "--draft=b", f"--output={place}")
        assert f"--output={place} holds {content}" in said


def test_model_drafter_without_draft_is_refused(folder, monkeypatch):
    monkeypatch.setenv("HOME", str(folder.parent))
    config = load_config(f"configs/hf.py:~/{folder.name}")
    built = experiment.build(ExperimentConfig.from_config_dict(config))
    assert built.pair.draft is None and built.pair_name == f"~/{folder.name}"
    config.drafter = "model"
    with refusal("--config.drafter=model reads a draft, and .* is a target alone: name both"):
        ExperimentConfig.from_config_dict(config)


@pytest.fixture(scope="module")
def head(tmp_path_factory):
    """Writes a head with random weights, which fits no target."""
    return write_random_head(tmp_path_factory.mktemp("public") / "head", "org/head")


@pytest.mark.slow
def test_a_head_is_checked(folder, head, tmp_path):
    """The doctor reports that a random head does not fit, and refuses a pair without a head."""
    (tmp_path / "prompts.txt").write_text("some text\nother text\n")
    common = [
        f"--config=configs/hf.py:{folder},{head}",
        "--config.hugging_face.dtype=float32",
        "--plain",
    ]
    common += [
        "--config.draft_length=2",
        "--config.sampling.temperature=0",
        f"--prompts={tmp_path / 'prompts.txt'}",
    ]
    common += ["--config.drafter=head", "--tokens=8", f"--output={tmp_path / 'check.json'}"]
    done = call("doctor", "--look_at=head", *common)
    assert done.returncode == 1, done.stderr
    assert "THE HEAD DOES NOT FIT" in done.stdout
    document = json.loads((tmp_path / "check.json").read_text())
    assert not document["fits"] and document["drafts"] > 8
    assert 0 <= document["acceptance"] < 0.2 and "as configured" in document["readings"]
    assert "drafter = 'model', and the pair has no head" in refuse(
        "doctor",
        "--look_at=head",
        f"--config=configs/hf.py:{folder},{folder}",
        "--config.hugging_face.dtype=float32",
    )


@extras.needs("jinja2")
def test_commands_check_heads_and_write_conversations(folder, head, tmp_path, capsys):
    target = shutil.copytree(folder, tmp_path / "tuned")
    template = "{% for m in messages %}{{ m.role + ': ' + m.content }}{% endfor %}"
    (target / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}))
    talk = [{"role": "user", "content": "some"}, {"role": "assistant", "content": "text"}]
    (tmp_path / "prompts.json").write_text(json.dumps(["some text", {"messages": talk}]))
    turned = {
        "hugging_face.dtype": "float32",
        "drafter": "head",
        "draft_length": 2,
        "sampling.temperature": 0,
    }
    config = ExperimentConfig.from_config_dict(
        load_config(f"configs/hf.py:{target},{head}")
    ).turned(turned | {"chat": True})
    built = experiment.build(
        config, module("benchmark").read_prompts(str(tmp_path / "prompts.json"))
    )
    texts = [built.pair.tokenizer.decode(prompt) for prompt in built.workload.prompts]
    assert texts == ["user: some text", "user: someassistant: text"]
    said = capsys.readouterr().err
    assert "of the head's first tokens are accepted" in said and "THE HEAD DOES NOT FIT" in said


@pytest.mark.slow
def test_a_head_is_read_for_other_drafters_as_a_head(folder, head, tmp_path):
    (tmp_path / "mine.py").write_text(
        "from specsamp import NgramDrafter\n"
        "def Mine(K, head): return NgramDrafter(K if head else 1)\n"
    )
    config = load_config(f"configs/hf.py:{folder},{head}")
    config.update({"drafter": "ngram", "draft_length": 2})
    config.hugging_face.dtype = "float32"
    built = experiment.build(ExperimentConfig.from_config_dict(config))
    assert built.pair.head is not None and built.pair.draft is None
    config.drafter = f"{tmp_path / 'mine.py'}:Mine(K, draft)"
    built = experiment.build(ExperimentConfig.from_config_dict(config))
    assert built.pair.head is not None and built.method.drafter.K == 2


def test_converting_and_the_ways_it_is_refused(folder, tmp_path):
    succeed("export", f"--checkpoint={folder}", f"--output={tmp_path / 'orbax'}", "--dtype=float32")
    assert open_checkpoint(tmp_path / "orbax").is_converted
    target = open_trained(tmp_path / "orbax")  # a draft can be distilled from it
    assert target.config == CONFIG and "data" not in target.provenance["config"]
    jax.tree.map(np.testing.assert_array_equal, target.params, random_params(CONFIG))
    assert JsonTokenizer(target.folder / "tokenizer.json", EOS).vocab_size <= CONFIG.vocab_size
    assert "choose another folder" in refuse(
        "export", f"--checkpoint={folder}", f"--output={tmp_path / 'orbax'}"
    )
    assert "was converted from a public checkpoint" in refuse(
        "export", f"--run={tmp_path / 'orbax'}", f"--output={tmp_path / 'back'}"
    )
    (tmp_path / "orbax" / "run.json").unlink()
    assert "an interrupted conversion" in refuse(
        "export", f"--checkpoint={folder}", f"--output={tmp_path / 'orbax'}"
    )


def test_problems_of_each_category_are_the_first_ones():
    problems = [Problem(id=str(n), category="abab"[n], prompt="x") for n in range(4)]
    assert [one.id for one in first_of_each(problems, 1)] == ["0", "1"]
    assert first_of_each(problems, None) == problems


def test_mesh_reads_kv_heads_from_the_folder(tmp_path):
    content = CONFIGS["meta-llama/Llama-3.1-8B"]
    (tmp_path / "config.json").write_text(json.dumps(dict(content)))
    assert experiment.read_kv_heads(PublicNames(target=str(tmp_path))) == 8
    assert experiment.read_kv_heads(PublicNames(target=str(tmp_path / "none"))) is None
    assert experiment.read_kv_heads(None) is None

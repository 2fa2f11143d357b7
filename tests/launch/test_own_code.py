"""Drafters and rules from the user's own files, named by --config.drafter and --config.rule."""

import json
import re

import pytest

from launch.lib import experiment
from launch.lib.config import load_config
from launch.lib.fields import ExperimentConfig, own_with_digest
from support.refusals import refusal
from support.run_script import TINY_PAIR, succeed

CODE = """
from __future__ import annotations

import dataclasses

import jax.numpy as jnp

from specsamp import Draft, Drafter, TokenRule


@dataclasses.dataclass(frozen=True)
class Repeats(Drafter):
    K: int = 3
    target: object = None

    def propose(self, weights, state, prefix, cache, sample):
        last_B1 = jnp.take_along_axis(prefix.tokens_BS, prefix.lengths_B[:, None] - 1, axis=1)
        draft = Draft(
            tokens_BK=jnp.repeat(last_B1, self.K, axis=1),
            num_drafted_B=jnp.full_like(prefix.lengths_B, self.K),
        )
        return draft, state, cache


class Mine(TokenRule):
    pass
"""
CONFIG = "configs/random_pair.py:tiny"


@pytest.fixture
def own(tmp_path):
    (tmp_path / "mine.py").write_text(CODE)
    return tmp_path / "mine.py"


def config(**fields):
    made = load_config(CONFIG)
    made.update(fields)
    return ExperimentConfig.from_config_dict(made)


@pytest.mark.slow
def test_drafter_and_rule_files_are_benchmarked(own, tmp_path):
    output = tmp_path / "result.json"
    flags = (
        f"--config.drafter={own}:Repeats(K)",
        f"--config.rule={own}:Mine()",
        f"--output={output}",
        "--plain",
    )
    flags += ("--config.draft_length=2", "--config.repeats=1", "--config.max_new_tokens=4")
    done = succeed("benchmark", *TINY_PAIR, *flags)
    assert "Repeats K = 2, Mine" in done.stdout + done.stderr
    document = json.loads(output.read_text())
    assert document["command"].startswith("python launch/benchmark.py --config=")
    assert document["identity"]["random_weights"]
    assert document["cells"][0]["key"]["drafter"].startswith(f"{own}:Repeats(K)")


def test_expressions_use_models_and_make_equal_drafters(own):
    made = config(drafter=f"{own}:Repeats(K, target)")
    built = experiment.build(made)
    assert built.method.drafter.target == built.pair.target
    assert built.method.drafter == experiment.build(made).method.drafter


def test_changed_files_have_another_name_in_results(own, tmp_path):
    (tmp_path / "texts.txt").write_text("a")
    cases = [dict(drafter=f"{own}:Repeats(K)"), dict(rule=f"{own}:Mine()")]
    cases.append(dict(drafter="ngram", corpus=str(tmp_path / "texts.txt")))

    def names():
        made = [config(**fields) for fields in cases]
        return {(one.drafter_name, own_with_digest(one.rule)) for one in made}

    before = names()
    assert names() == before
    for path in tmp_path.glob("*.*"):
        path.write_text(f"{path.read_text()}\n")
    assert not names() & before


@pytest.mark.parametrize(
    "fields, message",
    [
        ({"drafter": "none.py:X()"}, "drafter=none.py:X(): no file 'none.py'"),
        ({"drafter": "{own}:Repeat(K)"}, "NameError: name 'Repeat' is not defined"),
        ({"drafter": "{own}:K"}, "is of type int: it must be a Drafter"),
        (
            {"drafter": "{own}:Repeats(7)"},
            "drafts K = 7 tokens, and --config.draft_length is 5: set it to 7",
        ),
        ({"rule": "{own}:Repeats()"}, "is of type Repeats: it must be a Rule"),
        ({"drafter": "mine"}, "drafter must be one of"),
    ],
)
def test_unfitting_code_is_refused_in_one_line(own, fields, message):
    fields = {name: value.format(own=own) for name, value in fields.items()}
    with refusal(re.escape(message)):
        experiment.build(config(draft_length=5, **fields))

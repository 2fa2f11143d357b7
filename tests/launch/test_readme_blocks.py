"""Every block of code in a README runs or, where it would take a network, a cloud or long, is named here with the reason.

Commands that are not run are parsed: their flags, and the fields of their configurations.
"""

import importlib
import re
import shlex
import sys

import jax
import pytest

from specsamp.decoding.pair import Pair
from specsamp.models.config import tiny
from specsamp.models.transformer import TransformerLM
from support.run_script import ROOT, call

PAGES = sorted(
    path
    for folder in ("", "launch", "launch/tpu", "notebooks", "notebooks/results", "tests")
    for path in (ROOT / folder).glob("README.md")
)
# What a block begins with, and what is written smaller in it; or why it is not run.
PYTHON = {
    "from specsamp import BlockRule": {"max_new_tokens=128": "max_new_tokens=8", "num_samples=4": "num_samples=2"},
    "from specsamp import Confidence": {
        'load_pair("python")': "pair",
        '["def read_file(path):", "class Node:"]': "[[1, 2], [3]]",
        "calibrate(pair, prompts, lengths=(0, 1, 2, 4)": "calibrate(pair, prompts, 4, lengths=(0, 2), repeats=1",
        "generate(pair, prompts,": "generate(pair, prompts, 4,",
    },
    "from specsamp import ChoosingDrafter": {
        'load_pair("python"), 4': "pair, 2",
        '["def read_file(path):"],': "[[1, 2]], 4,",
    },
    "from specsamp import EARS": {
        'load_pair("python"), ["def read_file(path):", "class Node:"]': "pair, [[1, 2], [3]]",
        "generate(pair, prompts,": "generate(pair, prompts, 4,",
    },
    "import dataclasses": "tests/decoding/test_generate.py runs it, and looks at what it gives",
    "from specsamp.mesh.layout": {
        "(1, 16)": "(1, 8)",
        "(1, 64, draft_model_parallelism=16)": "(1, 8, draft_model_parallelism=4)",
        "draft_model_parallelism=16)": "draft_model_parallelism=4)",
    },
    "from specsamp.checkpoints.public_pair": "downloads two models",
}
NETWORK, CLOUD = "installs or downloads", "orders or uses a slice; test_tpu_scripts.py runs it on a stand-in"
LONG = "takes minutes or hours"
# What a command begins with, and why it is not run as it is. A command that is not named here is.
COMMANDS = {
    "bash launch/demo.sh": NETWORK,
    "bash launch/test.sh": "runs these tests",
    "pip install": NETWORK,
    "jupytext": "test_notebooks.py runs the notebooks",
    "launch/check_head.py --config=configs/hf.py:meta": NETWORK,
    "launch/demo.py --config=configs/hf.py": NETWORK,
    "launch/demo.py --config.draft_length=4 '--config.adaptive": "compiles four widths; test_adaptive.py compiles smaller ones",
    "launch/demo.py --config=configs/trained_pair.py:runs": "decodes with what a command before trained",
    "launch/demo.py --config=configs/random_pair.py:tiny": "test_launch.py runs it with fewer tokens",
    "launch/benchmark.py": LONG + "; test_launch.py measures fewer tokens",
    "launch/sweep.py": LONG,
    "launch/evaluate.py": LONG,
    "launch/audit.py": LONG,
    "launch/train.py": LONG + "; test_train.py trains smaller ones",
    "launch/export_pair.py": "exports what a command before trained",
    "launch/export_head.py": "exports what a command before trained",
    "launch/plan.py --measured=runs": "reads what a command before measured",
    "launch/plan.py --acceptance=0.8 --compile_report=runs": "reads what a command before compiled",
    "launch/compile_report.py": LONG + "; test_compile.py compiles smaller ones",
    "launch/calibrate.py": LONG,
    "launch/serve.py": "serves until it is interrupted; test_serve.py starts it, and stops it",
    "curl": "asks that server; test_endpoint.py asks one",
    "launch/studies/": LONG,
    "launch/tpu/": CLOUD,
    "gcloud": CLOUD,
    "export": CLOUD,
    "ssh-add": CLOUD,
}


def blocks(language):
    found = []
    for page in PAGES:
        for indent, code in re.findall(
            rf"^( *)```{language}\n(.*?)^ *```$", page.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL
        ):
            found.append((page, re.sub(rf"^{indent}", "", code, flags=re.MULTILINE)))
    return found


def commands():
    """Lines of the shell without comments, without variables before them, and without the folder of the programs."""
    lines = [(page, line) for page, code in blocks("bash") for line in code.replace("\\\n", " ").splitlines()]
    words = [(page, shlex.split(line, comments=True)) for page, line in lines]
    found = []
    for page, line in words:
        while line and re.match(r"[A-Z_]+=", line[0]):
            line = line[1:]
        if line:
            program = line[0].removeprefix(".venv/bin/")
            found.append((page, line[1:] if re.fullmatch(r"python3?", program) else [program, *line[1:]]))
    return found


def entry_of(table, text):
    """The longest beginning that a table has of a text."""
    return max((start for start in table if text.startswith(start)), key=len, default=None)


def name_of(case):
    return case[0].parent.name + ": " + (case[1] if isinstance(case[1], str) else shlex.join(case[1]))[:60]


@pytest.mark.slow
@pytest.mark.parametrize("page, code", blocks("python"), ids=[name_of(one) for one in blocks("python")])
def test_a_block_of_python_runs(page, code):
    start = entry_of(PYTHON, code)
    if isinstance(PYTHON.get(start), str):
        return
    for larger, smaller in PYTHON.get(start, {}).items():
        assert larger in code, (page, larger)
        code = code.replace(larger, smaller)
    exec(code, {"pair": small_pair()})


def small_pair():
    """A pair over eight devices, for blocks that begin with a pair."""
    model = TransformerLM(tiny(num_layers=1, num_heads=8, num_kv_heads=8, vocab_size=64))
    params = jax.tree.map(lambda x: jax.numpy.zeros(x.shape, x.dtype), jax.eval_shape(model.init, jax.random.key(0)))
    return Pair(target=model, target_params=params, draft=model, draft_params=params)


@pytest.mark.parametrize("page, command", commands(), ids=[name_of(one) for one in commands()])
def test_a_command_runs_or_is_parsed(page, command, monkeypatch):
    if entry_of(COMMANDS, shlex.join(command)) is not None:
        parse(command, monkeypatch)
        return
    assert command[0].startswith("launch/"), f"{page}: name {command[0]} above, with the reason why it cannot run here"
    done = call(command[0].removeprefix("launch/").removesuffix(".py"), *command[1:])
    assert done.returncode == 0, done.stderr


def parse(command, monkeypatch):
    """Parses a command of launch, also one that a script of launch/tpu runs on a slice."""
    here = next((i for i, word in enumerate(command) if re.fullmatch(r"launch/[\w/]+\.py", word)), None)
    if here is None:
        return
    entry = importlib.import_module("launch.lib.entry")

    def only_parse(main, config=None):
        entry._parse(config, sys.argv)
        sys.exit(0)

    monkeypatch.setattr(entry, "run", only_parse)
    done = call(command[here].removeprefix("launch/").removesuffix(".py"), *command[here + 1 :])
    assert done.returncode == 0, done.stderr


def test_no_reason_is_left_over():
    """What is named above stands in a README."""
    assert {entry_of(PYTHON, code) for _, code in blocks("python")} - {None} == set(PYTHON)
    assert {entry_of(COMMANDS, shlex.join(command)) for _, command in commands()} == {None, *COMMANDS}

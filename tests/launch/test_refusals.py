"""Command lines that commands refuse: one line that names the fault, exit status 2, and no traceback."""

import importlib
import shlex

import pytest

from support import extras
from support.run_script import call

TINY = "--config=configs/random_pair.py:tiny"
CALLS = "--target_ms=14.1 --draft_ms=1.8"
CHINCHILLA = "--config=configs/chinchilla.py --chip=v4"
GRID = "--measured=notebooks/results/python_pair_grid.json --temperature=0.8"
PYTHON = "evaluate --task=python --problems=6 --samples=2 --rows=4 --blocks=2"

BEFORE_A_PAIR_IS_READ = [
    # What all commands share.
    (f"demo {TINY} --config.draft_lenght=1", "has no field 'draft_lenght'; did you mean draft_length"),
    ("demo --config.target.width=7", "has no field 'target.width'; choose one of adaptive.acceptance, "),
    (f"demo {TINY} --config.sampling=1", "--config.sampling is a group of fields: set one of sampling.min_p"),
    (f"demo {TINY} --config.draft_length=many", "--config.draft_length must be an integer >= 0"),
    ("demo --config=configs/trained.py", "no file 'configs/trained.py'; did you mean configs/trained_pair.py"),
    ("demo --config=", "no file ''; choose one of configs/chinchilla.py"),
    ("demo --config=README.md", "README.md is no Python file"),
    ("demo --config=configs/random_pair.py:huge", "no size 'huge' in configs/random_pair.py"),
    ("demo --config=configs/python_pair.py", "--config has no field rule, drafter"),
    (f"demo {TINY} --nothing", "Unknown command line flag 'nothing'"),
    (f"demo {TINY} one", "unexpected argument 'one'"),
    (f"demo {TINY} --config.beams=0", "--config.beams must be an integer >= 1 and below 2147483648; got 0"),
    (f"demo {TINY} --config.exit_layer=0", "--config.exit_layer must be an integer >= 1 and below 2147483648; got 0"),
    (f"demo {TINY} --config.draft_temperature=0.5", "--config.draft_temperature=0.5 has no effect here"),
    (f"demo {TINY} --config.synthetic_acceptance=0.7", "--config.synthetic_acceptance=0.7 has no effect here"),
    (f"demo {TINY} --config.mesh.model=3", "3 "),
    (f"demo {TINY} --config.mesh.data=0", "0"),
    # benchmark
    (f"benchmark {TINY} --grid=draft_lenght=1", "'draft_lenght' makes another pair"),
    (f"benchmark {TINY} --config.synthetic_acceptance=1.5", "synthetic_acceptance must be a number from 0 to 1"),
    (f"benchmark {TINY} --config.max_new_tokens=5000", "need 5008 positions, but the target has"),
    (f"benchmark {TINY} --config.attention=kernel", "attention 'kernel' is for TPUs, and this is a cpu: choose plain"),
    (f"benchmark {TINY} --config.attention=flash", "attention must be one of plain, kernel; got 'flash'"),
    (f"benchmark {TINY} --config.draft_length=4000", "draft_length 4000 must be below the target's"),
    (f"benchmark {TINY} --config.seed=4294967296", "seed must be an integer >= 0 and below 4294967296"),
    (f"benchmark {TINY} --sweep", "configs/random_pair.py:tiny has no GRIDS"),
    (f"benchmark {TINY} --trace=README.md", "--trace=README.md/profile cannot be written"),
    (f"benchmark {TINY} --trace=runs/x --grid=draft_length=1,2", "--trace is of one cell, and 2 are asked for"),
    ("benchmark --gather=cells.json --output=other.json", "--output has no effect: --gather"),
    # chat, compile_report, evaluate, export
    ("compile_report --topology=v9:2x2", "no TPU topology 'v9:2x2': give a chip (v3, v4, v5e, v5p, v6e, v7x)"),
    (
        "compile_report --config.drafter=early_exit --config.exit_layer=80",
        "exit_layer must be an integer >= 1 and below 80; got 80",
    ),
    ("compile_report --config.drafter=ngram", "--config.drafter is ngram"),
    ("compile_report --acceptance=0.5 --acceptance=1.5", "--acceptance must be a number from 0 to 1; got 1.5"),
    ("compile_report --output=/proc/none/report.json", "--output=/proc/none/report.json cannot be written"),
    (f"{PYTHON} --methods=slow", "got 'slow'"),
    (f"{PYTHON} --methods=plain,ears:0.3 --require_exact", "exactness is required, but EARS(beta=0.3"),
    (f"{PYTHON} --methods=token/eagle", "got 'eagle'"),
    (f"{PYTHON} --methods=token/early_exit", "--config.exit_layer must be an integer >= 1"),
    (f"{PYTHON} --methods=token/model/0", "name a number of at least 1"),
    (f"{PYTHON} --config.draft_length=machine", "with K = machine: name a number of at least 1"),
    ("chat --config.draft_length=machine --config.drafter=none", "draft_length=machine takes a drafter"),
    (f"{PYTHON} --methods=", "--methods has ''"),
    (f"{PYTHON} --methods=token/none", "drafts nothing: write plain"),
    (f"{PYTHON} --methods=token,token", "names token, model, K = 3 twice"),
    (f"{PYTHON} --config=configs/hf.py:llama-8b-eagle3", "python is completed and not answered"),
    (f"{PYTHON} --config.rule=block", "--config.rule=block has no effect: name it in --methods"),
    (f"{PYTHON} {TINY}", "a pair without a tokenizer"),
    ("evaluate --task=humaneval --source=/nowhere.jsonl", "/nowhere.jsonl"),
    ("export --pair=python --output=", "--output is empty: give a value, or leave the flag out"),
    (f"demo {TINY} --passes=99999999999999999999", "--passes must be a number below 2147483648; got 9999"),
    (f"benchmark {TINY} --chip_hour=nan", "--chip_hour must be a number below 2147483648; got nan"),
    ("study figures --output=runs/x.json", "--output has no effect: nothing is measured"),
    (f"demo {TINY} --config.repeats=3", "--config.repeats=3 has no effect: give --passes"),
    ("serve --config.sampling.temperature=0.5", "--config.sampling.temperature=0.5 has no effect: requests bring it"),
    ("serve --config.batch=2", "--config.batch=2 has no effect: requests bring it, and --rows"),
    ("plan --chip=v4 --devices=16 --acceptance=0.8 --config.batch=2", "--config.batch=2 has no effect"),
    (f"demo {TINY} --config.drafter=ngram --config.exit_layer=99", "--config.exit_layer must be an integer >= 1"),
    (f"demo {TINY} --config.adaptive.usual=2", "--config.adaptive.usual has no effect without adaptive.lengths"),
    (f"demo {TINY} --config.mesh.draft_model_parallelism=2", "draft_model_parallelism 2 does not divide the 1"),
    (f"doctor {TINY} --config.mesh.data=0", "--config.mesh.data must be an integer >= 1"),
    ("train --workdir=none --config.data.length=0", "--config.data.length must be an integer >= 1"),
    ("train --workdir=none --config.data.pattern=/", "data.pattern must be of file names, such as '*.py'; got '/'"),
    ("export --checkpoint=none --model=3 --output=/tmp/none", "--model=3 does not divide the 8 devices"),
    # plan
    (f"plan --acceptance=0.8 {CALLS} --chip_hour=3", "--chip_hour needs --devices: how many chips take these"),
    (f"plan --acceptance=1.5 {CALLS}", "must be a number from 0 to 1; got 1.5"),
    (f"plan --histogram=3,x {CALLS}", "--histogram=3,x: invalid literal"),
    (f"plan --acceptance=0.8 {CALLS} --chip=v4", "give costs in one way"),
    ("plan --acceptance=0.8 --target_ms=nan --draft_ms=1", "--target_ms must be a number below 2147483648; got nan"),
    ("plan --acceptance=0.8 --measured=README.md", "README.md holds no cells"),
    (f"plan {GRID} --context=2048", "--context has no effect: it goes with --chip or --compile_report"),
    (f"plan --acceptance=0.8 {CALLS} --config=configs/chinchilla.py", "--config has no effect: it goes with --chip"),
    (f"plan --acceptance=0.8 {CHINCHILLA} --config.drafter=ngram", "--config.drafter is ngram"),
    (f"plan --acceptance=0.8 {CHINCHILLA} --devices=4", "--devices=4 cannot hold the models: weights of 148"),
    (f"plan {GRID} --drafter=lookup", "python_pair_grid.json has block, model, T = 0.8"),
    # study
    ("study", "--list"),
    ("study backtets", "did you mean backtest?"),
    ("study backtest --outptu=x", "outptu"),
    ("study backtest --output=launch", "is a folder"),
    ("study speedup --config.batchh=1", "did you mean batch"),
    (f"study speedup {TINY} --config.drafter=none", "--config.drafter: without a drafter"),
    (f"study agreement {TINY} --config.drafter=none", "without a drafter there is nothing to forecast"),
    ("study adaptive --drafters=none", "--drafters must be one of"),
    ("study lossy --rules=ears:1", "--rules=ears:1 must begin with token"),
    ("study serving --problems=/nowhere.jsonl", "/nowhere.jsonl"),
    ("study compile", "--grid: name one of slices, scoring"),
    (
        "study compile --grid=scoring --change=token=2",
        "--change=token=2: cells of scoring have no 'token'; did you mean",
    ),
    ("study compile --grid=training --change=target=gpt", "--change=target=gpt: its shape is not known here"),
    ("study compile --grid=scoring --change=tokens=0", "--change=tokens=0: tokens must be a positive integer; got '0'"),
]
SERVE = [
    ("serve --port=0 --warps=top_p,top_q", "--warps must be one of penalties, top_k, top_p, min_p; got 'top_q'"),
    (f"serve --port=0 {TINY}", "a pair without a tokenizer"),
    ("serve --port=0 --require_exact --config.rule=ears:0.3", "exactness is required, but EARS(beta=0.3"),
    ("serve --port=0 --host=no.such.host.invalid", "--host=no.such.host.invalid --port=0: "),
    ("serve --port=0 --host=192.0.2.1", "choose another address"),
    ("serve --port=0 --key_file=README.md", "--key_file=README.md must hold a key of printable ASCII without spaces"),
    ("serve --port=0 --key_file=/dev/zero", "/dev/zero is no regular file"),
    ("serve --port=0 --timeout=inf", "--timeout must be a number below 2147483648; got inf"),
]
BEFORE_A_PAIR_IS_READ += [pytest.param(*case, marks=extras.needs("starlette", "uvicorn", "pydantic")) for case in SERVE]
AFTER_A_PAIR_IS_READ = [
    (f"{PYTHON} --config.max_new_tokens=2040", "all 6 problems are too long for 2048 positions"),
    ("study adaptive --texts=17", "--texts=17 needs a quarter more prompts, and there are 20"),
    (f"study agreement {TINY}", "two halves of prompts need four, this pair has 0"),
]


def refused(command, message):
    done = call(*shlex.split(command))
    assert done.returncode == 2 and message in done.stderr and done.stderr.count("\n") == 1, done.stderr


@pytest.mark.parametrize("command, message", BEFORE_A_PAIR_IS_READ)
def test_what_is_refused_before_a_pair_is_read(monkeypatch, command, message):
    def never(*_, **__):
        raise AssertionError("a pair was read")

    for name in ("load_pair", "read_pair", "bare_pair"):
        monkeypatch.setattr(importlib.import_module("launch.lib.experiment"), name, never)
    refused(command, message)


@pytest.mark.parametrize("command, message", AFTER_A_PAIR_IS_READ)
def test_what_is_refused_after_a_pair_was_read(command, message):
    refused(command, message)

"""Every block of Python in a README runs, and every command of launch is parsed with its fields."""

import importlib
import re
import shlex

import jax
import pytest

from specsamp import Pair, TransformerLM
from specsamp.models.config import tiny
from support.run_script import ROOT, succeed
from support.weights import shapes_of

PAGES = sorted(
    path
    for folder in ("", "launch", "launch/tpu", "notebooks", "notebooks/results", "tests")
    for path in (ROOT / folder).glob("README.md")
)
SCRIPT = re.compile(r"(?:.*/)?launch/([a-z_/]+)\.py")
PROMPTS = '["def read_file(path):", "class Node:"]'
# The first words of a block of Python, and the parts that become smaller before it runs.
SMALLER = {
    "from specsamp import BlockRule": {"max_new_tokens=128": "max_new_tokens=8"},
    "from specsamp import Confidence": {
        'load_pair("python")': "pair",
        PROMPTS: "[[1, 2], [3]]",
        "(pair, prompts, lengths=(0, 1, 2, 4)": "(pair, prompts, 4, lengths=(0, 2), repeats=1",
        "generate(pair, prompts,": "generate(pair, prompts, 4,",
    },
    "from specsamp import ChoosingDrafter": {
        'load_pair("python")': "pair",
        '["def area("], 64': "[[1, 2]], 4",
    },
    "from specsamp import Growth": {
        'load_pair("python")': "pair",
        '["def area("],': "[[1, 2]], 4,",
    },
    "from specsamp import EARS": {
        f'load_pair("python"), {PROMPTS}': "pair, [[1, 2], [3]]",
        "generate(pair, prompts,": "generate(pair, prompts, 4,",
    },
    "from specsamp.mesh.layout": {
        "(1, 16)": "(1, 8)",
        "(1, 64, draft_model_parallelism=16)": "(1, 8, draft_model_parallelism=4)",
        "draft_model_parallelism=16)": "draft_model_parallelism=4)",
    },
}
NOT_RUN = {
    "import dataclasses": "tests/decoding/test_generate.py runs it",
    "from specsamp.checkpoints.public_pair": "downloads two models",
}


def blocks(language):
    found = []
    for page in PAGES:
        for indent, code in re.findall(
            rf"^( *)```{language}\n(.*?)^ *```$", page.read_text(), re.MULTILINE | re.DOTALL
        ):
            found.append((page, re.sub(rf"^{indent}", "", code, flags=re.MULTILINE)))
    return found


def commands():
    """Returns commands of launch in shell blocks and text, also behind a script of launch/tpu."""
    lines = [
        (page, line)
        for page, code in blocks("bash")
        for line in code.replace("\\\n", " ").splitlines()
    ]
    inline = [
        (page, re.findall(r"`([^`\n]*python launch/[^`\n]*)`", page.read_text())) for page in PAGES
    ]
    lines += [(page, line) for page, found in inline for line in dict.fromkeys(found)]
    words = [(page, shlex.split(line, comments=True)) for page, line in lines]
    starts = [
        next((i for i, word in enumerate(line) if SCRIPT.fullmatch(word)), None)
        for _, line in words
    ]
    return [(page, line[start:]) for (page, line), start in zip(words, starts) if start is not None]


def name_of(case):
    return (
        case[0].parent.name
        + ": "
        + (case[1] if isinstance(case[1], str) else shlex.join(case[1]))[:60]
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    "page, code", blocks("python"), ids=[name_of(one) for one in blocks("python")]
)
def test_a_block_of_python_runs(page, code):
    if code.startswith(tuple(NOT_RUN)):
        return
    start = next((start for start in SMALLER if code.startswith(start)), None)
    for larger, smaller in SMALLER.get(start, {}).items():
        assert larger in code, (page, larger)
        code = code.replace(larger, smaller)
    exec(code, {"pair": small_pair()})


def small_pair():
    """Returns a pair that eight devices can share, for blocks that begin with a pair."""
    model = TransformerLM(tiny(num_layers=1, num_heads=8, num_kv_heads=8, vocab_size=64))
    params = jax.tree.map(lambda x: jax.numpy.zeros(x.shape, x.dtype), shapes_of(model))
    return Pair(target=model, target_params=params, draft=model, draft_params=params)


@pytest.mark.parametrize("page, command", commands(), ids=[name_of(one) for one in commands()])
def test_a_command_is_parsed(page, command, monkeypatch):
    entry = importlib.import_module("launch.lib.entry")

    def only_parse(main, config, arguments):
        entry.parse_arguments(config, [word for word in arguments if word not in entry.HELP])
        return 0

    monkeypatch.setattr(entry, "_status", only_parse)
    succeed(SCRIPT.fullmatch(command[0])[1], *command[1:])

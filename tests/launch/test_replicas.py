"""The replicas of a command together write the results of one run."""

import json
import re

import pytest

from support.run_script import ROOT, call, read_cells, refuse, save_tiny_pair, succeed

PROMPTS = [
    {"prompt": "def f(x):"},
    {"prompt": "x"},
    {"prompt": "return"},
    {"id": 8, "prompt": "def g(y):", "messages": None},
]


def texts(path):
    lines = map(json.loads, path.read_text().splitlines()[1:])
    return {
        (line["prompt_id"], line["sample_index"]): (line["text"], line["tokens"]) for line in lines
    }


@pytest.fixture
def asked(tmp_path):
    """Writes a small pair and a file of prompts, and returns their flags."""
    save_tiny_pair(tmp_path / "pair", ["def f(x):"])
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps(one) + "\n" for one in PROMPTS), encoding="utf-8")
    return [
        f"--prompts={prompts}",
        f"--config=configs/trained_pair.py:{tmp_path / 'pair'}",
        "--config.max_new_tokens=4",
        "--rows=1",
    ]


@pytest.mark.slow
def test_pods_write_the_texts_of_one_run(tmp_path, asked):
    """Pods have the indices of an Indexed Job; a run of all prompts decodes the parts of pods that
    never start.
    """
    page = (ROOT / "launch" / "tpu" / "README.md").read_text()
    (line,) = re.findall(r"- -c\n +- (python .*)", page)
    assert line.split()[0] == "python" and line.endswith(" --replica=$JOB_COMPLETION_INDEX/4")
    output = tmp_path / "texts.jsonl"
    succeed("generate", *asked, f"--output={output}", "--replica=0/4")
    part = texts(tmp_path / "texts.replica-0-of-4.jsonl")
    assert list(part) == [(0, 0), (8, 0)] and not output.exists()

    whole = succeed("generate", *asked, f"--output={output}")
    assert "4 texts, 2 of them known before; 16 tokens" in whole.stdout, whole.stderr
    one = tmp_path / "one" / "texts.jsonl"
    assert call("generate", *asked, f"--output={one}").returncode == 0
    assert texts(output) == texts(one) and len(texts(one)) == 4
    assert texts(output).items() >= part.items()
    later = call("generate", *asked, f"--output={output}", "--replica=1/4")
    assert "1 texts, 1 of them known before" in later.stdout, later.stderr
    assert "seed was 0, is 1" in refuse("generate", *asked, f"--output={output}", "--config.seed=1")


@pytest.mark.parametrize(
    "line, message",
    [
        ('{"prompt": ""}', 'prompt 2: write {"prompt": TEXT} or {"messages": [...]}; got'),
        ('{"messages": "Hi"}', 'prompt 2: write {"prompt": TEXT} or {"messages": [...]}; got'),
        ('{"id": 0, "prompt": "x"}', "prompt 2: id 0 is that of an earlier prompt"),
        ('{"id": "a", "prompt": "x"}', "prompt 2: id must be an integer >= 0"),
        ('{"prompt": "x", "seed": 1}', "prompt 2: a line has id and prompt; got also seed"),
        ('{"prompt": "x", "messages": [{}]}', "prompt 2: it has a prompt and messages"),
        ('"x"', "line 2: must be a JSON object"),
    ],
)
def test_a_wrong_line_of_prompts_is_refused(tmp_path, line, message):
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": "x"}\n' + line + "\n")
    error = refuse("generate", f"--prompts={path}", f"--output={tmp_path / 'texts.jsonl'}")
    assert message in error and error.count("\n") == 1


@pytest.mark.slow
def test_replicas_evaluate_with_scores_of_one_run(tmp_path):
    """A run of all problems decodes the completions that a killed replica's last block lacks."""
    asked = [
        "--task=python",
        "--problems=5",
        "--rows=3",
        "--blocks=2",
        "--config.max_new_tokens=6",
        "--methods=plain",
    ]
    for output in (tmp_path / "parts.json", tmp_path / "one.json"):
        for index in (0, 1) if output.stem == "parts" else ():
            succeed("evaluate", *asked, f"--output={output}", f"--replica={index}/2")
            part = json.loads((tmp_path / f"parts.replica-{index}-of-2.json").read_text())[
                "evaluation"
            ]
            assert part[0]["problems"] == 3 - index and part[0]["ms_per_token"] > 0
        for lost in output.parent.glob("parts.json.texts/plain.2_of_2.*.replica-1-of-2.jsonl"):
            lost.write_text(
                "".join(lost.read_text().splitlines(keepends=True)[:-1]), encoding="utf-8"
            )
        succeed("evaluate", *asked, f"--output={output}")
    parts, one = (read_cells(tmp_path / f"{name}.json") for name in ("parts", "one"))
    assert [cell["key"] for cell in parts] == [cell["key"] for cell in one] and len(one) == 2
    for of_parts, whole in zip(parts, one):
        for name in ("problems", "finish", "counts"):
            assert of_parts["result"][name] == whole["result"][name]
        for score, other in zip(
            of_parts["result"]["scores"], whole["result"]["scores"], strict=True
        ):
            assert score == pytest.approx(other, abs=1e-5)
    assert "rounds" in json.dumps(one)


@pytest.mark.slow
def test_cells_of_replicas_are_taken_over(tmp_path):
    output = tmp_path / "cells.json"
    grid = ["--config=configs/random_pair.py:tiny", "--grid=draft_length=0,1,2"]
    ones = ("repeats", "max_new_tokens", "prompt_length", "target.num_layers")
    grid += [f"--config.{name}=1" for name in ones]
    succeed("benchmark", *grid, f"--output={output}", "--replica=1/2", "--plain")
    (cell,) = read_cells(tmp_path / "cells.replica-1-of-2.json")
    assert cell["key"]["draft_length"] == 1 and not output.exists()
    whole = succeed("benchmark", *grid, f"--output={output}", "--plain")
    assert "1 of 3 cells are in" in whole.stdout, whole.stderr
    cells = read_cells(output)
    assert [one["key"]["draft_length"] for one in cells] == [1, 0, 2] and cells[0] == cell
    assert "--replica=3/4 has none of the 3 cells" in refuse(
        "benchmark", *grid, f"--output={output}", "--replica=3/4"
    )

"""Commands with one or two tests: their files, output and exit statuses, and how they resume."""

import io
import json
import types

import pytest
from rich.console import Console

from launch import chat
from launch.lib import entry
from support.run_script import TINY_PAIR, call, read_cells, refuse, save_tiny_pair, succeed

TINY = [*TINY_PAIR, "--config.draft.positions=rotary", "--prompt_count=3"]
TINY += ["--checks=acceptance", "--detect=0.3", "--rows=16"]


@pytest.mark.slow
def test_audit_of_a_sound_pair_passes(tmp_path):
    output = tmp_path / "audit.json"
    done = succeed("audit", "--plain", *TINY, f"--output={output}")
    assert "1 of 1 checks passed" in done.stdout and "acceptance  passed" in done.stdout
    document = json.loads(output.read_text())
    assert document["passed"] and document["settings"]["detect"] == 0.3
    (check,) = document["checks"]
    assert check["numbers"]["accepted"] == check["numbers"]["verified"] > 0


def test_a_lossy_setting_of_the_configuration():
    done = call("audit", "--plain", *TINY, "--config.synthetic_acceptance=0.5")
    assert done.returncode == 1, done.stderr
    assert "1 of 1 checks failed: acceptance" in done.stdout


# benchmark --sweep


SWEPT = """
from configs import random_pair

GRIDS = [["draft_length=0"]]

def get_config():
    config = random_pair.get_config("tiny")
    config.repeats, config.max_new_tokens, config.prompt_length = 1, 1, 1
    return config
"""


@pytest.mark.slow
def test_a_sweep_is_measured_and_gathered(tmp_path):
    (swept := tmp_path / "swept.py").write_text(SWEPT)
    output = tmp_path / "sweep.json"
    succeed("benchmark", "--sweep", f"--config={swept}", f"--output={output}", "--plain")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["sweep.json", "swept.py"]
    document = result(output)
    assert [cell["key"]["draft_length"] for cell in document["cells"]] == [0]
    assert document["command"].startswith("python launch/benchmark.py --sweep --config=")
    assert document["identity"]["random_weights"]
    assert document["environment"].keys() >= {"date", "python", "jax", "device_kind", "cores"}
    gathered = call("benchmark", f"--gather={output}", f"--gather={output}", "--plain")
    assert (
        gathered.stdout.count("plain") >= 2 == gathered.stdout.count("ms per token over all rows")
    )


# evaluate


FLAGS = [
    "--task=python",
    "--problems=6",
    "--samples=2",
    "--rows=4",
    "--blocks=2",
    "--config.max_new_tokens=8",
]


def result(path):
    return json.loads(path.read_text())


@pytest.mark.slow
def test_methods_are_added_and_a_run_goes_on(tmp_path):
    """A second run adds the token rule and a control, and decodes nothing twice; completions of a
    killed block are kept.
    """
    output = tmp_path / "python.json"
    done = succeed("evaluate", *FLAGS, "--methods=plain", f"--output={output}", "--plain")
    plain = read_cells(output)
    assert [cell["key"]["block"] for cell in plain] == ["1 of 2", "2 of 2"]
    assert all(
        len(cell["result"]["scores"]) == 3 and cell["result"]["timed"]["completions"] == 6
        for cell in plain
    )
    (kept,) = (tmp_path / "python.json.texts").glob("plain.1_of_2.*.jsonl")
    lines = kept.read_text().splitlines()
    kept.write_text("\n".join([*lines[:4], ""]))
    output.write_text(json.dumps(result(output) | {"cells": plain[1:]}), encoding="utf-8")

    done = succeed(
        "evaluate", *FLAGS, "--methods=plain,token,always/model/2", f"--output={output}", "--plain"
    )
    again = [cell for cell in read_cells(output) if cell["key"] == plain[0]["key"]]
    assert again[0]["result"]["timed"] == {}
    assert again[0]["result"]["scores"] == plain[0]["result"]["scores"]
    rows = {row["name"]: row for row in result(output)["evaluation"]}
    assert list(rows) == ["plain", "token, model, K = 3", "always, model, K = 2"]
    always = rows["always, model, K = 2"]
    token = rows["token, model, K = 3"]
    assert not always["exact"] and token["exact"] and not rows["plain"]["differences"]
    assert always["differences"]["log_prob"]["high"] < 0 < token["differences"]["log_prob"]["high"]
    assert always["counts"]["rate"] == 1 and 0.3 < token["counts"]["rate"] < 1
    printed = " ".join(done.stdout.split())
    assert "fewer than 20 problems" in printed
    assert "task.problems was 6, is 5" in refuse(
        "evaluate", *FLAGS[:1], "--problems=5", *FLAGS[2:], f"--output={output}"
    )


# chat


def test_turns_of_a_pair_without_a_template(tmp_path, monkeypatch):
    save_tiny_pair(tmp_path, ["def f(x):"])
    typed = b"def f(x):\n\n/undo\ndef f(x):\nreturn x\n/new\n\xff" + b"x" * 300 + b"\n/quit\n"
    stdin = io.TextIOWrapper(io.BytesIO(typed), "utf-8", "surrogateescape")  # as in the locale C
    monkeypatch.setattr("sys.stdin", stdin)
    done = succeed(
        "chat",
        f"--config=configs/trained_pair.py:{tmp_path}",
        "--config.max_new_tokens=6",
        "--max_tokens=60",
    )
    assert "no chat template: what you type is completed" in done.stdout
    first, again, longer = [line for line in done.stdout.splitlines() if "a round" in line]
    assert done.stdout.index("compiled in") < done.stdout.index("a second"), "no turn compiles"
    assert all("a second" in line for line in (first, again, longer))
    read = [int(line.rpartition("read ")[2].split()[0]) for line in (first, again, longer)]
    assert first.startswith("6 tokens") and again.startswith("6 tokens")
    assert read[1] == 2, "the same turn again: only the pending tokens are read"
    assert read[2] < read[0] + 6, "what was said and answered is not read again"
    assert "exceed its max_tokens = 60: lower max_new_tokens, or make" in done.stdout


def test_messages_of_a_conversation():
    said = [
        chat.Turn(asked=a, answered=b, tokens=())
        for a, b in (("Hi", "Hello."), ("Why?", "Because."))
    ]
    talk = types.SimpleNamespace(has_template=True, system="Be brief.", turns=said)
    messages = chat.Talk.prompt(talk, "And then?")
    assert [one["role"] for one in messages] == ["system", *("user", "assistant") * 2, "user"]
    told = " ".join(one["content"] for one in messages)
    assert told == "Be brief. Hi Hello. Why? Because. And then?"
    # Without a template, a line begins with no beginning of text, behind no stop token.
    tokenizer = types.SimpleNamespace(encode=lambda text: [1, *text.encode()], eos_id=2)
    pair = types.SimpleNamespace(
        tokenizer=tokenizer, stop=(2, 3), target=types.SimpleNamespace(vocab_size=256)
    )
    for turns, read in (
        ([], [1, *b"c"]),
        ([chat.Turn(asked="a", answered="b", tokens=(1, *b"ab", 3))], [1, *b"ab\nc"]),
    ):
        talk = types.SimpleNamespace(
            has_template=False, turns=turns, experiment=types.SimpleNamespace(pair=pair)
        )
        assert chat.Talk.prompt(talk, "c") == read


def test_pieces_are_marked_by_their_writer():
    """Each piece has its own mark, and the text as a whole no style, also with a tokenizer that
    drops the first space of a text.
    """
    space = (ord(" "), None)
    tokenizer = types.SimpleNamespace(
        token_bytes=lambda token, before=None: b"" if (token, before) == space else bytes([token]),
        eos_id=None,
    )
    pair = types.SimpleNamespace(
        tokenizer=tokenizer, stop=[ord("!")], target=types.SimpleNamespace(vocab_size=256)
    )
    plain, coloured = (
        Console(file=io.StringIO(), force_terminal=True, no_color=one, width=80)
        for one in (True, False)
    )
    for console, expected in (
        (plain, " ab⟦c⟧⟦d⟧ef"),
        (coloured, "\x1b[32mb\x1b[0m\x1b[30;43mc\x1b[0m"),
    ):
        pieces = entry.Pieces(pair, list(b" Hi."), console)
        for text, flags in (
            (" abc", [True, True, True, False]),
            ("d", [False]),
            ("ef!", [True, True, False]),  # the name of a stop token is no text
        ):
            new = pieces.add(list(text.encode()), flags, text[-1] == "!")
            console.print(new, end="")
        assert expected in console.file.getvalue() and pieces.text == " abcdef"

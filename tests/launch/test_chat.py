"""The chat: turns stay in the caches, commands do what they say, and bad turns do not end it."""

import io
import types

from rich.console import Console

from launch import chat
from support.run_script import call, save_tiny_pair


def test_turns_of_a_pair_without_a_template(tmp_path, monkeypatch):
    save_tiny_pair(tmp_path, ["def f(x):"])
    monkeypatch.setattr(
        "sys.stdin", io.StringIO("def f(x):\n\n/undo\ndef f(x):\nreturn x\n/new\n" + "x" * 300 + "\n/quit\n")
    )
    done = call("chat", f"--config=configs/trained_pair.py:{tmp_path}", "--config.max_new_tokens=6", "--max_tokens=60")
    assert done.returncode == 0, done.stderr
    assert "no chat template: what you type is completed" in done.stdout
    first, again, longer = [line for line in done.stdout.splitlines() if "a round" in line]
    assert done.stdout.index("compiled in") < done.stdout.index("a second"), "no turn compiles"
    assert all("a second" in line for line in (first, again, longer))
    read = [int(line.rpartition("read ")[2].split()[0]) for line in (first, again, longer)]
    assert first.startswith("6 tokens") and again.startswith("6 tokens")
    assert read[1] == 2, "the same turn again: only the pending tokens are read"
    assert read[2] < read[0] + 6, "what was said and answered is not read again"
    assert "beyond the max_tokens = 60 that it was made for. /new begins anew" in done.stdout


def test_messages_of_a_conversation():
    said = [chat.Turn(asked=a, answered=b, tokens=()) for a, b in (("Hi", "Hello."), ("Why?", "Because."))]
    talk = types.SimpleNamespace(has_template=True, system="Be brief.", turns=said)
    messages = chat.Talk.prompt(talk, "And then?")
    assert [one["role"] for one in messages] == ["system", *("user", "assistant") * 2, "user"]
    assert [one["content"] for one in messages] == ["Be brief.", "Hi", "Hello.", "Why?", "Because.", "And then?"]


def test_pieces_are_marked_by_who_wrote_them():
    """Also with tokenizers that take the first space off a text."""
    out = io.StringIO()
    tokenizer = types.SimpleNamespace(decode=lambda tokens: bytes(tokens).decode().removeprefix(" "))
    pieces = chat.Pieces(tokenizer, Console(file=out, no_color=True, width=80))
    pieces.follow(list(b" Hi."))
    for text, flags in ((" abc", [True, True, True, False]), ("d", [False]), ("ef", [True, True])):
        pieces.show(types.SimpleNamespace(text=text, tokens=list(text.encode()), from_draft=flags))
    assert out.getvalue() == " ab⟦c⟧⟦d⟧ef" and pieces.text == " abcdef"

"""Behaviour that all commands share: wrong flags and configurations, errors, interrupts, and safe
output to a terminal.
"""

import contextlib
import importlib
import io
import re
import sys

import jax
import pytest

from support.refusals import refusal
from support.run_script import ROOT, only_shared_flags, refuse, succeed


@pytest.fixture
def entry():
    return importlib.import_module("launch.lib.entry")


def test_output_is_checked_before_the_work(entry, tmp_path, monkeypatch):
    entry.check_output(None)
    entry.check_output("/dev/null")
    entry.check_output(str(tmp_path / "new" / "result.json"))
    assert list((tmp_path / "new").iterdir()) == []
    (tmp_path / "file").write_text("")
    with refusal("--output=.*/new is a folder: name a file in it"):
        entry.check_output(str(tmp_path / "new"))
    with refusal("--output=.*/file/result.json cannot be written"):
        entry.check_output(f"{tmp_path}/file/result.json")
    with refusal("'ftpx://bucket/result.json'"):
        entry.check_output("ftpx://bucket/result.json")

    def full(path, content):
        if content:  # an empty probe fits on a full disk
            raise OSError(28, "No space left on device", str(path))

    monkeypatch.setattr(entry.storage, "write", full)
    with refusal("cannot be written: .*No space left on device"):
        entry.check_output(str(tmp_path / "result.json"))


def test_command_is_recorded_as_typed(entry, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["launch/x.py", "--prompt=a b"])
    assert entry.command() == "python launch/x.py '--prompt=a b'"


def test_configurations_are_found_from_any_folder(tmp_path, monkeypatch):
    """A file of the same name in the current folder takes precedence."""
    config_file = importlib.import_module("launch.lib.config")
    monkeypatch.chdir(tmp_path)
    assert config_file.load_file("configs/random_pair.py:tiny").SHAPES
    (tmp_path / "configs").mkdir()
    (tmp_path / "configs" / "random_pair.py").write_text("MINE = 1")
    assert config_file.load_file("configs/random_pair.py").MINE == 1


@pytest.mark.parametrize(
    "content, word, message",
    [
        ("x = 1", "", "has no attribute 'get_config'"),
        ("def get_config(:", "", "mine.py: SyntaxError: invalid syntax"),
        (
            "import nothing_there",
            "",
            "mine.py: ModuleNotFoundError: No module named 'nothing_there'",
        ),
        ("def get_config(): return {}['size']", "", "mine.py: KeyError: 'size'"),
        ("def get_config(): return {}", "", "returns dict, not a ConfigDict"),
        ("def get_config(): ...", ":word", "takes 0 positional arguments but 1 was given"),
    ],
)
def test_a_file_that_is_no_configuration_is_named(tmp_path, content, word, message):
    path = tmp_path / "mine.py"
    path.write_text(content)
    error = refuse("demo", f"--config={path}{word}")
    assert message in error and error.count("\n") == 1


def test_help_lists_flags_and_fields():
    done = succeed("train", "--config=configs/python_pair.py:tiny_target", "--help")
    assert not done.stderr, done.stderr
    for text in ("--workdir: ", "train.learning_rate = 0.003", "--config=FILE[:WORD]"):
        assert text in done.stdout


SCRIPTS = [
    str(path.relative_to(ROOT / "launch").with_suffix(""))
    for path in sorted([*ROOT.glob("launch/*.py"), *ROOT.glob("launch/studies/*.py")])
    # compare_transformers needs torch.
    if "entry.run(" in path.read_text(encoding="utf-8") and path.stem != "compare_transformers"
]


@pytest.mark.parametrize("script", SCRIPTS)
def test_every_command_explains_itself_in_sentences(script):
    done = succeed(script, "--help")
    assert done.stdout[0].isupper(), done.stderr
    helps = re.findall(r"^  --(\w+)(?:=<.*>)?: (.*)$", done.stdout, re.MULTILINE)
    assert {"plain", "traceback"} <= {name for name, _ in helps}
    for name, text in helps:
        sentence = text.partition(" Default: ")[0]
        assert sentence[0].isupper() and sentence.endswith(".") and len(sentence.split()) >= 3, (
            name,
            text,
        )


@pytest.fixture
def status_of(entry):
    """Returns a function that runs a command and returns its exit status and stderr."""

    def status_of(main, *arguments):
        errors = io.StringIO()
        with contextlib.redirect_stderr(errors), only_shared_flags():
            status = entry.status_of(main, None, ["launch/x.py", *arguments])
        return status, errors.getvalue()

    return status_of


@pytest.mark.parametrize(
    "error, status, message",
    [
        (ValueError("one\n  two"), 2, "one two"),
        (IsADirectoryError(21, "Is a directory", "/tmp"), 2, "/tmp: Is a directory"),
        (
            jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: x; No space left on device"),
            2,
            "RESOURCE_EXHAUSTED: x; No space left on device",
        ),
        (MemoryError(), 2, "out of memory: MemoryError"),
        (KeyboardInterrupt(), 130, "interrupted"),
        (ValueError("a \x1b]0;title\x07 tensor"), 2, "a ␛]0;title␇ tensor"),
    ],
)
def test_an_error_is_one_line(status_of, error, status, message):
    def main():
        raise error

    found, written = status_of(main)
    assert (found, written.strip()) == (status, message)


def test_interrupt_names_the_kept_results(status_of, entry):
    def main():
        with entry.keeps("two cells are in x.json; the same command goes on"):
            raise KeyboardInterrupt

    assert status_of(main) == (
        130,
        "interrupted; two cells are in x.json; the same command goes on\n",
    )


def test_mistakes_of_the_program_keep_their_traceback(status_of):
    def main():
        raise TypeError("a mistake")

    with pytest.raises(TypeError):
        status_of(main)


def test_text_cannot_steer_a_terminal(entry):
    assert entry.visible("a\n\tb é ↵") == "a\n\tb é ↵"
    assert entry.visible("\x1b[2J\r\x7f\x9b\u202e") == "␛[2J␍<U+007F><U+009B><U+202E>"


def test_colours_are_left_out_without_a_terminal(entry, monkeypatch):
    with only_shared_flags():
        entry.flags.FLAGS(["x"])
        monkeypatch.delenv("COLUMNS", raising=False)
        assert not entry.make_console(force_terminal=True).no_color
        monkeypatch.setenv("NO_COLOR", "1")
        assert entry.make_console(force_terminal=True).no_color
        assert entry.make_console(file=io.StringIO()).width == entry.WIDTH_OF_FILES


def test_shown_commands_spare_the_shipped_results():
    """Commands to copy write to runs/, which git ignores, and never over the authors' results."""
    shown = [
        ROOT / "README.md",
        *ROOT.glob("configs/*.py"),
        *ROOT.glob("launch/**/*.py"),
        *ROOT.glob("launch/**/*.md"),
    ]
    # That README.md is a page, not a measurement.
    over = re.compile(r"--(output|figure|workdir)=notebooks/results(?!/README\.md)")
    assert not [path.name for path in shown if over.search(path.read_text(encoding="utf-8"))]
    assert "/runs/" in (ROOT / ".gitignore").read_text().splitlines()

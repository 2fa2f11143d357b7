"""Checks sizes that readers notice: pages, the drafter protocol, the heart's files, a clone."""

import pathlib
import re
import subprocess
import sys
import traceback

import jax

from launch.lib import page
from specsamp import Drafter, NgramDrafter, generate
from support import durations
from support.fakes import counting_pair

ROOT = pathlib.Path(__file__).parents[1]


def readme_lines():
    return len((ROOT / "README.md").read_text(encoding="utf-8").splitlines())


def results_sizes():
    """Returns tables, words, words of the longest paragraph and words per sentence of the results
    page. Tables, marks, code, headings and pictures have no words.
    """
    text = (ROOT / "notebooks/results/README.md").read_text(encoding="utf-8")
    tables = len(re.findall(r"^\|[ :|-]+\|$", text, re.MULTILINE))
    text = re.sub(r"^\|.*\n", "", page.MARK.sub("", text), flags=re.MULTILINE)
    text = re.sub(r"```.*?```", "", text, flags=re.DOTALL)
    parts = [part.strip() for part in re.split(r"\n\s*\n|\n(?=- )", text)]
    parts = [part for part in parts if part and not part.startswith(("#", "!["))]
    words = [len(part.split()) for part in parts]
    sentences = sum(len(re.split(r"(?<=[.?!])\s+(?=[A-Z`*\[])", part)) for part in parts)
    return tables, sum(words), max(words), sum(words) / sentences


def drafter_members():
    """Returns the public members of `Drafter`, which an author of a drafter reads."""
    members = set()
    for base in Drafter.__mro__:
        members.update(vars(base), vars(base).get("__annotations__", ()))
    return len([name for name in members if not name.startswith("_")])


def frames_before_the_loop():
    """Returns the package's frames between a caller of `generate` and ``while_loop``."""
    frames, loop = [], jax.lax.while_loop

    def while_loop(*arguments):
        files = [frame.filename for frame in traceback.extract_stack()]
        frames.append(sum(str(ROOT / "specsamp") in file for file in files))
        return loop(*arguments)

    jax.lax.while_loop = while_loop
    generate(counting_pair(), ["abc"], 5, drafter=NgramDrafter(2, max_ngram=7))
    return max(frames)


def modules_with(name):
    """Returns the number of the package's modules that a module imports, itself included."""
    code = f"import sys, {name}; print(sum(one.startswith('specsamp') for one in sys.modules))"
    return int(subprocess.check_output([sys.executable, "-c", code], cwd=ROOT))


def tracked_files():
    """Returns the names of the files that git tracks."""
    names = subprocess.check_output(["git", "ls-files", "-z"], cwd=ROOT, text=True).split("\0")
    return [name for name in names if (ROOT / name).is_file()]


def installing_texts():
    """Returns the number of texts that install the package from an index: no index has a package of
    this name, so anyone could register it.
    """
    by_name = re.compile(r"pip install [^\n]*?(?<![\w/@.-])specsamp\b(?![/.]|\[[\w,]+\] @)")
    assert by_name.search("pip install 'specsamp[serve]'")  # the control
    texts = [
        name
        for name in tracked_files()
        if name.endswith((".py", ".md", ".sh", ".ipynb")) and name != ".ci/house.py"
    ]
    return sum(bool(by_name.search((ROOT / name).read_text(encoding="utf-8"))) for name in texts)


def tracked_bytes():
    """Returns the bytes of all tracked weights, and of the largest other file."""
    sizes = {name: (ROOT / name).stat().st_size for name in tracked_files()}
    weights = {name: size for name, size in sizes.items() if name.endswith(".safetensors")}
    return sum(weights.values()), max(sizes[name] for name in sizes.keys() - weights)


def clone_error():
    """Returns the larger relative error, in percent, of the README's sizes of a clone; 0 in a
    shallow or a filtered clone, which does not have old versions.
    """

    def git(*words):
        return subprocess.check_output(["git", *words], cwd=ROOT, text=True).strip()

    def megabytes(*of):
        return int(git("rev-list", "--disk-usage", "--objects", *of)) / 1e6

    settings = git("config", "--list")
    if git("rev-parse", "--is-shallow-repository") == "true" or ".promisor=true" in settings:
        return 0.0
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    (said,) = re.findall(r"(\d+) MB instead of (\d+)", readme)
    filtered = megabytes("--filter=blob:none", "HEAD") + megabytes("HEAD^{tree}")
    found = filtered, megabytes("HEAD")
    return max(100 * abs(int(x) / y - 1) for x, y in zip(said, found, strict=True))


def quick_seconds():
    """Returns the recorded seconds of all quick tests together."""
    tests = [test for file in durations.read().values() for test in file.items()]
    return sum(seconds for name, seconds in tests if not name.endswith(", slow"))


def main():
    tables, words, longest, per_sentence = results_sizes()
    weights, largest = tracked_bytes()
    sizes = [
        ("lines of README.md", readme_lines(), 240),
        ("tables of the results page", tables, 16),
        ("words of the results page", words, 2200),
        ("words of its longest paragraph", longest, 120),
        ("words of its sentences, mean", per_sentence, 20),
        ("public members of Drafter", drafter_members(), 12),
        ("frames from generate to its loop", frames_before_the_loop(), 4),
        ("modules that decoding.loop imports", modules_with("specsamp.decoding.loop"), 22),
        ("modules that decoding.generate imports", modules_with("specsamp.decoding.generate"), 33),
        ("seconds of the quick tests on a core", quick_seconds(), 24 * 60),
        ("texts that install the package by its name", installing_texts(), 0),
        ("error of the README's sizes of a clone, percent", clone_error(), 10),
        ("bytes of tracked weights", weights, 66_000_000),
        ("bytes of the largest other file", largest, 1_000_000),
    ]
    for name, size, most in sizes:
        print(f"{name}: {size:.4g} of {most}{', TOO MUCH' if size > most else ''}")
    sys.exit(any(size > most for _, size, most in sizes))


if __name__ == "__main__":
    main()

"""The files in git stay small: everybody who tries the package fetches a clone."""

import pathlib
import re
import subprocess

import pytest

ROOT = pathlib.Path(__file__).parents[1]
MOST_BYTES, MOST_WEIGHTS = 1_000_000, 46_000_000


def tracked_files():
    """Returns the files that git tracks, and their sizes."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True)
    if listed.returncode:
        pytest.skip("no clone of git")
    paths = [ROOT / name for name in listed.stdout.split("\0") if name]
    return {path: path.stat().st_size for path in paths if path.exists()}


def test_weights_are_the_only_large_files_and_leave_room():
    sizes = tracked_files()
    weights = {path: size for path, size in sizes.items() if path.suffix == ".safetensors"}
    assert 0 < sum(weights.values()) < MOST_WEIGHTS
    large = [
        f"{path.relative_to(ROOT)}: {size}" for path, size in sizes.items() if size > MOST_BYTES
    ]
    assert [name for name in large if ".safetensors:" not in name] == []


def test_no_text_installs_the_package_by_its_name():
    """No index has a package of this name, so anybody could register it."""
    by_name = re.compile(r"pip install [^\n]*?(?<![\w/@.-])specsamp\b(?![/.]|\[[\w,]+\] @)")
    assert by_name.search("pip install 'specsamp[serve]'")  # the control
    texts = [
        path
        for path in tracked_files()
        if path.suffix in (".py", ".md", ".sh", ".ipynb") and path.name != "test_repository.py"
    ]
    assert [str(path) for path in texts if by_name.search(path.read_text(encoding="utf-8"))] == []

"""No text of the repository installs the package from an index."""

import pathlib
import re
import subprocess

import pytest

ROOT = pathlib.Path(__file__).parents[1]


def test_no_text_installs_the_package_by_its_name():
    """No index has a package of this name, so anyone could register it."""
    by_name = re.compile(r"pip install [^\n]*?(?<![\w/@.-])specsamp\b(?![/.]|\[[\w,]+\] @)")
    assert by_name.search("pip install 'specsamp[serve]'")  # the control
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True)
    if listed.returncode:
        pytest.skip("no clone of git")
    paths = [ROOT / name for name in listed.stdout.split("\0")]
    texts = [
        path
        for path in paths
        if path.suffix in (".py", ".md", ".sh", ".ipynb")
        and path.name != "test_repository.py"
        and path.exists()
    ]
    assert [str(path) for path in texts if by_name.search(path.read_text(encoding="utf-8"))] == []

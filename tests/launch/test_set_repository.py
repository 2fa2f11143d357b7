"""The address of the repository in the notebooks: what git's remote says, or a line why not."""

import json
import shutil
import subprocess

import pytest

from support.run_script import ROOT, call, module


@pytest.fixture
def script():
    return module("set_repository")


@pytest.fixture
def clone(tmp_path):
    """A repository with the notebooks of this one."""
    subprocess.run(["git", "init", "-q", tmp_path], check=True)
    shutil.copytree(ROOT / "notebooks", tmp_path / "notebooks", ignore=shutil.ignore_patterns("results"))
    return tmp_path


def with_remote(clone, address, name="origin"):
    subprocess.run(["git", "-C", clone, "remote", "add", name, address], check=True)


@pytest.mark.parametrize(
    "address",
    [
        "git@github.com:some-one/spec.samp.git",
        "ssh://git@github.com/some-one/spec.samp.git",
        "https://github.com/some-one/spec.samp",
        "https://github.com/some-one/spec.samp.git/",
        "https://a-token@github.com/some-one/spec.samp.git",
    ],
)
def test_a_remote_on_github_has_a_name(script, clone, address):
    with_remote(clone, address)
    assert script.of_remote(clone, "origin") == "some-one/spec.samp"


@pytest.mark.parametrize(
    "address", ["/srv/git/specsamp", "git@example.com:a/b.git", "https://notgithub.com/a/b", "../other"]
)
def test_another_remote_is_said_with_its_address(script, clone, address):
    with_remote(clone, address)
    with pytest.raises(ValueError, match="not on GitHub: .* give --repository=OWNER/NAME") as error:
        script.of_remote(clone, "origin")
    assert address in str(error.value)


def test_a_password_in_an_address_is_not_said(script, clone):
    with_remote(clone, "https://me:secret@example.com/a/b.git")
    with pytest.raises(ValueError, match="is https://example.com/a/b.git, not on GitHub") as error:
        script.of_remote(clone, "origin")
    assert "secret" not in str(error.value)


def test_no_remote_and_no_checkout(script, clone, tmp_path_factory):
    with pytest.raises(ValueError, match="no remote 'upstream' .*: push to GitHub first"):
        script.of_remote(clone, "upstream")
    with pytest.raises(ValueError, match="is no checkout of git"):
        script.files(tmp_path_factory.mktemp("installed"))


def test_notebooks_name_the_repository_and_a_fork_names_its_own(script, clone):
    """Script and notebook stay the same program, and nothing else of them changes."""
    paths = script.files(clone)
    assert len(paths) == 7
    for name in ("some-one/specsamp", "a-fork/renamed"):
        assert all([script.write(path, name) for path in paths])
        assert not any([script.write(path, name) for path in paths])
        for path in (clone / "notebooks").glob("*.py"):
            line = f'REPOSITORY = "https://github.com/{name}"'
            cells = json.loads(path.with_suffix(".ipynb").read_text(encoding="utf-8"))["cells"]
            first = "".join(next(cell["source"] for cell in cells if cell["cell_type"] == "code"))
            assert first.startswith(line) and line in path.read_text(encoding="utf-8")
            here = (ROOT / "notebooks" / path.name).read_text(encoding="utf-8").splitlines()
            changed = [new for old, new in zip(here, path.read_text(encoding="utf-8").splitlines()) if old != new]
            assert len(changed) == 1
        assert f"/github/{name}/blob/" in (clone / "notebooks/README.md").read_text(encoding="utf-8")


def test_a_name_that_is_none_is_refused():
    done = call("set_repository", "--repository=someone")
    assert done.returncode == 2 and "--repository=someone: write OWNER/NAME" in done.stderr

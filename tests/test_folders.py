"""The layout of the package: a folder imports only from those above it in the table of the README."""

import pathlib
import re

import specsamp

PACKAGE = pathlib.Path(specsamp.__file__).parent
ORDER = (
    "sampling",
    "models",
    "decoding",
    "mesh",
    "checkpoints",
    "training",
    "serving",
    "evaluation",
    "analysis",
    "tpu",
)


def test_folders_are_those_of_the_readme():
    readme = (PACKAGE.parent / "README.md").read_text(encoding="utf-8")
    assert tuple(re.findall(r"`specsamp/(\w+)`", readme.partition("## Layout")[2])) == ORDER
    assert {path.name for path in PACKAGE.iterdir() if (path / "__init__.py").exists()} == set(ORDER)


def test_a_folder_imports_only_from_those_above_it():
    found = []
    for path in PACKAGE.glob("*/**/*.py"):
        here = path.relative_to(PACKAGE).parts[0]
        for name in re.findall(r"^\s*(?:from|import) specsamp\.(\w+)", path.read_text(encoding="utf-8"), re.MULTILINE):
            if name in ORDER and ORDER.index(name) > ORDER.index(here):
                found.append(f"{path.relative_to(PACKAGE)} imports specsamp.{name}")
    assert not found

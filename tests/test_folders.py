"""The layout of the package: a folder imports only from those above it in the table of the README."""

import pathlib
import re
import subprocess
import sys

import pytest

import specsamp

PACKAGE = pathlib.Path(specsamp.__file__).parent
ORDER = tuple("sampling models decoding mesh checkpoints serving training analysis evaluation tpu".split())


def test_folders_are_those_of_the_readme():
    readme = (PACKAGE.parent / "README.md").read_text(encoding="utf-8")
    assert tuple(re.findall(r"`specsamp/(\w+)`", readme.partition("## Layout")[2])) == ORDER
    assert {path.name for path in PACKAGE.iterdir() if (path / "__init__.py").exists()} == set(ORDER)


def test_a_folder_imports_only_from_those_above_it():
    found = []
    for path in PACKAGE.glob("*/**/*.py"):
        here = path.relative_to(PACKAGE).parts[0]
        if re.search(r"^\s*import specsamp$", path.read_text(encoding="utf-8"), re.MULTILINE):
            found.append(f"{path.relative_to(PACKAGE)} imports the whole package")
        for name in re.findall(r"^\s*(?:from|import) specsamp\.(\w+)", path.read_text(encoding="utf-8"), re.MULTILINE):
            if name in ORDER and ORDER.index(name) > ORDER.index(here):
                found.append(f"{path.relative_to(PACKAGE)} imports specsamp.{name}")
    assert not found


def test_the_public_names_of_the_stub_are_there():
    assert {"generate", "chain", "Pair"} < set(specsamp.__all__)
    assert all(getattr(specsamp, name).__module__.startswith("specsamp.") for name in specsamp.__all__)
    with pytest.raises(AttributeError, match="'generate_more'"):
        specsamp.generate_more


def test_importing_the_package_loads_nothing_that_is_not_used():
    code = """
import sys, specsamp
assert not {"jax", "numpy", "flax", "orbax"} & set(sys.modules)
from specsamp import generate, chain, temperature
loaded = set(sys.modules)
assert "jax" in loaded, "the control"
print(sorted({"orbax", "jax.experimental.pallas", "matplotlib", "tokenizers"} & loaded))
"""
    found = subprocess.run([sys.executable, "-c", code], cwd=PACKAGE.parent, capture_output=True, text=True)
    assert found.stdout == "[]\n", found.stdout + found.stderr


def test_the_shipped_pair_is_read_without_orbax_and_pallas():
    """Converted checkpoints and training alone need the first, kernels the second."""
    code = """
import sys
from specsamp.checkpoints.trained_pair import load_pair
load_pair("python")
print(sorted({"orbax", "tensorstore", "optax", "jax.experimental.pallas", "jinja2"} & set(sys.modules)))
import specsamp.checkpoints.hugging_face
assert {"orbax", "jax.experimental.pallas"} <= set(sys.modules), "the control"
"""
    found = subprocess.run([sys.executable, "-c", code], cwd=PACKAGE.parent, capture_output=True, text=True)
    assert found.stdout == "[]\n" and found.returncode == 0, found.stdout + found.stderr


@pytest.mark.parametrize("module, most", [("specsamp.decoding.loop", 20), ("specsamp.decoding.generate", 31)])
def test_the_heart_is_few_files(module, most):
    """So many modules of the package are read with one; a reader of the loop or of `generate` opens no others."""
    code = f"import sys, {module}; print(sum(name.startswith('specsamp') for name in sys.modules))"
    found = subprocess.run([sys.executable, "-c", code], cwd=PACKAGE.parent, capture_output=True, text=True)
    assert 0 < int(found.stdout or 0) <= most, found.stdout + found.stderr

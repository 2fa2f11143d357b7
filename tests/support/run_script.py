"""Launch scripts as a user runs them, but in this process."""

import contextlib
import importlib
import io
import json
import pathlib
import runpy
import subprocess
import sys
import types

from absl import flags

from specsamp import TransformerLM
from specsamp.checkpoints.export import export
from specsamp.checkpoints.tokenizer import EOS, JsonTokenizer
from specsamp.checkpoints.trained_pair import save_pair
from specsamp.models.config import tiny
from specsamp.training.data import train_tokenizer
from support.checkpoint_shapes import CONFIG, random_params
from support.weights import drawn_params

ROOT = pathlib.Path(__file__).parents[2]
# Compiled programs are kept in the folder of this session of tests (tests/conftest.py), not in the
# cache of the user.
FIXED = {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}
TINY_PAIR = ["--config=configs/random_pair.py:tiny", "--config.target.num_layers=1"]
TINY_PAIR += ["--config.target.positions=rotary"]


def call(script, *arguments):
    """Runs ``launch/{script}.py`` in this process, in milliseconds, since JAX is already imported.

    A traceback that a user would see is an exception here.
    """
    out, err = io.StringIO(), io.StringIO()
    try:
        with (
            only_shared_flags(),
            contextlib.redirect_stdout(out),
            contextlib.redirect_stderr(err),
            contextlib.chdir(ROOT),
        ):
            argv = sys.argv
            sys.argv = [f"launch/{script}.py", *map(str, arguments)]
            runpy.run_path(sys.argv[0], run_name="__main__")
    except SystemExit as end:
        status = end.code
    finally:
        sys.argv = argv
    return subprocess.CompletedProcess(sys.orig_argv, status, out.getvalue(), err.getvalue())


def succeed(script, *arguments):
    """Runs a command as `call` does, and checks that it succeeds."""
    done = call(script, *arguments)
    assert not done.returncode, done.stdout + done.stderr
    return done


def refuse(script, *arguments):
    """Runs a command as `call` does, checks that it refuses its input, and returns the error."""
    done = call(script, *arguments)
    assert done.returncode == 2, done.stdout + done.stderr
    return done.stderr


def flags_of(fields):
    """Returns the flags that set these fields of a configuration."""
    return [f"--config.{name}={value}" for name, value in fields.items()]


def read_cells(path):
    """Returns the cells of a file of results."""
    return json.loads(path.read_text())["cells"]


def module(script):
    """Returns the script as a module; its flags stay apart from the flags of other scripts."""
    with only_shared_flags(), contextlib.chdir(ROOT):
        return types.SimpleNamespace(**runpy.run_path(f"launch/{script}.py", run_name=script))


@contextlib.contextmanager
def only_shared_flags():
    """Defines only the flags that all commands share, unparsed; restores all flags at the end."""
    shared = importlib.import_module("launch.lib.entry").SHARED_FLAGS
    # Flags of imported scripts.
    others = {name: flags.FLAGS[name] for name in set(flags.FLAGS) - shared}
    for name in others:
        delattr(flags.FLAGS, name)
    try:
        yield
    finally:
        for name in set(flags.FLAGS) - shared:
            delattr(flags.FLAGS, name)
        for name in flags.FLAGS:
            flags.FLAGS[name].unparse()
        for name, flag in others.items():
            flags.FLAGS[name] = flag
        flags.FLAGS.unparse_flags()


def save_tiny_pair(folder, prompts, num_layers=1):
    """Saves a pair with random weights, whose draft is its target, for scripts to load."""
    config = tiny(vocab_size=300, num_layers=num_layers, positions="rotary")
    side = config, drawn_params(TransformerLM(config))
    tokenizer = train_tokenizer(["def f(x): return x"] * 3, 300).to_str()
    save_pair(folder, target=side, draft=side, tokenizer_json=tokenizer, provenance={})
    texts = [{"text": prompt} for prompt in prompts]
    (folder / "prompts.json").write_text(json.dumps({"prompts": texts}))


CHAT = """{% for message in messages %}<{{ message.role }}>{{ message.content }}{% endfor %}
{%- if add_generation_prompt %}<assistant>{% endif %}"""


def save_public_target(folder, template=CHAT):
    """Saves a target in the format of Hugging Face, whose random weights often end a text."""
    texts = ["add 3 to x: x + 3", "some text"] * 3
    tokenizer = JsonTokenizer.from_tokenizer(train_tokenizer(texts, 300), eos=EOS)
    export(folder, CONFIG, random_params(CONFIG), tokenizer)
    if template is not None:
        (folder / "chat_template.jinja").write_text(template)
    return folder

"""The shared code of all commands: flags, errors in one line, the console, progress, and writing of
results.

    python launch/evaluate.py --task=python --distributed   # on every worker of a TPU pod
    python launch/evaluate.py --task=python --coordinator=10.0.0.2:8476 --num_processes=2 \\
        --process_id=0

Exit status of every command: 0, done; 1, a check or a computation failed; 2, the command is invalid
or impossible, with a line on stderr; 130, interrupted.
"""

import collections
import contextlib
import importlib.util
import os
import re
import secrets
import shlex
import sys
import threading
import time
import traceback

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")  # before JAX: only errors of the runtime

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax
from absl import flags, logging
from rich.console import Console
from rich.text import Text

from launch.lib.config import ConfigFlag
from specsamp import machine, storage
from specsamp.analysis import report
from specsamp.decoding.pair import Pair
from specsamp.decoding.request import make_stops
from specsamp.decoding.text import Continuation, TextStream
from specsamp.jax_names import multihost_utils
from specsamp.machine import has_tpu
from specsamp.mesh import distributed
from specsamp.models.compiling import is_full_disk, is_out_of_memory
from specsamp.replica import Replica

# The tests install a TPU's compiler. Without a TPU, JAX would search for one at length and print
# errors.
is_here = importlib.util.find_spec
if is_here("libtpu") and not (
    has_tpu() or is_here("jax_cuda12_plugin") or is_here("jax_cuda13_plugin")
):
    jax.config.update("jax_platforms", jax.config.jax_platforms or "cpu")

UNUSABLE, INTERRUPTED, BROKEN_PIPE = 2, 130, 141
ENDLESS = 2**31  # no flag takes a number as large
HELP = ("--help", "-help", "-h", "--helpshort", "--helpfull")
WIDTH_OF_FILES = 160  # columns of files and pipes
SAY_EVERY_SECONDS = 20.0
INSTALLED = "specsamp"  # the program of an installed wheel
DRAFTED, OWN, PROMPT = "green", "black on yellow", "dim"
BRACKETS = "⟦", "⟧"

_OTHERS = frozenset(flags.FLAGS)  # flags of the libraries, which --help leaves out
_PLAIN = flags.DEFINE_bool("plain", False, "Print without colours, and tables as aligned text.")
_TRACEBACK = flags.DEFINE_bool(
    "traceback", False, "Print the whole traceback of an error instead of a single line."
)
_DISTRIBUTED = flags.DEFINE_bool(
    "distributed", False, "Join the other processes of this pod, which JAX finds by itself."
)
_COORDINATOR = flags.DEFINE_string(
    "coordinator",
    None,
    "The address host:port of process 0, for processes that JAX does not find by itself.",
)
_NUM_PROCESSES = flags.DEFINE_integer(
    "num_processes", None, "Number of processes; goes with --coordinator.", lower_bound=1
)
_PROCESS_ID = flags.DEFINE_integer(
    "process_id",
    None,
    "Index of this process, counted from 0; goes with --coordinator.",
    lower_bound=0,
)
SHARED_FLAGS = frozenset(flags.FLAGS)  # of the libraries and of all commands


# Flags of several commands, each with its default and its help.
OF_SEVERAL = {
    "output": (
        None,
        "Write the result as JSON to this file, local or gs://; by default nothing is written.",
    ),
    "prompts": (
        None,
        "Take the prompts of this file: JSON, JSON lines, or one per line; by default the pair's.",
    ),
    "again": (False, "Measure cells that --output already has again, and replace them."),
    "require_exact": (False, "Refuse rules that are lossy."),
    "order": (
        None,
        "The order of texts: first_come, the default, or shortest_first by predicted length, or "
        "shortest_first:AGING with the tokens that a second of waiting is worth, by default 1.",
    ),
    "replica": (
        None,
        "Take part i of N, as i/N; a run without it puts the parts in --output together.",
    ),
}


# Kinds of flags, by the type of the default.
KINDS = {bool: flags.DEFINE_bool, int: flags.DEFINE_integer, list: flags.DEFINE_list}


def define(name: str, described: Mapping[str, tuple[Any, str]] = OF_SEVERAL) -> flags.FlagHolder:
    """Defines a flag by its default, whose type it has, and its help; None is of a text."""
    default, help = described[name]
    return KINDS.get(type(default), flags.DEFINE_string)(name, default, help)


def parse_replica(text: str | None, output: str | None) -> tuple[Replica, str | None]:
    """Returns the replica of --replica, and the file that it writes.

    Raises:
      ValueError: --output is not a file, in whose folder a part can be written; or the file cannot
        be written.
    """
    replica = Replica.parse(text)
    if text is not None and (not output or storage.is_stream(output)):
        raise ValueError(f"--replica={text} writes a part beside a file: name the file in --output")
    own = output and replica.file(output)
    check_output(own)
    return replica, own


def refuse_flags(names: Iterable[str], why: str) -> None:
    """Raises ValueError for flags that have no effect with this command line."""
    for name in sorted(names):
        if flags.FLAGS[name].present:
            raise ValueError(f"--{name} has no effect: {why}")


def check_goes_with(others: Mapping[str, Sequence[str]]) -> None:
    """Raises ValueError for a flag if none of the flags that it needs has a value."""
    for name, needed in others.items():
        if all(flags.FLAGS[other].value is None for other in needed):
            refuse_flags([name], f"it goes with {' or '.join(f'--{other}' for other in needed)}")


def run(main: Callable[[], int | None], config: ConfigFlag | None = None) -> None:
    """Runs `status_of` with the arguments of this process, and exits with the status."""
    sys.exit(status_of(main, config, sys.argv))


def status_of(
    main: Callable[[], int | None], config: ConfigFlag | None, arguments: Sequence[str]
) -> int:
    """Parses flags and --config, joins other processes if flags say so, calls ``main`` and returns
    its exit status, or 0.
    """
    return guarded(lambda: _status(main, config, arguments))


def guarded(command: Callable[[], int]) -> int:
    """Calls ``command`` and returns its exit status, or the status of its error.

    Wrong input (ValueError, OSError, a wrong flag or configuration), a backend that does not start,
    insufficient memory and an interrupt become one line on stderr. Any other exception is a bug of
    this program, and keeps its traceback.
    """
    try:
        return command()
    except BrokenPipeError:  # the reader of the output has closed it
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return BROKEN_PIPE
    except KeyboardInterrupt as interrupt:
        kept = str(interrupt)
        return _end(interrupt, f"interrupted; {kept}" if kept else "interrupted", INTERRUPTED)
    except (ValueError, OSError, FloatingPointError, flags.Error) as error:
        return _end(error, _in_words(error), UNUSABLE)
    except MemoryError as error:
        return _end(error, f"out of memory: {_in_words(error)}", UNUSABLE)
    except jax.errors.JaxRuntimeError as error:
        if jax.distributed.is_initialized():
            distributed.end_now(
                f"a computation of {jax.process_count()} processes failed; has one of them died? "
                f"{error}"
            )
        if is_full_disk(error):
            return _end(error, _in_words(error), UNUSABLE)
        if is_out_of_memory(error):
            return _end(error, f"out of memory: {_in_words(error)}", UNUSABLE)
        raise
    except (RuntimeError, AssertionError) as error:
        try:
            machine.require_devices()
        except RuntimeError as backend:
            return _end(error, str(backend), UNUSABLE)
        raise


def _status(
    main: Callable[[], int | None], config: ConfigFlag | None, arguments: Sequence[str]
) -> int:
    if any(argument in HELP for argument in arguments[1:]):
        print(_help(main, config, arguments))
        return 0
    parse_arguments(config, arguments)
    logging.use_absl_handler()
    logging.set_verbosity(logging.FATAL)  # errors are raised, and printed in one line
    numbers = (_COORDINATOR.value, _NUM_PROCESSES.value, _PROCESS_ID.value)
    if _DISTRIBUTED.value or numbers != (None, None, None):
        try:
            distributed.start(*numbers)
        except (ValueError, ConnectionError, RuntimeError) as error:
            raise ValueError(f"joining other processes: {error}") from error
    status = main() or 0
    if jax.distributed.is_initialized():  # the first process may still be writing
        multihost_utils.sync_global_devices("the end")
    sys.stdout.flush()
    return status


def parse_arguments(config: ConfigFlag | None, arguments: Sequence[str]) -> None:
    """Parses the flags and loads the configuration."""
    rest = list(arguments[1:]) if config is None else config.load(arguments[1:])
    try:
        left = flags.FLAGS([arguments[0], *rest])
    except (TypeError, AttributeError, LookupError) as error:
        raise ValueError(f"--config.FIELD=VALUE: {error}") from error
    if len(left) > 1:
        raise ValueError(f"unexpected argument {left[1]!r}: write --FLAG=VALUE")
    for name in set(flags.FLAGS) - _OTHERS:
        # Fields have checks of their kind.
        if flags.FLAGS[name].present and not name.startswith("config."):
            check_flag(name, flags.FLAGS[name].value)


def check_flag(name: str, value: Any) -> None:
    """Raises ValueError for empty texts, often an unset variable of the shell, and for infinite
    numbers.
    """
    for each in value if isinstance(value, list) else [value]:
        if each == "" and not isinstance(flags.FLAGS[name].parser, flags.ListParser):
            raise ValueError(f"--{name} is empty: give a value, or leave the flag out")
        if isinstance(each, (int, float)) and not abs(each) < ENDLESS:
            raise ValueError(f"--{name} must be a number below {ENDLESS}; got {each}")


def _end(error: BaseException, line: str, status: int) -> int:
    if flags.FLAGS.is_parsed() and _TRACEBACK.value:
        traceback.print_exception(error)
    else:
        print(visible(line), file=sys.stderr)
    return status


def _in_words(error: BaseException) -> str:
    """Returns an error's message in one line; for an OSError, with the file first."""
    if isinstance(error, OSError) and error.strerror:
        return (
            error.strerror
            if error.filename is None
            else f"{os.fsdecode(error.filename)}: {error.strerror}"
        )
    return " ".join(str(error).split()) or type(error).__name__


def _help(
    main: Callable[[], int | None], config: ConfigFlag | None, arguments: Sequence[str]
) -> str:
    """Returns the command's docstring, its flags, and the fields of the configuration that the
    arguments name.
    """
    text = (main.__doc__ or main.__globals__.get("__doc__") or "").strip()
    if sys.argv[0] == INSTALLED:
        text = re.sub(
            r"python launch/(\w+)\.py", lambda found: f"specsamp {found[1].replace('_', '-')}", text
        )
    lines = [text, "", "Flags:"]
    if config is not None:
        lines.append(
            f"  --config=FILE[:WORD]: The configuration, a Python file. Default: {config.default}"
        )
    for name in sorted(set(flags.FLAGS) - _OTHERS):
        if name.startswith("experimental_orbax"):
            continue
        flag = flags.FLAGS[name]
        default = "" if flag.default in (None, []) else f" Default: {flag.default_as_str}"
        text = flag.help.partition(";\n")[0]  # without absl's "may be repeated"
        # A help with choices begins with them: "<greedy|sampled>: ".
        lines.append(f"  --{name}{'=' if text.startswith('<') else ': '}{text}{default}")
    if config is not None:
        config.load([argument for argument in arguments[1:] if argument not in HELP])
        lines += ["", *config.describe()]
    return "\n".join(lines)


def is_first() -> bool:
    """Returns whether this process prints and writes; does not start JAX for a single process."""
    return not jax.distributed.is_initialized() or jax.process_index() == 0


def make_console(**options: Any) -> Console:
    """Returns a console: without colours after --plain or NO_COLOR, and wide without a terminal."""
    if not sys.stdout.isatty() and "COLUMNS" not in os.environ:
        options = {"width": WIDTH_OF_FILES, **options}
    return Console(
        quiet=not is_first(),
        no_color=flags.FLAGS.is_parsed() and _PLAIN.value or None,
        highlight=False,
        markup=False,
        soft_wrap=True,
        **options,
    )


def own(piece: str, console: Console) -> Text:
    """Returns a token of the target with a background colour, or in brackets; the background ends
    at line breaks.
    """
    if console.color_system is None or console.no_color:
        return Text(f"{BRACKETS[0]}{piece}{BRACKETS[1]}")
    head, line_break, tail = piece.partition("\n")
    return Text.assemble((head + ("↵" if line_break else ""), OWN), line_break, (tail, OWN))


class Pieces:
    """A growing text, each token coloured by its author.

    Attributes:
      text: the present text.
    """

    def __init__(self, pair: Pair, prompt: Sequence[int], console: Console):
        self.text, self._console = "", console
        # The name of a stop token is no part of a text.
        self._stream = TextStream(Continuation(pair.tokenizer, prompt), make_stops(pair, None))
        self._tokens: list[int] = []

    def add(self, tokens: Sequence[int], from_draft: Sequence[bool], finished: bool) -> Text:
        """Returns the text of the next tokens, which are the last ones if ``finished``."""
        found = Text()
        for count, (token, by_draft) in enumerate(zip(tokens, from_draft, strict=True), 1):
            self._tokens.append(token)
            piece = self._stream.push(self._tokens, finished and count == len(tokens))
            self.text += piece
            if piece:
                shown = visible(piece)
                found.append_text(
                    Text(shown, style=DRAFTED) if by_draft else own(shown, self._console)
                )
        return found


def show(tables: Sequence[report.Table], console: Console) -> None:
    """Prints tables, as aligned text after --plain."""
    report.print_tables(tables, console, _PLAIN.value)


@contextlib.contextmanager
def progress(console: Console, doing: str) -> Iterator[Callable[[str], None]]:
    """Shows the progress of a block of code: a spinner on a terminal, elsewhere a line now and then
    on stderr.

    The block gets a function that changes the text.
    """
    start, ended = time.monotonic(), threading.Event()
    last_text = collections.deque([doing], maxlen=1)

    def watch() -> None:
        while not ended.wait(every):
            show(Text(f"{visible(last_text[0])}, {time.monotonic() - start:.0f} s"))

    with contextlib.ExitStack() as stack:
        if console.is_terminal and not console.quiet:
            show, every = stack.enter_context(console.status(Text(doing))).update, 0.2
        else:
            show, every = make_console(stderr=True).print, SAY_EVERY_SECONDS
        watcher = threading.Thread(target=watch, daemon=True)
        watcher.start()
        try:
            yield last_text.append
        finally:
            ended.set()
            watcher.join()


def weights_progress(console: Console) -> Callable[[str, int, int], None]:
    """Returns a function that prints a line for every gigabyte of weights that was read."""
    gigabytes = 0

    def say(name: str, done: int, total: int) -> None:
        nonlocal gigabytes
        if done // 1e9 > gigabytes or done == total:
            gigabytes = done // 1e9
            text = f"read {done / 1e9:.1f} of {total / 1e9:.1f} GB, {name}"
            console.print(visible(text), style="dim")

    return say


@contextlib.contextmanager
def keeps(what: str) -> Iterator[None]:
    """Adds ``kept`` to the message of an interrupt within the block."""
    try:
        yield
    except KeyboardInterrupt as error:
        raise KeyboardInterrupt(what) from error


@contextlib.contextmanager
def reading(path: str) -> Iterator[None]:
    """Turns the errors of a damaged document within the block into a ValueError that names the
    file.
    """
    try:
        yield
    except (KeyError, TypeError, IndexError, AttributeError, ZeroDivisionError) as error:
        raise ValueError(
            f"{path} is damaged, or of another kind: {type(error).__name__} {error}"
        ) from error


# The direction of writing.
_TURNS = "\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069\u200e\u200f\u061c"
_SIGNS = {code: chr(0x2400 + code) for code in range(32) if chr(code) not in "\n\t"}
_SIGNS |= {code: f"<U+{code:04X}>" for code in (*range(127, 160), *map(ord, _TURNS))}


def visible(text: str) -> str:
    """Replaces control characters, except line breaks and tabs, by symbols, since they could
    control the terminal.
    """
    return text.translate(_SIGNS)


def command() -> str:
    """Returns the command line as it was typed."""
    return shlex.join(sys.argv if sys.argv[0] == INSTALLED else ["python", *sys.argv])


def check_output(path: str | None, flag: str = "output") -> None:
    """Raises ValueError for a path that cannot be written, before long computations."""
    if not path or not is_first() or storage.is_stream(path):
        return
    if storage.place(path).is_dir():
        raise ValueError(f"--{flag}={path} is a folder: name a file in it")
    probe = f"{path}.{secrets.token_hex(4)}.probe"  # other runs may try the same path
    try:
        storage.check_regular(path)
        storage.write(probe, " ")
        storage.place(probe).unlink()
    except OSError as error:
        raise ValueError(f"--{flag}={path} cannot be written: {_in_words(error)}") from error


def check_result(path: str | None) -> None:
    """Raises ValueError for an --output that cannot be written, or holds anything but a result of
    `write_result`, which would be replaced.
    """
    check_output(path)
    if not path or not is_first() or storage.is_stream(path):
        return
    if not storage.is_regular_file(path) or not storage.place(path).read_bytes().strip():
        return
    try:
        known = storage.read_json(path).keys()
    except ValueError:
        known = set()
    if "command" not in known or "cells" in known:
        raise ValueError(f"--output={path} holds no result of this command: give another")


def write_result(path: str | None, document: dict, console: Console) -> None:
    """Writes a result as JSON, after the command and the environment, in process 0."""
    if path and is_first():
        storage.write(path, report.json_text(header() | document))
    say_written(path, console)


def header() -> dict[str, Any]:
    """Returns the first fields of a file of results: command and environment."""
    return {"command": command(), "environment": machine.environment()}


def say_written(path: str | None, console: Console) -> None:
    """Prints where a result was written."""
    if path and not storage.is_stream(path):
        console.print(f"\nwritten to {path}")

"""The flag --trace: profiles what a command measures, and shows its time by named scope."""

import jax
from absl import flags
from rich.console import Console

from launch.lib import entry
from specsamp.analysis.trace import Trace, trace
from specsamp.analysis.workload import TimedDecoder

HELP = "Then profile one prefill and some rounds into this folder, and show their time by named scope."


def define_trace() -> flags.FlagHolder:
    """Defines --trace."""
    return flags.DEFINE_string("trace", None, HELP)


def check_trace(folder: str | None) -> None:
    """Refuses a folder that cannot be written, and programs that are not compiled."""
    if folder and jax.config.jax_disable_jit:
        raise ValueError("--trace is of compiled programs, and JAX_DISABLE_JIT is set: leave out one of the two")
    if folder:
        entry.check_output(f"{folder.rstrip('/')}/profile", "trace")


def show_trace(decoder: TimedDecoder, folder: str, console: Console) -> Trace:
    """Writes the profile; prints how to open it, and its time by named scope."""
    with entry.progress(console, "compiling and tracing"):
        traced = trace(decoder, folder)
    entry.show(traced.tables(), console)
    console.print("\n" + "\n".join(map(entry.visible, traced.sentences)))
    return traced

"""The installed command: ``specsamp demo`` is launch/demo.py, of this checkout or of the copy in
a wheel.

specsamp                                       # lists the commands
specsamp plan --help
python -m specsamp demo                        # the same without installing, in a checkout
"""

import ast
import difflib
import importlib
import pathlib
import sys
from collections.abc import Sequence

from specsamp import __version__

PACKAGE = pathlib.Path(__file__).parent
COPY = PACKAGE / "checkout"  # of launch and configs, see setup.py
USAGE = "usage: specsamp COMMAND [--FLAG=VALUE ...]; specsamp COMMAND --help says more"


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command and returns its exit status; 2 for one that does not exist."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    known = commands()
    if not arguments or arguments[0] in ("--help", "-h", "help"):
        print("\n".join([USAGE, "", *(f"  {name:<20} {text}" for name, text in known.items())]))
        return 0
    if arguments[0] in ("--version", "-V"):
        print(f"specsamp {__version__}")
        return 0
    name = arguments[0].replace("_", "-")
    if name not in known:
        close = difflib.get_close_matches(name, known, n=1)
        today = f"did you mean {close[0]}?" if close else f"choose one of {', '.join(known)}"
        print(f"no command {arguments[0]!r}: {today}", file=sys.stderr)
        return 2
    sys.path.insert(0, str(folder().parent))
    sys.argv = ["specsamp", name, *arguments[1:]]
    script = importlib.import_module(f"launch.{name.replace('-', '_')}")
    entry = importlib.import_module("launch.lib.entry")
    if hasattr(script, "status_of"):  # the command study, whose studies define flags
        return script.status_of([f"specsamp {name}", *arguments[1:]])
    return entry.status_of(
        script.main, getattr(script, "_CONFIG", None), [f"specsamp {name}", *arguments[1:]]
    )


def folder() -> pathlib.Path:
    """Returns the folder of the commands."""
    return COPY / "launch" if COPY.is_dir() else PACKAGE.parent / "launch"


def commands() -> dict[str, str]:
    """Returns the commands, each with the first line of its docstring."""
    found = {}
    for path in sorted(folder().glob("*.py")):
        source = path.read_text(encoding="utf-8")
        if "__main__" in source:
            words = (ast.get_docstring(ast.parse(source)) or "").partition("\n")[0]
            found[path.stem.replace("_", "-")] = words
    return found


if __name__ == "__main__":
    sys.exit(main())

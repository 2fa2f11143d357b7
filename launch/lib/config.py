"""The flag --config: a file with a get_config(), and flags that set its fields.

    --config=configs/random_pair.py:tiny --config.sampling.temperature=0.0

The word after the colon is the argument of ``get_config``. A file is searched for in the current
folder, then in this checkout. A configuration is Python code that is executed: use only files that
you trust.
"""

import contextlib
import dataclasses
import difflib
import functools
import pathlib
import re
import types
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from absl import flags
from flax.traverse_util import flatten_dict
from ml_collections import ConfigDict, config_flags

from launch.lib.own_code import load_module

CHECKOUT = pathlib.Path(__file__).resolve().parents[2]
_FIELD = re.compile(r"--?(?:no)?config\.([^=[]+)")


@dataclasses.dataclass
class ConfigFlag:
    """The configuration of --config, after the flags are parsed."""

    default: str
    kind: Any  # the dataclass that the fields become, by its from_config_dict
    text: str = ""  # as typed, or the default
    module: types.ModuleType | None = None  # of the file
    fields: ConfigDict | None = None
    fields_set: tuple[str, ...] = ()  # by --config.FIELD=VALUE
    is_given: bool = False  # whether --config or one of its fields was typed

    def load(self, arguments: Sequence[str]) -> list[str]:
        """Loads the file in ``arguments``, defines flags for the fields that they set, returns the
        other arguments.
        """
        first = flags.FlagValues()
        first.set_gnu_getopt()
        flags.DEFINE_string("config", self.default, "The file.", flag_values=first)
        rest = first(["", *arguments], known_only=True)[1:]
        self.text, self.module = first.config, load_file(first.config)
        self.fields = load_config(self.text)
        known, found = known_fields(self.fields), map(_FIELD.match, rest)
        self.fields_set = tuple(match[1] for match in found if match)
        self.is_given = bool(first["config"].present or self.fields_set)
        for name in self.fields_set:
            if members := [field for field in known if field.startswith(f"{name}.")]:
                raise ValueError(
                    f"--config.{name} is a group of fields: set one of {', '.join(members)}"
                )
            if name not in known:
                raise ValueError(f"--config={self.text} has no field {name!r}{meant(name, known)}")
        config_flags.DEFINE_config_dict("config", self.fields, sys_argv=["", *rest])
        return rest

    def refuse(self, why: str) -> None:
        """Raises ValueError if --config or one of its fields was typed."""
        if self.is_given:
            raise ValueError(f"--config has no effect: {why}")

    def refuse_fields(self, names: Sequence[str], why: str) -> None:
        """Raises ValueError for fields, or groups of fields, that were set but have no effect on
        this command.
        """
        for name in self.fields_set:
            if {name, name.partition(".")[0]} & {*names}:
                raise ValueError(
                    f"--config.{name}={known_fields(self.fields)[name]} has no effect: {why}"
                )

    @functools.cached_property
    def value(self) -> Any:
        """Returns the dataclass of the fields; raises ValueError for a field that is missing or
        wrong.
        """
        return self.kind.from_config_dict(self.fields)

    def describe(self) -> list[str]:
        """Returns a line for each field, for --help."""
        return [
            f"Fields of --config={self.text}, each set by --config.FIELD=VALUE:",
            *(
                f"  {name} = {'(not set)' if value is None else value}"
                for name, value in known_fields(self.fields).items()
            ),
        ]


def load_file(text: str) -> types.ModuleType:
    """Runs the file of ``FILE.py:WORD`` and returns it as a module; raises ValueError if it does
    not exist.
    """
    name = text.partition(":")[0]
    places = [pathlib.Path(name).expanduser(), CHECKOUT / name]
    path = next((place for place in places if name and place.is_file()), None)
    if path is None:
        shipped = [f"configs/{file.name}" for file in sorted((CHECKOUT / "configs").glob("*.py"))]
        raise ValueError(f"--config={text}: no file {name!r}{meant(name, shipped)}")
    with _own_code(text):
        return load_module(path.resolve())


@contextlib.contextmanager
def _own_code(text: str) -> Iterator[None]:
    """Turns all exceptions of a configuration's code into a ValueError; --traceback shows where."""
    try:
        yield
    except Exception as error:
        kind = "" if isinstance(error, ValueError) else f"{type(error).__name__}: "
        raise ValueError(f"--config={text}: {kind}{error}") from error


def load_config(text: str) -> ConfigDict:
    """Returns the configuration of ``FILE.py:WORD``; raises ValueError if the file or the word
    does not exist.
    """
    module = load_file(text)
    with _own_code(text):
        config = module.get_config(*text.split(":", 1)[1:])
    if not isinstance(config, ConfigDict):
        raise ValueError(
            f"--config={text}: get_config() returns {type(config).__name__}, not a ConfigDict"
        )
    return config


def known_fields(config: ConfigDict) -> dict[str, Any]:
    """Returns the fields and their values in order of their names; fields of a group are
    ``group.field``.
    """
    return dict(sorted(flatten_dict(config.to_dict(), sep=".").items()))


def meant(name: str, known: Iterable[str]) -> str:
    """Returns the end of a message about an unknown name: the closest known names, or all known
    names.
    """
    known = list(known)
    close = difflib.get_close_matches(name, known, n=3, cutoff=0.6)
    if close:
        return f"; did you mean {' or '.join(close)}?"
    return f"; choose one of {', '.join(known)}"

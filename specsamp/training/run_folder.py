"""The folder of a training run: its configuration, tokenizer, corpus, metrics and checkpoints."""

import contextlib
import datetime
import io
import json
import os
import pathlib
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
from etils import epath
from rich.console import Console

from specsamp import storage
from specsamp.models.heads import DRAFT_IDS

FIX = "restore the file, or begin anew in another --workdir"
IDS = f"{DRAFT_IDS}.npy"  # of a head with a reduced vocabulary


def check_run(folder: str | os.PathLike, config: dict, changeable: Sequence[str] = ()) -> None:
    """Checks that a folder, if it holds a run, holds one of this configuration.

    Args:
      changeable: top-level fields that may differ between a run and its resumption.

    Raises:
      ValueError: another configuration began this run (the message lists the differences), or its
        file is damaged.
    """
    if (storage.place(folder) / "run.json").exists():
        now = json.loads(json.dumps(config))
        before = read_config(folder) | {name: now.get(name) for name in changeable}
        if different := storage.differences(before, now):
            raise ValueError(
                f"{folder} holds a run with another configuration: {'; '.join(different)}. "
                "Give the old values to resume it, or another --workdir"
            )


def check_same(folder: str | os.PathLike, name: str, description: dict) -> None:
    """Checks that a run resumes with its first "corpus" or "target" (``name``).

    Raises:
      ValueError: its ``sha256`` differs (the message shows both descriptions), or its file is
        damaged.
    """
    path = storage.place(folder) / f"{name}.json"
    if path.exists():
        before = read_description(path)
        if before.get("sha256") != description["sha256"]:
            raise ValueError(
                f"{folder} was begun with another {name}: {before}, now {description}. (Another "
                "Python has another standard library.) Resume with the same, or begin anew in "
                "another --workdir"
            )


def open_run(
    folder: str | os.PathLike, config: dict, tokenizer_json: str, **made_from: dict
) -> None:
    """Creates the folder of a run and writes its configuration, tokenizer and descriptions."""
    folder = storage.place(folder)
    storage.write_json(folder / "run.json", config)
    storage.write(folder / "tokenizer.json", tokenizer_json)
    for name, description in made_from.items():
        storage.write_json(folder / f"{name}.json", description)


def last_metrics(folder: epath.Path, step: int) -> dict[str, Any]:
    """Returns the last value of every number that a run logged up to a step, and the seconds its
    steps took.
    """
    last: dict[str, Any] = {}
    seconds = 0.0
    before = 0
    config = read_config(folder)
    tokens_per_step = config["train"]["batch"] * config["data"]["length"]
    for record in read_metrics(folder / "metrics.jsonl"):
        if record["step"] > step:  # a run that was killed, or is still under way
            break
        if "tokens_per_second" in record:
            seconds += (record["step"] - before) * tokens_per_step / record["tokens_per_second"]
            before = record["step"]
        last |= record
    return last | {"training_seconds": seconds}


def read_config(folder: str | os.PathLike) -> dict:
    """Reads the configuration of a run.

    Raises:
      FileNotFoundError: there is no run.
      ValueError: its run.json is damaged.
    """
    path = storage.place(folder) / "run.json"
    if not path.exists():
        raise FileNotFoundError(f"no training run at {str(folder)!r}: it has no run.json")
    return read_description(path)


def without_paths(config: dict) -> dict:
    """Returns the configuration of a run with directories stripped from its paths."""

    def shorten(fields, *names):
        return fields | {n: pathlib.Path(fields[n]).name for n in names if fields.get(n)}

    data = shorten(config["data"], "folder", "tokenizer")
    return shorten(config, "target", "init") | {"data": data}


def read_description(path: epath.Path) -> dict:
    """Reads an object of a run's folder, for example the description of its corpus; raises as
    `storage.read_json`.
    """
    try:
        return storage.read_json(path)
    except ValueError as error:
        raise ValueError(f"{error}: {FIX}") from error


def write_array(path: str | os.PathLike, array: np.ndarray) -> None:
    """Writes an array as ``.npy``, atomically."""
    buffer = io.BytesIO()
    np.save(buffer, array)
    storage.write(path, buffer.getvalue())


def read_array(path: str | os.PathLike) -> np.ndarray:
    """Reads an array that `write_array` wrote."""
    return np.load(io.BytesIO(storage.place(path).read_bytes()))


class MetricsLog:
    """Writes one JSON object per line, in the order of steps; a resumed run drops the records it
    will write again.

    Without a path nothing is written: one process of a run does it.
    """

    def __init__(self, path: str | os.PathLike | None, resumed_at: int = 0):
        self._lines = path and storage.Lines(
            path,
            [
                json.dumps(record) + "\n"
                for record in read_metrics(path)
                if record["step"] <= resumed_at
            ],
        )

    def write(self, step: int, **numbers: float) -> None:
        """Appends a record."""
        if self._lines is not None:
            self._lines.add(json.dumps({"step": step, **numbers}) + "\n")


def read_metrics(path: str | os.PathLike) -> list[dict]:
    """Reads the records of a log; a line that was cut while it was being written is left out."""
    path = storage.place(path)
    records = []
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else ():
        with contextlib.suppress(json.JSONDecodeError):
            records.append(json.loads(line))
    return records


class Progress:
    """Prints numbers, tokens per second and time left: a line that is rewritten on a terminal, else
    one per report.
    """

    def __init__(self, steps: int, tokens_per_step: int, start: int, console: Console):
        self._steps = steps
        self._tokens = tokens_per_step
        self._console = console
        self._first = self._last = (start, time.monotonic())

    def report(self, step: int, **numbers: float) -> float:
        """Prints the state of a step and returns the tokens per second since the last report."""
        now = time.monotonic()
        pace, mean_pace = (
            (now - before) / max(step - begin, 1) for begin, before in (self._last, self._first)
        )
        self._last = (step, now)
        left = datetime.timedelta(seconds=round(mean_pace * (self._steps - step)))
        text = "  ".join(f"{name} {value:.4g}" for name, value in numbers.items())
        rate = self._tokens / pace
        self._console.print(
            f"step {step}/{self._steps}  {text}  {rate:,.0f} tokens/s  {left} left",
            end="\r" if self._console.is_terminal else "\n",
            highlight=False,
            soft_wrap=True,
        )
        return rate

    def note(self, text: str) -> None:
        """Prints a line that stays."""
        self._console.print(text, highlight=False, soft_wrap=True)

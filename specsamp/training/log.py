"""Metrics as JSON lines, and progress on the terminal."""

from __future__ import annotations

import datetime
import json
import os
import time

from rich.console import Console

from specsamp import storage


class MetricsLog:
    """Writes one JSON object per line, in the order of steps; a resumed run drops the records it will write again."""

    def __init__(self, path: str | os.PathLike, resumed_at: int = 0):
        kept = [record for record in read_metrics(path) if record["step"] <= resumed_at]
        self._lines = storage.Lines(path, [json.dumps(record) + "\n" for record in kept])

    def write(self, step: int, **numbers: float) -> None:
        """Appends a record."""
        self._lines.add(json.dumps({"step": step, **numbers}) + "\n")


def read_metrics(path: str | os.PathLike) -> list[dict]:
    """Reads the records of a log; a line that was cut while it was being written is left out."""
    path, records = storage.place(path), []
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else ():
        try:
            records.append(json.loads(line))
        except json.JSONDecodeError:
            continue
    return records


class Progress:
    """Prints numbers, tokens per second and time left: a line that is rewritten on a terminal, else one per report."""

    def __init__(self, steps: int, tokens_per_step: int, start: int, console: Console):
        self._steps, self._tokens, self._console = steps, tokens_per_step, console
        self._first = self._last = (start, time.monotonic())

    def report(self, step: int, **numbers: float) -> float:
        """Prints the state of a step and returns the tokens per second since the last report."""
        (first_step, first_time), (last_step, last_time) = self._first, self._last
        now = time.monotonic()
        self._last = (step, now)
        pace = (now - last_time) / max(step - last_step, 1)
        mean_pace = (now - first_time) / max(step - first_step, 1)
        left = datetime.timedelta(seconds=round(mean_pace * (self._steps - step)))
        text = "  ".join(f"{name} {value:.4g}" for name, value in numbers.items())
        line = f"step {step}/{self._steps}  {text}  {self._tokens / pace:,.0f} tokens/s  {left} left"
        self._console.print(line, end="\r" if self._console.is_terminal else "\n", highlight=False, soft_wrap=True)
        return self._tokens / pace

    def note(self, text: str) -> None:
        """Prints a line that stays."""
        self._console.print(text, highlight=False, soft_wrap=True)

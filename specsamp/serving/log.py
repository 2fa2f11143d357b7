"""A file of completions, a line of JSON each, that is written as they end and that a killed run goes on from."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import time
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from specsamp import storage
from specsamp.decoding.job import Job
from specsamp.decoding.results import Completion, RowStats
from specsamp.mesh.distributed import gather_objects

SECONDS_BETWEEN_WRITES = 30  # to a bucket, where a file cannot be appended to


class CompletionLog:
    """Completions in a file, local or in a bucket. Of several processes the first writes, and tells the others.

    The first line says what was asked; a file of something else is refused. A line that was cut short by the end of a
    process is dropped, and its completion decoded again.

    Attributes:
      completions: what the file holds, by prompt and sample.
    """

    def __init__(self, path: str | os.PathLike, identity: Mapping[str, Any] | None = None):
        """Names a file, which is read by `open`.

        Args:
          identity: what else must be the same for a run to go on, such as a digest of the weights.
        """
        self.path, self._identity = storage.place(path), dict(identity or {})
        self._in_bucket = os.fspath(path).startswith(storage.BUCKETS)
        self._lines: list[str] = []
        self._written = 0.0
        self.completions: dict[tuple[int, int], Completion] = {}

    def open(self, asked: Mapping[str, Any]) -> None:
        """Reads what the file holds, or begins one.

        Raises:
          ValueError: it was begun by another call, or is no file of completions; with what differs.
          OSError: it cannot be written.
        """
        identity = json.loads(json.dumps({"completions_of": dict(asked) | self._identity}))
        content = gather_objects(self._read() if jax.process_index() == 0 else None)[0]
        self._lines, self.completions = [json.dumps(identity)], {}
        if content:
            first, *others = content
            self._check(first, identity)
            self._lines += others
            for number, line in enumerate(others, start=2):
                completion = self._parse(line, number)
                self.completions[completion.prompt_index, completion.sample_index] = completion
        if jax.process_index() == 0:
            storage.write(self.path, "".join(line + "\n" for line in self._lines))

    def add(self, completion: Completion) -> None:
        """Writes a completion; on a disk it is there when this returns."""
        key = completion.prompt_index, completion.sample_index
        if key in self.completions:
            return
        self.completions[key] = completion
        if jax.process_index() != 0:
            return
        line = json.dumps(dataclasses.asdict(completion))
        if not self._in_bucket:
            with open(self.path, "ab") as file:
                end = file.tell()
                try:
                    file.write(line.encode() + b"\n")
                    file.flush()
                except OSError:  # a full disk: what is there stays whole lines
                    file.truncate(end)
                    raise
            return
        self._lines.append(line)
        if time.monotonic() - self._written > SECONDS_BETWEEN_WRITES:
            self.flush()

    def flush(self) -> None:
        """Writes to a bucket what it has not yet."""
        if self._in_bucket and jax.process_index() == 0:
            storage.write(self.path, "".join(line + "\n" for line in self._lines))
            self._written = time.monotonic()

    def _read(self) -> list[str]:
        """Returns the whole lines of the file; none if it is not there, or no line of it was finished."""
        if not self.path.exists():
            return []
        *lines, _ = storage.read_text(self.path).split("\n")
        return lines

    def _parse(self, line: str, number: int) -> Completion:
        try:
            fields = json.loads(line)
            stats = {name: tuple(x) if isinstance(x, list) else x for name, x in fields["stats"].items()}
            return Completion(**fields | {"stats": RowStats(**stats)})
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"{self.path}, line {number} is no completion ({error}): remove the line") from error

    def _check(self, line: str, identity: dict) -> None:
        try:
            before = json.loads(line)["completions_of"]
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{self.path} is no file of completions: give another path") from error
        now = identity["completions_of"]
        different = [
            f"{name} was {before.get(name)!r}, is {now.get(name)!r}"
            for name in sorted(before.keys() | now.keys())
            if before.get(name) != now.get(name)
        ]
        if different:
            raise ValueError(
                f"{self.path} holds completions of another call: {'; '.join(different)}. Give the old values to go on, "
                "or another path"
            )


def describe(job: Job, seed: int) -> dict[str, Any]:
    """Returns what a job's completions depend on but for the weights: the same job, the same description."""
    leaves, structure = jax.tree.flatten((job.request.sampling, job.request.draft_sampling))
    asked = hashlib.sha256(repr((job.prompts, job.request.limits_B.tolist(), str(structure))).encode())
    for leaf in leaves:
        asked.update(np.asarray(leaf).tobytes())
    asked.update(np.asarray(jax.random.key_data(job.request.row_keys_B)).tobytes())
    return {
        "prompts": len(job.prompts),
        "num_samples": job.num_samples,
        "seed": seed,
        "stops": [*sorted(job.stops.ids), *job.stops.texts],
        "drafter": repr(job.method.drafter),
        "rule": repr(job.method.rule),
        "target": repr(job.pair.target),
        "log_probs": job.loop.keep_log_probs,
        "requests": asked.hexdigest()[:16],
    }

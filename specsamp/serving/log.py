"""A file of completions, a line of JSON each, that is written as they end and that a killed run goes on from."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import os
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from specsamp import storage
from specsamp.checkpoints.params import digest_of_pair
from specsamp.decoding.job import Job
from specsamp.decoding.results import Completion, RowStats
from specsamp.mesh.distributed import from_first

BUCKET_SECONDS = 30  # between writes to a bucket, where a file cannot be appended to


class CompletionLog:
    """Completions in a file, local or in a bucket. Of several processes the first writes, and tells the others.

    The first line says what was asked; a file of something else is refused. A line that was cut short by the end of a
    process is dropped, and its completion decoded again. One run at a time writes a file.

    Attributes:
      completions: what the file holds, by prompt and sample.
    """

    def __init__(self, path: str | os.PathLike, identity: Mapping[str, Any] | None = None):
        """Names a file, which is read by `open`.

        Args:
          identity: what else must be the same for a run to go on; as JSON. Default: `digest_of_pair`, which reads
            all parameters.
        """
        if not isinstance(path, (str, os.PathLike)):
            raise ValueError(f"log must be a path or a CompletionLog; got {path!r}")
        self.path, self.identity = storage.place(path), identity
        self.completions: dict[tuple[int, int], Completion] = {}
        self._lines: storage.Lines | None = None
        self._lock = contextlib.ExitStack()

    def open(self, job: Job, seed: int) -> None:
        """Reads what the file holds of a job, or begins one, and keeps it from other runs until `close`.

        Raises:
          ValueError: it was begun by another call, with what differs; it is no file of completions; or another run is
            writing it.
          OSError: it cannot be written.
        """
        identity = self.identity
        if identity is None:
            identity = {"weights": digest_of_pair(job.pair)}
        try:
            asked = json.loads(json.dumps({"completions_of": describe(job, seed) | dict(identity)}))
        except TypeError as error:
            raise ValueError(f"the identity of a log must be JSON ({error}); got {identity!r}") from error
        with contextlib.ExitStack() as lock:
            from_first(lambda: lock.enter_context(storage.locked(self.path, wait=False)))
            lines = from_first(self._read)
            self.completions = self._completions(lines, asked, job)
            from_first(lambda: self._begin([json.dumps(asked), *lines[1:]]))
            self._lock = lock.pop_all()

    def add(self, completion: Completion) -> None:
        """Writes a completion; on a disk it is there when this returns."""
        self.completions[completion.prompt_index, completion.sample_index] = completion
        if self._lines is not None:
            self._lines.add(json.dumps(dataclasses.asdict(completion)) + "\n")

    def close(self) -> None:
        """Writes what a bucket has not got yet, and leaves the file to other runs."""
        with self._lock:
            if self._lines is not None:
                self._lines.flush()

    def _begin(self, lines: list[str]) -> None:
        self._lines = storage.Lines(self.path, [line + "\n" for line in lines], bucket_seconds=BUCKET_SECONDS)

    def _read(self) -> list[str]:
        """Returns the whole lines of the file; none if it is not there, or no line of it was finished."""
        if not self.path.exists():
            return []
        *lines, _ = storage.read_text(self.path).split("\n")
        return lines

    def _completions(self, lines: list[str], asked: dict, job: Job) -> dict[tuple[int, int], Completion]:
        if not lines:
            return {}
        self._check(lines[0], asked)
        found = (self._parse(line, number, job) for number, line in enumerate(lines[1:], start=2))
        return {(completion.prompt_index, completion.sample_index): completion for completion in found}

    def _parse(self, line: str, number: int, job: Job) -> Completion:
        try:
            fields = json.loads(line)
            completion = Completion(**fields | {"stats": RowStats.from_json(fields["stats"])})
            if not (0 <= completion.prompt_index < len(job.prompts) and 0 <= completion.sample_index < job.num_samples):
                raise ValueError(f"sample {completion.sample_index} of prompt {completion.prompt_index}")
            if not all(isinstance(token, int) for token in completion.tokens):
                raise ValueError(f"tokens {completion.tokens!r:.40}")
            return completion
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"{self.path}, line {number} is no completion ({error}): remove the line") from error

    def _check(self, line: str, asked: dict) -> None:
        try:
            before = dict(json.loads(line)["completions_of"])
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{self.path} is no file of completions: give another path") from error
        now = asked["completions_of"]
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
    adaptive = {} if job.method.adaptive is None else {"adaptive": repr(job.method.adaptive)}
    return adaptive | {
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

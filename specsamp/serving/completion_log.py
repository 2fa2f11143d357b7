"""A file of completions: a line of JSON each, written as they end. A killed run goes on from it."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import os
from collections.abc import Mapping, Sequence, Set
from typing import Any

import jax
import numpy as np

from specsamp import storage, validate
from specsamp.checkpoints.params import digest_of_pair
from specsamp.decoding.engine import Engine
from specsamp.decoding.request import Request
from specsamp.decoding.results import Completion, RowStats
from specsamp.mesh.distributed import from_first

BUCKET_SECONDS = 30  # between writes to a bucket, where a file cannot be appended to


class CompletionLog:
    """Completions in a file, local or in a bucket. Of several processes the first reads and writes it.

    The first line describes the call; a file of another call is refused. A line that was cut short when a process ended is
    dropped, and its completion is decoded again. One run at a time writes a file.

    Attributes:
      completions: of the file, by prompt and sample.
    """

    def __init__(self, path: str | os.PathLike, identity: Mapping[str, Any] | None = None):
        """Names a file, which is read by `open`.

        Args:
          identity: values that must be the same for a run to go on, besides the call; as JSON. Default: `digest_of_pair`,
            which reads all parameters.
        """
        self.path, self.identity = storage.place(validate.path("log", path)), identity
        self.completions: dict[tuple[int, int], Completion] = {}
        self._lines: storage.Lines | None = None
        self._lock = contextlib.ExitStack()

    def open(self, engine: Engine, requests: Sequence[Request]) -> None:
        """Reads the completions of these requests, or begins a file, and keeps it from other runs until `close`.

        Raises:
          ValueError: another call began the file (the message lists the differences), it is no file of completions, or
            another run is writing it.
          OSError: it cannot be written.
        """
        identity = {"weights": digest_of_pair(engine.pair)} if self.identity is None else self.identity
        try:
            asked = json.loads(json.dumps({"completions_of": describe_requests(engine, requests) | dict(identity)}))
        except TypeError as error:
            raise ValueError(f"the identity of a log must be JSON ({error}); got {identity!r}") from error
        with contextlib.ExitStack() as lock:
            from_first(lambda: lock.enter_context(storage.locked(self.path, wait=False)))
            lines = from_first(self._read)
            if lines:
                self._check(lines[0], asked)
            known = {(request.prompt_index, request.sample_index) for request in requests}
            for number, line in enumerate(lines[1:], start=2):
                completion = self._parse(line, number, known)
                self.completions[completion.prompt_index, completion.sample_index] = completion
            from_first(lambda: self._begin([json.dumps(asked), *lines[1:]]))
            self._lock = lock.pop_all()

    def add(self, completion: Completion) -> None:
        """Writes a completion; on a disk it is there when this returns."""
        self.completions[completion.prompt_index, completion.sample_index] = completion
        if self._lines is not None:
            self._lines.add(json.dumps(dataclasses.asdict(completion)) + "\n")

    def close(self) -> None:
        """Writes completions that a bucket lacks, and leaves the file to other runs."""
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

    def _parse(self, line: str, number: int, known: Set[tuple[int, int]]) -> Completion:
        try:
            fields = json.loads(line)
            completion = Completion(**fields | {"stats": RowStats.from_json(fields["stats"])})
            if (completion.prompt_index, completion.sample_index) not in known:
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
        if different := storage.differences(before, asked["completions_of"]):
            raise ValueError(
                f"{self.path} holds completions of another call: {'; '.join(different)}. Give the old values to go on, "
                "or another path"
            )


def describe_requests(engine: Engine, requests: Sequence[Request]) -> dict[str, Any]:
    """Describes everything besides the weights that the completions depend on; equal requests have equal descriptions."""
    arrays, method, first = engine.arrays(requests), engine.method, requests[0]
    leaves, structure = jax.tree.flatten((arrays.sampling, arrays.draft_sampling))
    prompts = tuple(request.prompt for request in requests if request.sample_index == 0)
    asked = hashlib.sha256(repr((prompts, arrays.limits_B.tolist(), str(structure))).encode())
    for leaf in leaves:
        asked.update(np.asarray(leaf).tobytes())
    asked.update(np.asarray(jax.random.key_data(arrays.row_keys_B)).tobytes())
    adaptive = {} if method.adaptive is None else {"adaptive": repr(method.adaptive)}
    return adaptive | {
        "prompts": len(prompts),
        "num_samples": len(requests) // len(prompts),
        "seed": first.seed,
        "stops": [*sorted(first.stops.ids), *first.stops.texts],
        "drafter": repr(method.drafter),
        "rule": repr(method.rule),
        "target": repr(engine.pair.target),
        "log_probs": engine.loop.keep_log_probs,
        "requests": asked.hexdigest()[:16],
    }

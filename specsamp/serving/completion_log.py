"""A file of completions, a line of JSON each, with which a killed run resumes."""

import contextlib
import dataclasses
import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from etils import epath

from specsamp import storage, validate
from specsamp.checkpoints.params import digest_of_pair
from specsamp.decoding.engine import Engine
from specsamp.decoding.request import Request
from specsamp.decoding.results import Completion, RowStats
from specsamp.mesh.distributed import from_first
from specsamp.replica import Replica, files_of

BUCKET_SECONDS = 30  # interval of writes to a bucket, whose files cannot be appended to
OF_THE_PART = ("prompts", "requests")  # values of a call that differ between replicas


class CompletionLog:
    """Completions in a file, local or in a bucket. Process 0 reads and writes it.

    The first line describes the call; a file of another call is refused. An incomplete last line is
    dropped, and its completion is decoded again. One run at a time writes a file. A replica writes
    a file of its own, and every run uses the completions of its requests in all replicas' files.

    Attributes:
      completions: of the files, by prompt and sample.
    """

    def __init__(
        self,
        path: str | os.PathLike,
        identity: Mapping[str, Any] | None = None,
        replica: Replica = Replica(),
    ):
        """Names a file, which is read by `open`.

        Args:
          path: the file of a run without replicas.
          identity: further JSON values that must be the same when a run resumes. Default:
            `digest_of_pair`, which reads all parameters.
          replica: which of several runs this is.
        """
        self._family = storage.place(validate.path("log", path))
        self.path, self.identity = storage.place(replica.file(self._family)), identity
        self.completions: dict[tuple[int, int], Completion] = {}
        self._requests: dict[tuple[int, int], dict[str, Any]] = {}
        self._lines: storage.Lines | None = None
        self._lock = contextlib.ExitStack()

    def open(self, engine: Engine, requests: Sequence[Request]) -> None:
        """Reads the completions of these requests, or begins a file, and keeps it from other runs
        until `close`.

        Raises:
          ValueError: the file is of another call (the message lists the differences), is not a
            file of completions, or is being written by another run.
          OSError: it cannot be written.
        """
        identity = (
            {"weights": digest_of_pair(engine.pair)} if self.identity is None else self.identity
        )
        digests = digest_requests(engine, requests)
        self._requests = {
            (one.prompt_index, one.sample_index): {"prompt_id": one.prompt_id, "request": digest}
            for one, digest in zip(requests, digests, strict=True)
        }
        call = describe_requests(engine, requests, digests) | dict(identity)
        try:
            asked = json.loads(json.dumps({"completions_of": call}))
        except TypeError as error:
            raise ValueError(
                f"the identity of a log must be JSON ({error}); got {identity!r}"
            ) from error
        with contextlib.ExitStack() as lock:
            from_first(lambda: lock.enter_context(storage.locked(self.path, wait=False)))
            lines = from_first(lambda: _read(self.path))
            if lines:
                _check(self.path, lines[0], asked["completions_of"])
            for number, line in enumerate(lines[1:], start=2):
                _, completion = _parse(self.path, line, number)
                key = completion.prompt_index, completion.sample_index
                if key not in self._requests:
                    fault = f"sample {key[1]} of prompt {key[0]}"
                    raise ValueError(
                        f"{self.path}, line {number} is no completion ({fault}): remove the line"
                    )
                self.completions[key] = completion
            others = self._read_others(asked["completions_of"])
            self.completions |= others
            lines = [json.dumps(asked), *lines[1:], *map(self._line, others.values())]
            from_first(lambda: self._begin(lines))
            self._lock = lock.pop_all()

    def _read_others(self, call: Mapping[str, Any]) -> dict[tuple[int, int], Completion]:
        """Returns the completions that only the files of other replicas have."""
        shared = {name: value for name, value in call.items() if name not in OF_THE_PART}
        missing = {
            told["request"]: key
            for key, told in self._requests.items()
            if key not in self.completions
        }
        found = {}
        # If each machine has its own disk, only process 0 reads the files.
        names = from_first(
            lambda: [os.fspath(one) for one in files_of(self._family) if one != self.path]
        )
        for path in map(storage.place, names):
            lines = from_first(lambda path=path: _read(path))
            if lines:
                _check(path, lines[0], shared)
            for number, line in enumerate(lines[1:], start=2):
                digest, completion = _parse(path, line, number)
                if digest in missing:
                    key = missing[digest]
                    found[key] = dataclasses.replace(completion, prompt_index=key[0])
        return found

    def add(self, completion: Completion) -> None:
        """Writes a completion; a local disk has it when this returns."""
        self.completions[completion.prompt_index, completion.sample_index] = completion
        if self._lines is not None:
            self._lines.add(self._line(completion) + "\n")

    def close(self) -> None:
        """Writes the last completions to a bucket, and unlocks the file."""
        with self._lock:
            if self._lines is not None:
                self._lines.flush()

    def _begin(self, lines: list[str]) -> None:
        self._lines = storage.Lines(
            self.path, [line + "\n" for line in lines], bucket_seconds=BUCKET_SECONDS
        )

    def _line(self, completion: Completion) -> str:
        told = self._requests[completion.prompt_index, completion.sample_index]
        return json.dumps(told | dataclasses.asdict(completion))


def _read(path: epath.Path) -> list[str]:
    """Returns the complete lines of a file; none if the file does not exist or is empty.

    The first line of a log is never incomplete, so a text without a line break is another file.
    """
    if not path.exists():
        return []
    *lines, last = storage.read_text(path).split("\n")
    if last and not lines:
        return [last]
    return lines


def _parse(path: epath.Path, line: str, number: int) -> tuple[str, Completion]:
    """Returns the digest of a request, and its completion."""
    try:
        fields = json.loads(line)
        digest = fields.pop("request")
        del fields["prompt_id"]
        completion = Completion(**fields | {"stats": RowStats.from_json(fields["stats"])})
        if not all(isinstance(token, int) for token in completion.tokens):
            raise ValueError(f"tokens {completion.tokens!r:.40}")
        return digest, completion
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(
            f"{path}, line {number} is no completion ({error}): remove the line"
        ) from error


def _check(path: epath.Path, line: str, call: Mapping[str, Any]) -> None:
    """Raises ValueError unless a file's first line describes a call with these values."""
    try:
        before = dict(json.loads(line)["completions_of"])
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path} is no file of completions: give another path") from error
    before = {
        name: value for name, value in before.items() if name in call or name not in OF_THE_PART
    }
    if different := storage.differences(before, call):
        raise ValueError(
            f"{path} holds completions of another call: {'; '.join(different)}. Give the old "
            "values to go on, or another path"
        )


def digest_requests(engine: Engine, requests: Sequence[Request]) -> list[str]:
    """Returns a digest of each request: of its prompt, budget, sampling and random numbers."""
    arrays = engine.arrays(requests)
    leaves, structure = jax.tree.flatten((arrays.sampling, arrays.draft_sampling))
    leaves = [
        np.asarray(leaf)
        for leaf in (*leaves, arrays.limits_B, jax.random.key_data(arrays.row_keys_B))
    ]
    prompts = {one.prompt_index: repr(one.prompt) for one in requests if one.sample_index == 0}

    def digest(row: int, request: Request) -> str:
        told = hashlib.sha256(f"{structure}{prompts[request.prompt_index]}".encode())
        for leaf in leaves:
            told.update(leaf[row].tobytes())
        return told.hexdigest()[:16]

    return [digest(row, request) for row, request in enumerate(requests)]


def describe_requests(
    engine: Engine, requests: Sequence[Request], digests: Sequence[str]
) -> dict[str, Any]:
    """Describes everything but the weights that the completions depend on."""
    method, first = engine.method, requests[0]
    count = len({request.prompt_index for request in requests})
    adaptive = {} if method.adaptive is None else {"adaptive": repr(method.adaptive)}
    return adaptive | {
        "prompts": count,
        "num_samples": len(requests) // count,
        "seed": first.seed,
        "stops": [*sorted(first.stops.ids), *first.stops.texts],
        "drafter": repr(method.drafter),
        "rule": repr(method.rule),
        "target": repr(engine.pair.target),
        "log_probs": engine.loop.keep_log_probs,
        "requests": hashlib.sha256("".join(digests).encode()).hexdigest()[:16],
    }

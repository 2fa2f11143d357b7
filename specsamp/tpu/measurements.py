"""Published times of decode steps on TPUs, with their conditions.

    for row in published():
        row.milliseconds, row.work()      # the time, and the work of the step

`measurements.json` holds the rows, in groups that share conditions; a row without all conditions is
refused. Kinds of rows:

    step          one program for each token: what `specsamp.tpu.calibration` explains
    collective    one all-reduce, read off a profiler's trace
    served        a server under load: host and interleaved prefills are in it
    launched      the host launches several programs for each token and fetches it
    experts       mixtures of experts; routing and sorting are in no formula here
    arithmetic    bound by arithmetic instead of memory
    vector unit   products of one row that left the matrix unit idle
    round         of speculation, call by call; the work is that of scoring ``tokens`` alone

Only steps and collectives are fitted. All other kinds are compared with the forecast and shown
with its error.
"""

import dataclasses
import functools
import json
import pathlib
from collections.abc import Mapping
from typing import Any

from specsamp.checkpoints.published import published_config
from specsamp.mesh.torus import find_boxes
from specsamp.models.config import TransformerConfig
from specsamp.tpu.topology import CHIPS
from specsamp.tpu.work import Shape, Work

FILE = pathlib.Path(__file__).with_name("measurements.json")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Measurement:
    """One published time and its conditions."""

    source: str
    url: str
    software: str
    date: str
    kind: str  # see above
    chip: str
    slice: str  # chips along each axis, such as "4x4"
    tensor: int  # chips that hold one replica of the model
    data: int  # replicas
    model: str
    weights: str
    cache: str
    batch: int  # rows of all replicas
    context: int  # slots of the caches
    milliseconds: float  # of a step, or of one collective
    shape: Shape
    sequences: int | None = None  # whose attention one chip computes; None: all of its replica
    # Share of the live slots; unless published, that of a text half way.
    live: float = 0.5
    tokens: int = 1  # of each row in one call
    # Chips of a replica along each axis; None: see `find_boxes`.
    axes: tuple[int, ...] | None = None
    notes: str = ""

    @property
    def name(self) -> str:
        """The model, its parallelism, batch and context."""
        split = f"tensor {self.tensor}" + f" x data {self.data}" * (self.data > 1)
        return (
            f"{self.model}, {self.weights}, {self.chip} {self.slice}, {split}, batch {self.batch}, "
            f"{self.context}"
        )

    @property
    def layout(self) -> str:
        """Chip, slice and parallelism; rows with the same are left out of a fit together."""
        return f"{self.chip} {self.slice}, tensor {self.tensor} x data {self.data}"

    @functools.cached_property
    def chips(self) -> tuple[int, ...]:
        """Chips of one replica along each axis."""
        extent = 1, *map(int, self.slice.split("x"))
        return self.axes or find_boxes(extent, self.tensor, self.tensor)[0][1:]

    def work(self) -> Work:
        """Returns the work of a step, or of one collective."""
        rows = self.batch // self.data
        if self.kind == "collective":
            return self.shape.collective(CHIPS[self.chip], self.chips, rows)
        return self.shape.call(
            CHIPS[self.chip],
            self.chips,
            rows=rows,
            context=self.live * self.context,
            tokens=self.tokens,
            weights=self.weights,
            cache=self.cache,
            sequences=self.sequences,
        )


@functools.cache
def published() -> tuple[Measurement, ...]:
    """Returns the rows of `measurements.json`."""
    return read_measurements(json.loads(FILE.read_text(encoding="utf-8")))


def read_measurements(document: Mapping[str, Any]) -> tuple[Measurement, ...]:
    """Reads ``{"models": {name: shape}, "groups": [{conditions, "rows": [...]}]}``; rows need
    exactly all conditions.
    """
    models = {name: _shape(fields) for name, fields in document["models"].items()}
    rows = []
    for group in document["groups"]:
        for row in group["rows"]:
            known = {name: value for name, value in group.items() if name != "rows"} | row
            shape = models.get(known["model"]) or Shape.of(published_config(known["model"]))
            rows.append(
                Measurement(
                    **known | {"axes": known.get("axes") and tuple(known["axes"])}, shape=shape
                )
            )
    return tuple(rows)


def _shape(fields: Mapping[str, Any]) -> Shape:
    return Shape(**fields) if "layers" in fields else Shape.of(TransformerConfig(**fields))

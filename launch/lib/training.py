"""The fields of a configuration for training, such as configs/python_pair.py, each with
its check.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np

from launch.lib.fields import Config, MeshFields, Positive, Share, Whole
from specsamp.sampling.warp import Warp, chain, temperature, top_p
from specsamp.training.trainer import Intervals, TrainConfig


@dataclasses.dataclass(frozen=True, kw_only=True)
class DataFields:
    """The training text."""

    folder: str
    pattern: str
    exclude: tuple[str, ...]
    held_out: float
    tokenizer: str
    eos: str
    length: Positive
    held_out_windows: Positive


@dataclasses.dataclass(frozen=True, kw_only=True)
class GeneratedFields:
    """The windows that the target completes for its draft or head."""

    rows: Whole
    share: Share
    prompt_length: Positive
    temperature: float
    top_p: float
    batch: Positive
    greedy_share: Share

    def __post_init__(self):
        self.sampling  # refuses numbers out of range

    @property
    def is_off(self) -> bool:
        """Returns whether the target writes nothing."""
        return not (self.rows and self.share)

    @property
    def sampling(self) -> Warp:
        """Returns the sampling distribution with which the target writes a batch of rows.

        Greedy rows are spread evenly, so that the last batch, of fewer rows, has its share.
        """
        greedy_N = np.diff(np.round(self.greedy_share * np.arange(self.batch + 1)))
        return chain(temperature(np.where(greedy_N, 0.0, self.temperature)), top_p(self.top_p))


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainingTestFields:
    """The steps of a head's training-time test, or the blocks of a head that drafts blocks."""

    test_steps: int
    decay: float
    chunk: int | None = None
    anchors: int | None = None  # of block heads alone, as the next
    marginals: float = 0.0
    pace: float | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainingConfig(Config):
    """The fields of a configuration.

    Attributes:
      target: the name of the model that a draft or a head is distilled from; None: a target is
        trained.
      head, layer_skip, together: the fields of this kind of training; None: another kind.
        ``together`` has the "model" of the target that is trained with its draft or head, and
        fields of `TrainTogether`.
    """

    data: DataFields
    model: Mapping[str, Any]
    train: TrainConfig
    intervals: Intervals
    mesh: MeshFields
    compute_dtype: str
    target: str | None = None
    init: str = ""
    objective: str = ""
    generated: GeneratedFields | None = None
    test_time: TrainingTestFields | None = None
    head: Mapping[str, Any] | None = None
    layer_skip: Mapping[str, Any] | None = None
    together: Mapping[str, Any] | None = None

    @property
    def draft_vocab_size(self) -> int:
        """Returns the size of a head's reduced vocabulary; 0: it drafts all tokens."""
        return (self.head or {}).get("draft_vocab_size", 0)

    def __post_init__(self):
        length, chunk = self.data.length, None
        if self.test_time is not None and self.test_time.anchors is None:
            chunk = self.test_time.chunk
        if self.generated is not None and self.generated.prompt_length > length:
            raise ValueError(
                f"generated.prompt_length {self.generated.prompt_length} must be at most "
                f"data.length, {length}"
            )
        if chunk is not None and (chunk < 1 or length % chunk):
            raise ValueError(
                f"test_time.chunk {chunk} does not divide data.length {length}: choose one that "
                "does"
            )

"""Defines the work of a program, from which its milliseconds follow; computes it from shapes alone,
and bounds a round.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

from specsamp.analysis.costs import Costs
from specsamp.models.config import TransformerConfig
from specsamp.tpu.topology import CHIPS

BYTES = {"int8": 1, "bfloat16": 2, "float32": 4}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Work:
    """The work of one device in one run of a program."""

    streaming_ms: float  # of its traffic, at the full rate of the HBM
    collectives: float = 0.0  # one after another
    collective_hops: float = 0.0  # collectives, each times the hops that it crosses
    wire_ms: float = 0.0  # of the bytes that collectives carry, at the full rate of the links
    layer_sequences: float = 0.0  # layers of its calls, each times the sequences of the device
    cycles_ms: float = 0.0  # of its computation, as the compiler estimates it
    calls: int = 1  # of a model


def calls_of_round(whole: Work, draft_step: Work) -> tuple[Work, ...]:
    """Splits the work of a round into its calls: collectives of the draft can only hide under the
    draft's streaming.

    The target's call, the first, is the whole without the draft's steps.
    """
    steps = whole.calls - 1
    names = [field.name for field in dataclasses.fields(Work)]
    left = {name: getattr(whole, name) - steps * getattr(draft_step, name) for name in names}
    return (Work(**{name: max(value, 0) for name, value in left.items()}), *[draft_step] * steps)


def hops(chips: Sequence[int]) -> int:
    """Returns the hops between the two chips that are farthest apart: 5 for (2, 2, 4).

    No axis wraps around: the fit of `specsamp.tpu.calibration` then missed a layout that was left
    out by 10% at most, else by 24%, because of steps on a 4x4x4.
    """
    return sum(size - 1 for size in chips)


def wire_ms(carried: float, chips: Sequence[int], link_bytes_per_second: float) -> float:
    """Returns the milliseconds in which every chip of a replica sends its share of some bytes to
    all other chips.

    Bytes of an all-reduce count twice. Each axis has links in both directions; the rate is that of
    one link, one way.
    """
    count, axes = math.prod(chips), sum(size > 1 for size in chips)
    return carried * (count - 1) / count / (2 * axes * link_bytes_per_second) * 1e3 if axes else 0.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Roofline(Costs):
    """A lower bound from sizes and rates: a call takes the longer of streaming and arithmetic.

    Weights are read once for all sequences and all their tokens, the cache of each sequence once
    (Pope et al., arXiv 2211.05102), and the experts that the tokens are expected to choose.
    """

    target: TransformerConfig
    draft: TransformerConfig
    chip: str
    devices: int = 1
    default_context: int = 1024

    def round_ms(self, draft_length: int, batch: int = 1, context: int | None = None) -> float:
        context = self.default_context if context is None else context
        scored = self.call_ms(self.target, draft_length + 1, batch, context)
        return scored + draft_length * self.call_ms(self.draft, 1, batch, context)

    def tree_ms(self, depth: int, rows: int, batch: int = 1, context: int | None = None) -> float:
        context = self.default_context if context is None else context
        level = math.ceil((rows - 1) / depth)  # nodes of a level, on average
        drafted = depth * self.call_ms(self.draft, level, batch, context)
        return self.call_ms(self.target, rows, batch, context) + drafted

    def call_ms(self, model: TransformerConfig, tokens: int, batch: int, context: int) -> float:
        """Returns the milliseconds of one call with ``tokens`` tokens in each of ``batch``
        sequences.
        """
        chip, experts = CHIPS[self.chip], model.experts
        weight_bytes = BYTES[model.weight_dtype or model.dtype]
        embeddings = model.vocab_size * model.width
        # Tables that are only looked up are left out.
        tables = (
            embeddings * (1 if model.tied else 2)
            + model.num_ngram_tables * model.ngram_rows * model.width
        )
        every_token = model.num_parameters - model.num_expert_parameters - tables
        read, used = every_token, every_token + embeddings
        if experts is not None:
            chosen = experts.experts_per_token / experts.num_experts
            used += chosen * model.num_expert_parameters
            # Random routing chooses the experts of a call.
            read += (1 - (1 - chosen) ** (batch * tokens)) * model.num_expert_parameters
        # The states of recurrent layers are not counted.
        attentions = model.num_layers - sum(map(model.is_recurrent, range(model.num_layers)))
        cached = 2 * attentions * model.num_kv_heads * model.head_size
        # The output matrix stays in bfloat16 where the layers are in int8.
        read_bytes = read * weight_bytes + embeddings * max(weight_bytes, BYTES["bfloat16"])
        read_bytes += batch * context * cached * BYTES[model.cache_dtype or model.dtype]
        streaming = read_bytes / chip.hbm_bytes_per_second
        computing = 2 * used * batch * tokens / chip.flops_per_second
        return max(streaming, computing) / self.devices * 1e3

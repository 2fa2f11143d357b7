"""Defines the work of a program, from which its milliseconds follow; computes it from shapes alone,
and bounds a round.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Sequence

from specsamp.analysis.costs import Costs
from specsamp.models.config import TransformerConfig
from specsamp.models.transformer import TransformerLM
from specsamp.tpu.topology import CHIPS, Chip

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

    No axis wraps around: the fit of `specsamp.tpu.calibration` then misses a layout that was left
    out by 10% at most, else by 24%, because of steps on a 4x4x4.
    """
    return sum(size - 1 for size in chips)


def wire_ms(carried: float, chips: Sequence[int], link_bytes_per_second: float) -> float:
    """Returns the milliseconds in which every chip of a replica sends its share of some bytes to
    all other chips.

    Bytes of an all-reduce count twice. Each axis has links in both directions; the rate is that of
    one link, one way.
    """
    count = math.prod(chips)
    axes = sum(size > 1 for size in chips)
    return carried * (count - 1) / count / (2 * axes * link_bytes_per_second) * 1e3 if axes else 0.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Shape:
    """Sizes of a model, from which the work of a call follows; `specsamp.tpu.program` takes it from
    the compiler instead.
    """

    layers: int
    width: int
    parameters: float  # of the layers, read at every step
    # Of the output matrix, which stays in bfloat16 where the layers are in int8.
    head_parameters: float = 0.0
    cached: float = 0.0  # numbers of the cache per token of a sequence
    windowed: float = 0.0  # the same, of layers that read the last ``window`` tokens alone
    window: float = math.inf
    expert_parameters: float = 0.0  # of one expert
    expert_layers: int = 0
    experts: int = 0  # of such a layer
    experts_per_token: int = 0
    collectives_per_layer: int = 2

    @classmethod
    @functools.cache
    def of(cls, config: TransformerConfig) -> Shape:
        """Takes the sizes of a transformer; tables that are only looked up are left out."""
        embeddings = config.vocab_size * config.width
        # The states of recurrent layers are not counted.
        cached, windowed = [], []
        for i in (i for i in range(config.num_layers) if not config.is_recurrent(i)):
            layer = config.of_layer(i)
            read = cached if config.window_of(i) is None else windowed
            read.append(2 * layer.num_kv_heads * layer.head_size)
        tables = (
            embeddings * (1 if config.tied else 2)
            + config.num_ngram_tables * config.ngram_rows * config.width
        )
        experts, sparse = config.experts, config.num_sparse_layers
        one = 3 * config.width * experts.width if experts else 0
        total = TransformerLM(config).num_parameters
        return cls(
            layers=config.num_layers,
            width=config.width,
            parameters=total - sparse * one * (experts.num_experts if experts else 0) - tables,
            head_parameters=embeddings,
            cached=sum(cached),
            windowed=sum(windowed),
            window=config.window or math.inf,
            expert_parameters=one,
            expert_layers=sparse,
            experts=experts.num_experts if experts else 0,
            experts_per_token=experts.experts_per_token if experts else 0,
        )

    def weight_bytes(self, dtype: str, tokens: int) -> float:
        """Returns the bytes of weights that a call of so many tokens reads; experts as random
        routing picks them.
        """
        missed = (1 - self.experts_per_token / self.experts) ** tokens if self.experts else 1.0
        picked = self.expert_layers * self.experts * (1 - missed) * self.expert_parameters
        return (self.parameters + picked) * BYTES[dtype] + self.head_parameters * max(
            BYTES[dtype], BYTES["bfloat16"]
        )

    def cache_bytes(self, dtype: str, slots: int) -> int:
        """Returns the bytes of a sequence's caches; layers with a window have all slots too."""
        return slots * (self.cached + self.windowed) * BYTES[dtype]

    def call(
        self,
        chip: Chip,
        chips: Sequence[int],
        *,
        rows: int,
        context: float,
        tokens: int = 1,
        weights: str = "bfloat16",
        cache: str = "bfloat16",
        sequences: int | None = None,
    ) -> Work:
        """Returns the work of a call on one chip of a replica; a compiled program moves a little
        more.

        Args:
          rows: sequences of the replica.
          context: slots of the caches that are read.
          tokens: of each sequence.
          sequences: whose attention one chip computes; None: all of its replica.
        """
        count = math.prod(chips)
        of_row = context * self.cached + min(context, self.window) * self.windowed
        read = self.weight_bytes(weights, rows * tokens) + rows * of_row * BYTES[cache]
        used = self.parameters + self.head_parameters
        used += self.expert_layers * self.experts_per_token * self.expert_parameters
        one = self.collective(chip, chips, rows * tokens)
        # And for embedding and logits.
        times = self.collectives_per_layer * self.layers + 2 if count > 1 else 0
        return Work(
            streaming_ms=read / count / chip.hbm_bytes_per_second * 1e3,
            cycles_ms=2 * used * rows * tokens / count / chip.flops_per_second * 1e3,
            collectives=times,
            collective_hops=times * one.collective_hops,
            wire_ms=times * one.wire_ms,
            layer_sequences=self.layers * (rows if sequences is None else sequences),
        )

    def collective(self, chip: Chip, chips: Sequence[int], rows: int) -> Work:
        """Returns the work of one all-reduce of activations, which scatters sums and
        gathers them.
        """
        carried = 2 * rows * self.width * BYTES["bfloat16"]
        return Work(
            streaming_ms=0.0,
            collectives=1,
            collective_hops=hops(chips),
            wire_ms=wire_ms(carried, chips, chip.link_bytes_per_second),
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Roofline(Costs):
    """A lower bound from sizes and rates: a call takes the longer of streaming and arithmetic.

    Weights are read once for all sequences and all their tokens, the cache of each sequence once
    (Pope et al., arXiv 2211.05102), of layers with a window its slots alone, and the experts that
    the tokens are expected to choose.
    """

    target: TransformerConfig
    draft: TransformerConfig
    chip: str
    devices: int = 1
    default_context: int = 1024

    def tree_ms(self, depth: int, rows: int, batch: int = 1, context: int | None = None) -> float:
        context = self.default_context if context is None else context
        level = math.ceil((rows - 1) / max(depth, 1))  # nodes of a level, on average
        drafted = depth * self.call_ms(self.draft, level, batch, context)
        return self.call_ms(self.target, rows, batch, context) + drafted

    def call_ms(self, model: TransformerConfig, tokens: int, batch: int, context: int) -> float:
        """Returns the milliseconds of one call with ``tokens`` tokens in each of ``batch``
        sequences.
        """
        work = Shape.of(model).call(
            CHIPS[self.chip],
            (self.devices,),
            rows=batch,
            context=context,
            tokens=tokens,
            weights=model.weight_dtype or model.dtype,
            cache=model.cache_dtype or model.dtype,
        )
        return max(work.streaming_ms, work.cycles_ms)

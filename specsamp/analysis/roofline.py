"""What a round costs at least, from the sizes of both models and a chip's rates."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True, kw_only=True)
class Model:
    """What a call of a model reads and computes."""

    weight_bytes: float  # that a call streams
    parameters: float  # two operations for each, per token
    kv_bytes_per_token: float = 0.0  # of the cache, per row


@dataclasses.dataclass(frozen=True, kw_only=True)
class Roofline:
    """A call takes the longer of streaming and arithmetic, and a constant.

    ``max((W + B S kv) / (n bandwidth), 2 N B T / (n flops)) + call_ms``: weights are read once for all rows and
    all T tokens of a row, every row's cache of S slots once (the model of Pope et al., arXiv 2211.05102).
    """

    target: Model
    draft: Model
    bytes_per_second: float  # of one device
    flops_per_second: float
    devices: int = 1
    call_ms: float = 0.0  # collectives and dispatch, per call
    default_context: int = 1024
    error: float = 0.0

    def round_ms(self, draft_length: int, batch: int = 1, context: int | None = None) -> float:
        context = self.default_context if context is None else context
        scored = self.call(self.target, draft_length + 1, batch, context)
        return scored + draft_length * self.call(self.draft, 1, batch, context)

    def call(self, model: Model, tokens: int, batch: int, context: int) -> float:
        """Milliseconds of one call with ``tokens`` tokens in each row."""
        streamed = (model.weight_bytes + batch * context * model.kv_bytes_per_token) / self.bytes_per_second
        computed = 2 * model.parameters * batch * tokens / self.flops_per_second
        return max(streamed, computed) / self.devices * 1e3 + self.call_ms

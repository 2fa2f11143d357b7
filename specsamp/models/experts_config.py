"""Shapes of feed-forward parts made of experts, and how many of them a call is expected to read."""

from __future__ import annotations

import dataclasses
import functools
import math

import numpy as np

from specsamp import validate


@dataclasses.dataclass(frozen=True, kw_only=True)
class ExpertsConfig:
    """Describes layers whose feed-forward part is a choice of experts for each token (Shazeer et al., arXiv 1701.06538)."""

    num_experts: int  # E, of a layer
    experts_per_token: int  # k
    width: int  # of each expert
    normalised: bool = True  # the weights of the chosen experts sum to one
    dense_layers: tuple[int, ...] = ()  # layers with the usual feed-forward part

    def __post_init__(self):
        object.__setattr__(self, "dense_layers", tuple(self.dense_layers))
        for name in ("num_experts", "experts_per_token", "width"):
            value = getattr(self, name)
            if not (isinstance(value, int) and value >= 1):
                raise ValueError(f"{name} of experts must be a positive integer; got {value!r}")
        if self.experts_per_token > self.num_experts:
            raise ValueError(f"a token cannot have {self.experts_per_token} experts of {self.num_experts}")
        validate.switch("normalised", self.normalised)
        if not all(isinstance(layer, int) and layer >= 0 for layer in self.dense_layers):
            raise ValueError(f"dense_layers must be numbers of layers; got {self.dense_layers!r}")

    def num_sparse_layers(self, num_layers: int) -> int:
        """Returns how many of a model's layers have experts."""
        return num_layers - sum(layer < num_layers for layer in set(self.dense_layers))

    def expected_touched(self, tokens: int) -> float:
        """Returns how many experts of a layer a call of so many tokens is expected to read.

        ``E (1 - (1 - k / E)^T)``, if tokens choose independently and all experts are equally popular (Huang et al., MoESD,
        arXiv 2505.19645). Independent tokens read fewer where some experts are more popular than others, since the sum
        of the chances that each is read is concave in their popularity; and so do neighbouring tokens, which are alike.
        """
        return self.expected_blocks(tokens, max(tokens, 1))

    def expected_blocks(self, tokens: int, block: int) -> float:
        """Returns the expected number of blocks of at most ``block`` tokens of one expert, under the same assumptions."""
        share, counts = self.experts_per_token / self.num_experts, np.arange(1, tokens + 1)
        if share == 1:
            return float(self.num_experts * math.ceil(tokens / block))
        # The logarithms of the chances that an expert has 0, 1, ... tokens, by the ratio of each to the one before.
        ratios = np.log((tokens + 1 - counts) / counts * share / (1 - share))
        chances = np.exp(tokens * math.log1p(-share) + np.concatenate([[0.0], np.cumsum(ratios)]))
        at_most = np.cumsum(chances)[0:tokens:block]  # beyond each of these counts it needs one block more
        return float(self.num_experts * np.sum(1 - at_most))

    def expected_slowest(self, tokens: int, block: int, devices: int) -> float:
        """Returns the expected blocks of the device that has most of them, where devices divide the experts evenly."""
        if devices == 1:
            return self.expected_blocks(tokens, block)
        return _slowest(self.num_experts, self.experts_per_token, tokens, block, devices)


@functools.cache  # for each layer anew
def _slowest(total: int, chosen: int, tokens: int, block: int, devices: int) -> float:
    """Simulates calls, 4000 of them unless they are long: the maximum of dependent counts has no short formula."""
    calls = min(max(20_000_000 // (tokens * total), 50), 4000)
    random, counts_CE = np.random.default_rng(0), np.zeros((calls, total), np.int64)
    for _ in range(tokens):
        experts_Ck = np.argsort(random.random((calls, total)), axis=1)[:, :chosen]
        counts_CE[np.arange(calls)[:, None], experts_Ck] += 1
    blocks_CE = -(-counts_CE // block)
    return float(blocks_CE.reshape(calls, devices, -1).sum(axis=2).max(axis=1).mean())

"""A table as a torch model, with what the loops of the field ask of one; imported by adapters alone."""

from __future__ import annotations

import types
from collections.abc import Callable

import numpy as np
import torch

from launch.studies.conformance.cases import Case

torch.set_grad_enabled(False)


class TokenTable(torch.nn.Module):
    """Logits by the last token, ``[B, T] -> [B, T, V]``; there is nothing to cache."""

    device, dtype = torch.device("cpu"), torch.float64

    def __init__(self, logits: np.ndarray, shift: int = 0):
        super().__init__()
        whole = np.full((len(logits) + shift,) * 2, -np.inf)
        whole[:shift, -1], whole[shift:, shift:] = 0, logits
        self.rows = torch.tensor(whole)
        self.config = types.SimpleNamespace(vocab_size=len(whole), max_position_embeddings=1000)

    def forward(self, input_ids: torch.Tensor, *_, **__) -> types.SimpleNamespace:
        return types.SimpleNamespace(logits=self.rows[input_ids.long()], past_key_values=None, hidden_states=None)


def tables(case: Case, shift: int = 0) -> tuple[TokenTable, TokenTable]:
    """Returns target and draft; with ``shift``, tokens begin at that number, and smaller ones have no probability."""
    return TokenTable(case.target, shift), TokenTable(case.draft, shift)


def tempered(case: Case) -> Callable[[torch.Tensor], torch.Tensor]:
    """Returns the softmax at the temperature of a case."""
    return lambda logits: (logits / case.temperature).softmax(-1)


def drawn(probabilities: Callable[[torch.Tensor], torch.Tensor], target: TokenTable) -> Callable[[int], list[int]]:
    """Returns plain sampling by multinomial: ``probabilities`` warps logits ``[1, V]``."""
    return lambda last: [torch.multinomial(probabilities(target.rows[last][None].clone()), 1).item()]

"""Trains a draft on the texts that it drafts, during decoding (online speculative decoding, arXiv
2310.07177).

    learner = DraftLearner(pair, TrainConfig(steps=1000, batch=8, learning_rate=1e-4))
    for completion in generate_many(pair, prompts, learner=learner): ...

Texts follow the target with any draft, so only speed changes, and the text of a seed: under
`CoupledRule` alone it is the same for every draft. Noise must not be used again: a draft that was
trained on a text depends on the noise of this text, which must not verify its proposals. Use a seed
once; a `Service` takes seeds of its own.
"""

import math
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from specsamp import validate
from specsamp.decoding.pair import Pair
from specsamp.models.transformer import TransformerLM
from specsamp.training.trainer import TrainConfig, check_finite, init_state, train_update
from specsamp.training.training_task import TrainModel


class DraftLearner:
    """Distils the draft model of a pair on whole texts, prompts included.

    Attributes:
      state: parameters and optimizer.
      losses: of all updates.
    """

    def __init__(self, pair: Pair, config: TrainConfig, length: int = 128):
        """Makes a learner that begins with the draft's parameters.

        Args:
          pair: has a draft model. Heads and early exits compute with the target's parameters, and
            are refused.
          config: of the optimizer; a batch of ``config.batch`` windows makes an update, up to
            ``config.steps`` of them.
          length: tokens that a window predicts. Texts are joined and cut into windows; the tokens
            after the last full batch are kept for the next text.

        Raises:
          ValueError: naming the value and the fix.
        """
        if pair.draft is None or pair.vocabulary is not None:
            others = {"a head": pair.head, "another tokenizer": pair.vocabulary}
            kind = next((name for name, part in others.items() if part is not None), "no draft")
            raise ValueError(
                f"a learner takes a draft model of the target's tokenizer; the pair has {kind}"
            )
        target, draft = (TransformerLM(model.config) for model in (pair.target, pair.draft))
        self._task = TrainModel(draft, target)
        self._config = config
        self._teacher = pair.target_params
        self._length = validate.integer("length", length, 1)
        self._tokens = np.zeros(0, np.int32)
        self.state = init_state(self._task, config, pair.draft_params)
        self.losses = []

    def __call__(self, tokens: Sequence[int]) -> Any | None:
        """Takes a text; returns new parameters of the draft if they have changed, else None.

        Raises:
          FloatingPointError: the loss or the gradient is no longer finite.
        """
        left = self._config.steps - len(self.losses)
        if not left:
            return None
        tokens = np.concatenate([self._tokens, np.asarray(tokens, np.int32)])
        shape = self._config.batch, self._length + 1
        count = min(len(tokens) // math.prod(shape), left)
        batches, self._tokens = np.split(tokens, [count * math.prod(shape)])
        for windows_BT in batches.reshape(count, *shape):
            self.state, numbers = train_update(
                self._task, self._config, self.state, self._teacher, windows_BT
            )
            numbers = {name: float(value) for name, value in numbers.items()}
            check_finite(len(self.losses) + 1, numbers, None)
            self.losses.append(numbers["loss"])
        # The next update takes the state's own memory.
        return jax.tree.map(jax.numpy.copy, self.state.params) if count else None

"""Text that the target wrote, to distil a draft where it will be used (DistillSpec, arXiv 2310.08461)."""

from __future__ import annotations

import numpy as np

from specsamp import validate
from specsamp.decoding.generate import generate
from specsamp.decoding.pair import Pair
from specsamp.sampling.warp import Warp


def complete_windows(
    pair: Pair,
    rows: np.ndarray,
    *,
    prompt_length: int,
    sampling: Warp,
    seed: int = 0,
    batch: int = 64,
    first_id: int = 0,
) -> np.ndarray:
    """Keeps the first ``prompt_length`` tokens of each row and lets the target write the rest.

    Args:
      pair: its target writes.
      rows: ``[rows, T + 1]`` tokens.
      prompt_length: tokens that are kept, in [1, T].
      sampling: the target's warp, with numbers for all rows or for each row of a batch.
      seed: of the noise, which depends on the seed and the id of a row alone.
      batch: rows written at a time.
      first_id: the id of the first row; ids increase by 1.

    Returns:
      ``[rows, T + 1]`` int32. A row goes on after an end of text, with the next text.

    Raises:
      ValueError: no token is kept, or none is left to write.
    """
    validate.integer("prompt_length", prompt_length, 1, limit=rows.shape[1])
    written = []
    for start in range(0, len(rows), batch):
        prompts = rows[start : start + batch, :prompt_length]
        padded = np.resize(prompts, (batch, prompt_length))  # one shape, one program
        completions = generate(
            pair,
            padded.tolist(),
            rows.shape[1] - prompt_length,
            sampling=sampling,
            draft_length=0,
            stop=(),
            seed=seed,
            prompt_ids=[first_id + start + i for i in range(batch)],
        )
        written += [[*prompt, *completion.tokens] for prompt, completion in zip(prompts, completions)]
    return np.array(written, np.int32)

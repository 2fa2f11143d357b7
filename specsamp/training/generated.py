"""Text that the target wrote, to distil a draft where it will be used (DistillSpec, arXiv
2310.08461).
"""

from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from etils import epath

from specsamp import validate
from specsamp.decoding.generate import generate
from specsamp.decoding.pair import Pair
from specsamp.jax_names import multihost_utils
from specsamp.mesh import distributed
from specsamp.sampling.warp import Warp
from specsamp.training.run_folder import read_array, write_array


def kept_windows(
    folder: epath.Path,
    pair: Pair,
    rows: np.ndarray,
    *,
    batch: int,
    prompt_length: int,
    sampling: Warp,
    seed: int = 0,
    report: Callable[[int], Any] = lambda done: None,
) -> np.ndarray:
    """Keeps the first ``prompt_length`` tokens of each row and samples the later ones from the
    target.

    Each batch is kept in a file, with which a killed run resumes. Processes take turns with the
    batches, or write each together if none has the whole target.

    Args:
      folder: of the files.
      pair: its target writes.
      rows: ``[rows, T + 1]`` tokens.
      batch: rows written at a time.
      prompt_length: tokens that are kept, in [1, T].
      sampling: the target's warp, with numbers for all rows or for each row of a batch.
      seed: of the noise, which depends on the seed and a row's number alone.
      report: called with the number of written rows.

    Returns:
      ``[rows, T + 1]`` int32. After an end of text, a row continues with another text.

    Raises:
      ValueError: no token is kept, or none is left to write.
    """
    validate.integer("prompt_length", prompt_length, 1, limit=rows.shape[1])
    paths = {first: folder / f"{first}.npy" for first in range(0, len(rows), batch)}
    missing = distributed.from_first(
        lambda: [first for first, path in paths.items() if not path.exists()]
    )
    for number, first in enumerate(missing):
        is_mine = number % jax.process_count() == jax.process_index()
        # A target on a mesh computes in all processes together.
        if is_mine or pair.shards.mesh is not None:
            prompts = rows[first : first + batch, :prompt_length]
            completions = generate(
                pair,
                np.resize(prompts, (batch, prompt_length)).tolist(),  # one shape, one program
                rows.shape[1] - prompt_length,
                sampling=sampling,
                draft_length=0,
                stop=(),
                seed=seed,
                prompt_ids=range(first, first + batch),
            )
            if is_mine:
                texts_BT = [[*prompt, *one.tokens] for prompt, one in zip(prompts, completions)]
                write_array(paths[first], np.array(texts_BT, np.int32))
        report(min(first + batch, len(rows)))
    if jax.process_count() > 1:
        multihost_utils.sync_global_devices("generated text")
    return np.concatenate([read_array(path) for path in paths.values()])

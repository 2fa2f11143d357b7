"""Teacher forcing: computes the target's logits of whole texts in one call, without an earlier
cache or a draft.

Logits that are computed in another way differ by rounding. So a token is *explained* if the target
would choose it for some logits within a tolerance of these. Two changes of the logits are tried.
Both raise the token's own logit by the tolerance. The first lowers all larger logits by it. The
second lowers the logit of the target's choice and raises all logits larger than that. This covers
the thresholds of a warp: rounding may put the token, or the target's choice, inside or outside a
nucleus.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from specsamp.decoding.data_shards import BY_ROWS, REPLICATED, DataShards
from specsamp.decoding.drafter import Drafter, positions_of
from specsamp.decoding.drafters import NoDrafter
from specsamp.decoding.engine import round_slots, to_host
from specsamp.decoding.pair import Pair
from specsamp.evaluation.audit.readers import Reader
from specsamp.models.interface import LanguageModel
from specsamp.pytrees import pytree
from specsamp.sampling.rng import RoundKeys, row_keys
from specsamp.sampling.warp import Warp, for_rows, log_probs

Array = jax.Array

TOGETHER = 8  # texts per call
WIDTH_MULTIPLE, COUNT_MULTIPLE = 64, 8  # so that few programs are compiled


@dataclasses.dataclass(frozen=True, kw_only=True)
class Text:
    """A prompt and the tokens that followed."""

    prompt: tuple[int, ...]
    tokens: tuple[int, ...]
    prompt_id: int = 0


@pytree
class Judgement:
    """Results of teacher forcing for each of the N tokens behind a prompt.

    Attributes:
      chosen_N: bool, the token is the target's choice.
      explained_N: bool, it is the target's choice for some logits within the tolerance.
      excusable_N: bool, the second highest score is within twice the tolerance of the highest.
      behind_N: float32, the distance of the token's score from the highest; inf where the token is
        excluded.
    """

    chosen_N: np.ndarray
    explained_N: np.ndarray
    excusable_N: np.ndarray
    behind_N: np.ndarray


def read_tokens(
    pair: Pair,
    texts: Sequence[Text],
    compute: Callable[..., Any],
    *,
    drafter: Drafter = NoDrafter(),
    reader: Reader | None = None,
) -> list[Any]:
    """Reads texts with the target, and returns the results of ``compute``: arrays ``[N, ...]`` for
    each text.

    Args:
      pair: its target reads.
      texts: prompts with the tokens that followed.
      compute: takes the texts of a batch, the tokens ``[B, N]``, and the target's logits of them,
        ``[B, N, V]``; returns arrays ``[B, N, ...]``.
      drafter: whose weights ``reader`` finds.
      reader: reads as well; its logits are the last argument of ``compute``.
    """
    count = -(-max(len(text.tokens) for text in texts) // COUNT_MULTIPLE) * COUNT_MULTIPLE
    longest = max(len(text.prompt) + len(text.tokens) for text in texts)
    width = -(-longest // WIDTH_MULTIPLE) * WIDTH_MULTIPLE
    readers = filter(None, (pair.target, pair.draft))
    width = max(longest, min(width, positions_of(*readers)))
    slots = round_slots(width)
    batch = -(-min(TOGETHER, len(texts)) // pair.shards.count) * pair.shards.count
    weights = pair.weights(drafter, slots)
    results = []
    models = [(pair.target, weights.target)] + (
        [(reader.model, reader.weights_of(weights))] if reader else []
    )
    for start in range(0, len(texts), batch):
        # Filled up with the last text.
        rows = [texts[min(i, len(texts) - 1)] for i in range(start, start + batch)]
        tokens_BT = np.zeros((batch, width), np.int32)
        tokens_BN = np.zeros((batch, count), np.int32)
        for row, text in enumerate(rows):
            tokens_BT[row, : len(text.prompt) + len(text.tokens)] = (*text.prompt, *text.tokens)
            tokens_BN[row, : len(text.tokens)] = text.tokens
        starts_B = np.array([len(text.prompt) for text in rows], np.int32)
        logits = [
            logits_from(model, pair.shards, params, tokens_BT, starts_B, slots=slots, count=count)
            for model, params in models
        ]
        found = to_host(compute(rows, tokens_BN, *logits))
        results += [
            jax.tree.map(lambda x: x[row, : len(text.tokens)], found)
            for row, text in enumerate(rows)
        ]
    return results[: len(texts)]


def next_logits(pair: Pair, texts: Sequence[Sequence[int]]) -> np.ndarray:
    """Returns the target's logits after each text, ``[len(texts), V]`` float32."""
    anything = [Text(prompt=tuple(text), tokens=(0,)) for text in texts]
    return np.concatenate(
        read_tokens(pair, anything, lambda rows, tokens_BN, logits_BNV: logits_BNV)
    )


def judge(
    pair: Pair,
    texts: Sequence[Text],
    warp: Warp,
    tolerance: float,
    *,
    noise_seed: int | None = None,
) -> list[Judgement]:
    """Compares every token with the target's choice: the token with the highest score.

    Args:
      pair: its target reads the texts.
      texts: prompts with the tokens that followed.
      warp: warp with one number for all texts; ``chain()`` for greedy texts.
      tolerance: largest rounding error of a logit.
      noise_seed: seed of texts of the coupled rule, whose score is the log-probability plus noise.
        None: the score is the log-probability.
    """

    def compare(rows, tokens_BN, logits_BNV):
        keys = None
        if noise_seed is not None:
            ids_B = jnp.int32([text.prompt_id for text in rows])
            starts_B = jnp.int32([len(text.prompt) for text in rows])
            keys = RoundKeys(
                rows_B=row_keys(noise_seed, ids_B, jnp.zeros_like(ids_B)), starts_B=starts_B
            )
        return _judge(logits_BNV, tokens_BN, for_rows(warp, len(rows)), keys, tolerance)

    return read_tokens(pair, texts, compare)


@functools.partial(jax.jit, static_argnames=("model", "shards", "slots", "count"))
def logits_from(
    model: LanguageModel,
    shards: DataShards,
    weights: Any,
    tokens_BT: Array,
    starts_B: Array,
    *,
    slots: int,
    count: int,
) -> Array:
    """Returns the logits of ``count`` tokens from ``starts_B`` on, ``[B, count, V]`` float32; stale
    beyond a text.
    """

    def read(weights, tokens_BT, starts_B):
        at_BN = jnp.minimum(
            starts_B[:, None] - 1 + jnp.arange(count)[None, :], tokens_BT.shape[1] - 1
        )
        start_B = jnp.zeros_like(starts_B)
        cache = model.init_cache(len(tokens_BT), slots)
        ends = model.with_lengths(start_B + tokens_BT.shape[1])
        output = model(weights, tokens_BT, start_B, cache, **ends)
        return jnp.take_along_axis(output.logits_BTV.astype(jnp.float32), at_BN[..., None], axis=1)

    return shards.map(read, (REPLICATED, BY_ROWS, BY_ROWS))(weights, tokens_BT, starts_B)


@jax.jit
def _judge(
    logits_BNV: Array, tokens_BN: Array, warp: Warp, keys: RoundKeys | None, tolerance: float
) -> Judgement:
    _, N, V = logits_BNV.shape
    noise_BNV = 0.0
    if keys is not None:
        draw = jax.vmap(lambda offset: keys.position_gumbels(offset, V), out_axes=1)
        noise_BNV = draw(jnp.arange(N))

    def scores(logits_BNV):
        return log_probs(warp, logits_BNV) + noise_BNV

    def is_token(tokens_BN):
        return jnp.arange(V)[None, None] == tokens_BN[..., None]

    def is_larger(tokens_BN):
        return logits_BNV > jnp.take_along_axis(logits_BNV, tokens_BN[..., None], axis=-1)

    scores_BNV = scores(logits_BNV)
    best_BN = jnp.argmax(scores_BNV, axis=-1)
    own_BN = jnp.take_along_axis(scores_BNV, tokens_BN[..., None], axis=-1)[..., 0]
    highest_BN = scores_BNV.max(-1)
    second_BN = jnp.where(is_token(best_BN), -jnp.inf, scores_BNV).max(-1)
    lower_larger_BNV = jnp.where(is_larger(tokens_BN), -tolerance, 0)
    exclude_best_BNV = jnp.where(
        is_token(best_BN), -tolerance, jnp.where(is_larger(best_BN), tolerance, 0)
    )
    explained_BN = best_BN == tokens_BN
    for shift_BNV in (lower_larger_BNV, exclude_best_BNV):
        favoured_BNV = logits_BNV + jnp.where(is_token(tokens_BN), tolerance, shift_BNV)
        explained_BN |= jnp.argmax(scores(favoured_BNV), axis=-1) == tokens_BN
    return Judgement(
        chosen_N=best_BN == tokens_BN,
        explained_N=explained_BN,
        excusable_N=highest_BN - second_BN <= 2 * tolerance,
        behind_N=highest_BN - own_BN,
    )

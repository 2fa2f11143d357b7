"""Measures how often a draft that was prepared while the target scored would be the right one (SSD, arXiv 2603.03251).

    python launch/study.py prepared --output=runs/python_prepared.json

A round ends with a number of accepted tokens and a token of the target. Prepared are 16 such outcomes: for each number the
draft's most probable tokens, how many of them by their mass in half of the rounds; hits are counted in the other half. The
draft may avoid the tokens that are prepared as corrections, so that the target's correction is more often one of them: their
probabilities are multiplied by ``avoid``. Gains are those on the published times of Chen et al., whose collectives show.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from launch.lib.study import Document, Published, Study
from specsamp import chain, generate, load_pair, temperature, top_p
from specsamp.analysis.report import Table
from specsamp.checkpoints.trained_pair import load_prompts
from specsamp.sampling.warp import log_probs

K, BRANCHES, TOKENS, CUTS, SAMPLES, ROOM, SAMPLING = 4, 16, 128, 4, 4, 256, chain(temperature(0.8), top_p(0.95))
SCORE_MS, DRAFT_MS = 22.8 - 4 * 1.8, 1.8  # of Chen et al., 16 TPU v4: a round of four steps less its drafts, and a step


def laws(model: Any, params: Any, ids_NT: np.ndarray, first_N: np.ndarray, count: int) -> np.ndarray:
    """Returns the distributions of ``count`` tokens of each text from ``first_N`` on, ``[N, count, V]``."""
    weights = model.fit_slots(model.prepare(params), ROOM)

    @jax.jit
    def call(ids_BT, first_B):
        batch = len(ids_BT)
        logits_BTV = model(weights, ids_BT, jnp.zeros(batch, jnp.int32), model.init_cache(batch, ROOM)).logits_BTV
        rows_BR = first_B[:, None] - 1 + jnp.arange(count)
        taken_BRV = jnp.take_along_axis(logits_BTV, rows_BR[:, :, None], axis=1)
        return jnp.exp(log_probs(SAMPLING, taken_BRV))

    return np.concatenate([call(ids_NT[i : i + 32], first_N[i : i + 32]) for i in range(0, len(ids_NT), 32)])


def rounds(pair: Any, ids_NT: np.ndarray, first_N: np.ndarray, fan_out: list[int], avoid: float) -> Any:
    """Returns for one round behind each text how many tokens were accepted, and the rank of the target's token."""
    random, N, q_NKV = np.random.default_rng(0), np.arange(len(ids_NT)), []
    ids_NT, orders = ids_NT.copy(), []
    for step in range(K + 1):
        q_NV = laws(pair.draft, pair.draft_params, ids_NT, first_N + step, 1)[:, 0].astype(np.float64)
        orders.append(np.argsort(np.argsort(-q_NV, axis=1, kind="stable"), axis=1))  # the rank of each token
        q_NV = q_NV * np.where(orders[-1] < fan_out[step] * (step < K), avoid, 1.0)
        q_NKV.append(q_NV / q_NV.sum(1, keepdims=True))
        ids_NT[N, first_N + step] = (np.cumsum(q_NKV[-1], 1) > random.random((len(N), 1))).argmax(1)
    p_NKV = laws(pair.target, pair.target_params, ids_NT, first_N, K + 1).astype(np.float64)
    x_NK = ids_NT[N[:, None], first_N[:, None] + np.arange(K)]
    ratio_NK = np.stack([p_NKV[N, i, x_NK[:, i]] / q_NKV[i][N, x_NK[:, i]] for i in range(K)], 1)
    accepted_N = np.cumprod(random.random(ratio_NK.shape) < ratio_NK, axis=1).sum(1)
    q_NV = np.stack(q_NKV, 1)[N, accepted_N] * (accepted_N < K)[:, None]
    rest_NV = np.maximum(p_NKV[N, accepted_N] - q_NV, 0)
    y_N = (np.cumsum(rest_NV / rest_NV.sum(1, keepdims=True), 1) > random.random((len(N), 1))).argmax(1)
    rank_N = np.stack(orders, 1)[N, accepted_N, y_N]
    refused_N = np.stack(orders, 1)[N, accepted_N, x_NK[N, np.minimum(accepted_N, K - 1)]]
    return accepted_N, rank_N - ((accepted_N < K) & (refused_N < rank_N))  # the refused token is no correction


@functools.cache
def contexts() -> tuple[Any, list[int]]:
    """Returns the pair with texts of the target, cut somewhere, and how many outcomes of each number are prepared."""
    pair, random, prompts = load_pair("python"), np.random.default_rng(1), load_prompts("python")
    ids_NT, first_N = [], []
    for done in generate(pair, prompts, TOKENS, sampling=SAMPLING, num_samples=SAMPLES):
        text = [*pair.tokenizer.encode(prompts[done.prompt_index]), *done.tokens]
        for cut in random.integers(len(text) - len(done.tokens) + 1, len(text), CUTS):
            ids_NT.append(np.pad(text[:cut], (0, ROOM - cut)))
            first_N.append(cut)
    given = pair, np.array(ids_NT, np.int32), np.array(first_N)
    accepted_N, rank_N = rounds(*given, [0] * (K + 1), 1.0)
    half, (n, r) = len(rank_N) // 2, np.divmod(np.arange((K + 1) * BRANCHES), BRANCHES)
    mass = [np.mean((accepted_N[:half] == a) & (rank_N[:half] == b)) for a, b in zip(n, r)]
    return given, np.bincount(n[np.argsort(mass)[::-1][:BRANCHES]], minlength=K + 1).tolist()


def measure(options: Any, key: dict, say: Callable[[str], None]) -> dict[str, Any]:
    """Returns tokens per round, the outcomes that were prepared and hits by number of accepted tokens."""
    given, fan_out = contexts()
    accepted_N, rank_N = rounds(*given, fan_out, key["avoid"])
    half = len(rank_N) // 2
    accepted_N, hit_N = accepted_N[half:], rank_N[half:] < np.array(fan_out)[accepted_N[half:]]
    by_count = [float(hit_N[accepted_N == count].mean()) for count in range(K + 1)]
    return {
        "fan_out": fan_out,
        "rounds": len(hit_N),
        "tokens_per_round": float(accepted_N.mean() + 1),
        "hits": float(hit_N.mean()),
        "hits_by_count": by_count,
    }


def table(document: Document) -> Table:
    """Returns a row for each factor: hits, and what they are worth where collectives show."""
    cells = [cell["key"] | cell["result"] for cell in document["cells"]]
    usual = cells[0]["tokens_per_round"] / (SCORE_MS + K * DRAFT_MS)
    rows = [
        {
            "avoid": str(cell["avoid"]),
            "tokens per round": f"{cell['tokens_per_round']:.2f}",
            "hits": f"{cell['hits']:.2f}",
        }
        | {"by accepted tokens": ", ".join(f"{x:.2f}" for x in cell["hits_by_count"])}
        | {"gain": f"{cell['tokens_per_round'] / (SCORE_MS + (1 - cell['hits']) * K * DRAFT_MS) / usual - 1:+.0%}"}
        for cell in cells
    ]
    return Table.of("Drafts that are prepared while the target scores, 16 outcomes", rows)


STUDY = Study(
    question="Would a draft that was prepared while the target scored be the right one?",
    cells=lambda options: [{"avoid": avoid} for avoid in (1.0, 0.7, 0.4)],
    measure=measure,
    tables={"prepared": Published(["python_prepared"], table)},
)

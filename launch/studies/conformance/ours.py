"""specsamp's rules, as the loop calls them: drafts are drawn, verified and corrected in the code that is compiled."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np

from launch.lib.rules import make_rule
from launch.studies.conformance.cases import Case
from launch.studies.conformance.systems import Emit
from specsamp import chain, temperature, top_k, top_p
from specsamp.evaluation.enumeration import interpret
from specsamp.sampling.rng import RoundKeys, row_keys
from specsamp.sampling.rules import Draft, TargetDistributions
from specsamp.sampling.warp import log_probs


def rounds(files: None, case: Case, *, rule: str, one_hot: bool = False, order: str = "tkp") -> tuple[Emit, Emit]:
    """Returns rounds of a rule with K drafted tokens, and with none; ``order`` is that of temperature, top-k and top-p."""
    verifier, batch = make_rule(rule), len(case.temperatures)
    heat = temperature(case.temperatures if batch > 1 else case.temperature)
    warps = {"t": heat, "k": top_k(case.top_k or 10), "p": top_p(case.top_p)}
    warp = chain(*(warps[letter] for letter in order))

    def round_(K: int, last_B: jax.Array) -> jax.Array:
        zeros_B = jnp.zeros(batch, jnp.int32)
        keys = RoundKeys(rows_B=row_keys(jnp.uint32(0), jnp.arange(batch), zeros_B), starts_B=zeros_B)
        tokens, rows = [last_B], []
        for i in range(K):
            rows.append(log_probs(warp, jnp.asarray(case.draft)[tokens[-1]]))
            drawn_B = jnp.argmax(rows[-1], -1) if one_hot else verifier.sample(rows[-1], keys, node=i, depth=i)
            tokens.append(drawn_B.astype(jnp.int32))
        lengths_B = jnp.minimum(K, jnp.asarray(case.lengths or [K] * batch, jnp.int32))
        proposal = Draft(
            tokens_BK=jnp.stack(tokens[1:], 1) if K else jnp.zeros((batch, 0), jnp.int32),
            num_drafted_B=lengths_B,
            log_probs_BRV=jnp.stack(rows, 1) if K and not one_hot else None,
        )
        logits_BTV = jnp.asarray(case.target)[jnp.stack(tokens, 1)]
        target = TargetDistributions(logits_BTV=logits_BTV, warp=warp, draft=proposal)
        return verifier.verify(proposal, target, keys).tokens_BT

    def emit(K: int) -> Emit:
        run = interpret(functools.partial(round_, K))

        def tokens(last: int) -> list[int]:
            with jax.enable_x64(True):
                return [token for token in np.asarray(run(jnp.full(batch, last, jnp.int32)))[case.row] if token >= 0]

        return tokens

    return emit(case.K), emit(0)

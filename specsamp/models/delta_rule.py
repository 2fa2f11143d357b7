"""The gated delta rule (Yang et al., arXiv 2412.06464) in chunks.

Its states do not depend on the split of a text into calls.

The state of a head is a matrix S ``[K, V]``. A token decays it, and corrects the value that it
returns for the token's key:

    S_t = exp(g_t) S_{t-1} + beta_t k_t (v_t - exp(g_t) S_{t-1}' k_t)',      out_t = S_t' q_t

Chunks are aligned at absolute multiples of `CHUNK`, in prompts and in decoding. States are kept
only between chunks, so a state is always the same function of the state and of the tokens of the
chunk before it. It does not depend on the calls that read the text, nor on rejected tokens. The
outputs within a chunk follow from the state before the chunk and the inputs since, by products of
matrices: nothing is computed token by token.
"""

import jax
import jax.numpy as jnp

Array = jax.Array

CHUNK = 32  # C, tokens


def mix_chunks(
    state_BNKV: Array,
    q_BNLK: Array,
    k_BNLK: Array,
    v_BNLV: Array,
    g_BNL: Array,
    beta_BNL: Array,
    num_kept_B: Array,
) -> tuple[Array, Array]:
    """Returns the outputs of L tokens, ``[B, N, L, V]``, and the state after ``num_kept_B`` chunks.

    All arrays are float32. An output depends on the tokens up to it alone, so tokens behind the end
    of a text may be any finite numbers.

    Args:
      state_BNKV: before the first token, whose position is a multiple of `CHUNK`.
      q_BNLK, k_BNLK: normalised, the queries also scaled; L is a multiple of `CHUNK`.
      g_BNL: logarithms of the decays, at most 0.
      beta_BNL: the shares of the corrections.
    """
    q, k, v, g, beta = (_split(x) for x in (q_BNLK, k_BNLK, v_BNLV, g_BNL, beta_BNL))
    decay = jnp.cumsum(g, axis=-1)
    between = decay[..., :, None] - decay[..., None, :]
    is_before = jnp.tri(CHUNK, dtype=bool)[None, None, None]
    between = jnp.exp(jnp.where(is_before, between, -jnp.inf))
    started = jnp.exp(decay)[..., None]
    to_end = jnp.exp(decay[..., -1:] - decay)[..., None]
    chunks = dict(
        solved=_invert(_product("cBNiK,cBNjK->cBNij", k * beta[..., None], k) * between),
        scores=_product("cBNiK,cBNjK->cBNij", q, k) * between,
        queries=q * started,
        keys=k * started,
        values=v,
        beta=beta[..., None],
        last_keys=k * to_end,
        whole=jnp.exp(decay[..., -1])[..., None, None],
    )

    def step(carry: tuple[Array, ...], chunk: dict[str, Array]) -> tuple[tuple, Array]:
        state, kept, index = carry
        known = _product("BNiK,BNKV->BNiV", chunk["keys"], state)
        missing = (chunk["values"] - known) * chunk["beta"]
        corrected = _product("BNij,BNjV->BNiV", chunk["solved"], missing)
        out = _product("BNiK,BNKV->BNiV", chunk["queries"], state)
        out = out + _product("BNij,BNjV->BNiV", chunk["scores"], corrected)
        added = _product("BNjK,BNjV->BNKV", chunk["last_keys"], corrected)
        state = state * chunk["whole"] + added
        kept = jnp.where((index < num_kept_B)[:, None, None, None], state, kept)
        return (state, kept, index + 1), out

    first = state_BNKV, state_BNKV, jnp.zeros_like(num_kept_B)
    (_, kept_BNKV, _), out_cBNCV = jax.lax.scan(step, first, chunks)
    return jnp.moveaxis(out_cBNCV, 0, 2).reshape(v_BNLV.shape), kept_BNKV


def _split(x_BNL: Array) -> Array:
    """Returns ``[chunks, B, N, C, ...]``."""
    batch, heads, length, *rest = x_BNL.shape
    return jnp.moveaxis(x_BNL.reshape(batch, heads, length // CHUNK, CHUNK, *rest), 2, 0)


def _invert(lower: Array) -> Array:
    """Returns the inverse of ``I + lower``; only the entries of ``lower`` below the diagonal count.

    Blocks on the diagonal are inverted in pairs, each twice the size of the last ones:

        [A 0; B D]^-1 = [A^-1 0; -D^-1 B A^-1 D^-1]

    A series of powers would cancel catastrophically where keys are alike.
    """
    rows, columns = jnp.arange(CHUNK)[:, None], jnp.arange(CHUNK)[None]
    inverse = jnp.broadcast_to(jnp.eye(CHUNK), lower.shape)
    size = 1
    while size < CHUNK:
        is_pair = (rows // size == columns // size + 1) & (rows // size % 2 == 1)
        joining = jnp.where(is_pair[None, None, None], lower, 0.0)
        joining = _product("...ij,...jk->...ik", inverse, joining)
        inverse = inverse - _product("...ij,...jk->...ik", joining, inverse)
        size *= 2
    return inverse


def _product(spec: str, x: Array, y: Array) -> Array:
    return jnp.einsum(spec, x, y, precision=jax.lax.Precision.HIGHEST)

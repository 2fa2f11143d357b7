"""A draft of one call has the model's distributions on text and masks. Texts: test_pairs.py; masks
in the cache: test_next_round.py.
"""

import jax
import jax.numpy as jnp
import numpy as np

from specsamp import ParallelDrafter, TokenRule, TransformerLM, chain
from specsamp.checkpoints.hugging_face import open_checkpoint, read_params
from specsamp.decoding.sampler import Sampler
from specsamp.decoding.state import Prefix, Weights
from specsamp.models.config import tiny
from specsamp.sampling.rng import RoundKeys, row_keys
from support import golden
from support.fakes import TableLM
from support.loop_distributions import TARGET, V
from support.refusals import refused_calls
from support.weights import drawn_params


def marginals(model, params, tokens_BS, length, K, mask):
    """Returns the log-probabilities of K drafted tokens after a text with an unread last token."""
    one = ParallelDrafter(model, K, mask_id=mask)
    batch = len(tokens_BS)
    weights = Weights(target=None, draft=model.prepare(params))
    lengths_B = jnp.full(batch, length)
    zeros_B = jnp.zeros(batch, jnp.int32)
    sample = Sampler(
        warp=chain(),
        rule=TokenRule(),
        keys=RoundKeys(rows_B=row_keys(0, zeros_B, zeros_B), starts_B=lengths_B),
    )
    slots = tokens_BS.shape[1]
    state = model(weights.draft, tokens_BS[:, : length - 1], zeros_B, one.init(batch, slots)).cache
    prefix = Prefix(tokens_BS=jnp.asarray(tokens_BS), lengths_B=lengths_B)
    return one.propose(weights, state, prefix, None, sample)[0].log_probs_BRV


def test_one_call_drafts_from_text_and_masks():
    """The text has fewer than K + 1 tokens, as after a short prompt."""
    length = 2
    model = TransformerLM(tiny(vocab_size=16, positions="rotary"))
    K = 4
    mask = 15
    params = drawn_params(model)
    tokens = jax.random.randint(jax.random.key(0), (1, 16), 0, 15)
    text = jnp.concatenate([tokens[:, :length], jnp.full((1, K - 1), mask)], axis=1)
    expected = jax.nn.log_softmax(model.forward(params, text).logits_BTV[:, length - 1 :])
    np.testing.assert_allclose(
        marginals(model, params, tokens, length, K, mask), expected, atol=1e-5
    )


def test_marginals_equal_transformers(tmp_path):
    """A Llama reads text and masks in one causal pass; tokens behind the text have no effect."""
    theirs, K = golden.read(golden.PARD), golden.MASKS + 1
    checkpoint = open_checkpoint(theirs.write_checkpoint(tmp_path), dtype="float32")
    model = TransformerLM(checkpoint.config)
    length = theirs.tokens_BT.shape[1] - golden.MASKS
    mask = theirs.config["pard_token"]
    text = np.where(np.arange(length + K) < length, np.pad(theirs.tokens_BT, ((0, 0), (0, 1))), 7)
    expected = jax.nn.log_softmax(theirs.logits_BTV[:, length - 1 :])
    found = marginals(model, read_params(checkpoint, model), text, length, K, mask)
    np.testing.assert_allclose(found, expected, atol=1e-4)
    other = marginals(model, read_params(checkpoint, model), text, length, K, mask - 1)
    assert np.abs(other - expected)[:, 1:].max() > 0.1, "the control: another mask token"


SMALL = TableLM(V, max_positions=5)
TOO_LONG = ParallelDrafter(SMALL, 3, mask_id=1)

test_refused_parallel_drafters = refused_calls(
    {
        "law must be one of": lambda: ParallelDrafter(SMALL, 2, mask_id=1, law="conditional"),
        "K = 3 reads 6 tokens per call, .* draft's 5 positions": lambda: TOO_LONG.check(
            SMALL, SMALL, TARGET
        ),
    }
)

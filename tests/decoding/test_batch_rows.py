"""Rows that enter a batch, runs that return early, stop tokens of a row."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

from specsamp import BlockRule, ModelDrafter
from specsamp.decoding.batch_rows import insert
from specsamp.decoding.state import Finish, Weights
from specsamp.sampling.warp import chain, temperature
from support import fakes
from support.fakes import TableLM, table_loop, texts
from support.loop_distributions import NEAR, TARGET, V

PROMPTS, BUDGET, SLOTS = [[1, 2], [0], [2, 2, 1]], 12, 24
LOOP = table_loop(BlockRule(), ModelDrafter(TableLM(V), 3))
WEIGHTS = Weights(target=TARGET, draft=NEAR)
SAMPLING = chain(temperature(0.9))


def prefill(ids, slots=SLOTS, loop=LOOP):
    """Returns the state after prefill of these prompts, each under its own id."""
    prompts = [PROMPTS[i] for i in ids]
    return fakes.prefill(
        loop, TARGET, NEAR, prompts, BUDGET, SAMPLING, prompt_ids=ids, padded_length=4, slots=slots
    )


def finished(state):
    return LOOP.run(WEIGHTS, state, 1000)


@pytest.fixture(scope="module")
def alone():
    """Returns the text of each prompt, decoded alone."""
    return [texts(finished(prefill([i])))[0] for i in range(3)]


@pytest.mark.parametrize("rounds", [0, 2])
def test_moved_row_keeps_its_text(alone, rounds):
    """A prompt with fewer slots enters a running batch; no text changes."""
    batch = LOOP.run(WEIGHTS, prefill([0, 1]), 2)
    newcomer = prefill([2], slots=20)
    if rounds:
        newcomer = LOOP.run(WEIGHTS, newcomer, rounds)
    mixed = insert(batch, newcomer, [0])
    assert texts(finished(mixed)) == [alone[2], alone[1]]


def test_the_request_of_a_caller_survives_donation():
    batch, request = prefill([0, 1]), prefill([2]).request
    after = insert(LOOP.run(WEIGHTS, batch, 1), prefill([2]), [1])
    assert int(after.request.limits_B[1]) == int(request.limits_B[0]) == 3 + BUDGET
    assert int(batch.request.limits_B[1]) == 1 + BUDGET, "not donated"


def test_a_run_returns_once_fewer_rows_are_running(alone):
    state = prefill([0, 1, 2])
    state = dataclasses.replace(
        state,
        request=dataclasses.replace(state.request, limits_B=jnp.array([4, 1 + BUDGET, 3 + BUDGET])),
    )
    state = LOOP.run(WEIGHTS, state, 1000, 3)
    assert state.running_B.tolist() == [False, True, True]
    state = LOOP.run(WEIGHTS, state, 1000, 2)
    assert np.asarray(state.running_B).sum() < 2
    assert texts(finished(state)) == [alone[0][:4], *alone[1:]]


def test_stop_tokens_of_each_row():
    """Of two rows with the same prompt, the one with a stop token ends there."""
    state = prefill([1, 1])
    stop = texts(finished(prefill([1])))[0][2]
    stops = jnp.full_like(state.request.stop_ids_BN, -1).at[1, 0].set(stop)
    done = finished(
        dataclasses.replace(state, request=dataclasses.replace(state.request, stop_ids_BN=stops))
    )
    assert done.finish_B.tolist() == [Finish.LENGTH, Finish.STOP]
    assert texts(done)[1] == texts(done)[0][: len(texts(done)[1])] and texts(done)[1][-1] == stop

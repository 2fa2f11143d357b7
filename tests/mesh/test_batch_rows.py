"""Rows that move between batches on a mesh: the texts of one device, and no cache that travels between devices."""

import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specsamp import generate, generate_many
from specsamp.decoding import batch_rows
from specsamp.decoding.drafter import Drafter
from specsamp.decoding.loop import Loop
from specsamp.decoding.pair import Pair
from specsamp.decoding.state import RequestBatch
from specsamp.mesh.layout import make_mesh
from specsamp.mesh.sharded import shard
from specsamp.models.config import tiny
from specsamp.models.transformer import TransformerLM
from specsamp.sampling.rejection import TokenRule
from specsamp.sampling.rules import Draft
from specsamp.sampling.warp import chain, temperature
from specsamp.serving.batch import to_device_memory, to_host_memory
from support.schedules import Restless
from support.weights import drawn_params

TARGET = TransformerLM(tiny(positions="rotary", num_layers=1))
ROWS, SLOTS, BUDGET = 8, 32, 12


@dataclasses.dataclass(frozen=True)
class Feature(Drafter):
    """Drafts the largest entry of the target's last known hidden state, which is its own state."""

    K: int = 2
    hidden_layers = (1,)

    def init(self, batch, slots):
        return jnp.zeros((batch, TARGET.width))

    def read(self, weights, state, tokens_BT, start_B, lengths_B, target_output, cache):
        at_B11 = jnp.clip(lengths_B - 2 - start_B, 0, tokens_BT.shape[1] - 1)[:, None, None]
        return jnp.take_along_axis(target_output.hidden[0], at_B11, axis=1)[:, 0], cache

    def propose(self, weights, state, prefix, cache, sample):
        token_B = jnp.argmax(state, axis=1).astype(jnp.int32)
        tokens_BK = jnp.stack([token_B] * self.K, axis=1)
        return Draft(tokens_BK=tokens_BK, num_drafted_B=jnp.full_like(token_B, self.K)), state, cache

    def commit(self, weights, state, prefix, draft, verdict, output, cache):
        last_B11 = verdict.num_accepted_B[:, None, None]
        return jnp.take_along_axis(output.hidden[0], last_B11, axis=1)[:, 0], cache


@pytest.fixture(scope="module")
def pair():
    return Pair(target=TARGET, target_params=drawn_params(TARGET))


def setting(pair):
    loop = Loop(target=pair.target, drafter=Feature(), rule=TokenRule(), shards=pair.shards)
    return loop, pair.weights(loop.drafter, SLOTS)


def prefill(loop, weights, first, rows=ROWS):
    ids = np.arange(first, first + rows)
    request = RequestBatch.create(sampling=chain(temperature(1.0)), limits=[3 + BUDGET] * rows, prompt_ids=ids)
    tokens_BP = jnp.asarray(np.stack([(ids * 7 + i) % 64 for i in range(4)], axis=1), jnp.int32)
    return loop.prefill(weights, request, tokens_BP, jnp.full((rows,), 3), slots=SLOTS)


@pytest.mark.parametrize("data, model", [(2, 2), pytest.param(1, 4, marks=pytest.mark.slow)])
def test_rows_that_are_refilled_on_a_mesh_have_the_tokens_of_one_device(pair, data, model):
    """Budgets differ, so that a shard has a free row while the other has none."""
    prompts, budgets = [[i, 3 * i, 7] for i in range(1, 10)], [3, 12, 5, 9, 1, 12, 7, 2, 11]
    call = dict(drafter=Feature(), sampling=chain(temperature(1.0)))
    alone = [row.tokens for row in generate(pair, prompts, budgets, **call)]
    mesh = make_mesh(data, model, devices=jax.devices()[: data * model])
    done = list(generate_many(shard(pair, mesh), prompts, budgets, rows=4, **call))
    assert [row.tokens for row in sorted(done, key=lambda row: row.prompt_index)] == alone
    if data == 1:
        return
    more = dict(schedule=Restless(), rounds_per_slice=2)  # rows that are put aside in host memory, and brought back
    work = generate_many(shard(pair, mesh), prompts, budgets, rows=4, **call, **more)
    assert [row.tokens for row in sorted(work, key=lambda row: row.prompt_index)] == alone
    assert work.usage.preempted > 4


@pytest.mark.parametrize("data, model", [(2, 2), pytest.param(1, 4, marks=pytest.mark.slow)])
def test_no_cache_travels_and_a_feature_stays_where_it_is(pair, data, model):
    loop, weights = setting(shard(pair, make_mesh(data, model, devices=jax.devices()[: data * model])))
    state = prefill(loop, weights, 0)
    before = state.drafter_state.sharding
    for _ in range(2):
        state = loop.run(weights, state, 1)
        assert state.drafter_state.sharding.is_equivalent_to(before, 2)
    at_N = jnp.asarray([1, 2])
    rows = batch_rows.extract(state, at_N, loop.shards)
    read = batch_rows._read.lower(state, at_N, loop.shards).compile().as_text()
    bare = [dataclasses.replace(each, request=None) for each in (state, rows)]
    write = batch_rows._write_donated.lower(*bare, at_N, loop.shards).compile().as_text()
    for text in (read, write):
        assert "dynamic-" in text and not re.search(r"= \S+ (all-gather|all-to-all|collective-permute)\(", text)
    aside = to_host_memory(dataclasses.replace(rows, request=None), loop.shards)
    back = to_device_memory(aside, loop.shards)
    for kept, old, new in zip(*map(jax.tree.leaves, (aside, dataclasses.replace(rows, request=None), back))):
        assert kept.sharding.memory_kind == "pinned_host" and new.sharding == old.sharding
        assert [piece.device for piece in kept.addressable_shards] == [piece.device for piece in old.addressable_shards]
        assert kept.sharding.devices_indices_map(kept.shape) == old.sharding.devices_indices_map(old.shape)
        np.testing.assert_array_equal(new, old)


@dataclasses.dataclass(frozen=True)
class Forgetful(Feature):
    """Begins with a state of another width than `read` returns."""

    def init(self, batch, slots):
        return {"feature": jnp.zeros((batch, 3))}


@pytest.mark.parametrize("on_mesh", [False, True])
def test_a_state_that_reading_changes_is_refused_in_one_line(pair, on_mesh):
    pair = shard(pair, make_mesh(2, 4)) if on_mesh else pair
    with pytest.raises(ValueError, match=r"Forgetful.read .* init: at state\['feature'\] init has float32\[") as error:
        generate(pair, [[1, 2, 3]], 4, drafter=Forgetful())
    assert "nothing" in str(error.value) and "\n" not in str(error.value)

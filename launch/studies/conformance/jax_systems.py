"""tpu-inference: its functions, as its runner calls them (runner/tpu_runner.py:2113)."""

from __future__ import annotations

import pathlib
import types

import jax
import jax.numpy as jnp
import numpy as np

from launch.studies.conformance.cases import Case
from launch.studies.conformance.systems import Emit, load_module
from specsamp.evaluation.enumeration import interpret


def tpu_inference(files: pathlib.Path, case: Case) -> tuple[Emit, Emit]:
    """Runs the rejection sampler on argmax drafts, and the sampler for the bonus token and as the plain one."""
    stubs = {
        "vllm__config__model": None,
        "vllm__v1__outputs": types.SimpleNamespace(LogprobsTensors=object),
        "tpu_inference": types.SimpleNamespace(envs=types.SimpleNamespace(SAMPLING_MICROBATCH_SIZE=0)),
        "tpu_inference__layers__common__binary_search": load_module(files / "layers/common/binary_search.py"),
        "tpu_inference__layers__common__sharding": types.SimpleNamespace(
            ShardingAxisName=types.SimpleNamespace(ATTN_DATA=None, MLP_TENSOR=None)
        ),
        "tpu_inference__layers__jax__sample__sampling_metadata": load_module(
            files / "layers/jax/sample/sampling_metadata.py",
            tpu_inference__runner__input_batch=None,
            tpu_inference__utils=None,
        ),
        "tpu_inference__models__common__compiler_options": types.SimpleNamespace(get_sampling_compiler_options=dict),
    }
    sampler = load_module(files / "layers/jax/sample/sampling.py", **stubs)
    verifier = load_module(files / "layers/jax/sample/rejection_sampler.py", **stubs)
    metadata = sampler.TPUSupportedSamplingMetadata(
        temperature=jnp.array([t or -1.0 for t in case.temperatures], jnp.float32),
        top_k=jnp.full(len(case.temperatures), case.top_k),
        top_p=jnp.full(len(case.temperatures), case.top_p, jnp.float32),
        do_sampling=True,
    )
    mesh = jax.make_mesh((1,), ("data",), (jax.sharding.AxisType.Auto,))
    target, draft = jnp.asarray(case.target, jnp.float32), jnp.argmax(jnp.asarray(case.draft), -1)
    lengths = np.array(case.lengths or [case.K] * len(case.temperatures))

    def sample(key: jax.Array, last_B: jax.Array) -> jax.Array:
        return sampler.sample(key, mesh, target[last_B], metadata)[0]

    @interpret
    def verify(last: jax.Array) -> jax.Array:
        bonus_key, rejection_key = jax.random.split(jax.random.key(0))
        rows = [[last] for _ in lengths]
        for row, length in zip(rows, lengths, strict=True):
            for _ in range(length):
                row.append(draft[row[-1]])
        scored = jnp.stack([token for row in rows for token in row[:-1]])
        drafted = jnp.stack([token for row in rows for token in row[1:]])
        probabilities = verifier._compute_probs(target[scored], jnp.asarray(lengths), metadata)
        bonus = sample(bonus_key, jnp.stack([row[-1] for row in rows]))
        return verifier.rejection_sample(drafted, jnp.asarray(lengths), None, probabilities, bonus, True, rejection_key)

    plain = interpret(lambda last: sample(jax.random.key(0), jnp.full(len(lengths), last)))
    starts = np.cumsum([0, *lengths])

    def emit(last: int) -> list[int]:
        tokens = np.asarray(verify(jnp.int32(last)))
        own = [*tokens[starts[case.row] : starts[case.row + 1]], tokens[starts[-1] + case.row]]
        return [token for token in own if token >= 0]

    return emit, lambda last: [int(plain(jnp.int32(last))[case.row])]

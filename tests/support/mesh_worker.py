"""One process of a job on CPU devices, as test_distributed.py starts it.

PYTHONPATH=.:tests python tests/support/mesh_worker.py SCENARIO FOLDER PORT --process_id=PROCESS
"""

import dataclasses
import os
import pathlib
import queue
import sys
import time

import jax
import numpy as np

from specsamp import (
    Method,
    ModelDrafter,
    Pair,
    SamplingRequest,
    ShortestFirst,
    TransformerLM,
    chain,
    generate,
    generate_many,
    stream,
    temperature,
    top_p,
)
from specsamp.checkpoints.hugging_face import open_checkpoint, read_params, write_converted
from specsamp.checkpoints.orbax import Checkpoints
from specsamp.checkpoints.safetensors_io import Tensor
from specsamp.mesh import distributed
from specsamp.mesh.layout import Layout, make_mesh
from specsamp.mesh.sharded import shard, shard_model
from specsamp.models.config import tiny
from specsamp.serving.service import Service
from support.checkpoint_shapes import CONFIG, random_params
from support.weights import drawn_params

TARGET = TransformerLM(tiny(num_heads=8, width=64, num_kv_heads=2, num_layers=1))
DRAFT = TransformerLM(tiny(num_heads=8, num_layers=1, positions="rotary"))
PUBLIC = dataclasses.replace(CONFIG, num_heads=8, num_kv_heads=8, head_size=8)
PROMPTS = [[1, 2, 3], [4, 5], [6], [7, 8, 9, 10], [3]]
CALL = {"max_new_tokens": 12, "sampling": chain(temperature(0.8), top_p(0.9)), "num_samples": 2}


def pair():
    params = [drawn_params(model, seed) for seed, model in enumerate((TARGET, DRAFT))]
    return Pair(target=TARGET, target_params=params[0], draft=DRAFT, draft_params=params[1])


def mesh(*sizes):
    """Makes a mesh of all eight devices, in which the devices of a process lie apart."""
    return make_mesh(*sizes, devices=[jax.devices()[3 * i % 8] for i in range(8)])


def tokens(completions):
    return [completion.tokens for completion in completions]


def decode(folder):
    """Decodes with one model over both processes, and with sequences split between them."""
    # Clocks differ; the chosen K and the repeats of a phase must not.
    assert distributed.gather_objects(1.0 + jax.process_index())[0] == 1.0
    results = {}
    results["one model over both"] = tokens(generate(shard(pair(), mesh(1, 8)), PROMPTS, **CALL))
    over_both = shard(pair(), mesh(2, 4), draft_model_parallelism=1)
    streamed = {}
    for chunk in stream(over_both, PROMPTS, rounds_per_chunk=2, **CALL):
        streamed.setdefault((chunk.prompt_index, chunk.sample_index), []).extend(chunk.tokens)
    results["rows over both, streamed"] = [streamed[key] for key in sorted(streamed)]
    # Hosts have disks of their own: the first host's log counts.
    log = folder / f"queue{jax.process_index()}.jsonl"
    for is_known in (False, True):
        work = generate_many(over_both, PROMPTS, rows=4, log=log, **CALL)
        done = {(row.prompt_index, row.sample_index): row.tokens for row in work}
        assert (work.usage.rounds == 0) == is_known and log.exists() == (jax.process_index() == 0)
    results["queue"] = [done[key] for key in sorted(done)]
    writer = generate_many(over_both, PROMPTS, rows=4, log=log, **CALL)
    try:  # the first process finds the log in use, and both end
        generate_many(over_both, PROMPTS, rows=4, log=log, **CALL)
    except ValueError as error:
        assert "is being written by another run" in str(error)
    else:
        raise AssertionError("a log had two writers")
    writer.close()
    results["service"] = serve(over_both)
    np.save(folder / f"decoded{jax.process_index()}.npy", results, allow_pickle=True)


def serve(over_both):
    """Serves requests of the first process; cancelled and failing ones end in both processes."""
    service = Service(
        over_both,
        Method(drafter=ModelDrafter(over_both.draft, 4), sampling=CALL["sampling"]),
        rows=4,
        order=ShortestFirst(aging=0),
    )
    service.start()
    texts = {}
    if jax.process_index() == 0:
        pieces = queue.SimpleQueue()
        fields = dict(sampling=CALL["sampling"], is_streamed=True)

        def fail(chunk):
            raise ConnectionError("gone")

        service.submit(SamplingRequest(prompts=[[5, 6]], **fields), fail)
        lone = queue.SimpleQueue()
        answer = service.submit(SamplingRequest(prompts=[[6, 5]], **fields), lone.put)
        lone.get(timeout=300)
        fields |= dict(prompts=PROMPTS, max_new_tokens=12, num_samples=2)
        service.submit(SamplingRequest(**fields), pieces.put)
        while sum(text[-1] is not None for text in texts.values()) < 10:
            chunk = pieces.get(timeout=300)
            answer.cancel()
            text = texts.setdefault((chunk.prompt_index, chunk.sample_index), [])
            text[-1:] = [*chunk.tokens, chunk.finish]
        while service.unfinished:
            time.sleep(0.01)
        service.close()
    service.join()
    assert service.failed is None and not any(service.batch.table.entries)
    assert service.batch.usage.preempted, "texts with the budget of the context gave up rows"
    rounds = distributed.gather_objects(service.batch.usage.rounds)
    # Cancelled requests had budgets of thousands of tokens.
    assert len({*rounds}) == 1 and rounds[0] < 200
    return [texts[key][:-1] for key in sorted(texts)]


def sharded_params(over):
    model = shard_model(TARGET, Layout.tensor_parallel(over))
    return model, jax.jit(model.init)(jax.random.key(5))


def save(folder):
    _, params = sharded_params(mesh(1, 8))
    checkpoints = Checkpoints(folder / "checkpoints")
    checkpoints.save(3, params=params, rest={"step": np.int32(3)})
    checkpoints.close()


def restore(folder):
    """Restores the checkpoint of `save`, of a different layout, straight into this layout."""
    model, expected = sharded_params(mesh(4, 2))
    shapes = jax.eval_shape(TARGET.init, jax.random.key(5))
    shapes = jax.tree.map(
        lambda x, at: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=at),
        shapes,
        model.param_shardings(shapes),
    )
    checkpoints = Checkpoints(folder / "checkpoints")
    params = checkpoints.restore(params=shapes)["params"]
    checkpoints.close()

    def same(a, b):
        return a.sharding.is_equivalent_to(b.sharding, a.ndim) and all(
            np.array_equal(x.data, y.data)
            for x, y in zip(a.addressable_shards, b.addressable_shards, strict=True)
        )

    assert all(jax.tree.leaves(jax.tree.map(same, params, expected)))
    (folder / f"restored{jax.process_index()}").touch()


def checkpoint(folder):
    """Reads a public checkpoint, half in each process, and again after both have converted it."""
    asked, read = [], Tensor.read
    Tensor.read = lambda self, index: asked.append(read(self, index)) or asked[-1]
    opened = open_checkpoint(folder / "public", dtype="float32")
    model = shard_model(TransformerLM(opened.config), Layout.tensor_parallel(mesh(1, 8)))
    params = read_params(opened, model)
    expected = random_params(PUBLIC)

    def same(ours, whole):
        return all(np.array_equal(part.data, whole[part.index]) for part in ours.addressable_shards)

    assert all(jax.tree.leaves(jax.tree.map(same, params, expected)))
    share = 1 / jax.process_count() + 0.02  # norms are on all devices
    assert sum(piece.size for piece in asked) < share * TransformerLM(PUBLIC).num_parameters
    write_converted(opened, params, folder / "converted")
    distributed.gather_objects("written")
    again = read_params(open_checkpoint(folder / "converted", dtype="float32"), model)
    assert all(jax.tree.leaves(jax.tree.map(same, again, expected)))
    (folder / f"read{jax.process_index()}").touch()


def die(folder, dying):
    """Ends one process silently; the second process continues."""
    if jax.process_index() == dying:
        os._exit(0)
    while True:
        distributed.gather_objects("alive")


def die_caught(folder):
    """Ends like `die`, but the survivor ends as in launch/lib/entry.py."""
    try:
        die(folder, 1)
    except jax.errors.JaxRuntimeError:
        distributed.end_now("a computation failed")


def work(folder):
    """Runs everything that ends well, in one job."""
    decode(folder)
    save(folder / "two")
    restore(folder / "one")
    checkpoint(folder)


SCENARIOS = {
    "work": work,
    "nothing": lambda folder: None,
    "die": lambda folder: die(folder, 1),
    "coordinator_dies": lambda folder: die(folder, 0),
    "die_caught": die_caught,
}

if __name__ == "__main__":
    scenario, folder, port, process = sys.argv[1:]
    index = int(process.removeprefix("--process_id="))
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 4)
    jax.config.update("jax_default_matmul_precision", "float32")
    jax.config.update("jax_enable_compilation_cache", False)
    jax.config.update("jax_disable_most_optimizations", True)  # much is compiled here, little runs
    if scenario == "other_code" and index == 1:
        distributed.code_version = lambda: "specsamp 0000"
    distributed.start(f"127.0.0.1:{port}", 2, index)
    SCENARIOS.get(scenario, SCENARIOS["nothing"])(pathlib.Path(folder))

"""Compiles the same work in several forms for 16 TPU v4 chips: why the loop is written as it is.

Each cell is one form; `launch/studies/compile_study.py --study=variants` writes them all. What they say (libtpu
0.0.42.1; `notebooks/results/compile_variants.json` has the figures):

- **Rows of a call.** With one row per device a product becomes a vector multiply-reduce: a step of the target
  takes 27 ms of cycles, with two rows 6, less than the 7.5 ms of streaming. So one-token calls carry two rows on a
  TPU (`decode_window`), and the autoregressive baseline is measured at the best of `STEP_WINDOWS`.
- **Layout of the heads.** Weights of attention are ``[heads, width, size]``: 2.7 times fewer cycles than
  ``[width, heads, size]``, for a quarter more traffic (both fit the chip in this small program). Side by side,
  ``[width, heads * size]``, costs the same, but a part of the heads is then no contiguous part of an axis that can
  be split where kv heads are few.
- **Writing rows into a cache.** One `dynamic_update_slice` per row into ``[rows, heads, slots, size]`` moves
  what attention reads. A `vmap` of it moves half as much again, a scatter or a one-hot select twice as much, in
  up to ten times the cycles.
- **Relative keys.** Scores with a reversed table, shifted once per row, cost 3.5 times what attention without
  positions costs; gathering the key of every pair twice that, gathers themselves not counted. (The table of one
  layer stays on chip here; in a model it is streamed.)
- **Logits.** Split over the vocabulary and then gathered whole: sampling holds no collective. Left split, the
  bisection of top-p waits 36 times for the other chips. Straight to whole is the same at batch 1; at batch 8
  the compiler gathers the embedding instead, 2.7 times the traffic. At batch 8 forty distributions on every chip are 3.1 ms
  of cycles and two copies of 5 MB. So chips share the rows: eight over sixteen chips, each on two, take 0.3 ms,
  if the vocabulary is first gathered to as many devices as rows go over. Straight from sixteen parts to eight rows
  the compiler gathers all of it on the way, 1.9 ms.
- **Collectives.** A round of the paper's pair waits for 234, one after another. Two per layer are what this layout
  needs. A draft on four of the chips has shorter rings, but streams four times as much on each: 2.2 to 3.5 ms a step,
  not 0.45 to 2.0 (`compile_shapes.json`, from all collectives hidden to all added); a copy on every chip waits for none
  and takes 8.3 to 9.9. Copies of the embedding would save five of the 234, for half a GB on each chip. Where
  collectives are added, fewer layers are the way: a draft of four layers of the same size steps in 0.46 to 1.7 ms.
  `FEWEST_COLLECTIVES` asks for all-reduces as they stand, and not for chains of permutes that
  overlap products. In this layout this compiler chooses none by itself, at 5 rows or at 64: the option is there for
  others.
- **Caches that pass through on-chip memory.** At every batch the compiler fetches most caches of a layer, writes the
  new rows there, attends, and copies them back whole: at batch 1, 158 of the 160 of a target step and 12 of the 16
  of a draft step. Copying back moves 331 and 19 MB a step and chip: in the target step 3.9% of the floor and nearly
  all that is moved beyond it. Forbidden to copy anything back (``xla_msa_max_outstanding_evictions=0``), a target
  step at batch 1 moves 1.01 instead of 1.05 times its floor and takes 8% more cycles, still fewer than streaming
  (counted once, not in a cell here). At batch 8 and 32 calls move 16 to 33% less and take 14 to 20% more cycles, as
  attention then waits for what was fetched before; the longer of the two grows. In the round at batch 1 the option
  takes a layer of the target from 1.04 to 1.00 of its floor, with 6% more cycles (counted once, in rounds of two and
  four layers by libtpu 0.0.50.1). It is not used: it would have to follow the batch. With ``--config.attention=kernel``
  caches are pinned to HBM, so that none is fetched whole or carried back, at any batch (`compile_kernels.json`).
- **Fused projections.** Query, key and value in one product: an eighth fewer cycles, more traffic, and streaming
  is what a step waits for.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from launch.studies.compile_cells import Cell
from specsamp.models.compiling import FEWEST_COLLECTIVES
from specsamp.models.config import chinchilla_70b, draft_4b
from specsamp.sampling.warp import for_rows, top_p
from specsamp.tpu.stack import Stack, facts
from specsamp.tpu.topology import described_mesh, parse
from specsamp.tpu.traffic import traffic_of

TOPOLOGY = "v4:2x2x4"
WIDTH, HEADS, SIZE, SLOTS, LAYERS, VOCABULARY = 8192, 64, 128, 2048, 4, 32_000
bf16 = jnp.bfloat16
NO_EVICTIONS = {"xla_msa_max_outstanding_evictions": "0"}  # nothing on chip is carried back to HBM


def variants() -> list[Cell]:
    """Asks for the traffic and the cycles of every form."""
    cells = []
    for rows in (1, 2, 4, 8):
        for name, config in (("target", chinchilla_70b()), ("draft", draft_4b())):

            def stack(config=config):
                return Stack(config, described_mesh(TOPOLOGY), TOPOLOGY)

            def call(s=stack, n=rows):
                return facts(s().call(n), TOPOLOGY)

            cells.append(_cell("rows of a call", f"{name}, {rows}", call))
    for form in LAYOUTS:
        cells.append(_cell("layout of heads", form, lambda f=form: _compiled(*_heads(f))))
    for batch in (1, 8):
        for form in WRITES:

            def answer(f=form, b=batch):
                return _compiled(*_writes(f, b))

            cells.append(_cell("row writes", f"{form}, batch {batch}", answer))
    for form in KEYS:
        cells.append(_cell("relative keys", form, lambda f=form: _compiled(*_keys(f))))
    for batch in (1, 8):
        for form in LOGITS if batch > 1 else list(LOGITS)[:3]:
            cells.append(_cell("logits", f"{form}, batch {batch}", lambda f=form, b=batch: _compiled(*_logits(f, b))))
    for form, options in (("as they stand", dict(FEWEST_COLLECTIVES)), ("by default", {})):
        for rows in (5, 64):
            name = f"{form}, {rows} rows"
            cells.append(_cell("collectives", name, lambda n=rows, o=options: _compiled(*_layers(n), options=o)))
    for batch in (8, 32):
        for tokens in (2, 5):
            for form, options in (("as the compiler likes", {}), ("never carried back", NO_EVICTIONS)):
                options = dict(FEWEST_COLLECTIVES) | options

                def answer(b=batch, n=tokens, o=options):
                    return _compiled(*_layers(n, b), options=o)

                cells.append(_cell("caches on chip", f"{form}, {tokens} tokens, batch {batch}", answer))
    for form in ("apart", "fused"):
        cells.append(_cell("projections", form, lambda f=form: _compiled(*_projections(f == "fused"))))
    return cells


def _cell(question: str, form: str, answer: Callable[[], dict[str, Any]]) -> Cell:
    return Cell({"question": question, "form": form}, answer)


def _compiled(function: Callable, arguments: tuple, donated: tuple[int, ...] = (), options: dict | None = None):
    options = dict(FEWEST_COLLECTIVES) if options is None else options
    compiled = jax.jit(function, donate_argnums=donated).lower(*arguments).compile(compiler_options=options)
    traffic, (chip, _) = traffic_of(compiled.as_text()), parse(TOPOLOGY)
    return {
        "hbm_bytes": traffic.bytes,
        "cycles": traffic.cycles,
        "collectives": dict(traffic.collectives),
        "copies": len(traffic.copies),
        "copied_bytes": sum(size for _, size in traffic.copies),
        "temporary_bytes": compiled.memory_analysis().temp_size_in_bytes,
        "streaming_ms": traffic.bytes / chip.hbm_bytes_per_second * 1e3,
        "cycles_ms": traffic.cycles / chip.clock_hz * 1e3,
    }


def _mesh() -> Mesh:
    return described_mesh(TOPOLOGY)


def _shape(
    mesh: Mesh, sizes: tuple[int, ...], *axes: str | tuple[str, ...] | None, dtype: Any = bf16
) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(sizes, dtype, sharding=NamedSharding(mesh, P(*axes)))


def _loop(step: Callable, carry: Any, *arguments: Any) -> Any:
    """Repeats a step in a loop whose bound is data, as decoding does."""
    return jax.lax.while_loop(
        lambda state: state[0] > 0, lambda state: (state[0] - 1, step(state[1], *arguments)), carry
    )


# Layout of the heads: two numbers of rows in one program.
LAYOUTS = {
    "heads, width, size": ((HEADS, WIDTH, SIZE), ("model",), "td,ndh->tnh"),
    "width, heads, size": ((WIDTH, HEADS, SIZE), (None, "model"), "td,dnh->tnh"),
    "width, heads times size": ((WIDTH, HEADS * SIZE), (None, "model"), "td,df->tf"),
}


def _heads(form: str) -> tuple:
    mesh, (sizes, axes, product) = _mesh(), LAYOUTS[form]
    into = [_shape(mesh, sizes, *axes) for _ in range(LAYERS)]
    out = [_shape(mesh, (HEADS * SIZE, WIDTH), "model") for _ in range(LAYERS)]

    def call(x_TD, into, out):
        for w, o in zip(into, out):
            heads = jnp.einsum(product, x_TD, w).reshape(x_TD.shape[0], -1)
            x_TD = x_TD + jnp.dot(jnp.tanh(heads), o)
        return x_TD

    def run(rounds, x_TD, into, out):
        def step(x, into, out):
            return call(x, into, out) + call(x[:2], into, out).sum(0)

        return _loop(step, (rounds, x_TD), into, out)

    return run, (_shape(mesh, (), dtype=jnp.int32), _shape(mesh, (5, WIDTH)), into, out)


def _attend(q_BTNH: Any, k_BNSH: Any, v_BNSH: Any, bias: Any = 0.0) -> Any:
    scores = jnp.einsum("btnh,bnsh->bnts", q_BTNH, k_BNSH, preferred_element_type=jnp.float32) + bias
    return jnp.einsum("bnts,bnsh->btnh", jax.nn.softmax(scores).astype(bf16), v_BNSH)


def _unrolled(cache_BNSH, new_BNTH, start_B):
    for row in range(cache_BNSH.shape[0]):
        place = (row, 0, start_B[row], 0)
        cache_BNSH = jax.lax.dynamic_update_slice(cache_BNSH, new_BNTH[row : row + 1], place)
    return cache_BNSH


def _vmapped(cache_BNSH, new_BNTH, start_B):
    def write(cache, new, start):
        return jax.lax.dynamic_update_slice(cache, new, (0, start, 0))

    return jax.vmap(write)(cache_BNSH, new_BNTH, start_B)


def _scattered(cache_BNSH, new_BNTH, start_B):
    B, _, T, _ = new_BNTH.shape
    slots_BT = start_B[:, None] + jnp.arange(T)
    return cache_BNSH.at[jnp.arange(B)[:, None], :, slots_BT].set(new_BNTH.swapaxes(1, 2))


def _selected(cache_BNSH, new_BNTH, start_B):
    places_BTS = jax.nn.one_hot(start_B[:, None] + jnp.arange(new_BNTH.shape[2]), cache_BNSH.shape[2], dtype=bf16)
    written_BS = places_BTS.sum(1)[:, None, :, None]
    return cache_BNSH * (1 - written_BS) + jnp.einsum("bts,bnth->bnsh", places_BTS, new_BNTH)


WRITES = {"unrolled updates": _unrolled, "vmap of the update": _vmapped, "scatter": _scattered, "one-hot": _selected}


def _writes(form: str, batch: int) -> tuple:
    mesh, write = _mesh(), WRITES[form]
    cache = _shape(mesh, (batch, HEADS, SLOTS, SIZE), None, "model")
    new = _shape(mesh, (batch, 5, HEADS, SIZE), None, None, "model")

    def run(rounds, caches, new_BTNH, start_B):
        def step(state, start_B):
            (keys, values), x = state
            keys, values = (write(cache, x.swapaxes(1, 2), start_B) for cache in (keys, values))
            return (keys, values), _attend(x, keys, values)

        return _loop(step, (rounds, (caches, new_BTNH)), start_B)

    start = _shape(mesh, (batch,), dtype=jnp.int32)
    return run, (_shape(mesh, (), dtype=jnp.int32), (cache, cache), new, start), (1,)


KEYS = ("none", "a slice of a reversed table", "gathered")


def _keys(form: str) -> tuple:
    mesh = _mesh()
    cache = _shape(mesh, (1, HEADS, SLOTS, SIZE), None, "model")
    table = _shape(mesh, (HEADS, SLOTS, SIZE), "model")
    query = _shape(mesh, (1, 5, HEADS, SIZE), None, None, "model")

    def bias(x_BTNH, table_NSH, start_B):
        if form == KEYS[0]:
            return 0.0
        padded = jnp.pad(table_NSH, ((0, 0), (SLOTS, SLOTS), (0, 0)))
        rows = []
        for t in range(5):
            if form == KEYS[1]:
                keys = jax.lax.dynamic_slice_in_dim(padded, SLOTS - start_B[0] - t, SLOTS, 1)
            else:
                keys = table_NSH[:, jnp.clip(start_B[0] + t - jnp.arange(SLOTS), 0, SLOTS - 1)]
            rows.append(jnp.einsum("nh,nsh->ns", x_BTNH[0, t], keys, preferred_element_type=jnp.float32))
        return jnp.stack(rows, 1)[None]

    def run(rounds, x, cache, table, start_B):
        def step(x, cache, table, start_B):
            return _attend(x, cache, cache, bias(x, table, start_B))

        return _loop(step, (rounds, x), cache, table, start_B)

    return run, (_shape(mesh, (), dtype=jnp.int32), query, cache, table, _shape(mesh, (1,), dtype=jnp.int32))


# Eight rows: the model axis is "replica" x "model", two times eight devices.
LOGITS = {
    "split, then whole": ("split", "whole"),
    "straight to whole": ("whole",),
    "left split": ("split",),
    "split, then by rows": ("split", "by rows"),
    "split, over fewer, by rows": ("split", "over fewer", "by rows"),
}


def _logits(form: str, batch: int) -> tuple:
    mesh = described_mesh(TOPOLOGY, rows=batch)
    all_devices = tuple(axis for axis in ("model", "replica") if axis in mesh.shape)
    places = {
        "split": P(None, None, all_devices),
        "whole": P(),
        "over fewer": P(None, None, "model"),
        "by rows": P("model"),
    }

    def run(rounds, x_BTD, embedding_VD):
        def step(x_BTD, embedding_VD):
            logits = jnp.einsum("btd,vd->btv", x_BTD, embedding_VD, preferred_element_type=jnp.float32)
            for place in LOGITS[form]:
                logits = jax.lax.with_sharding_constraint(logits, NamedSharding(mesh, places[place]))
            kept = for_rows(top_p(0.8), batch)(logits)
            return x_BTD + embedding_VD[jnp.argmax(kept, -1)]

        return _loop(step, (rounds, x_BTD), embedding_VD)

    embedding = _shape(mesh, (VOCABULARY, WIDTH), all_devices)
    return run, (_shape(mesh, (), dtype=jnp.int32), _shape(mesh, (batch, 5, WIDTH)), embedding)


def _layers(tokens: int, batch: int = 1) -> tuple:
    """Builds a call of the target itself, of `LAYERS` layers."""
    programs = Stack(chinchilla_70b(), described_mesh(TOPOLOGY, rows=batch), TOPOLOGY, batch).programs(LAYERS)
    target = programs.target
    tokens, start = (_shape(programs.mesh, sizes, dtype=jnp.int32) for sizes in ((batch, tokens), (batch,)))

    def run(weights, tokens_BT, start_B, cache):
        output = target(weights, tokens_BT, start_B, cache)
        return output.logits_BTV, output.cache

    return run, (programs.weights(target), tokens, start, programs.cache(target)), (3,)


def _projections(fused: bool) -> tuple:
    mesh = _mesh()
    count = 3
    if fused:
        into = [_shape(mesh, (HEADS, WIDTH, count * SIZE), "model") for _ in range(LAYERS)]
    else:
        into = [[_shape(mesh, (HEADS, WIDTH, SIZE), "model") for _ in range(count)] for _ in range(LAYERS)]
    out = [_shape(mesh, (HEADS, SIZE, WIDTH), "model") for _ in range(LAYERS)]

    def project(x, w):
        return jnp.einsum("td,ndh->tnh", x, w)

    def run(x_TD, into, out):
        for w, o in zip(into, out):
            parts = jnp.split(project(x_TD, w), count, -1) if fused else [project(x_TD, part) for part in w]
            heads = parts[0] * jax.nn.sigmoid(parts[1]) + parts[2]
            x_TD = x_TD + jnp.einsum("tnh,nhd->td", heads, o)
        return x_TD

    return run, (_shape(mesh, (5, WIDTH)), into, out)

"""Ahead-of-time compilation of a pair for a described slice: what fits, what a round moves, what it waits for.

    report = compile_report(target, draft, mesh=described_mesh("v4:2x2x4"), topology="v4:2x2x4", ...)

Five programs are compiled: one step of the draft, one of the target (the autoregressive baseline, at the
window that a TPU likes), the scoring of K+1 tokens, the prefill, and the whole loop of generation. For each:
bytes through HBM (see `specsamp.mesh.hlo`) against the floor, collectives, large copies, transfers to the host,
cycles. The floor of a call is its weights, its table of relative keys and all slots of its cache, each read
once; what a call does beyond is overhead.

Everything here is a **compiler estimate**: nothing ran. Collectives have no estimate at all and are
listed at several latencies.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import re
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from specsamp.decoding.drafters import ModelDrafter, NoDrafter
from specsamp.decoding.loop import Loop
from specsamp.decoding.types import Request, Rule, Weights
from specsamp.mesh import hlo
from specsamp.mesh.described import Chip, is_out_of_memory, parse
from specsamp.mesh.layout import DATA
from specsamp.mesh.on_mesh import DataShares, OnMesh
from specsamp.models.compiling import FEWEST_COLLECTIVES
from specsamp.sampling.rng import row_keys
from specsamp.sampling.warp import Warp, for_rows

WINDOW = 2  # tokens of a one-token call on a TPU: with one row, the matrix unit is not used at all
LATENCIES_US = (5, 10, 20, 43)  # per collective; 43 would explain the 14.1 ms of Chen et al. alone
PREFILL = 128  # tokens


@dataclasses.dataclass(frozen=True, kw_only=True)
class Memory:
    """Bytes of HBM on each device."""

    arguments: int  # weights, tables, state
    temporaries: int
    outputs: int  # that share no memory with arguments
    capacity: int

    @property
    def total(self) -> int:
        return self.arguments + self.temporaries + self.outputs


@dataclasses.dataclass(frozen=True, kw_only=True)
class Program:
    """One compiled program, or why it does not fit; traffic per device, per call (of the loop: per round)."""

    name: str
    tokens: int  # fed per row and call
    floor_bytes: float
    live_floor_bytes: float  # the same with only the slots of half a full cache
    memory: Memory | None
    out_of_memory: str | None  # the compiler's words: how much is missing, and the largest contributors
    hbm_bytes: float | None = None
    cycles: float | None = None
    collectives: dict[str, int] | None = None
    collective_bytes: dict[str, float] | None = None
    copies: tuple[tuple[str, float], ...] = ()
    host_transfers: int = 0

    @property
    def over_floor(self) -> float | None:
        return None if self.hbm_bytes is None else self.hbm_bytes / self.floor_bytes

    def milliseconds(self, chip: Chip, latency_us: float) -> float:
        """The longer of streaming and computing, and the collectives one after another."""
        busy = max(self.hbm_bytes * chip.devices / chip.hbm_bytes_per_second, self.cycles / chip.clock_hz)
        return busy * 1e3 + sum(self.collectives.values()) * latency_us / 1e3


@dataclasses.dataclass(frozen=True, kw_only=True)
class Report:
    """Of one pair, batch and slice."""

    topology: str
    mesh: dict[str, int]
    batch: int
    slots: int
    draft_length: int
    rule: str
    programs: tuple[Program, ...]

    def __getitem__(self, name: str) -> Program:
        return next(program for program in self.programs if program.name == name)

    def ms_per_token(self, emitted_per_round: float, latency_us: float) -> tuple[float, float]:
        """Autoregressive and speculative."""
        chip, _ = parse(self.topology)
        alone = self["target step"].milliseconds(chip, latency_us)
        return alone, self["round"].milliseconds(chip, latency_us) / emitted_per_round


def compile_report(
    target: OnMesh,
    draft: OnMesh,
    *,
    mesh: Mesh,
    topology: str,
    draft_length: int,
    rule: Rule,
    sampling: Warp,
    batch: int = 1,
    slots: int = 2048,
    programs: Sequence[str] = ("draft step", "target step", "score", "prefill", "round"),
    progress: Callable[[str], None] = lambda text: None,
) -> Report:
    """Compiles and measures.

    Args:
      target, draft: on ``mesh``, from `on_mesh`.
      mesh: from `described_mesh(topology)`.
      draft_length: K.
      batch: rows over all shares.
      slots: of the caches.
      programs: which of the five.
      progress: is told what is being compiled.

    Raises:
      ValueError: a model does not divide over the mesh, or the batch over its shares.
    """
    shares = DataShares(mesh)
    if batch % shares.ways:
        raise ValueError(f"batch {batch} does not divide over {shares.ways} shares of the data axis")
    shapes = _Shapes(target, draft, mesh, sampling, batch, slots)
    chip, _ = parse(topology)
    capacity = chip.hbm_bytes // chip.devices
    weights = {"target": shapes.weights(target), "draft": shapes.weights(draft)}
    loop = Loop(
        target=target, drafter=ModelDrafter(draft, draft_length, WINDOW), rule=rule, window=WINDOW, shares=shares
    )
    models = {"target": target, "draft": draft}
    floors = {side: functools.partial(shapes.floor, model, weights[side]) for side, model in models.items()}
    made = {
        "draft step": (WINDOW, floors["draft"], lambda: shapes.call(draft, weights["draft"], WINDOW)),
        "target step": (WINDOW, floors["target"], lambda: shapes.call(target, weights["target"], WINDOW)),
        "score": (draft_length + 1, floors["target"], lambda: shapes.call(target, weights["target"], draft_length + 1)),
        "prefill": (PREFILL, floors["target"], lambda: shapes.call(target, weights["target"], PREFILL)),
        "round": (
            draft_length + 1,
            lambda live=1.0: floors["target"](live) + draft_length * floors["draft"](live),
            lambda: shapes.round(loop, Weights(**weights)),
        ),
    }
    results = []
    for name in programs:
        progress(name)
        tokens, floor, lowered = made[name]
        results.append(_compile(name, tokens, floor(), floor(0.5), lowered, capacity))
    return Report(
        topology=topology, mesh=dict(mesh.shape), batch=batch, slots=slots, draft_length=draft_length,
        rule=type(rule).__name__, programs=tuple(results),
    )  # fmt: skip


def bytes_of_state(target: OnMesh, draft: OnMesh, batch: int, slots: int) -> tuple[int, int]:
    """Bytes per device of both models' weights, and of both caches."""
    shapes = _Shapes(target, draft, target.layout.mesh, None, batch, slots)
    size = lambda tree: sum(map(_bytes_per_device, jax.tree.leaves(tree)))
    models = (target, draft)
    return sum(size(shapes.weights(model)) for model in models), sum(size(shapes.cache(model)) for model in models)


@dataclasses.dataclass(frozen=True)
class _Shapes:
    """Arguments of the programs, as shapes with shardings: no memory is allocated."""

    target: OnMesh
    draft: OnMesh
    mesh: Mesh
    sampling: Warp
    batch: int
    slots: int

    def weights(self, model: OnMesh) -> Any:
        prepare = lambda key: model.model.prepare(model.model.init(key), self.slots)
        shapes = jax.eval_shape(prepare, jax.random.key(0))
        return _placed(shapes, model.weight_shardings(shapes))

    def floor(self, model: OnMesh, weights: Any, live: float = 1.0) -> float:
        """Bytes per device that a call reads at least; ``live`` is the share of slots that hold something."""
        streamed = {id(leaf) for leaf in jax.tree.leaves((model.streamed(weights), weights.get("relative_keys")))}
        read = sum(_bytes_per_device(leaf) for leaf in jax.tree.leaves(weights) if id(leaf) in streamed)
        return read + live * sum(map(_bytes_per_device, jax.tree.leaves(self.cache(model))))

    def call(self, model: OnMesh, weights: Any, tokens: int) -> jax.stages.Lowered:
        """A call of a model by itself; its logits are whole on every device."""

        def call(weights, tokens_BT, start_B, cache):
            output = model(weights, tokens_BT, start_B, cache)
            return output.logits_BTV, output.cache

        split = DataShares(self.mesh)(call, (False, True, True, True))
        arguments = (weights, self._rows((tokens,), jnp.int32), self._rows((), jnp.int32), self.cache(model))
        return jax.jit(split, donate_argnums=3).lower(*arguments)

    def round(self, loop: Loop, weights: Weights) -> jax.stages.Lowered:
        """The whole loop of generation."""
        request = jax.eval_shape(self._request)
        at = lambda split: NamedSharding(self.mesh, PartitionSpec(DATA) if split else PartitionSpec())
        place = lambda split, tree: jax.tree.map(lambda x: _shape(x, at(split)), tree)
        request = jax.tree.map(place, Request.by_rows(), request)
        state = self._state(loop, weights, request)
        rounds = jax.ShapeDtypeStruct((), jnp.int32, sharding=NamedSharding(self.mesh, PartitionSpec()))
        run = lambda weights, request, state, rounds: loop.run(weights, request, state, rounds)
        return jax.jit(run, donate_argnums=2).lower(weights, request, state, rounds)

    def _request(self) -> Request:
        ids_B = jnp.arange(self.batch)
        return Request(
            sampling=for_rows(self.sampling, self.batch), draft_sampling=for_rows(self.sampling, self.batch),
            row_keys_B=row_keys(0, ids_B, jnp.zeros_like(ids_B)), limits_B=jnp.full((self.batch,), self.slots),
            stop_ids=jnp.full((4,), -1),
        )  # fmt: skip

    def _state(self, loop: Loop, weights: Weights, request: Request) -> Any:
        plain = dataclasses.replace(loop, target=loop.target.model, shares=type(loop).shares)
        if not isinstance(loop.drafter, NoDrafter):
            drafter = dataclasses.replace(loop.drafter, model=loop.drafter.model.model)
            plain = dataclasses.replace(plain, drafter=drafter)
        prompt = (jnp.zeros((self.batch, 16), jnp.int32), jnp.full((self.batch,), 16, jnp.int32))
        state = jax.eval_shape(lambda w, r: plain.prefill(w, r, *prompt, slots=self.slots), weights, request)
        rows = NamedSharding(self.mesh, PartitionSpec(DATA))
        placed = jax.tree.map(lambda x: _shape(x, rows), dataclasses.replace(state, cache=None, drafter_state=None))
        drafter_state = self.cache(self.draft) if isinstance(loop.drafter, ModelDrafter) else state.drafter_state
        return dataclasses.replace(placed, cache=self.cache(self.target), drafter_state=drafter_state)

    def cache(self, model: OnMesh) -> Any:
        shapes = jax.eval_shape(lambda: model.model.init_cache(self.batch, self.slots))
        return _placed(shapes, model.layout.shardings(model.model.cache_axes(), shapes))

    def _rows(self, shape: tuple[int, ...], dtype: Any) -> jax.ShapeDtypeStruct:
        rows = NamedSharding(self.mesh, PartitionSpec(DATA))
        return jax.ShapeDtypeStruct((self.batch, *shape), dtype, sharding=rows)


def _compile(name, tokens, floor, live_floor, lowered, capacity) -> Program:
    known = dict(name=name, tokens=tokens, floor_bytes=floor, live_floor_bytes=live_floor)
    try:
        compiled = lowered().compile(compiler_options=dict(FEWEST_COLLECTIVES))
    except jax.errors.JaxRuntimeError as error:
        if not is_out_of_memory(error):
            raise
        return Program(**known, memory=None, out_of_memory=_largest(str(error)))
    sizes = compiled.memory_analysis()
    memory = Memory(
        arguments=sizes.argument_size_in_bytes, temporaries=sizes.temp_size_in_bytes,
        outputs=sizes.output_size_in_bytes - sizes.alias_size_in_bytes, capacity=capacity,
    )  # fmt: skip
    traffic = hlo.measure(compiled.as_text())
    return Program(
        **known, memory=memory, out_of_memory=None, hbm_bytes=traffic.bytes, cycles=traffic.cycles,
        collectives=dict(traffic.collectives), collective_bytes=dict(traffic.collective_bytes),
        copies=tuple(traffic.copies), host_transfers=traffic.host_transfers,
    )  # fmt: skip


def _largest(message: str, most: int = 8) -> str:
    """The lines of the compiler's message that say how much is missing and to whom it went."""
    wanted = re.compile(r"Ran out of memory|Exceeded|Total hbm|Program|Arguments|Size:|Shape:|Operator:", re.I)
    return "\n".join([line.strip() for line in message.splitlines() if wanted.search(line)][: 3 * most])


def _placed(shapes: Any, shardings: Any) -> Any:
    return jax.tree.map(_shape, shapes, shardings)


def _shape(x: Any, sharding: NamedSharding) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)


def _bytes_per_device(x: jax.ShapeDtypeStruct) -> int:
    return math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize

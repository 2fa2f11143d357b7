"""Compiles a pair for a described slice, ahead of time: what fits, what a round moves, what it waits for.

    report = compile_report(Programs(...), topology="v4:2x2x4", draft_length=4, rule=TokenRule())

Six programs are compiled: one step of the draft and one of the target (the autoregressive baseline; each at the
fastest of `STEP_WINDOWS`), the scoring of K+1 tokens, both prefills, and the loop of generation. For each of them:
bytes through HBM (see `specsamp.tpu.traffic`) beside the floor, collectives, large copies, transfers to the host,
cycles. The floor of a call is its weights, its table of relative keys and all slots of its cache, each read once.
What a call moves beyond is mostly caches that the compiler fetches whole, updates on chip and copies back whole. A
round can go below the floor of its calls: where on-chip memory holds weights of the draft from one step to the next,
they are read once a round.

Everything here is a **compiler estimate**: nothing ran. The compiler has no estimate for collectives: they are listed
at several latencies, and at one that is fitted on published step times, with its band. Their time is added to that of
streaming, although weights may be streamed while a collective runs (see `specsamp.tpu.calibration`).
"""

from __future__ import annotations

import dataclasses
import functools
import math
import re
import time
from collections.abc import Callable, Sequence

import jax

from specsamp.decoding.data_shards import DataShards
from specsamp.mesh.sharded import ShardedModel
from specsamp.models.compiling import FEWEST_COLLECTIVES, is_out_of_memory
from specsamp.sampling.rules import Rule
from specsamp.tpu.calibration import calibrate, hops
from specsamp.tpu.programs import Programs
from specsamp.tpu.topology import Chip, parse
from specsamp.tpu.traffic import traffic_of

STEP_WINDOWS = (2, 4)  # tried for a step, so that the baseline is measured at its best; with several rows, 1 too
LATENCIES_US = (5, 10, 20, 43)  # per collective; 43 would explain the 14.1 ms of Chen et al. alone
PREFILL = 128  # tokens
USABLE = 0.98  # share of the memory of a chip that programs can have
NAMES = ("draft step", "target step", "score", "draft prefill", "prefill", "round")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Memory:
    """Bytes of HBM on each device."""

    arguments: int  # weights, tables, state
    temporaries: int
    outputs: int  # without those that reuse the memory of arguments
    code: int = 0
    capacity: int

    @property
    def total(self) -> int:
        """Bytes of all parts."""
        return self.arguments + self.temporaries + self.outputs + self.code

    @property
    def fits(self) -> bool:
        """Returns whether a device has room for it."""
        return self.total <= USABLE * self.capacity


@dataclasses.dataclass(frozen=True, kw_only=True)
class Program:
    """One compiled program, or why it does not fit.

    Traffic is per device and call, that of the loop per round. What is not known of a program that does not fit is
    None.
    """

    name: str
    tokens: int  # fed per row and call
    floor_bytes: float
    live_floor_bytes: float  # the same with a cache that is half full
    memory: Memory | None
    out_of_memory: str | None  # from the compiler's message: how much is missing, and the largest contributors
    hbm_bytes: float | None = None
    cycles: float | None = None
    collectives: dict[str, int] | None = None
    collective_bytes: dict[str, float] | None = None
    copies: tuple[tuple[str, float], ...] = ()  # of 1 MB or more, HBM to HBM: scope and bytes
    num_copies: int = 0
    open_loops: int = 0  # loops counted once, because their bound is data
    host_transfers: int = 0
    compile_seconds: float = 0.0

    @property
    def over_floor(self) -> float | None:
        """Traffic as a multiple of the floor."""
        return None if self.hbm_bytes is None else self.hbm_bytes / self.floor_bytes

    def busy_ms(self, chip: Chip) -> float:
        """Returns the longer of streaming and computing, in milliseconds."""
        return max(self.streaming_ms(chip), self.cycles / chip.clock_hz * 1e3)

    def streaming_ms(self, chip: Chip) -> float:
        """Returns the milliseconds that the traffic takes at the rate of the HBM."""
        return self.hbm_bytes * chip.devices / chip.hbm_bytes_per_second * 1e3

    def wire_ms(self, chip: Chip, devices: int) -> float:
        """Returns the milliseconds that the bytes of collectives take, in both directions of one axis of the slice."""
        # An all-reduce scatters sums and gathers them; a reduce-scatter delivers one part of what it sums.
        times = {"all-reduce": 2.0, "reduce-scatter": float(devices)}
        carried = sum(times.get(kind, 1.0) * size for kind, size in self.collective_bytes.items())
        return carried * (devices - 1) / devices / (2 * chip.link_bytes_per_second) * 1e3

    def milliseconds(self, chip: Chip, latency_us: float) -> float:
        """Adds collectives of a latency each, one after another, to the longer of streaming and computing."""
        return self.busy_ms(chip) + sum(self.collectives.values()) * latency_us / 1e3


@dataclasses.dataclass(frozen=True, kw_only=True)
class Report:
    """The programs of one pair, batch and slice."""

    topology: str
    mesh: dict[str, int]
    batch: int
    slots: int
    draft_length: int
    rule: str
    programs: tuple[Program, ...]
    draft_model_parallelism: int | None = None  # devices that hold a replica of the draft; None: as the target's

    def __getitem__(self, name: str) -> Program:
        """Returns the program of a name in `NAMES`."""
        return next(program for program in self.programs if program.name == name)

    @property
    def chip(self) -> Chip:
        """The chip of the slice."""
        return parse(self.topology)[0]

    @property
    def fits(self) -> bool:
        """Returns whether every program fits."""
        return all(program.memory is not None and program.memory.fits for program in self.programs)

    def ms_per_token(self, emitted_per_round: float, latency_us: float) -> tuple[float, float]:
        """Returns milliseconds per token, autoregressive and speculative, at a latency of collectives."""
        alone = self["target step"].milliseconds(self.chip, latency_us)
        return alone, self["round"].milliseconds(self.chip, latency_us) / emitted_per_round

    def calibrated_ms(self, name: str) -> tuple[float, float, float]:
        """Returns the least, likely and most milliseconds of a program, see `specsamp.tpu.calibration`."""
        program, (chip, sizes) = self[name], parse(self.topology)
        serial = sum(program.collectives.values())
        of_target = max(math.prod(self.mesh.values()) // self.mesh["data"] // chip.devices, 1)
        of_draft = (
            of_target if self.draft_model_parallelism is None else max(self.draft_model_parallelism // chip.devices, 1)
        )
        crossed = serial * hops(sizes, of_draft if name == "draft step" else of_target)
        calls = 1
        if name == "round":
            steps = [p for p in self.programs if p.name == "draft step"]  # without one, all count as the target's
            drafts = sum(sum(step.collectives.values()) for step in steps) * self.draft_length
            crossed = (serial - drafts) * hops(sizes, of_target) + drafts * hops(sizes, of_draft)
            calls = self.draft_length + 1
        return calibrate().estimate(
            program.streaming_ms(chip),
            crossed,
            cycles_ms=program.cycles / chip.clock_hz * 1e3,
            wire_ms=program.wire_ms(chip, of_target),
            calls=calls,
        )


def compile_report(
    programs: Programs,
    *,
    topology: str,
    draft_length: int,
    rule: Rule,
    names: Sequence[str] = NAMES,
    progress: Callable[[str], None] = lambda text: None,
) -> Report:
    """Compiles the programs of a pair and counts what they move.

    Args:
      programs: of a pair on a mesh from `described_mesh(topology)`.
      draft_length: K.
      names: those of `NAMES` to compile.
      progress: called with a text when a program begins to be compiled.

    Raises:
      ValueError: a model does not divide over the mesh, or the batch over its data shards; K below 1, or slots for
        fewer tokens than a round has, or for more than a model can read.
    """
    programs.check()
    if draft_length < 1 or programs.slots < max(draft_length + 1, 16):
        raise ValueError(
            f"a round is compiled with draft_length >= 1 and at least {max(draft_length + 1, 16)} slots; got "
            f"draft_length {draft_length} and {programs.slots} slots"
        )
    shards = DataShards(programs.mesh)
    if programs.batch % shards.count:
        raise ValueError(f"batch {programs.batch} does not divide over {shards.count} shards of the data axis")
    target, draft = programs.target, programs.draft
    of_target, of_draft = (functools.partial(programs.floor, model) for model in (target, draft))

    for floor in (of_target, of_draft):
        floor()  # shapes that do not divide over the mesh are refused before anything is compiled

    def of_round(live=1.0):
        return of_target(live) + draft_length * of_draft(live)

    windows = STEP_WINDOWS if programs.batch == shards.count else (1, *STEP_WINDOWS)

    def call(model, tokens):
        return (tokens, lambda: programs.call(model, tokens))

    made = {
        "draft step": (of_draft, [call(draft, window) for window in windows]),
        "target step": (of_target, [call(target, window) for window in windows]),
        "score": (of_target, [call(target, draft_length + 1)]),
        "draft prefill": (of_draft, [call(draft, min(PREFILL, programs.slots))]),
        "prefill": (of_target, [call(target, min(PREFILL, programs.slots))]),
        "round": (of_round, [(draft_length + 1, lambda: programs.round(draft_length, rule))]),
    }
    chip, _ = parse(topology)
    results = []
    for name in names:
        floor, tried = made[name]
        found = []
        for tokens, lowered in tried:
            progress(f"{name}, {tokens} tokens")
            found.append(measure(name, tokens, floor(), floor(0.5), lowered, chip.hbm_bytes // chip.devices))
        fitting = [program for program in found if program.memory is not None]
        results.append(min(fitting, key=lambda program: program.busy_ms(chip), default=found[0]))
    return Report(
        topology=topology,
        mesh=dict(programs.mesh.shape),
        batch=programs.batch,
        slots=programs.slots,
        draft_length=draft_length,
        rule=type(rule).__name__,
        draft_model_parallelism=model_parallelism(draft),
        programs=tuple(results),
    )


def model_parallelism(model: ShardedModel) -> int:
    """Returns the number of devices that hold one replica of a model together."""
    layout = model.layout
    return math.prod(layout.mesh.shape[axis] for axis in dict(layout.rules).get("heads", ()))


def measure(
    name: str, tokens: int, floor: float, live_floor: float, lowered: Callable[[], jax.stages.Lowered], capacity: int
) -> Program:
    """Compiles one program and counts what it moves; that it does not fit is a result."""
    known = dict(name=name, tokens=tokens, floor_bytes=floor, live_floor_bytes=live_floor)
    start = time.perf_counter()
    try:
        compiled = lowered().compile(compiler_options=dict(FEWEST_COLLECTIVES))
    except jax.errors.JaxRuntimeError as error:
        if not is_out_of_memory(error):
            raise
        return Program(**known, memory=None, out_of_memory=_largest(str(error)))
    sizes = compiled.memory_analysis()
    memory = Memory(
        arguments=sizes.argument_size_in_bytes,
        temporaries=sizes.temp_size_in_bytes,
        outputs=sizes.output_size_in_bytes - sizes.alias_size_in_bytes,
        code=sizes.generated_code_size_in_bytes,
        capacity=capacity,
    )
    traffic = traffic_of(compiled.as_text())
    return Program(
        **known,
        memory=memory,
        out_of_memory=None,
        hbm_bytes=traffic.bytes,
        cycles=traffic.cycles,
        collectives=dict(traffic.collectives),
        collective_bytes=dict(traffic.collective_bytes),
        copies=tuple(traffic.copies),
        num_copies=len(traffic.copies),
        host_transfers=traffic.host_transfers,
        open_loops=traffic.open_loops,
        compile_seconds=time.perf_counter() - start,
    )


def _largest(message: str, most: int = 8) -> str:
    """Picks the lines of the compiler's message that say how much is missing and which buffers are largest."""
    wanted = re.compile(r"Ran out of memory|Exceeded|Total hbm|Program|Arguments|Size:|Shape:|Operator:", re.I)
    return "\n".join([line.strip() for line in message.splitlines() if wanted.search(line)][: 3 * most])

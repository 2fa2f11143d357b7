"""Compiles a pair for a described slice, ahead of time: what fits, what a round moves, what it waits for.

    report = compile_report(Programs(...), topology="v4:2x2x4", draft_length=4, rule=TokenRule())

Six programs are compiled: one step of the draft and one of the target (the autoregressive baseline; each at the
fastest of `STEP_WINDOWS`), the scoring of K+1 tokens, both prefills, and the loop of generation. For each of them:
bytes through HBM (see `specsamp.tpu.traffic`) beside the floor, collectives, large copies, transfers to the host,
cycles. The floor of a call is its weights, its table of relative keys and all slots of its cache, each read once. Of
experts it has those that the tokens of the call are expected to choose, never all, divided evenly among the devices;
that of a step, those of its one new token, and not of one that it is fed again. What is counted of a program is the
device that reads most of them: devices that have whole experts wait for it.
What a call without kernels moves beyond is mostly caches that the compiler fetches whole, updates on chip and copies
back whole. Kernels write caches in place and read what is alive of them: traffic and floor are stated for all slots and
for half of them. A round can go below the floor of its calls: where on-chip memory holds weights of the draft from one step to the next,
they are read once a round.

Everything here is a **compiler estimate**: nothing ran. The compiler has no estimate for collectives: they are listed
at several latencies, one after another, and once as `specsamp.tpu.calibration` estimates the whole program, with a band.
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
from specsamp.tpu.calibration import Band, Calibration, estimate
from specsamp.tpu.program import Memory, Program, fastest
from specsamp.tpu.programs import Programs
from specsamp.tpu.topology import Chip, parse
from specsamp.tpu.traffic import traffic_of
from specsamp.tpu.work import Work, calls_of_round, hops, replica_axes

STEP_WINDOWS = (2, 4)  # tried for a step, so that the baseline is measured at its best; with several rows, 1 too
LATENCIES_US = (5, 10, 20, 43)  # per collective; 43 would explain the 14.1 ms of Chen et al. alone
PREFILL = 128  # tokens
NAMES = ("draft step", "target step", "score", "draft prefill", "prefill", "round")


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

    def calibrated_ms(self, name: str, own: Calibration | None = None) -> Band:
        """Estimates the milliseconds of a program, by a calibration of the devices themselves if there is one."""
        return estimate(self.topology.partition(":")[0], *self.works(name), own=own)

    def works(self, name: str) -> tuple[Work, ...]:
        """Returns the work of each call of a program; those of a round share what the round moves."""
        program, (chip, sizes) = self[name], parse(self.topology)
        of_target = max(math.prod(self.mesh.values()) // self.mesh["data"] // chip.devices, 1)
        of_draft = (
            of_target if self.draft_model_parallelism is None else max(self.draft_model_parallelism // chip.devices, 1)
        )
        far, near = replica_axes(sizes, of_target), replica_axes(sizes, of_draft)
        sequences = max(self.batch // self.mesh["data"], 1)
        calls = self.draft_length + 1 if name == "round" else 1
        work = program.work(chip, near if name.startswith("draft") else far, sequences=sequences, calls=calls)
        steps = [p for p in self.programs if p.name == "draft step"]  # without one, all count as the target's
        if name != "round" or not steps:
            return (work,)
        drafts = sum(steps[0].collectives.values()) * self.draft_length
        crossed = work.collective_hops - drafts * (hops(far) - hops(near))
        draft_step = steps[0].work(chip, near, sequences=sequences)
        return calls_of_round(dataclasses.replace(work, collective_hops=crossed), draft_step, self.draft_length)


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
    for side, model in (("target", programs.target), ("draft", programs.draft)):
        most = model.max_positions
        if most is not None and programs.slots > most:
            raise ValueError(f"{programs.slots} slots exceed the {most} positions of the {side}: give --slots={most}")
    if draft_length < 1 or programs.slots < max(draft_length + 1, 16):
        raise ValueError(
            f"a round is compiled with draft_length >= 1 and at least {max(draft_length + 1, 16)} slots; got "
            f"draft_length {draft_length} and {programs.slots} slots"
        )
    shards = DataShards(programs.mesh)
    if programs.batch % shards.count:
        raise ValueError(f"batch {programs.batch} does not divide over {shards.count} shards of the data axis")
    target, draft = programs.target, programs.draft
    for model in (target, draft):
        programs.floor(model)  # shapes that do not divide over the mesh are refused before anything is compiled
    scored, prefilled = draft_length + 1, min(PREFILL, programs.slots)
    calls = {  # the model, its new tokens, and the numbers of tokens that are tried
        "draft step": (draft, 1, step_windows(programs, draft)),
        "target step": (target, 1, step_windows(programs, target)),
        "score": (target, scored, (scored,)),
        "draft prefill": (draft, prefilled, (prefilled,)),
        "prefill": (target, prefilled, (prefilled,)),
    }
    chip, _ = parse(topology)
    results = []
    for name in names:
        if name == "round":
            progress(f"round, {scored} tokens")
            floor = functools.partial(programs.floor_of_round, draft_length)
            layers = target.config.num_layers + draft_length * draft.config.num_layers
            lowered = functools.partial(programs.round, draft_length, rule)
            results.append(measure(name, scored, floor, lowered, topology, layers=layers))
            continue
        model, new, windows = calls[name]
        floor, found = functools.partial(programs.floor, model, tokens=new), []
        for tokens in windows:
            progress(f"{name}, {tokens} tokens")
            lowered = functools.partial(programs.call, model, tokens)
            found.append(measure(name, tokens, floor, lowered, topology, layers=model.config.num_layers))
        results.append(fastest(found, chip))
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


def step_windows(programs: Programs, model: ShardedModel) -> tuple[int, ...]:
    """Returns the numbers of tokens that are tried for a step: 1 with several rows, and where tokens choose experts.

    One that is fed again chooses experts, too.
    """
    several = programs.batch > DataShards(programs.mesh).count
    return (1, *STEP_WINDOWS) if several or model.model.config.experts else STEP_WINDOWS


def model_parallelism(model: ShardedModel) -> int:
    """Returns the number of devices that hold one replica of a model together."""
    layout = model.layout
    return math.prod(layout.mesh.shape[axis] for axis in layout.over)


def measure(
    name: str,
    tokens: int,
    floor: Callable[[float], float],
    lowered: Callable[[], jax.stages.Lowered],
    topology: str,
    *,
    layers: int,
    live: float = 0.5,
) -> Program:
    """Compiles one program and counts what it moves; that it does not fit is a result.

    Args:
      floor: returns the bytes per device that are read at least, by the share of the slots of caches that is alive.
      layers: of all calls of models in one run.
      live: the share of the slots that is alive in ``live_floor_bytes`` and ``live_hbm_bytes``.
    """
    chip, _ = parse(topology)
    known = dict(name=name, tokens=tokens, floor_bytes=floor(1.0), live_floor_bytes=floor(live), layers=layers)
    start = time.perf_counter()
    try:
        compiled = lowered().compile(compiler_options=dict(FEWEST_COLLECTIVES))
    except jax.errors.JaxRuntimeError as error:
        if not is_out_of_memory(error):
            raise
        return Program(**known, memory=None, out_of_memory=_largest(str(error)))
    text = compiled.as_text()
    traffic = traffic_of(text)
    return Program(
        **known,
        memory=Memory.of(compiled, chip.hbm_bytes // chip.devices),
        out_of_memory=None,
        hbm_bytes=traffic.bytes,
        live_hbm_bytes=traffic_of(text, live).bytes,
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

"""Compiles a pair for a described slice, ahead of time: memory, traffic, collectives and cycles of
each program.

    report = compile_report(Programs(...), topology="v4:2x2x4", size=4, rule=TokenRule())

The floor of a call is its weights, and all slots of its cache and of its table of relative keys,
each read once. Of experts it counts the number that the tokens of the call are expected to choose,
divided evenly among the devices; the traffic is that of the device that reads most of them, since
it is the slowest. Without kernels the compiler copies some caches to the chip and back.
Kernels write caches in place and read only the slots that are alive: traffic and floor are stated
for all slots and for half of them, also of layers with a window, which read its slots alone. The
floor of a round is the sum of its calls' floors, and a round can go below it: on-chip memory may
keep weights of the draft.

All numbers are **compiler estimates**, without a time of collectives; `specsamp.tpu.calibration`
estimates milliseconds.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any

from specsamp import validate
from specsamp.analysis.costs import CostTable
from specsamp.analysis.report import Say, Table, silent
from specsamp.decoding.drafter import positions_of
from specsamp.decoding.trees import TreeShape
from specsamp.mesh.torus import find_boxes
from specsamp.sampling.rules import Rule
from specsamp.tpu.calibration import Band, estimate, fit_published, two_digits
from specsamp.tpu.lowering import Programs, rows_of_step, scored_rows
from specsamp.tpu.program import USABLE, Memory, Program, measure_program
from specsamp.tpu.topology import Chip, parse
from specsamp.tpu.work import Work, calls_of_round, hops

PREFILL, GIB = 128, 2**30  # tokens; bytes
NAMES = ("draft step", "target step", "score", "draft prefill", "prefill", "round")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Report:
    """The programs of one pair, batch and slice."""

    topology: str
    mesh: dict[str, int]
    batch: int
    slots: int
    draft_length: int  # of a tree, its depth
    rule: str
    programs: tuple[Program, ...]
    # Devices that hold a replica of the draft; None: as the target's.
    draft_model_parallelism: int | None = None
    tree: Sequence[int] = ()  # the parents of its nodes; (): chains

    @classmethod
    def from_json(cls, report: Mapping[str, Any]) -> Report:
        """Reads a report from JSON without fields that are gone; raises ValueError without a target
        step and a round.
        """

        def make(kind, fields):
            names = {field.name for field in dataclasses.fields(kind)}
            return kind(**{name: fields[name] for name in names & fields.keys()})

        try:
            programs = tuple(
                make(Program, entry | {"memory": entry["memory"] and Memory(**entry["memory"])})
                for entry in report["programs"]
            )
            compiled = make(cls, {**report, "programs": programs})
            compiled["target step"], compiled["round"]
        except (KeyError, TypeError, StopIteration) as error:
            reason = f"{type(error).__name__}: {error}"
            raise ValueError(
                f"no compile report with a target step and a round ({reason})"
            ) from error
        return compiled

    def __getitem__(self, name: str) -> Program:
        """Returns the program of a name in `NAMES`."""
        return next(program for program in self.programs if program.name == name)

    @property
    def chip(self) -> Chip:
        """The chip of the slice."""
        return parse(self.topology)[0]

    def calibrated_ms(self, name: str) -> Band:
        """Estimates the milliseconds of a program."""
        return estimate(self.topology.partition(":")[0], *self.works(name))

    def works(self, name: str) -> tuple[Work, ...]:
        """Returns the work of each call of a program; a round is split into its calls, which
        together take no less than its lower bound.
        """
        program = self[name]
        chip, sizes = parse(self.topology)
        target_devices = math.prod(self.mesh.values()) // self.mesh["data"]
        copy_box, model_box = find_boxes((chip.devices, *sizes), target_devices, self.mesh["model"])
        far = copy_box[1:]  # chips along each axis
        near = {1: (1,), self.mesh["model"]: model_box[1:]}.get(self.draft_model_parallelism, far)
        sequences = max(self.batch // self.mesh["data"], 1)
        work = program.work(chip, near if name.startswith("draft") else far, sequences=sequences)
        # Without one, all calls count as the target's.
        steps = [p for p in self.programs if p.name == "draft step"]
        if name != "round" or not steps:
            return (work,)
        drafts = sum(steps[0].collectives.values()) * (work.calls - 1)
        crossed = work.collective_hops - drafts * (hops(far) - hops(near))
        draft_step = steps[0].work(chip, near, sequences=sequences)
        calls = calls_of_round(dataclasses.replace(work, collective_hops=crossed), draft_step)
        # Steps of a draft can take longer in their loop than alone.
        busy = [max(call.streaming_ms, call.cycles_ms) for call in calls]
        missing = max(program.lower_bound_ms(chip) - sum(busy), 0) / max(len(calls) - 1, 1)
        steps = [
            dataclasses.replace(call, cycles_ms=alone + missing)
            for call, alone in zip(calls[1:], busy[1:])
        ]
        return (calls[0], *steps)


def compile_report(
    programs: Programs,
    *,
    topology: str,
    size: int | TreeShape,
    rule: Rule,
    names: Sequence[str] = NAMES,
    progress: Say = silent,
) -> Report:
    """Compiles the programs of a pair and counts what they move.

    Args:
      programs: of a pair on a mesh from `described_mesh(topology)`.
      size: of a round's draft: K, or the shape of a tree.
      names: the programs of `NAMES` to compile.

    Raises:
      ValueError: a model does not divide over the mesh, or the batch over its data shards; K below
        1, or slots for fewer tokens than a round has, or for more than a model can read.
    """
    models = programs.target, programs.draft
    validate.integer("draft_length", scored_rows(size) - 1, 1)
    validate.integer("slots", programs.slots, max(scored_rows(size), 16), positions_of(*models) + 1)
    count = programs.shards.count
    if programs.batch % count:
        raise ValueError(
            f"batch {programs.batch} does not divide over {count} shards of the data axis"
        )
    for model in models:
        programs.floor(model)  # refuses models that do not divide over the mesh
    found = [_compiled(programs, name, topology, size, rule, progress) for name in names]
    layout = programs.draft.layout
    return Report(
        topology=topology,
        mesh=dict(programs.mesh.shape),
        batch=programs.batch,
        slots=programs.slots,
        draft_length=size.depth if isinstance(size, TreeShape) else size,
        tree=size.parents if isinstance(size, TreeShape) else (),
        rule=type(rule).__name__,
        draft_model_parallelism=math.prod(layout.mesh.shape[axis] for axis in layout.over),
        programs=tuple(found),
    )


def _compiled(
    programs: Programs,
    name: str,
    topology: str,
    size: int | TreeShape,
    rule: Rule,
    progress: Say,
) -> Program:
    """Compiles and measures the program of a name."""
    scored = scored_rows(size)
    if name == "round":
        progress(f"round, {scored} tokens")
        drafts = programs.draft_calls(size)
        return measure_program(
            name,
            scored,
            functools.partial(programs.floor_of_round, size),
            functools.partial(programs.round, size, rule),
            topology,
            layers=programs.target.config.num_layers + drafts * programs.draft.config.num_layers,
            calls=drafts + 1,
        )
    model = programs.draft if name.startswith("draft") else programs.target
    tree = None
    if name.endswith("step"):
        new, fed = 1, rows_of_step(model)
    elif name == "score":
        new = fed = scored
        tree = size if isinstance(size, TreeShape) else None
    else:
        new = fed = min(PREFILL, programs.slots)
    progress(f"{name}, {fed} tokens")
    floor = functools.partial(programs.floor, model, tokens=new)
    is_prompt = name.endswith("prefill")
    lowered = functools.partial(programs.call, model, fed, tree, is_prompt=is_prompt)
    return measure_program(name, fed, floor, lowered, topology, layers=model.config.num_layers)


def compiled_costs(report: dict[str, Any]) -> CostTable:
    """Returns the times of a plain step and of a round at the report's K, as a calibration
    estimates them.

    The ends of their bands are the bounds.

    Args:
      report: a `Report` as JSON: the entry "report" of a file of ``launch/compile_report.py``.

    Raises:
      ValueError: it is not a report of a pair, or its programs do not fit the slice.
    """

    def table(*times: float) -> CostTable:
        return CostTable(
            {compiled.batch: dict(zip((0, compiled.draft_length), times))}, context=compiled.slots
        )

    compiled = Report.from_json(report)
    if compiled.tree:
        raise ValueError(
            "this compile report is of a token tree, whose acceptance is no chain's: compile one "
            "of a chain"
        )
    programs = [compiled["target step"], compiled["round"]]
    if any(program.hbm_bytes is None for program in programs):
        raise ValueError(
            f"the programs of this compile report do not fit {compiled.topology}: they have no "
            "times"
        )
    step, round_ = (compiled.calibrated_ms(program.name) for program in programs)
    return dataclasses.replace(
        table(step.likely, round_.likely),
        bounds=(table(step.least, round_.least), table(step.most, round_.most)),
        scenarios=tuple(map(table, step.worlds, round_.worlds)),
        is_range=step.open,
    )


def report_tables(report: Report, weights: int, caches: int) -> list[Table]:
    """Tabulates a report: one call on one device, and its milliseconds.

    ``weights`` and ``caches`` of both models are in bytes per device.
    """
    device = report.chip.hbm_bytes // report.chip.devices
    drafted = f"a tree of {len(report.tree)} nodes" if report.tree else f"K = {report.draft_length}"
    where = (
        f"{report.topology}, mesh {report.mesh}, batch {report.batch}, {drafted}, {report.slots} "
        "slots"
    )
    most = max(int((USABLE * device - weights) // (caches / report.batch)), 0)
    most -= most % report.mesh["data"]
    made = [
        Table.of(
            f"One call on one device: {where} (compiler estimate)",
            [_traffic(program) for program in report.programs],
            note=f"weights and tables {weights / GIB:.2f} GiB, caches {caches / GIB:.2f} GiB, of "
            f"{device / GIB:.0f} GiB; before temporaries {most} sequences of {report.slots} slots "
            "fit on all devices together; the round is draft, score, verify, commit",
        )
    ]
    if fitting := [program for program in report.programs if program.memory is not None]:
        rows = [_times(report, program) for program in fitting]
        note = basis(report.calibrated_ms(fitting[0].name).open)
        made.append(Table.of("Milliseconds", rows, note=note))
    for program in report.programs:
        if program.out_of_memory:
            lines = [{"the compiler says": line} for line in program.out_of_memory.splitlines()]
            made.append(Table.of(f"{program.name}: out of memory", lines))
    return made


def _traffic(p: Program) -> dict[str, str]:
    """Returns the traffic of one program."""
    shown = {"": p.name, "tokens": str(p.tokens)}
    if p.memory is None:
        return shown | {"HBM, GiB": "does not fit"}
    live = "" if p.live_over_floor is None else f" ({p.live_over_floor:.3f})"
    return shown | {
        "HBM, GiB": f"{p.memory.total / GIB:.2f}",
        "temporary, MB": f"{p.memory.temporaries / 1e6:.0f}",
        "HBM traffic, MB": f"{p.hbm_bytes / 1e6:,.0f}",
        "floor (half a cache), MB": f"{p.floor_bytes / 1e6:,.0f} ({p.live_floor_bytes / 1e6:,.0f})",
        "over floor (half a cache)": f"{p.over_floor:.3f}{live}",
        "collectives": ", ".join(f"{count} {kind}" for kind, count in sorted(p.collectives.items()))
        or "none",
        "they carry, MB": f"{sum(p.collective_bytes.values()) / 1e6:.1f}",
        "large copies, host": f"{p.num_copies}, {p.host_transfers}",
    }


def _times(report: Report, p: Program) -> dict[str, str]:
    """Returns the milliseconds of one program."""
    return {
        "": p.name,
        "streaming": two_digits(p.streaming_ms(report.chip)),
        "cycles": two_digits(p.cycles_ms(report.chip))
        if report.chip.has_clock
        else f"{p.cycles:,.0f} cycles",
        "lower bound": two_digits(p.lower_bound_ms(report.chip)),
        "collectives": str(sum(p.collectives.values())),
        "calibrated": str(report.calibrated_ms(p.name)),
    }


def faster(found: Band) -> str:
    """Formats how much faster one program is than another."""
    least = two_digits(found.least)
    most = two_digits(found.most)
    if least == most:
        return f"{least}x"
    return (
        f"{least}x to {most}x" if found.open else f"{two_digits(found.likely)}x ({least} to {most})"
    )


def basis(open: bool) -> str:
    """Returns the basis of an estimate in words."""
    if open:
        return (
            "no program of today was measured on this chip: from streaming and cycles alone (all "
            "collectives hidden) to the sum that held for programs of 2022 and 2023 on TPU v4 (all "
            "added)"
        )
    fit = fit_published().hidden
    return (
        f"calibrated on {fit.points} published steps of TPU v5e; those of {fit.layouts} layouts, "
        f"each left out once, were within {math.expm1(fit.error):.0%}"
    )

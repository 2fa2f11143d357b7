"""Counts the bytes that a compiled TPU program moves, from its scheduled HLO.

    traffic = traffic_of(compiled.as_text())

Counted are the bytes between a chip's HBM and its other memory. An operation reads its
operands and writes its results, except that

- asynchronous copies and slices (prefetches) move what they deliver; what a run fetches at its end
  for the next run of the program is counted there, and not where that run would begin with it;
- a fusion that only slices or gathers from an operand, or a fusion within it, reads the slices,
  not the table;
- an update in place writes the update, not the buffer, and reads it only if the same fusion uses it
  further;
- the kernels of `specsamp.models.kernels` move the bytes that `specsamp.tpu.kernels` counts, for
  a given share of live slots;
- what names or packs a value (tuples, bitcasts, the end of an asynchronous operation) moves
  nothing.

A loop body counts as often as it runs: its bound is read from its condition. A loop over the
experts that tokens chose counts as often as is expected (`specsamp.models.experts.expected_steps`).
Any other loop whose bound is data (that of decoding) counts once: the result is that of a round. Of
branches the largest counts, but copies and transfers to the host count in all. XLA's own cost
analysis would count on-chip reads too, and every body once.

Cycles are the compiler's estimate, summed over operations; collectives, gathers and prefetches have
none. Cycles of kernels come from their schedules (`specsamp.tpu.schedules`), for all slots of
their caches.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from specsamp.models.experts import expected_steps
from specsamp.tpu.hlo import Instruction, Module
from specsamp.tpu.kernels import kernel_of
from specsamp.tpu.schedules import Schedule

FREE = {
    "parameter",
    "constant",
    "tuple",
    "get-tuple-element",
    "bitcast",
    "after-all",
    "partition-id",
    "replica-id",
    "opt-barrier",
    "add-dependency",
    "get-dimension-size",
}
COLLECTIVES = (
    "all-reduce",
    "all-gather",
    "reduce-scatter",
    "all-to-all",
    "collective-permute",
    "collective-broadcast",
)
HOST = ("infeed", "outfeed", "send", "recv")
SLICES = ("slice", "dynamic-slice", "gather")
# Of a fusion within another whose result is its operand.
VIEW = "output_to_operand_aliasing={{}: (0, {})}"
LARGE = 1_000_000  # bytes; a copy worth the name


@dataclasses.dataclass
class Traffic:
    """Traffic per device of one run of a program; of a loop whose bound is data, one round."""

    read: float = 0.0  # bytes from HBM
    written: float = 0.0  # bytes to HBM
    cycles: float = 0.0  # compiler estimate
    kernel_cycles: float = 0.0  # of these
    # By kind, how many.
    collectives: collections.Counter = dataclasses.field(default_factory=collections.Counter)
    # By kind.
    collective_bytes: collections.Counter = dataclasses.field(default_factory=collections.Counter)
    # Large, HBM to HBM: scope, bytes.
    copies: list[tuple[str, float]] = dataclasses.field(default_factory=list)
    host_transfers: int = 0
    open_loops: int = 0  # whose bound is data: counted once
    # Of all runs of each loop's body: bytes, cycles. Loops within it are further entries.
    loops: list[tuple[float, float]] = dataclasses.field(default_factory=list)

    @property
    def bytes(self) -> float:
        """Bytes from HBM and to it."""
        return self.read + self.written

    @property
    def parts(self) -> list[tuple[float, float]]:
        """Bytes and cycles of each loop without a prefetch that goes on during it, and of all
        else.
        """
        loops_X2 = np.array(self.loops).reshape(-1, 2)
        rest = np.subtract([self.bytes, self.cycles], loops_X2.sum(axis=0))
        return [*self.loops, tuple(rest.tolist())]

    def add(self, other: Traffic, times: float = 1) -> None:
        """Adds other traffic, as often as it happens; copies and open loops are listed once."""
        self.read += other.read * times
        self.written += other.written * times
        self.cycles += other.cycles * times
        self.kernel_cycles += other.kernel_cycles * times
        self.host_transfers += other.host_transfers * times
        self.open_loops += other.open_loops
        self.loops += [(bytes_ * times, cycles * times) for bytes_, cycles in other.loops]
        self.copies += other.copies
        for mine, theirs in (
            (self.collectives, other.collectives),
            (self.collective_bytes, other.collective_bytes),
        ):
            for kind, count in theirs.items():
                mine[kind] += count * times


def traffic_of(
    text: str, live: float = 1.0, schedules: Mapping[str, Schedule] | None = None
) -> Traffic:
    """Counts the traffic of ``compiled.as_text()``; kernels read only the ``live`` share of the
    slots of caches.

    ``schedules`` of the program's kernels are by the name of one operation of each kind; None:
    kernels take no cycles.
    """
    module = Module.parse(text)
    return Tally(module, live, schedules).of(module.entry)


@dataclasses.dataclass(frozen=True)
class Tally:
    """Counts the instructions of one module."""

    module: Module
    live: float  # see `traffic_of`
    schedules: Mapping[str, Schedule] | None

    @functools.cached_property
    def schedule_of(self) -> dict[Any, Schedule]:
        """The schedules by operands and results of kernels: equal kernels are scheduled once."""
        bodies = self.module.computations.values()
        known = [(body, op) for body in bodies for op in body.values() if op.name in self.schedules]
        return {_signature(op, _operands(op, body)): self.schedules[op.name] for body, op in known}

    def of(self, computation: str) -> Traffic:
        """Counts a computation; what it calls is counted as often as it is called."""
        body = self.module.computations[computation]
        total = Traffic()
        started: set[str] = set()
        for instruction in body.values():
            if instruction.opcode.endswith("-start"):
                started.add(instruction.name)
            elif instruction.opcode.endswith("-done"):
                started.difference_update(instruction.operands)
            loops = len(total.loops)
            self.count(instruction, body, total)
            if started:  # a prefetch goes on during the loop: it is no part of its own
                del total.loops[loops:]
        return total

    def count(self, op: Instruction, body: dict[str, Instruction], total: Traffic) -> None:
        """Adds one instruction of a computation to ``total``."""
        total.cycles += op.cycles
        if op.opcode == "while":
            bound = self.module.trips(op)
            bound = expected_steps(op.scope) if bound is None else bound
            total.open_loops += bound is None
            body_traffic = self.of(op.called("body"))
            *_, (bytes_, cycles) = body_traffic.parts
            total.add(body_traffic, bound or 1)
            total.loops.append((bytes_ * (bound or 1), cycles * (bound or 1)))
            asked = self.of(op.called("condition"))  # its bytes are a few numbers
            total.add(dataclasses.replace(asked, read=0.0, written=0.0, cycles=0.0), bound or 1)
            return
        if op.opcode == "conditional":
            branches = [self.of(name) for name in self.module.branches(op)]
            most = max(branches, key=lambda traffic: (traffic.bytes, traffic.cycles))
            total.add(most)
            for other in branches:
                if other is not most:
                    total.copies += other.copies
                    total.host_transfers += other.host_transfers
            return
        if op.opcode in ("call", "async-start"):
            total.add(self.of(op.called("to_apply") or op.called("calls")))
            return
        base = op.opcode.removesuffix("-start")
        if (
            op.opcode in FREE
            or op.opcode.endswith("-done")
            or 'custom_call_target="ConcatBitcast"' in op.attributes
        ):
            return
        operands = _operands(op, body)
        on_host = any(array.on_host for x in (op, *operands) for array in x.arrays)
        total.host_transfers += base in HOST or on_host or "is_host_transfer=true" in op.attributes
        read = sum(x.hbm_bytes for x in operands)
        written = op.hbm_bytes
        if base in COLLECTIVES:
            # The type of a start also has its operands and flags; that of its end has the results.
            ends = (
                x for x in body.values() if x.opcode == f"{base}-done" and op.name in x.operands
            )
            delivered = next(ends, op)
            total.collectives[base] += 1
            total.collective_bytes[base] += delivered.bytes
            written = delivered.hbm_bytes
        elif op.opcode in ("copy-start", "slice-start"):
            if "cross_program_prefetch_index" in op.attributes and _fetched_again(op, body):
                return
            # One of the arrays of the start is its result.
            result = 0 if op.opcode == "copy-start" else len(operands[0].arrays)
            delivered = op.arrays[result]
            read = delivered.bytes * (operands[0].hbm_bytes > 0)
            written = delivered.bytes * delivered.in_hbm
        elif op.opcode == "fusion":
            read, written = self.fusion(op, operands)
        elif op.opcode == "custom-call" and (count := kernel_of(op)):
            read, written, steps = count(op, [x.arrays[0] for x in operands], self.live)
            if self.schedules is not None:
                cycles = self.schedule_of[_signature(op, operands)].cycles(steps)
                total.cycles += cycles
                total.kernel_cycles += cycles
        elif op.opcode == "dynamic-update-slice":
            read = operands[1].hbm_bytes
            written = operands[1].bytes * (op.hbm_bytes > 0)
        elif op.opcode in SLICES:
            read = op.bytes * (operands[0].hbm_bytes > 0)
        if base == "copy" and written >= LARGE and _origin(operands[0], body).hbm_bytes > 0:
            total.copies.append((op.scope or op.name, written))
        total.read += read
        total.written += written

    def fusion(self, op: Instruction, operands: list[Instruction]) -> tuple[float, float]:
        """Returns the bytes that a fusion reads from HBM, and the bytes that it writes there."""
        called = op.called("calls")
        inner = self.module.computations[called]
        read = sum(min(taken, x.hbm_bytes) for taken, x in zip(self.taken(called), operands))
        root = self.module.root(called)
        results = [inner[name] for name in root.operands] if root.opcode == "tuple" else [root]
        if len(results) != len(op.arrays):
            return read, op.hbm_bytes
        written = 0.0
        for array, result in zip(op.arrays, results):
            updates = 0.0
            while result.opcode in ("bitcast", "dynamic-update-slice"):
                if result.opcode == "dynamic-update-slice":
                    updates += inner[result.operands[1]].bytes
                result = inner[result.operands[0]]
            # An update of anything else writes all of it.
            in_place = updates > 0 and result.opcode == "parameter"
            written += (updates if in_place else array.bytes) * array.in_hbm
        return read, written

    def taken(self, computation: str) -> list[float]:
        """Returns how many bytes of each parameter a fused computation reads; inf if it may read
        all of them.
        """
        inner = self.module.computations[computation]
        users: dict[str, list[tuple[Instruction, int]]] = collections.defaultdict(list)
        for user in inner.values():
            for place, name in enumerate(user.operands):
                users[name].append((user, place))

        @functools.cache
        def bytes_of(name: str, updated: bool = False) -> float:
            """Returns the bytes of a parameter (or of a bitcast or an update of it) that
            are read.
            """
            bytes_ = 0.0 if updated or not inner[name].is_root else math.inf
            for user, place in users[name]:
                if user.opcode in SLICES and place == 0:
                    bytes_ += user.bytes
                elif user.opcode == "bitcast" or VIEW in user.attributes:
                    bytes_ += bytes_of(user.name, updated)
                elif user.opcode == "fusion":
                    bytes_ += self.taken(user.called("calls"))[place]
                elif user.opcode == "dynamic-update-slice" and place == 0:
                    bytes_ += bytes_of(user.name, True)
                elif not (updated and user.opcode == "tuple"):  # a result
                    return math.inf
            return bytes_

        parameters = {int(x.operands[0]): x.name for x in inner.values() if x.opcode == "parameter"}
        return [
            bytes_of(parameters[i]) if i in parameters else 0.0
            for i in range(max(parameters, default=-1) + 1)
        ]


def _operands(op: Instruction, body: dict[str, Instruction]) -> list[Instruction]:
    return [body[name] for name in op.operands if name in body]


def _signature(op: Instruction, operands: list[Instruction]) -> Any:
    return op.name.partition(".")[0], op.arrays, *[x.arrays for x in operands]


def _fetched_again(op: Instruction, body: dict[str, Instruction]) -> bool:
    """Returns whether the same run fetches the operand of ``op`` once more, for the next run."""
    return any(
        x is not op and (x.opcode, x.operands) == (op.opcode, op.operands) for x in body.values()
    )


def _origin(op: Instruction, body: dict[str, Instruction]) -> Instruction:
    """Returns the instruction that made a value, before it was copied."""
    while op.opcode in ("copy", "copy-start", "copy-done", "bitcast") and op.operands[0] in body:
        op = body[op.operands[0]]
    return op

"""What a compiled TPU program moves, read off its scheduled HLO.

    traffic = measure(compiled.as_text())

Counted are the bytes that cross between a chip's HBM and the rest of it. A layout with a memory space,
``S(1)`` or ``S(3)``, is on chip, ``S(5)`` is the host's, one without is HBM. An operation reads its operands and
writes its results, except that

- asynchronous copies and slices (prefetches) move what they deliver;
- a fusion that only slices or gathers from an operand reads what it takes, not the table;
- an update in place writes the update, not the buffer, and reads it only if the same fusion uses it further;
- what names or packs a value (tuples, bitcasts, the end of an asynchronous operation) moves nothing.

A loop body counts as often as it runs: its bound is read from its condition. A loop whose bound is data (that
of decoding) counts once: what is reported is a round. Of branches the one that moves most counts, but copies and
transfers to the host are looked for in all. A copy that passes through on-chip memory is a copy too. ``bytes
accessed`` of XLA's own cost analysis counts on-chip reads too, and every body once.

Cycles are the compiler's estimate, summed over operations; collectives, gathers and the transfers that feed
an operation have none.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import math
import re
from collections.abc import Iterator

BYTES = {
    "pred": 1, "s4": 0.5, "u4": 0.5, "s8": 1, "u8": 1, "f8e4m3fn": 1, "f8e5m2": 1, "s16": 2, "u16": 2, "bf16": 2,
    "f16": 2, "s32": 4, "u32": 4, "f32": 4, "s64": 8, "u64": 8, "f64": 8, "token": 0, "opaque": 0,
}  # fmt: skip
FREE = {
    "parameter", "constant", "tuple", "get-tuple-element", "bitcast", "after-all", "partition-id", "replica-id",
    "opt-barrier", "add-dependency", "get-dimension-size",
}  # fmt: skip
COLLECTIVES = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute", "collective-broadcast")
HOST = ("infeed", "outfeed", "send", "recv")
HOST_MEMORY = "S(5)"
SLICES = ("slice", "dynamic-slice", "gather")
LARGE = 1_000_000  # bytes; a copy worth the name

_ARRAY = re.compile(r"(\w+)\[([\d,]*)\](\{[^}]*\})?")
_OPCODE = re.compile(r"([\w-]+)\(")
_NAME = re.compile(r"%([\w.\-]+)")


@dataclasses.dataclass(frozen=True)
class Array:
    """One array of a type."""

    bytes: float
    in_hbm: bool
    on_host: bool = False


@dataclasses.dataclass(frozen=True)
class Instruction:
    name: str
    opcode: str
    arrays: tuple[Array, ...]  # of the result, in the order of its type
    operands: tuple[str, ...]
    attributes: str
    is_root: bool

    @property
    def bytes(self) -> float:
        return sum(array.bytes for array in self.arrays)

    @property
    def hbm_bytes(self) -> float:
        return sum(array.bytes for array in self.arrays if array.in_hbm)

    def called(self, attribute: str) -> str | None:
        match = re.search(rf"\b{attribute}=%?([\w.\-]+)", self.attributes)
        return match and match.group(1)

    @property
    def cycles(self) -> int:
        match = re.search(r'"estimated_cycles":"(\d+)"', self.attributes)
        return int(match.group(1)) if match else 0

    @property
    def scope(self) -> str:
        """Where in the program it comes from, as `jax.named_scope` says."""
        match = re.search(r'op_name="([^"]*)"', self.attributes)
        return match.group(1) if match else ""


@dataclasses.dataclass
class Traffic:
    """Of one run of a program, or of one round of a loop whose bound is data; per device."""

    read: float = 0.0  # bytes from HBM
    written: float = 0.0  # bytes to HBM
    cycles: float = 0.0  # compiler estimate
    collectives: collections.Counter = dataclasses.field(default_factory=collections.Counter)  # by kind, how many
    collective_bytes: collections.Counter = dataclasses.field(default_factory=collections.Counter)  # by kind
    copies: list[tuple[str, float]] = dataclasses.field(default_factory=list)  # large, HBM to HBM: scope, bytes
    host_transfers: int = 0
    open_loops: int = 0  # whose bound is data: counted once

    @property
    def bytes(self) -> float:
        return self.read + self.written

    def add(self, other: Traffic, times: int = 1) -> None:
        self.read += other.read * times
        self.written += other.written * times
        self.cycles += other.cycles * times
        self.host_transfers += other.host_transfers * times
        self.open_loops += other.open_loops
        self.copies += other.copies
        for mine, theirs in ((self.collectives, other.collectives), (self.collective_bytes, other.collective_bytes)):
            for kind, count in theirs.items():
                mine[kind] += count * times


def measure(text: str) -> Traffic:
    """The traffic of a program's entry computation; see the module.

    Raises:
      ValueError: the text is no scheduled HLO module.
    """
    return Module.parse(text).traffic()


@dataclasses.dataclass(frozen=True, eq=False)
class Module:
    """Computations by name, each an ordered list of instructions."""

    computations: dict[str, dict[str, Instruction]]
    entry: str

    @classmethod
    def parse(cls, text: str) -> Module:
        computations: dict[str, dict[str, Instruction]] = {}
        entry, current = None, None
        for line in text.splitlines():
            if line.startswith(("%", "ENTRY")) and line.endswith("{"):
                current = _NAME.search(line).group(1)
                computations[current] = {}
                entry = current if line.startswith("ENTRY") else entry
            elif line.startswith("}"):
                current = None
            elif current is not None and " = " in line:
                instruction = _instruction(line)
                computations[current][instruction.name] = instruction
        if entry is None:
            raise ValueError("no ENTRY computation: is this the text of a compiled program?")
        return cls(computations, entry)

    def traffic(self, computation: str | None = None) -> Traffic:
        """Of a computation, by default the entry; what it calls is counted as often as it is called."""
        body = self.computations[computation or self.entry]
        total = Traffic()
        for instruction in body.values():
            self._count(instruction, body, total)
        return total

    def _count(self, op: Instruction, body: dict[str, Instruction], total: Traffic) -> None:
        total.cycles += op.cycles
        if op.opcode == "while":
            bound = self.trips(op)
            total.open_loops += bound is None
            total.add(self.traffic(op.called("body")), bound or 1)
            asked = self.traffic(op.called("condition"))  # its bytes are a few numbers
            total.add(dataclasses.replace(asked, read=0.0, written=0.0, cycles=0.0), bound or 1)
            return
        if op.opcode == "conditional":
            branches = [self.traffic(name) for name in self._branches(op)]
            most = max(branches, key=lambda traffic: (traffic.bytes, traffic.cycles))
            total.add(most)
            for other in branches:
                if other is not most:
                    total.copies += other.copies
                    total.host_transfers += other.host_transfers
            return
        if op.opcode in ("call", "async-start"):
            total.add(self.traffic(op.called("to_apply") or op.called("calls")))
            return
        base = op.opcode.removesuffix("-start")
        if op.opcode in FREE or op.opcode.endswith("-done") or 'custom_call_target="ConcatBitcast"' in op.attributes:
            return
        operands = [body[name] for name in op.operands if name in body]
        on_host = any(array.on_host for x in (op, *operands) for array in x.arrays)
        total.host_transfers += base in HOST or on_host or "is_host_transfer=true" in op.attributes
        if base in COLLECTIVES:
            # The type of a start holds what it reads and its flags too; that of its end what it delivers.
            ends = (x for x in body.values() if x.opcode == f"{base}-done" and op.name in x.operands)
            delivered = next(ends, op)
            total.collectives[base] += 1
            total.collective_bytes[base] += delivered.bytes
            read, written = sum(x.hbm_bytes for x in operands), delivered.hbm_bytes
        elif op.opcode in ("copy-start", "slice-start"):
            source = operands[0].hbm_bytes > 0
            target = op.arrays[0] if op.opcode == "copy-start" else op.arrays[len(operands[0].arrays)]
            read, written = target.bytes * source, target.bytes * target.in_hbm
        elif op.opcode == "fusion":
            read, written = self._fusion(op, operands)
        elif op.opcode == "dynamic-update-slice":
            read, written = operands[1].hbm_bytes, operands[1].bytes * (op.hbm_bytes > 0)
        elif op.opcode in SLICES:
            read, written = op.bytes * (operands[0].hbm_bytes > 0), op.hbm_bytes
        else:
            read, written = sum(x.hbm_bytes for x in operands), op.hbm_bytes
        if base == "copy" and written >= LARGE and _origin(operands[0], body).hbm_bytes > 0:
            total.copies.append((op.scope or op.name, written))
        total.read += read
        total.written += written

    def _fusion(self, op: Instruction, operands: list[Instruction]) -> tuple[float, float]:
        inner = self.computations[op.called("calls")]
        parameters = {int(p.operands[0]): p for p in inner.values() if p.opcode == "parameter"}
        users: dict[str, list[tuple[Instruction, int]]] = collections.defaultdict(list)
        for user in inner.values():
            for place, name in enumerate(user.operands):
                users[name].append((user, place))

        @functools.cache
        def taken(name: str, updated: bool = False) -> float:
            """Bytes of a parameter (or of a bitcast or an update of it) that are looked at; inf where all may be."""
            bytes_ = 0.0
            for user, place in users[name]:
                if user.opcode in SLICES and place == 0:
                    bytes_ += user.bytes
                elif user.opcode == "bitcast":
                    bytes_ += taken(user.name, updated)
                elif user.opcode == "dynamic-update-slice" and place == 0:
                    bytes_ += taken(user.name, True)
                elif not (updated and user.opcode == "tuple"):  # a result
                    return math.inf
            return bytes_

        read = sum(min(taken(parameters[i].name), x.hbm_bytes) for i, x in enumerate(operands) if i in parameters)
        root = next(x for x in inner.values() if x.is_root)
        results = [inner[name] for name in root.operands] if root.opcode == "tuple" else [root]
        if len(results) != len(op.arrays):
            return read, op.hbm_bytes
        written = 0.0
        for array, result in zip(op.arrays, results):
            updates = 0.0
            while result.opcode in ("bitcast", "dynamic-update-slice"):
                updates += inner[result.operands[1]].bytes if result.opcode == "dynamic-update-slice" else 0.0
                result = inner[result.operands[0]]
            in_place = updates > 0 and result.opcode == "parameter"  # an update of anything else writes all of it
            written += (updates if in_place else array.bytes) * array.in_hbm
        return read, written

    def trips(self, loop: Instruction) -> int | None:
        """How often a loop runs, by the constant its counter is compared with; None if that is data."""
        condition = self.computations[loop.called("condition")]
        root = next(x for x in condition.values() if x.is_root)
        if root.opcode == "fusion":
            constants = [condition[name] for name in root.operands if name in condition]
            inner = self.computations[root.called("calls")]
            compare = next((x for x in inner.values() if x.is_root), root)
            constants += [x for x in inner.values() if x.opcode == "constant"]
        else:
            compare, constants = root, [condition[name] for name in root.operands if name in condition]
        bounds = [_value(x) for x in constants if x.opcode == "constant"]
        if compare.opcode != "compare" or "direction=LT" not in compare.attributes or len(bounds) != 1:
            return None
        return bounds[0]

    def _branches(self, op: Instruction) -> Iterator[str]:
        names = re.search(r"branch_computations=\{([^}]*)\}", op.attributes)
        if names:
            yield from _NAME.findall(names.group(1))
        else:
            yield op.called("true_computation")
            yield op.called("false_computation")


def _origin(op: Instruction, body: dict[str, Instruction]) -> Instruction:
    """What made a value, before it was copied."""
    while op.opcode in ("copy", "copy-start", "copy-done", "bitcast") and op.operands[0] in body:
        op = body[op.operands[0]]
    return op


def _value(constant: Instruction) -> int | None:
    return int(constant.operands[0]) if constant.operands and constant.operands[0].lstrip("-").isdecimal() else None


def _instruction(line: str) -> Instruction:
    left, _, right = line.strip().partition(" = ")
    end = _closing(right, 0) + 1 if right.startswith("(") else right.index(" ")
    match = _OPCODE.search(right, end)
    opcode, start = match.group(1), match.end() - 1
    close = _closing(right, start)
    inside = right[start + 1 : close]
    # Constants and parameters have their value or number here, everything else names of values.
    operands = (inside,) if opcode in ("constant", "parameter") else tuple(_NAME.findall(inside))
    return Instruction(
        name=left.removeprefix("ROOT ").removeprefix("%"), opcode=opcode, arrays=tuple(_arrays(right[:end])),
        operands=operands, attributes=right[close + 1 :], is_root=left.startswith("ROOT "),
    )  # fmt: skip


def _arrays(type_text: str) -> Iterator[Array]:
    for dtype, sizes, layout in _ARRAY.findall(type_text):
        count = math.prod(int(size) for size in sizes.split(",") if size)
        yield Array(bytes=count * BYTES[dtype], in_hbm="S(" not in layout, on_host=HOST_MEMORY in layout)


def _closing(text: str, opening: int) -> int:
    depth = 0
    for i in range(opening, len(text)):
        depth += (text[i] == "(") - (text[i] == ")")
        if depth == 0:
            return i
    raise ValueError(f"unbalanced parentheses in {text[:80]!r}")

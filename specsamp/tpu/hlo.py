"""Parses the text of a compiled TPU program, scheduled HLO, into instructions.

Arrays whose layout names the memory space ``S(1)`` or ``S(3)`` are on chip, ``S(5)`` is the host's,
and without one they are in HBM. `specsamp.tpu.traffic` counts the moved bytes.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterator

HOST_MEMORY = "S(5)"
WITHOUT_BITS = {"pred": 1, "token": 0, "opaque": 0}  # bytes of types without a size in their name

_ARRAY = re.compile(r"(\w+)\[([\d,]*)\](\{[^}]*\})?")
_BITS = re.compile(r"(?:[suf]|bf)(\d+)(?:e\d+m\d+\w*)?")  # bits in type names: s8, bf16, f8e4m3fn
_OPCODE = re.compile(r"([\w-]+)\(")
_NAME = re.compile(r"%([\w.\-]+)")


@dataclasses.dataclass(frozen=True)
class Array:
    """The size of an array, and where it is."""

    bytes: float
    in_hbm: bool
    on_host: bool = False
    sizes: tuple[int, ...] = ()


@dataclasses.dataclass(frozen=True)
class Instruction:
    """One instruction of a computation."""

    name: str
    opcode: str
    arrays: tuple[Array, ...]  # of the result, in the order of its type
    operands: tuple[str, ...]
    attributes: str
    is_root: bool

    @property
    def bytes(self) -> float:
        """Bytes of the result."""
        return sum(array.bytes for array in self.arrays)

    @property
    def hbm_bytes(self) -> float:
        """Bytes of the result that are in HBM."""
        return sum(array.bytes for array in self.arrays if array.in_hbm)

    def called(self, attribute: str) -> str | None:
        """Returns the name of the computation of an attribute, for example "body"."""
        match = re.search(rf"\b{attribute}=%?([\w.\-]+)", self.attributes)
        return match and match.group(1)

    @property
    def cycles(self) -> int:
        """The compiler's estimate, 0 where it has none."""
        match = re.search(r'"estimated_cycles":"(\d+)"', self.attributes)
        return int(match.group(1)) if match else 0

    @property
    def scope(self) -> str:
        """The `jax.named_scope` that the instruction comes from."""
        match = re.search(r'op_name="([^"]*)"', self.attributes)
        return match.group(1) if match else ""


@dataclasses.dataclass(frozen=True, eq=False)
class Module:
    """Computations by name, each a dict of instructions in their order."""

    computations: dict[str, dict[str, Instruction]]
    entry: str

    @classmethod
    def parse(cls, text: str) -> Module:
        """Reads ``compiled.as_text()``; raises ValueError for other texts and for arrays of an
        unknown type.
        """
        computations: dict[str, dict[str, Instruction]] = {}
        entry = None
        current = None
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

    def trips(self, loop: Instruction) -> int | None:
        """Returns how often a loop runs: the constant that its counter is compared with, None if
        that is data.
        """
        condition = loop.called("condition")
        compare = self.root(condition)
        body = self.computations[condition]
        compared = [body[name] for name in compare.operands if name in body]
        if compare.opcode == "fusion":
            inner = compare.called("calls")
            compare = self.root(inner)
            compared += self.computations[inner].values()
        bounds = [x.operands[0] for x in compared if x.opcode == "constant"]
        is_below = compare.opcode == "compare" and "direction=LT" in compare.attributes
        is_number = len(bounds) == 1 and bounds[0].lstrip("-").isdecimal()
        return int(bounds[0]) if is_below and is_number else None

    def root(self, computation: str) -> Instruction:
        """Returns the instruction whose result is that of a computation."""
        return next(x for x in self.computations[computation].values() if x.is_root)

    def branches(self, op: Instruction) -> list[str]:
        """Returns the names of the computations that a conditional chooses from."""
        names = re.search(r"branch_computations=\{([^}]*)\}", op.attributes)
        if names:
            return _NAME.findall(names.group(1))
        return [op.called("true_computation"), op.called("false_computation")]


def _instruction(line: str) -> Instruction:
    """Parses a line such as ``ROOT %name = f32[2,3]{1,0} opcode(%operand), attribute=...``."""
    left, _, right = line.strip().partition(" = ")
    end = _closing(right, 0) + 1 if right.startswith("(") else right.index(" ")
    match = _OPCODE.search(right, end)
    opcode = match.group(1)
    start = match.end() - 1
    close = _closing(right, start)
    inside = right[start + 1 : close]
    # Constants and parameters have their value or number here, everything else names of values.
    operands = (inside,) if opcode in ("constant", "parameter") else tuple(_NAME.findall(inside))
    return Instruction(
        name=left.removeprefix("ROOT ").removeprefix("%"),
        opcode=opcode,
        arrays=tuple(_arrays(right[:end])),
        operands=operands,
        attributes=right[close + 1 :],
        is_root=left.startswith("ROOT "),
    )


def _arrays(type_text: str) -> Iterator[Array]:
    """Yields the arrays of a type, which may be a tuple."""
    for dtype, sizes, layout in _ARRAY.findall(type_text):
        bits = _BITS.fullmatch(dtype)
        if bits is None and dtype not in WITHOUT_BITS:
            raise ValueError(
                f"an array of {dtype}, whose size is not known: add it to specsamp/tpu/hlo.py"
            )
        shape = tuple(int(size) for size in sizes.split(",") if size)
        bytes_ = math.prod(shape) * (int(bits[1]) / 8 if bits else WITHOUT_BITS[dtype])
        yield Array(
            bytes=bytes_, in_hbm="S(" not in layout, on_host=HOST_MEMORY in layout, sizes=shape
        )


def _closing(text: str, opening: int) -> int:
    """Returns the index of the parenthesis that closes the one at ``opening``."""
    depth = 0
    for i in range(opening, len(text)):
        depth += (text[i] == "(") - (text[i] == ")")
        if depth == 0:
            return i
    raise ValueError(f"unbalanced parentheses in {text[:80]!r}")

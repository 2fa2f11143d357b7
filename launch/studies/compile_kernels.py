"""Asks how near its floor a program comes whose caches are read by kernels; see compile_study.py.

    kernels   the pair of the paper at 2048 slots; Llama 3.3 70B at 32,768; slices of 64 and 256 chips

Each program is stated twice: with all slots of the caches alive, and with as many as ``live``. Programs of Llama have
slots for 32,768 tokens, of which a text of 8,192 reads a quarter.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

from launch.studies.compile_cells import DISTRIBUTIONS, RULES, SLICES, Cell, K, at, small_round, whole_round
from specsamp.checkpoints.published import published_config
from specsamp.models.config import TransformerConfig, chinchilla_70b, draft_4b
from specsamp.models.kernels.cache import Kernels
from specsamp.tpu.program import Program
from specsamp.tpu.programs import WINDOW
from specsamp.tpu.report import measure
from specsamp.tpu.stack import FEW, MANY, Stack, continued, facts
from specsamp.tpu.topology import described_mesh

LLAMA = "meta-llama/Llama-3.3-70B-Instruct"
PAPER = "v4:2x2x4"
LENGTHS = (WINDOW, K + 1, 17)  # tokens of a call
LARGER = {"v5e:8x8": 4, "v5e:16x16": 16}  # slices, and their data shards


@dataclasses.dataclass(frozen=True)
class Pair:
    """Names two models, the slots of their caches, and how many of them are alive."""

    name: str
    target: Callable[[], TransformerConfig]
    draft: Callable[[], TransformerConfig]
    slots: int
    live: int


PAIRS = {
    "paper": Pair("Chinchilla 70B + 4B", chinchilla_70b, draft_4b, 2048, 256),
    "llama": Pair(
        "Llama 3.3 70B + 3.2 1B",
        functools.partial(published_config, LLAMA),
        functools.partial(published_config, "meta-llama/Llama-3.2-1B"),
        32_768,
        8192,
    ),
}


def kernels() -> list[Cell]:
    """Asks for calls and rounds of both pairs, and for a call on larger slices."""
    cells = []
    for batch, lengths in ((1, LENGTHS), (8, LENGTHS), (32, (K + 1,))):
        cells += [_call(PAPER, batch, tokens) for tokens in lengths]
    cells += [_round(PAIRS["paper"], PAPER, batch) for batch in (1, 8)]
    for topology in SLICES[1:]:
        cells += [_call(topology, 8, tokens) for tokens in LENGTHS]
        cells += [_round(PAIRS["paper"], topology, 8)]
    for topology in SLICES:
        # Sixteen v5e chips have no room for more than four such texts: eight are asked for once.
        rows = [8, 4, 4] if topology.startswith("v5e") else [8] * len(LENGTHS)
        cells += [_call(topology, batch, tokens, LLAMA) for batch, tokens in zip(rows, LENGTHS, strict=True)]
    cells += [_round(PAIRS["llama"], topology, 4 if topology.startswith("v5e") else 8) for topology in SLICES]
    return cells + [_larger(topology, data) for topology, data in LARGER.items()]


def stack_of(config: TransformerConfig, topology: str, batch: int, slots: int, live: int) -> Stack:
    """Returns a model with kernels on a slice, of whose slots ``live`` are alive."""
    mesh = described_mesh(topology, num_kv_heads=config.num_kv_heads, rows=batch)
    return Stack(config, mesh, topology, batch, slots, kernels=Kernels(), live=live / slots)


def stated(program: Program, topology: str, batch: int, calls: int = 1) -> dict[str, Any]:
    """Returns the `facts` of a program, and the same traffic with caches that are partly alive."""
    made = facts(program, topology, sequences=batch, calls=calls)
    if not made["fits"]:
        return made
    return made | {
        "floor_bytes": program.floor_bytes,
        "live_hbm_bytes": program.live_hbm_bytes,
        "live_over_floor": program.live_over_floor,
    }


def _call(topology: str, batch: int, tokens: int, model: str | None = None) -> Cell:
    slots, live = (32_768, 8192) if model else (2048, 256)

    def answer() -> dict[str, Any]:
        config = published_config(model) if model else chinchilla_70b()
        config = dataclasses.replace(config, dtype="bfloat16")
        stack = stack_of(config, topology, batch, slots, live)
        program = continued(at(stack, FEW, tokens), at(stack, MANY, tokens), config.num_layers)
        return stated(program, topology, batch)

    name = "Llama 3.3 70B" if model else "Chinchilla 70B"
    asked = {"program": f"{tokens} tokens", "batch": batch, "slots": slots, "live": live}
    return Cell({"model": name, "topology": topology} | asked, answer)


def _round(pair: Pair, topology: str, batch: int) -> Cell:
    def answer() -> dict[str, Any]:
        target, draft = (
            stack_of(dataclasses.replace(config(), dtype="bfloat16"), topology, batch, pair.slots, pair.live)
            for config in (pair.target, pair.draft)
        )
        small = small_round(target, draft, DISTRIBUTIONS["top-p"], RULES["token"])
        score, draft_step = (
            {layers: at(stack, layers, tokens) for layers in (FEW, MANY)}
            for stack, tokens in ((target, K + 1), (draft, WINDOW))
        )
        return stated(whole_round(target, draft, small, score, draft_step), topology, batch, calls=K + 1)

    asked = {"program": f"round, K = {K}", "batch": batch, "slots": pair.slots, "live": pair.live}
    return Cell({"model": pair.name, "topology": topology} | asked, answer)


def _larger(topology: str, data: int) -> Cell:
    """Asks whether a call compiles within data shards, two layers of it, and whether all layers fit."""
    slots, live, batch = 2048, 256, 4 * data

    def answer() -> dict[str, Any]:
        mesh = described_mesh(topology, data, rows=batch // data)
        stack = Stack(chinchilla_70b(), mesh, topology, batch, slots, kernels=Kernels(), live=live / slots)
        programs = stack.programs(FEW)
        floors = (programs.floor(programs.target, share) for share in (1.0, stack.live))
        name, capacity = "two layers", stack.capacity
        made = measure(name, K + 1, *floors, lambda: programs.call(programs.target, K + 1), capacity, live=stack.live)
        whole = dataclasses.replace(made.memory, arguments=stack.bytes_of_state())
        return stated(dataclasses.replace(made, memory=whole, layers=FEW), topology, batch // data)

    asked = {"program": f"{K + 1} tokens, two layers, data = {data}", "batch": batch, "slots": slots, "live": live}
    return Cell({"model": "Chinchilla 70B", "topology": topology} | asked, answer)

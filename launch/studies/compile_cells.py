"""Questions to the compiler that take many programs: each a list of cells, each cell one answer.

    slices    the pair of the paper on four slices, by batch, sampling and rule
    scoring   tokens per call, from one to the ridge of each chip: where does verification stop being free?
    shapes    drafts of 4B parameters from 4 to 40 layers, and a 7B of ordinary shape, on 1, 4, 8 and 16 chips

Models are compiled at two and four layers and continued to all of them, see `specsamp.tpu.stack`. compile_study.py
writes the answers.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

from jax.sharding import AxisType, Mesh

from specsamp.mesh.layout import mesh_axes
from specsamp.models.config import TransformerConfig, chinchilla_70b, draft_4b
from specsamp.sampling.rejection import BlockRule, TokenRule
from specsamp.sampling.rules import Rule
from specsamp.sampling.warp import Warp, chain, greedy, temperature, top_p
from specsamp.tpu.program import Program
from specsamp.tpu.programs import WINDOW
from specsamp.tpu.report import measure
from specsamp.tpu.stack import FEW, MANY, Stack, continued, facts, linear
from specsamp.tpu.topology import described_mesh, parse

K = 4  # the paper's draft length
SLICES = ("v4:2x2x4", "v5e:4x4", "v5p:2x2x4", "v6e:4x4")  # sixteen chips each
DISTRIBUTIONS: dict[str, Warp] = {"greedy": greedy(), "top-p": chain(temperature(1.0), top_p(0.8))}
RULES: dict[str, Rule] = {"token": TokenRule(), "block": BlockRule()}


@dataclasses.dataclass(frozen=True)
class Cell:
    """One question: what tells it from the others, and a function that finds the answer."""

    name: dict[str, Any]
    answer: Callable[[], dict[str, Any]]


@functools.cache
def at(stack: Stack, layers: int, tokens: int) -> Program:
    """Compiles a call at a depth, once for all that ask."""
    return stack.at(layers, tokens)


def first_devices(topology: str, count: int) -> Mesh:
    """Returns a mesh without data shards over the first ``count`` devices of a slice."""
    devices = described_mesh(topology).devices.reshape(-1)[:count]
    shape, names = mesh_axes(1, count)
    return Mesh(devices.reshape(shape), names, axis_types=(AxisType.Auto,) * len(names))


def slices() -> list[Cell]:
    """Asks for the paper's pair on sixteen chips of each kind."""

    def answer(topology: str, batch: int) -> dict[str, Any]:
        mesh = described_mesh(topology, rows=batch)
        target = Stack(chinchilla_70b(), mesh, topology, batch)
        draft = Stack(draft_4b(), mesh, topology, batch)
        calls = {
            "draft step": {layers: draft.at(layers, WINDOW) for layers in (FEW, MANY)},
            "score": {layers: target.at(layers, K + 1) for layers in (FEW, MANY)},
        }
        layers = {"draft step": draft.config.num_layers, "score": target.config.num_layers}
        whole = {name: continued(two[FEW], two[MANY], layers[name]) for name, two in calls.items()}
        whole["target step"] = target.step()
        made = {name: facts(program, topology, sequences=batch) for name, program in whole.items()}
        state = target.bytes_of_state() + draft.bytes_of_state()
        for distribution, sampling in DISTRIBUTIONS.items():
            for rule in RULES:
                small = small_round(target, draft, sampling, RULES[rule])
                program = whole_round(target, draft, small, calls["score"], calls["draft step"])
                made[f"round, {distribution}, {rule}"] = facts(program, topology, sequences=batch, calls=K + 1)
        return {"weights_and_caches_bytes": state, "programs": made}

    return [
        Cell({"topology": topology, "batch": batch}, lambda t=topology, b=batch: answer(t, b))
        for batch in (1, 8, 32)
        for topology in SLICES
    ]


def whole_round(
    target: Stack, draft: Stack, small: Program, score: dict[int, Program], draft_step: dict[int, Program]
) -> Program:
    """Continues a round of both models at `FEW` layers to all of theirs.

    Args:
      score, draft_step: the calls of a round, at `FEW` and at `MANY` layers.
    """
    per_target = (target.config.num_layers - FEW) / (MANY - FEW)
    per_draft = K * (draft.config.num_layers - FEW) / (MANY - FEW)
    of_target = (per_target, score[MANY]), (-per_target, score[FEW])
    of_draft = (per_draft, draft_step[MANY]), (-per_draft, draft_step[FEW])
    program = linear((1.0, small), *of_target, *of_draft)
    if program.memory is None:
        return program
    # A draft is called K times and held once.
    state = target.bytes_of_state() + draft.bytes_of_state()
    return dataclasses.replace(
        program, memory=dataclasses.replace(linear((1.0, small), *of_target).memory, arguments=state)
    )


def small_round(target: Stack, draft: Stack, sampling: Warp, rule: Rule) -> Program:
    """Compiles the round of both models at `FEW` layers."""
    programs = target.programs(FEW, sampling, draft.config)

    def floor(live):
        return programs.floor(programs.target, live) + K * programs.floor(programs.draft, live)

    floors = floor(1.0), floor(target.live)
    made = measure("round", K + 1, *floors, lambda: programs.round(K, rule), target.capacity, target.live)
    return dataclasses.replace(made, layers=FEW * (1 + K))


def scoring() -> list[Cell]:
    """Asks what one call of the target costs, by its tokens of one row."""

    def answer(topology: str, tokens: int) -> dict[str, Any]:
        stack = Stack(chinchilla_70b(), described_mesh(topology), topology)
        return facts(stack.call(tokens), topology) | {"ridge_tokens": parse(topology)[0].ridge}

    cells = []
    for topology in SLICES:
        ridge = round(parse(topology)[0].ridge)
        for tokens in sorted({1, 2, 3, 5, 9, 17, 33, 65, 129, 257, 513, ridge}):
            if tokens <= ridge:
                name = {"topology": topology, "tokens": tokens}
                cells.append(Cell(name, lambda t=topology, n=tokens: answer(t, n)))
    return cells


# Heads of 128, feed-forward of four times the width, relative positions: about 4B parameters each. Heads are a
# multiple of 16, so that as many chips can share them; that leaves the two deepest fewer than their width has.
SHAPES = {
    "4 layers": dict(width=8704, num_layers=4, num_heads=64),
    "8 layers (the paper's)": dict(width=6144, num_layers=8, num_heads=48),
    "18 layers": dict(width=4096, num_layers=18, num_heads=32),
    "32 layers": dict(width=3328, num_layers=32, num_heads=16),
    "40 layers": dict(width=2816, num_layers=40, num_heads=16),
    "a 7B, 32 layers": dict(width=4096, num_layers=32, num_heads=32),
}


def shapes() -> list[Cell]:
    """Asks what a draft step costs at batch 1, by the shape of the draft and the chips of a TPU v4 slice."""

    def answer(shape: str, chips: int) -> dict[str, Any]:
        config = TransformerConfig(vocab_size=32_000, head_size=128, dtype="bfloat16", **SHAPES[shape])
        topology, sizes = "v4:2x2x4", {1: (1,), 4: (2, 2), 8: (2, 2, 2), 16: (2, 2, 4)}[chips]
        stack = Stack(config, first_devices(topology, chips), topology)
        made = facts(stack.call(WINDOW), topology, chips=sizes)
        return made | {"parameters": config.num_parameters, "layers": config.num_layers}

    return [
        Cell({"shape": shape, "chips": chips}, lambda s=shape, c=chips: answer(s, c))
        for shape in SHAPES
        for chips in (1, 4, 8, 16)
    ]


STUDIES = {study.__name__: study for study in (slices, scoring, shapes)}

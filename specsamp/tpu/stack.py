"""Estimates programs of deep models from shallow models: all layers cost the same.

    pair = Stack(chinchilla_70b(), described_mesh("v4:2x2x4"), "v4:2x2x4", drafter=draft_4b())
    pair.round(4, chain(top_p(0.8)), TokenRule()).facts("v4:2x2x4")["work"]     # for `specsamp.tpu.calibration.estimate`

Programs of two and of four layers are compiled at full width and continued in a straight line to all layers; fixed
costs stay fixed. A head is compiled as it is.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

from jax.sharding import Mesh

from specsamp.mesh.layout import Layout
from specsamp.mesh.sharded import draft_layout, shard_model
from specsamp.models.config import TransformerConfig
from specsamp.models.heads import HeadConfig
from specsamp.models.kernels.dispatch import Kernels
from specsamp.models.transformer import TransformerLM
from specsamp.sampling.rules import Rule
from specsamp.sampling.warp import Warp
from specsamp.tpu.lowering import WINDOW, Programs, sharded_head_model, step_windows
from specsamp.tpu.program import Program, fastest, measure_program
from specsamp.tpu.topology import parse

FEW, MANY = 2, 4  # layers that are compiled
COUNTED = ("floor_bytes", "live_floor_bytes", "hbm_bytes", "live_hbm_bytes", "cycles", "kernel_cycles")
PARTS = ("arguments", "temporaries", "outputs", "code")  # of memory


@dataclasses.dataclass(frozen=True)
class Stack:
    """One target on one mesh, compiled at two depths, and its draft."""

    config: TransformerConfig
    mesh: Mesh
    topology: str
    batch: int = 1
    slots: int = 2048
    kernels: Kernels | None = None  # None: XLA's operations
    live: float = 0.5  # see `specsamp.tpu.program.measure_program`
    drafter: TransformerConfig | HeadConfig | int | None = None  # a model, a head, or the last layer of an early exit

    @property
    def draft(self) -> Stack:
        """Returns the stack of the layers that draft: of the draft model, or the target's own."""
        if isinstance(self.drafter, TransformerConfig):
            return dataclasses.replace(self, config=self.drafter, drafter=None)
        return dataclasses.replace(self, config=self._model(self.drafter).config, drafter=None)

    def programs(self, layers: int, sampling: Warp | None = None) -> Programs:
        """Returns the programs of ``layers`` layers of the target and of a draft model, or of one of an early exit.

        A head reads the first layers of such a target, whichever layers it would read of the whole.
        """
        target, layout = self._model(layers), draft_layout(self.mesh)
        if isinstance(self.drafter, HeadConfig):
            read = tuple(range(len(self.drafter.hidden_layers)))
            head = dataclasses.replace(self.drafter, target_layers=layers, hidden_layers=read)
            draft = sharded_head_model(target, head.head(), layout)
        elif isinstance(self.drafter, TransformerConfig):
            draft = shard_model(self.draft._model(layers), layout)
        else:
            draft = shard_model(target if self.drafter is None else target.first(1), layout)
        return Programs(
            target=shard_model(target, Layout.tensor_parallel(self.mesh)),
            draft=draft,
            mesh=self.mesh,
            sampling=sampling,
            batch=self.batch,
            slots=self.slots,
            inside=self.drafter is None or isinstance(self.drafter, int),
        )

    def call(self, tokens: int) -> Program:
        """Measures a call of the whole target with so many tokens a row."""
        return linear((1.0, self.at(FEW, tokens)), *self.more(tokens, self.config.num_layers - FEW))

    @functools.cache  # once for all steps and rounds
    def at(self, layers: int, tokens: int) -> Program:
        """Compiles and measures a call of the target with so many layers."""
        if self.drafter is not None:
            return dataclasses.replace(self, drafter=None).at(layers, tokens)
        programs = self.programs(layers)
        floor = functools.partial(programs.floor, programs.target, tokens=tokens)
        lowered = functools.partial(programs.call, programs.target, tokens)
        name = f"{tokens} tokens, {layers} layers"
        return measure_program(name, tokens, floor, lowered, self.topology, layers=layers, live=self.live)

    def more(self, tokens: int, layers: float) -> list[tuple[float, Program]]:
        """Returns the terms of `linear` that add so many layers to a program with such a call."""
        each = layers / (MANY - FEW)
        return [(each, self.at(MANY, tokens)), (-each, self.at(FEW, tokens))]

    def step(self) -> Program:
        """Measures a call of one new token per sequence, at the fastest window."""
        programs = self.programs(self._few)
        calls = [self.call(tokens) for tokens in step_windows(programs, programs.target)]
        return fastest(calls, parse(self.topology)[0])

    def draft_step(self, tokens: int = WINDOW) -> Program:
        """Measures a step of the draft; the block of a head that drafts blocks."""
        if not isinstance(self.drafter, HeadConfig):
            return self.draft.call(tokens)
        programs = self.programs(self._few)
        tokens = self.drafter.block_size if self.drafter.drafts_blocks else tokens
        floor = functools.partial(programs.floor, programs.draft)
        lowered = functools.partial(programs.call, programs.draft, tokens)
        layers = programs.draft.config.num_layers
        return measure_program("step", tokens, floor, lowered, self.topology, layers=layers, live=self.live)

    def round(self, K: int, sampling: Warp, rule: Rule) -> Program:
        """Measures a round of all layers: K steps of the draft, or a block, and one call of the target."""
        few, programs, rows = self._few, self.programs(self._few, sampling), K + 1
        drafts = programs.draft_calls(K)
        drafting = drafts * programs.draft.config.num_layers
        floor, lowered = functools.partial(programs.floor_of_round, K), functools.partial(programs.round, K, rule)
        shared = dict(layers=few + drafting, calls=drafts + 1, live=self.live)
        small = measure_program("round", rows, floor, lowered, self.topology, **shared)
        of_target = [(1.0, small), *self.more(rows, self.config.num_layers - few)]
        if isinstance(self.drafter, HeadConfig):
            return linear(*of_target)
        more_layers = drafts * self.draft.config.num_layers - drafting
        program = linear(*of_target, *self.draft.more(WINDOW, more_layers))
        if program.memory is None:
            return program
        memory = linear(*of_target).memory  # what drafts is called K times and held once
        if isinstance(self.drafter, TransformerConfig):
            memory = dataclasses.replace(memory, arguments=self.bytes_of_state())
        return dataclasses.replace(program, memory=memory)

    def bytes_of_state(self) -> int:
        """Returns the bytes per device of weights and caches, all layers of the target and of a draft model."""
        stacks = [self, self.draft] if isinstance(self.drafter, TransformerConfig) else [self]
        alone = [dataclasses.replace(stack, drafter=None) for stack in stacks]
        return sum(sum(stack.programs(stack.config.num_layers).bytes_of_state()) for stack in alone)

    @property
    def _few(self) -> int:
        """Returns the layers of the smaller target: as many as a head reads."""
        return max(FEW, len(self.drafter.hidden_layers) - 1) if isinstance(self.drafter, HeadConfig) else FEW

    def _model(self, layers: int) -> TransformerLM:
        return TransformerLM(self.config, kernels=self.kernels).first(layers)


def linear(*terms: tuple[float, Program]) -> Program:
    """Adds weighted programs: all that is counted, and their memory. One that does not fit is the result itself."""
    first = terms[0][1]
    unfit = next((program for _, program in terms if program.memory is None), None)
    if unfit is not None:
        return unfit

    def total(name: str, of: Callable[[Program], Any] = lambda program: program) -> float:
        return sum(weight * getattr(of(program), name) for weight, program in terms)

    def counts(name: str) -> dict[str, float]:
        kinds = dict.fromkeys(kind for _, program in terms for kind in getattr(program, name))
        sums = {
            kind: round(sum(weight * getattr(program, name).get(kind, 0) for weight, program in terms))
            for kind in kinds
        }
        return {kind: count for kind, count in sums.items() if count}

    memory = {name: max(round(total(name, lambda program: program.memory)), 0) for name in PARTS}
    return dataclasses.replace(
        first,
        **{name: total(name) for name in COUNTED},
        **{name: round(total(name)) for name in ("num_copies", "host_transfers", "open_loops", "layers")},
        memory=dataclasses.replace(first.memory, **memory),
        collectives=counts("collectives"),
        collective_bytes=counts("collective_bytes"),
    )

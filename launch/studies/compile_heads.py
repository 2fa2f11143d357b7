"""Compiles what heads and early exits cost on a chip, beside a draft model. Cells for compile_study.py.

    Llama 3.1 8B     on v5e:2x2 and v6e:2x2, with Llama 3.2 1B and with a head of EAGLE-3's shape
    Llama 3.3 70B    on v5p:2x2x4 and v6e:4x4, with the same two
    the paper's 70B  on v4:2x2x4, with its draft model, and leaving it after layer 10

Batch 1, 2048 slots, top-p, token rule, K = 4. The target is compiled at two and four layers and continued to all of them,
see `specsamp.tpu.stack`; a head has one layer and is compiled as it is.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

from launch.lib.shapes import EAGLE3_VOCABULARY
from launch.studies.compile_cells import DISTRIBUTIONS, RULES, Cell, K, at
from specsamp.checkpoints.published import published_config
from specsamp.mesh.layout import Layout
from specsamp.mesh.sharded import draft_layout, shard_model
from specsamp.models.config import TransformerConfig, chinchilla_70b, draft_4b
from specsamp.models.eagle import Eagle3Config
from specsamp.models.heads import FeatureHead
from specsamp.models.transformer import TransformerLM
from specsamp.tpu.head_step import shard_head_step
from specsamp.tpu.program import Program
from specsamp.tpu.programs import WINDOW, Programs
from specsamp.tpu.report import measure
from specsamp.tpu.stack import FEW, MANY, Stack, continued, facts, linear
from specsamp.tpu.topology import described_mesh

EXIT_LAYER = 10
TARGETS = {
    "Llama 3.1 8B": lambda: published_config("meta-llama/Llama-3.1-8B"),
    "Llama 3.3 70B": lambda: published_config("meta-llama/Llama-3.3-70B-Instruct"),
    "the paper's 70B": chinchilla_70b,
}
DRAFTS = {
    "Llama 3.2 1B": lambda: published_config("meta-llama/Llama-3.2-1B"),
    "the paper's 4B": draft_4b,
}
HEAD, EXIT = "EAGLE-3", f"early exit after {EXIT_LAYER}"
PLACES = (
    ("Llama 3.1 8B", "v5e:2x2", ("Llama 3.2 1B", HEAD)),
    ("Llama 3.1 8B", "v6e:2x2", ("Llama 3.2 1B", HEAD)),
    ("Llama 3.3 70B", "v5p:2x2x4", ("Llama 3.2 1B", HEAD)),
    ("Llama 3.3 70B", "v6e:4x4", ("Llama 3.2 1B", HEAD)),
    ("the paper's 70B", "v4:2x2x4", ("the paper's 4B", EXIT)),
)


def heads() -> list[Cell]:
    """Asks for the calls and the round of each drafter, beside a step of its target."""
    return [
        Cell({"target": target, "topology": topology, "drafter": drafter}, functools.partial(answer, *cell))
        for target, topology, drafters in PLACES
        for drafter in drafters
        for cell in [(target, topology, drafter)]
    ]


def answer(target: str, topology: str, drafter: str) -> dict[str, Any]:
    """Compiles the programs of one cell; those of its target once for all of its cells."""
    stack = stack_of(target, topology)
    score = {layers: at(stack, layers, K + 1) for layers in (FEW, MANY)}
    step = continued(*(at(stack, layers, WINDOW) for layers in (FEW, MANY)), stack.config.num_layers)
    more = stack.config.num_layers - FEW
    if drafter == HEAD:
        small_pair = with_head(stack)
        draft_step, small = head_step(stack, small_pair), round_of(stack, small_pair)
        drafting = []
    elif drafter == EXIT:
        draft_step = continued(*(at(stack, layers, WINDOW) for layers in (FEW, MANY)), EXIT_LAYER)
        small = round_of(stack, small_programs(stack, exit_layer=1))
        drafting = slope(K * (EXIT_LAYER - 1), *(at(stack, layers, WINDOW) for layers in (FEW, MANY)))
    else:
        draft = dataclasses.replace(stack, config=DRAFTS[drafter]())
        calls = [at(draft, layers, WINDOW) for layers in (FEW, MANY)]
        draft_step = continued(*calls, draft.config.num_layers)
        small = round_of(stack, stack.programs(FEW, DISTRIBUTIONS["top-p"], draft.config))
        drafting = slope(K * (draft.config.num_layers - FEW), *calls)
    round_ = linear((1.0, small), *slope(more, score[FEW], score[MANY]), *drafting)
    programs = {
        "target step": (step, 1),
        "score": (continued(score[FEW], score[MANY], stack.config.num_layers), 1),
        "draft step": (draft_step, 1),
        "round": (round_, K + 1),
    }
    return {"programs": {name: facts(program, topology, calls=calls) for name, (program, calls) in programs.items()}}


@functools.cache
def stack_of(target: str, topology: str) -> Stack:
    config = TARGETS[target]()
    return Stack(config, described_mesh(topology, num_kv_heads=config.num_kv_heads, rows=1), topology)


def slope(layers: int, few: Program, many: Program) -> list[tuple[float, Program]]:
    """Returns what so many more layers add, as terms of `linear`."""
    each = layers / (MANY - FEW)
    return [(each, many), (-each, few)]


def with_head(stack: Stack) -> Programs:
    """Returns the programs of a target of `FEW` layers with a head."""
    return small_programs(stack, head=FeatureHead(head_of(stack.config)))


def head_step(stack: Stack, programs: Programs, tokens: int = WINDOW) -> Program:
    """Compiles a step of a head."""
    floors = [programs.floor(programs.draft, live) for live in (1.0, stack.live)]
    made = measure("step", tokens, *floors, lambda: programs.call(programs.draft, tokens), stack.capacity, stack.live)
    return dataclasses.replace(made, layers=1)


def head_of(target: TransformerConfig) -> Eagle3Config:
    """Returns a head of EAGLE-3's shape for a target of `FEW` layers: three streams are read, whichever they are."""
    return Eagle3Config(
        layer=dataclasses.replace(target, num_layers=1, tied=False, positions="rotary"),
        target_layers=FEW,
        hidden_layers=(0, 1, FEW),
        draft_vocab_size=EAGLE3_VOCABULARY,
        own_output=True,
    )


def small_programs(stack: Stack, *, head: FeatureHead | None = None, exit_layer: int | None = None) -> Programs:
    """Returns the programs of a target of `FEW` layers that drafts itself, with a head or its first layers."""
    target = dataclasses.replace(stack.config, num_layers=FEW)
    layout = draft_layout(stack.mesh)
    first = dataclasses.replace(target, num_layers=exit_layer or FEW)
    return Programs(
        target=shard_model(TransformerLM(target, kernels=stack.kernels), Layout.tensor_parallel(stack.mesh)),
        draft=shard_model(TransformerLM(first, kernels=stack.kernels), layout)
        if head is None
        else shard_head_step(target, head, layout),
        mesh=stack.mesh,
        sampling=DISTRIBUTIONS["top-p"],
        batch=stack.batch,
        slots=stack.slots,
        exit_layer=exit_layer,
        head=head,
    )


def round_of(stack: Stack, programs: Programs) -> Program:
    """Compiles a round and counts what it moves."""
    floors = [programs.floor_of_round(K, live) for live in (1.0, stack.live)]
    layers = programs.target.config.num_layers + K * programs.draft.config.num_layers
    made = measure("round", K + 1, *floors, lambda: programs.round(K, RULES["token"]), stack.capacity, stack.live)
    return dataclasses.replace(made, layers=layers)

"""Asks what int8, fewer kv heads and drafting save together; see compile_study.py.

    complements   {bfloat16, int8 weights, int8 weights and caches} x {64, 8, 1 kv heads} x {plain, draft model, EAGLE-3}

The paper's target on 16 TPU v4 chips, with the paper's draft and with a head of EAGLE-3's shape, both in int8 as far as
the target is. Caches are read by kernels, and all of their slots are alive. Targets of two and four layers are continued
to all of them, see `specsamp.tpu.stack`; a head has one layer.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from launch.studies.compile_cells import DISTRIBUTIONS, RULES, Cell, K, at, small_round, whole_round
from launch.studies.compile_heads import head_step, round_of, slope, with_head
from specsamp.models.config import TransformerConfig, chinchilla_70b, draft_4b
from specsamp.models.kernels.cache import Kernels
from specsamp.tpu.program import Program
from specsamp.tpu.programs import WINDOW
from specsamp.tpu.stack import FEW, MANY, Stack, continued, facts, linear
from specsamp.tpu.topology import described_mesh

TOPOLOGY = "v4:2x2x4"
FORMS = {
    "bfloat16": {},
    "int8 weights": {"weight_dtype": "int8"},
    "int8 weights and caches": {"weight_dtype": "int8", "cache_dtype": "int8"},
}
KV_HEADS = (64, 8, 1)
BATCHES = (1, 16)


def complements() -> list[Cell]:
    """Asks for a step, for what drafts, and at batch 1 for whole rounds, of each form of the target."""
    return [
        Cell(
            {"form": form, "kv_heads": kv_heads, "batch": batch},
            lambda f=form, h=kv_heads, b=batch: {"programs": answer(f, h, b)},
        )
        for batch in BATCHES
        for kv_heads in KV_HEADS
        for form in FORMS
    ]


def answer(form: str, kv_heads: int, batch: int) -> dict[str, Any]:
    """Compiles the programs of one cell."""
    target = stack_of(chinchilla_70b(num_kv_heads=kv_heads), form, batch)
    draft = dataclasses.replace(target, config=dataclasses.replace(draft_4b(), **FORMS[form]))
    window = WINDOW if batch == 1 else 1  # a product of one row does not use the matrix unit
    score = calls_of(target, K + 1)
    draft_step = calls_of(draft, window)
    with_eagle3 = with_head(target)
    made = {
        "step": (whole(target, calls_of(target, window)), 1),
        "score": (whole(target, score), 1),
        "draft step": (whole(draft, draft_step), 1),
        "head step": (head_step(target, with_eagle3, window), 1),
    }
    if batch == 1:
        small = small_round(target, draft, DISTRIBUTIONS["top-p"], RULES["token"])
        more = slope(target.config.num_layers - FEW, score[FEW], score[MANY])
        made["round with the draft"] = whole_round(target, draft, small, score, draft_step), K + 1
        made["round with the head"] = linear((1.0, round_of(target, with_eagle3)), *more), K + 1
    return {name: facts(program, TOPOLOGY, sequences=batch, calls=calls) for name, (program, calls) in made.items()}


def stack_of(config: TransformerConfig, form: str, batch: int) -> Stack:
    """Returns a model with kernels, in a form."""
    mesh = described_mesh(TOPOLOGY, num_kv_heads=config.num_kv_heads, rows=batch)
    return Stack(dataclasses.replace(config, **FORMS[form]), mesh, TOPOLOGY, batch, kernels=Kernels())


def calls_of(stack: Stack, tokens: int) -> dict[int, Program]:
    """Compiles a call of `FEW` and of `MANY` layers."""
    return {layers: at(stack, layers, tokens) for layers in (FEW, MANY)}


def whole(stack: Stack, calls: dict[int, Program]) -> Program:
    """Continues a call to all layers."""
    return continued(calls[FEW], calls[MANY], stack.config.num_layers)

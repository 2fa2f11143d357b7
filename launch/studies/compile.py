"""Compiles pairs for TPU slices that are described: what calls and rounds move, hold and wait for. Nothing runs on a TPU.

    python launch/study.py compile --grid=slices --output=runs/compile_slices.json

    slices       the paper's pair on sixteen chips of each kind, by batch; its caches are read by kernels
    heads        heads of EAGLE-3's and DFlash's shape, and an early exit, beside a draft model; rounds of several K
    kernels      calls and rounds whose caches are read by kernels, with all slots alive and with ``live`` of them

Models are compiled at two and four layers and continued to all of them, see `specsamp.tpu.stack`. Rounds are of top-p, the
token rule and K = 4 unless they say another. Minutes to an hour on two cores. Other tables are dated records.
"""

import functools
import itertools
from typing import Any

import jax

from launch.lib.config import meant
from launch.lib.shapes import dflash_of, eagle3_of
from launch.lib.study import Option, Published, Study
from launch.studies import compile_tables as tables
from launch.studies.compile_tables import K
from specsamp import chain, storage, temperature, top_p
from specsamp.checkpoints.published import published_config
from specsamp.machine import version
from specsamp.models.config import TransformerConfig, chinchilla_70b, draft_4b
from specsamp.models.kernels.dispatch import Kernels
from specsamp.sampling.rejection import TokenRule
from specsamp.tpu.stack import Stack
from specsamp.tpu.topology import described_mesh

EXIT_LAYER, LENGTHS = 10, {"DFlash": (4, 8, 15)}  # of rounds; a block of 16 rows drafts 15 tokens
METHOD = chain(temperature(1.0), top_p(0.8)), TokenRule()
MODELS = {
    "Chinchilla 70B": chinchilla_70b,
    "Chinchilla 4B": draft_4b,
    "the paper's 70B": chinchilla_70b,
    "the paper's 4B": draft_4b,
    "Llama 3.1 8B": functools.partial(published_config, "meta-llama/Llama-3.1-8B"),
    "Llama 3.3 70B": functools.partial(published_config, "meta-llama/Llama-3.3-70B-Instruct"),
    "Llama 3.2 1B": functools.partial(published_config, "meta-llama/Llama-3.2-1B"),
    **{f"Qwen3 {size}": functools.partial(published_config, f"Qwen/Qwen3-{size}") for size in ("0.6B", "4B", "8B")},
}
HEADS = {"EAGLE-3": eagle3_of, "DFlash": dflash_of}
EXIT = f"early exit after {EXIT_LAYER}"
GRIDS = {  # of every block all cells that have one of the values of each field
    grid: [dict(zip(block, values, strict=True)) for block in blocks for values in itertools.product(*block.values())]
    for grid, blocks in storage.read_json(__file__.removesuffix("py") + "json").items()
}


def stack_of(config: TransformerConfig, topology: str, batch: int = 1, **fields: Any) -> Stack:
    mesh = described_mesh(topology, 1, num_kv_heads=config.num_kv_heads, rows=batch)
    return Stack(config, mesh, topology, batch, **fields)


def programs_of_pair(stack: Stack, rounds: dict[str, int]) -> dict[str, Any]:
    programs = {"draft step": stack.draft_step(), "score": stack.call(K + 1), "target step": stack.step()}
    programs |= {name: stack.round(length, *METHOD) for name, length in rounds.items()}
    return {"programs": {name: each.facts(stack.topology, sequences=stack.batch) for name, each in programs.items()}}


def slices(topology: str, batch: int) -> dict[str, Any]:
    stack = stack_of(chinchilla_70b(), topology, batch, drafter=draft_4b(), kernels=Kernels())
    return programs_of_pair(stack, {"round, top-p, token": K})


def heads(target: str, topology: str, drafter: str) -> dict[str, Any]:
    lengths, config = {f"round, K = {each}": each for each in LENGTHS.get(drafter, (4, 8))}, MODELS[target]()
    drafting = EXIT_LAYER if drafter == EXIT else HEADS[drafter](config) if drafter in HEADS else MODELS[drafter]()
    return programs_of_pair(stack_of(config, topology, drafter=drafting, kernels=Kernels()), lengths)


def kernels(model: str, topology: str, program: str, batch: int, slots: int, live: int) -> dict[str, Any]:
    target, _, draft = model.partition(" + ")
    drafter = MODELS[f"{target.split()[0]} {draft}"]() if draft else None
    fields = {"slots": slots, "live": live / slots, "kernels": Kernels(), "drafter": drafter}
    stack = stack_of(MODELS[target](), topology, batch, **fields)
    made = stack.round(K, *METHOD) if draft else stack.call(int(program.split()[0]))
    return made.facts(topology, sequences=batch)


def prepare(options: Any) -> None:
    """Checks the grid, and keeps arrays on the CPU: only the compiler is a TPU's."""
    if options.grid is None:
        raise ValueError(f"--grid: name one of {', '.join(GRIDS)}")
    jax.config.update("jax_platforms", "cpu")


def cells(options: Any) -> list[dict[str, Any]]:
    """Returns the cells of the grid, with the fields that --change changes."""
    keys, changes = GRIDS[options.grid], {}
    for change in options.change:
        name, _, value = change.partition("=")
        if name not in keys[0]:
            raise ValueError(f"--change={change}: cells of {options.grid} have no {name!r}{meant(name, keys[0])}")
        number = isinstance(keys[0][name], int)
        if number and not (value.isdecimal() and int(value)):
            raise ValueError(f"--change={change}: {name} must be a positive integer; got {value!r}")
        changes[name] = int(value) if number else value
    return [dict(each) for each in dict.fromkeys(tuple((key | changes).items()) for key in keys)]


ANSWERS = {answer.__name__: answer for answer in (slices, heads, kernels)}
TABLES = {name: f"compile_{name}" for name in (*GRIDS, "scoring", "trees", "shapes", "complements")}

STUDY = Study(
    question="What do pairs move, hold and wait for on a TPU slice, by its compiler's estimate?",
    options={
        "grid": Option(None, "The cells to compile, see above.", choices=tuple(GRIDS)),
        "change": Option((), "Compile cells with other values, such as topology=v5e:2x4,batch=2 or layers=7."),
    },
    prepare=prepare,
    cells=cells,
    identity=lambda options: {"grid": options.grid, "libtpu": version("libtpu")},
    measure=lambda options, key, say: ANSWERS[options.grid](**key),
    tables={name: Published([file], getattr(tables, name, tables.programs)) for name, file in TABLES.items()},
    shown=lambda options: [options.grid],
)

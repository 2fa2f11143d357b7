"""Compiles pairs for TPU slices that are described: what calls and rounds move, hold and wait for. Nothing runs on a TPU.

    python launch/study.py compile --grid=slices --output=runs/compile_slices.json
    python launch/study.py compile --grid=scoring --output=runs/compile_scoring.json --figures=runs
    python launch/study.py compile --grid=training --change=layers=7,test_steps=1   # a smaller target, one step of the test

    slices       the paper's pair on sixteen chips of each kind, by batch, sampling and rule
    scoring      a call by its tokens, from one to the ridge of each chip: where does verification stop being free?
    shapes       a step of drafts of 4B parameters from 4 to 40 layers, and of a 7B of ordinary shape, on 1 to 16 chips
    complements  {bfloat16, int8 weights, int8 weights and caches} x {64, 8, 1 kv heads} x {alone, draft model, EAGLE-3}
    heads        a head of EAGLE-3's shape, and an early exit, beside a draft model
    kernels      calls and rounds whose caches are read by kernels, with all slots alive and with ``live`` of them
    training     the training step of an EAGLE-3 head with its target's forward pass: the memory of a device, by ``data``
                 shards, ``rows`` of ``length`` tokens, ``layers`` of the target, ``test_steps`` of the training-time test,
                 and the ``chunk`` of positions whose logits exist at a time

Models are compiled at two and four layers and continued to all of them, see `specsamp.tpu.stack`; the training step is
compiled whole. Rounds are of top-p, the token rule and K = 4 where nothing else is said. Minutes to an hour on two cores.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import pathlib
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from launch.lib.command_tables import REPORTS
from launch.lib.config import meant
from launch.lib.shapes import eagle3_of
from launch.lib.study import Option, Published, Study
from launch.studies import compile_tables as tables
from specsamp import storage
from specsamp.checkpoints.published import CONFIGS, published_config
from specsamp.decoding import data_shards
from specsamp.machine import version
from specsamp.mesh.layout import Layout
from specsamp.models.config import TransformerConfig, chinchilla_70b, draft_4b
from specsamp.models.heads import FeatureHead
from specsamp.models.kernels.cache import Kernels
from specsamp.models.transformer import TransformerLM
from specsamp.sampling.rejection import BlockRule, TokenRule
from specsamp.sampling.warp import chain, greedy, temperature, top_p
from specsamp.tpu.program import Memory, Program
from specsamp.tpu.programs import WINDOW
from specsamp.tpu.stack import FEW, Stack, facts
from specsamp.tpu.topology import described_mesh, parse
from specsamp.training.eagle import TrainHead
from specsamp.training.trainer import TrainConfig, init_state, state_shardings, train_step

K, EXIT_LAYER = 4, 10
PAPER = "v4:2x2x4"
SAMPLINGS = {"greedy": greedy(), "top-p": chain(temperature(1.0), top_p(0.8))}
RULES = {"token": TokenRule(), "block": BlockRule()}
MODELS = {
    "Chinchilla 70B": chinchilla_70b,
    "Chinchilla 4B": draft_4b,
    "the paper's 70B": chinchilla_70b,
    "the paper's 4B": draft_4b,
    "Llama 3.1 8B": functools.partial(published_config, "meta-llama/Llama-3.1-8B"),
    "Llama 3.3 70B": functools.partial(published_config, "meta-llama/Llama-3.3-70B-Instruct"),
    "Llama 3.2 1B": functools.partial(published_config, "meta-llama/Llama-3.2-1B"),
}
HEAD, EXIT = "EAGLE-3", f"early exit after {EXIT_LAYER}"
FORMS = {
    "bfloat16": {},
    "int8 weights": {"weight_dtype": "int8"},
    "int8 weights and caches": {"weight_dtype": "int8", "cache_dtype": "int8"},
}
ROUND = f"round, K = {K}"
DATA = storage.read_json(pathlib.Path(__file__).with_suffix(".json"))
GRIDS = {  # of every block all cells that have one of the values of each field
    grid: [dict(zip(block, values, strict=True)) for block in blocks for values in itertools.product(*block.values())]
    for grid, blocks in DATA["grids"].items()
}


def stack_of(config: TransformerConfig, topology: str, batch: int = 1, data: int = 1, **fields: Any) -> Stack:
    mesh = described_mesh(topology, data, num_kv_heads=config.num_kv_heads, rows=batch // data)
    return Stack(config, mesh, topology, batch, **fields)


def told(programs: Mapping[str, Program], topology: str, batch: int = 1) -> dict[str, Any]:
    """Returns the facts of programs, of which rounds have K + 1 calls."""
    return {
        name: facts(program, topology, sequences=batch, calls=K + 1 if name.startswith("round") else 1)
        for name, program in programs.items()
    }


def slices(topology: str, batch: int) -> dict[str, Any]:
    pair = stack_of(chinchilla_70b(), topology, batch, drafter=draft_4b())
    programs = {"draft step": pair.draft_step(), "score": pair.call(K + 1), "target step": pair.step()}
    for sampling, warp in SAMPLINGS.items():
        programs |= {f"round, {sampling}, {name}": pair.round(K, warp, rule) for name, rule in RULES.items()}
    return {"weights_and_caches_bytes": pair.bytes_of_state(), "programs": told(programs, topology, batch)}


def scoring(topology: str, tokens: int) -> dict[str, Any]:
    program = stack_of(chinchilla_70b(), topology).call(tokens)
    return facts(program, topology) | {"ridge_tokens": parse(topology)[0].ridge}


def shapes(shape: str, chips: int) -> dict[str, Any]:
    """Asks for a step of heads of 128 and relative positions; their number is a multiple of 16, so that chips share them."""
    config = TransformerConfig(vocab_size=32_000, head_size=128, dtype="bfloat16", **DATA["shapes"][shape])
    topology = {1: "v4:1x1x1", 4: "v4:2x2x1", 8: "v4:2x2x2", 16: PAPER}[chips]
    made = facts(stack_of(config, topology).call(WINDOW), topology)
    return made | {"parameters": config.num_parameters, "layers": config.num_layers}


def complements(form: str, kv_heads: int, batch: int) -> dict[str, Any]:
    target = dataclasses.replace(chinchilla_70b(num_kv_heads=kv_heads), **FORMS[form])
    draft = dataclasses.replace(draft_4b(), **FORMS[form])
    pair = stack_of(target, PAPER, batch, drafter=draft, kernels=Kernels())
    with_head = dataclasses.replace(pair, drafter=eagle3_of(target))
    window = WINDOW if batch == 1 else 1  # a product of one row does not use the matrix unit
    programs = {"step": pair.call(window), "score": pair.call(K + 1)}
    programs |= {"draft step": pair.draft_step(window), "head step": with_head.draft_step(window)}
    if batch == 1:
        method = K, SAMPLINGS["top-p"], RULES["token"]
        programs |= {"round with the draft": pair.round(*method), "round with the head": with_head.round(*method)}
    return {"programs": told(programs, PAPER, batch)}


def heads(target: str, topology: str, drafter: str) -> dict[str, Any]:
    config = MODELS[target]()
    drafting = EXIT_LAYER if drafter == EXIT else eagle3_of(config) if drafter == HEAD else MODELS[drafter]()
    stack = stack_of(config, topology, drafter=drafting)
    programs = {"target step": stack.step(), "score": stack.call(K + 1), "draft step": stack.draft_step()}
    programs["round"] = stack.round(K, SAMPLINGS["top-p"], RULES["token"])
    return {"programs": told(programs, topology)}


def kernels(model: str, topology: str, program: str, batch: int, slots: int, live: int) -> dict[str, Any]:
    target, _, draft = model.partition(" + ")
    data = int(program.rpartition("data = ")[2]) if "data" in program else 1
    fields = dict(
        slots=slots,
        live=live / slots,
        kernels=Kernels(),
        drafter=MODELS[f"{target.split()[0]} {draft}"]() if draft else None,
    )
    stack = stack_of(MODELS[target](), topology, batch, data, **fields)
    if program == ROUND:
        made = stack.round(K, SAMPLINGS["top-p"], RULES["token"])
    elif data > 1:  # two layers of it; whether all fit
        made = stack.at(FEW, K + 1)
        made = dataclasses.replace(made, memory=dataclasses.replace(made.memory, arguments=stack.bytes_of_state()))
    else:
        made = stack.call(int(program.split()[0]))
    return facts(made, topology, sequences=batch // data, calls=K + 1 if program == ROUND else 1)


def training(
    target: str, topology: str, data: int, rows: int, length: int, layers: int, test_steps: int, chunk: int, **head: int
) -> dict[str, Any]:
    """Returns the memory of a device in a step of launch/train.py, with AdamW."""
    if target not in CONFIGS:
        raise ValueError(f"--change=target={target}: its shape is not known here; choose one of {', '.join(CONFIGS)}")
    whole, mesh, (chip, _) = published_config(target), described_mesh(topology, data), parse(topology)
    model = TransformerLM(whole).first(min(layers, whole.num_layers))
    shape = dataclasses.replace(eagle3_of(model.config), **head)
    task, config = (
        TrainHead(head=FeatureHead(shape), target=model, test_steps=test_steps, chunk=chunk),
        TrainConfig(steps=10_000, batch=rows),
    )
    ids, at = jnp.arange(shape.draft_vocab_size), state_shardings(task, config, mesh)
    state = placed(jax.eval_shape(lambda: init_state(task, config)), at)
    teacher = jax.eval_shape(lambda key: task.teacher(model.init(key), ids), jax.random.key(0))
    teacher = placed(teacher, Layout.tensor_parallel(mesh).shardings(task.teacher_axes(), teacher))
    replicated, by_row = (NamedSharding(mesh, PartitionSpec(*axes)) for axes in ((), (None, data_shards.DATA)))
    tokens = jax.ShapeDtypeStruct((1, rows, length + 1), jnp.int32, sharding=by_row)
    step = jax.jit(train_step, static_argnums=(0, 1), donate_argnums=2, out_shardings=(at, replicated))
    made = step.lower(task, config, state, teacher, tokens).compile()
    return {"head": shape, "memory": Memory.of(made, chip.hbm_bytes // chip.devices)}


def placed(shapes: Any, shardings: Any) -> Any:
    return jax.tree.map(lambda x, at: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=at), shapes, shardings)


def prepare(options: Any) -> Any:
    """Checks the grid, and keeps arrays on the CPU: only the compiler is a TPU's."""
    if options.grid is None:
        raise ValueError(f"--grid: name one of {', '.join(GRIDS)}")
    jax.config.update("jax_platforms", "cpu")
    cells(options)
    return options


def cells(options: Any) -> list[dict[str, Any]]:
    """Returns the cells of the grid, with the fields that --change changes.

    Raises:
      ValueError: a field that the cells do not have, or a value of another type.
    """
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


ANSWERS = {answer.__name__: answer for answer in (slices, scoring, shapes, complements, heads, kernels, training)}
TABLES = dict.fromkeys(("scoring", "shapes", "complements", "kernels"), tables.programs) | {
    "slices": tables.slices,
    "heads": tables.heads,
    "head_training": tables.head_training,
}

STUDY = Study(
    question="What do pairs move, hold and wait for on a TPU slice, by its compiler's estimate?",
    options={
        "grid": Option(None, "The cells to compile, see above.", choices=tuple(GRIDS)),
        "change": Option((), "Compile cells with other values, such as topology=v5e:2x4,batch=2 or layers=7."),
    },
    prepare=prepare,
    cells=cells,
    identity=lambda options: {"grid": options.grid, "libtpu": version("libtpu"), "jax": jax.__version__},
    measure=lambda options, key, say: ANSWERS[options.grid](**key),
    tables={name: Published([f"compile_{name}"], made) for name, made in TABLES.items()} | REPORTS,
    figures={f"compile_{grid}": Published([f"compile_{grid}"], draw) for grid, draw in tables.FIGURES.items()},
    shown=lambda options: [
        "head_training" if options.grid == "training" else options.grid,
        *[f"compile_{options.grid}"] * (options.grid in tables.FIGURES),
    ],
)

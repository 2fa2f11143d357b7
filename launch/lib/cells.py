"""Turns a configuration and a grid into cells for launch/benchmark.py, and files into prompts."""

import ast
import dataclasses
import io
import itertools
import re
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
from rich.console import Console

from launch.lib import entry
from launch.lib.experiment import Experiment
from launch.lib.fields import ExperimentConfig, SamplingFields, own_with_digest
from specsamp import machine, storage, validate
from specsamp.analysis.grid import SIDES, Cell, Results, describe, measure_cells
from specsamp.decoding.request import Prompt
from specsamp.evaluation.records import read_records
from specsamp.models import few_rows

Point = dict[str, Any]  # values of fields of the configuration

# The fields that a grid may change. Any other field changes the pair or the texts, and so needs
# another file.
TURNED = {
    *("draft_length", "drafter", "exit_layer", "window", "sinks", "corpus", "mask_id", "rule"),
    *("batch", "draft_temperature", "synthetic_acceptance"),
    *(f"sampling.{field.name}" for field in dataclasses.fields(SamplingFields)),
}

# Between values, not within the parentheses of an expression such as mine.py:Mine(f(K), 2).
COMMA = re.compile(r",(?!(?:[^()]|\([^()]*\))*\))")


def parse_grid(texts: Sequence[str]) -> list[Point]:
    """Returns every combination of ``["draft_length=0,1,4", "rule=token,block"]``; the last field
    varies fastest.
    """

    fields: dict[str, list[Any]] = {}
    for text in texts:
        field, _, values = text.partition("=")
        listed = [part.strip() for part in COMMA.split(values)]
        if not all(listed):
            raise ValueError(
                f"--grid={text}: write a field and its values, such as draft_length=0,1,4"
            )
        if field in fields:
            raise ValueError(f"--grid={text}: {field!r} is given twice")
        fields[field] = [_value(part) for part in listed]
    return [dict(zip(fields, point)) for point in itertools.product(*fields.values())]


def _value(text: str) -> Any:
    """Returns the number that a text writes, or else the text."""
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text


def turned(config: ExperimentConfig, points: Sequence[Point]) -> list[ExperimentConfig]:
    """Returns the configuration at each point; raises ValueError for a field that no grid can
    change, or a wrong value.
    """
    if others := set().union(*points) - TURNED:
        raise ValueError(
            f"--grid: {min(others)!r} makes another pair or text: choose of "
            f"{', '.join(sorted(TURNED))}"
        )
    return [config.turned(point) for point in points]


def make_cells(configs: Sequence[ExperimentConfig], experiment: Experiment) -> list[Cell]:
    """Returns a cell for each configuration, the first of equal ones."""
    cells: list[Cell] = []
    for config in configs:
        cell = _cell(config, experiment)
        if cell.key not in [other.key for other in cells]:
            cells.append(cell)
    return cells


def _cell(config: ExperimentConfig, experiment: Experiment) -> Cell:
    key = {
        "draft_length": 0,
        "drafter": "none",
        "rule": "token",
        "batch": config.batch,
        **dataclasses.asdict(config.sampling),
        "draft_temperature": None,
    }
    if not config.is_plain:
        key |= {
            "draft_length": config.draft_length,
            "drafter": config.drafter_name,
            "rule": own_with_digest(config.rule),
            "draft_temperature": config.draft_temperature,
        }
        if not config.adaptive.is_off:
            key["adaptive"] = dataclasses.asdict(config.adaptive)
        if config.synthetic_acceptance is not None:
            key["synthetic_acceptance"] = config.synthetic_acceptance
    work = experiment.workload
    return Cell(
        key=key,
        method=config.make_method(experiment.pair),
        workload=dataclasses.replace(work, batch=config.batch, repeats=config.repeats),
    )


def measure_missing(
    cells: Sequence[Mapping[str, Any]],
    measure: Callable[[int, Callable[[str], None]], Any],
    results: Results,
    again: bool,
    console: Console,
) -> dict[int, Any]:
    """Measures the cells that a file lacks, see `specsamp.analysis.grid.measure_cells`; prints the
    number it has.
    """
    path = results.path
    if there := sum(results.find(cell["key"]) is not None for cell in cells):
        console.print(
            f"{there} of {len(cells)} cells are in {path} already; --again measures them anew"
        )
    kept = (
        f"the cells measured so far are in {path}; the same command goes on"
        if path
        else "nothing was written"
    )
    with entry.keeps(kept), entry.progress(console, "starting") as say:
        return measure_cells(
            cells, measure, results, again=again, header=entry.header, progress=say
        )


def machine_identity() -> dict[str, Any]:
    """Returns the devices, and for a CPU the machine; accelerators are the same in any machine."""
    device = jax.devices()[0]
    found = {"platform": device.platform, "kind": device.device_kind, "count": jax.device_count()}
    own = {"machine": machine.host_facts()} if device.platform == "cpu" else {}
    if few_rows.kernel_name():  # a machine with the kernel is as fast as another machine
        own["few_rows"] = few_rows.kernel_name()
    return {"device": found, "jax": jax.__version__} | own


def known_identity(config: ExperimentConfig) -> dict[str, Any]:
    """Returns the part of a grid's identity that does not depend on the pair's weights."""
    apart = TURNED | {"sampling", "adaptive"}
    fields = {name: value for name, value in config.recorded.items() if name not in apart}
    return {"config": fields, **machine_identity()}


def pair_identity(experiment: Experiment) -> dict[str, Any]:
    """Returns the identity of pair and prompts, for files of results."""
    pair, work = experiment.pair, experiment.workload
    models = {"target": pair.target, "draft": pair.draft_or_head}
    known = {
        "pair": experiment.pair_name,
        "weights": experiment.weights,
        "random_weights": experiment.pair_name is None,
        "models": {side: model.config for side, model in models.items() if model is not None},
        "prompts": None,
    }
    if work.prompts:
        crc32 = zlib.crc32(repr(work.prompts).encode())
        known["prompts"] = {"count": len(work.prompts), "crc32": crc32}
    if pair.target.kernels is not None:  # "auto" may have become plain
        known["kernels"] = True
    return known


def costs_of(cells: Sequence[Mapping[str, Any]]) -> list[tuple[str, float]]:
    """Returns milliseconds per token, plain and drafted, of the cells that did not run out of
    memory.
    """
    rows = []
    for cell in cells:
        if "result" in cell:
            name = describe(cell["key"])
            ms = {side: cell["result"][side]["ms_per_token"]["median"] for side in SIDES}
            rows.append((f"{name}, plain", ms["autoregressive"]))
            if cell["key"]["draft_length"]:
                rows.append((name, ms["speculative"]))
    return rows


def read_prompts(path: str | None) -> list[Prompt]:
    """Returns the prompts of a file: JSON (a list of texts, or the prompts of a pair), JSON lines
    as of generate.py, or one in each line.

    In JSON a prompt may be a conversation, ``{"messages": [{"role": "user", "content": "Hi"}]}``,
    with further variables of a chat template.
    In a line, \\n stands for a line break.
    """
    if not path:
        return []
    if path.endswith(".json"):
        listed = storage.read_json_value(path)
        with entry.reading(path):
            listed = listed["prompts"] if isinstance(listed, dict) else listed
            if not isinstance(listed, list):
                raise TypeError("not a list of prompts")
            prompts = [
                one if isinstance(one, str) or one.get("messages") else one["text"]
                for one in listed
            ]
    elif path.endswith(".jsonl"):
        prompts = list(read_numbered(path).values())
    else:
        lines = io.StringIO(storage.read_text(path), newline=None)  # a form feed ends no line
        prompts = [line.removesuffix("\n").replace("\\n", "\n") for line in lines]
    if not prompts:
        raise ValueError(f"{path} holds no prompts")
    for number, prompt in enumerate(prompts, 1):
        if not prompt:
            raise ValueError(f"prompt {number} of {path} is empty")
    return prompts


def read_numbered(path: str, chat: bool = False) -> dict[int, Prompt]:
    """Returns the prompts of a file of JSON lines by their ids; with ``chat``, a text is the
    message of a user.

    Raises:
      ValueError: a line is wrong; the message has its number.
    """
    found: dict[int, Prompt] = {}
    for place, record in enumerate(read_records(path, {})):
        where = f"{path}, prompt {place + 1}"
        record = {name: value for name, value in record.items() if value is not None}
        id = validate.integer(f"{where}: id", record.get("id", place))
        if id in found:
            raise ValueError(f"{where}: id {id} is that of an earlier prompt")
        prompt = record.get("messages") or record.get("prompt")
        if not prompt or not isinstance(prompt, list if "messages" in record else str):
            raise ValueError(
                f'{where}: write {{"prompt": TEXT}} or {{"messages": [...]}}; got {record!r:.60}'
            )
        variables = {name: record[name] for name in record if name not in ("id", "prompt")}
        if isinstance(prompt, list):
            if "prompt" in record:
                raise ValueError(f"{where}: it has a prompt and messages: leave one out")
            found[id] = variables
        elif variables:
            raise ValueError(f"{where}: a line has id and prompt; got also {', '.join(variables)}")
        else:
            found[id] = [{"role": "user", "content": prompt}] if chat else prompt
    return found

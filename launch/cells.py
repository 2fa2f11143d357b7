"""From a configuration and points of a sweep to cells, and the run that launch/benchmark and launch/sweep share."""

from __future__ import annotations

import ast
import copy
import dataclasses
import json
import sys
import zlib
from collections.abc import Sequence
from typing import Any

import jax
from ml_collections import ConfigDict
from rich.console import Console

import entry
from experiment import RULES, Experiment, choose, make_drafter, make_sampling
from specsamp import storage
from specsamp.analysis import grid, report, tables
from specsamp.analysis.decoder import check_fits
from specsamp.analysis.grid import Cell, Results
from specsamp.analysis.hyper import Point, product, sweep
from specsamp.analysis.synthetic import LABEL, SyntheticAcceptance
from specsamp.decoding.checks import integer
from specsamp.decoding.drafters import NoDrafter
from specsamp.sampling.warp import chain, temperature

# What a point may turn; everything else makes another pair or another text, hence another file.
LAW = ("temperature", "top_k", "top_p", "min_p")
TURNED = {"draft_length", "drafter", "rule", "batch", "repeats", "draft_temperature", "synthetic_acceptance"}
TURNED |= {f"sampling.{name}" for name in LAW}


def parse_grid(texts: Sequence[str]) -> list[Point]:
    """``["draft_length=0,1,4", "rule=token,block"]`` -> every combination.

    Raises:
      ValueError: a text is no list of values.
    """

    def value(text: str) -> Any:
        try:
            return ast.literal_eval(text)
        except (ValueError, SyntaxError):
            return text

    sweeps = []
    for text in texts:
        field, equals, values = text.partition("=")
        listed = [part.strip() for part in values.split(",")]
        if not equals or not all(listed):
            raise ValueError(f"--grid={text}: write a field and its values, such as draft_length=0,1,4")
        sweeps.append(sweep(field, map(value, listed)))
    return product(sweeps)


def make_cells(config: ConfigDict, points: Sequence[Point], experiment: Experiment) -> list[Cell]:
    """A cell for each point, the first of equal ones; all are checked before any is measured.

    Raises:
      ValueError: a field that does not exist or cannot be turned, a value out of range.
    """
    cells: dict[str, Cell] = {}
    for point in points:
        cell = _cell(_turned(config, point), experiment)
        cells.setdefault(json.dumps(cell.key), cell)
    return list(cells.values())


def _turned(config: ConfigDict, point: Point) -> ConfigDict:
    turned = copy.deepcopy(config)  # ConfigDict(config) would share what is still to be filled in
    turned.lock()
    for field, value in point.items():
        if field not in TURNED:
            known = ", ".join(sorted(TURNED))
            raise ValueError(f"a sweep turns {known}; {field!r} makes another pair or text: run it apart")
        try:
            turned.update_from_flattened_dict({field: value})
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise ValueError(f"{field} = {value!r} does not fit this configuration: {error}") from error
    return turned


def _cell(config: ConfigDict, experiment: Experiment) -> Cell:
    K = integer("draft_length", config.draft_length, 0)
    plain = K == 0 or config.drafter == "none"
    law, heat, rate = config.sampling, config.get("draft_temperature"), config.get("synthetic_acceptance")
    rule = choose("rule", config.rule, RULES)()
    drafter = make_drafter(config.drafter, experiment.pair, K)  # checks the name
    key = {
        "draft_length": 0 if plain else K,
        "drafter": "none" if plain else config.drafter,
        "rule": "token" if plain else config.rule,
        "batch": integer("batch", config.batch, 1),
        **{name: law[name] for name in LAW},
        "draft_temperature": None if plain else heat,
    }
    if rate is not None and not plain:
        key["synthetic_acceptance"] = rate
        rule = SyntheticAcceptance(rule, rate)
    work = {"batch": config.batch, "repeats": config.repeats}
    draft_law = law
    if heat is not None:
        temperature(heat)  # out of range? said with the value
        draft_law = ConfigDict({**law.to_dict(), "temperature": float(heat)})

    # Temperatures are data and 0 is greedy: a chain keeps one program for all of them.
    def warm(fields):
        return make_sampling(fields) if fields.temperature else chain(temperature(0.0))

    mixed = heat is not None and (heat == 0) != (law.temperature == 0)
    return Cell(
        key=key,
        drafter=NoDrafter() if plain else drafter,
        rule=rule,
        sampling=warm(law) if mixed else make_sampling(law),
        draft_sampling=None if heat is None else warm(draft_law) if mixed else make_sampling(draft_law),
        workload=dataclasses.replace(experiment.workload, **work),
    )


def identity_of(config: ConfigDict, experiment: Experiment) -> dict[str, Any]:
    """What all cells of a file share."""
    device, work = jax.devices()[0], experiment.workload
    fields = {name: value for name, value in config.to_dict().items() if name not in TURNED | {"sampling"}}
    prompts = {"count": len(work.prompts), "crc32": zlib.crc32(repr(work.prompts).encode())} if work.prompts else None
    return {
        "pair": experiment.pair_name,
        "weights": experiment.weights,
        "random_weights": experiment.pair_name is None,
        "models": {"target": experiment.pair.target.config, "draft": experiment.pair.draft.config},
        "config": fields,
        "prompts": prompts,
        "device": {"platform": device.platform, "kind": device.device_kind, "count": jax.device_count()},
        "jax": jax.__version__,
    }


def run_cells(
    config: ConfigDict,
    points: Sequence[Point],
    experiment: Experiment,
    output: str | None,
    console: Console,
    plain: bool,
    again: bool = False,
) -> None:
    """Measures what ``output`` does not hold yet, and shows one table of all the points; of one alone, all of it.

    Args:
      again: measures what it does hold, too.
    """
    try:
        cells = make_cells(config, points, experiment)
        for cell in cells:
            check_fits(experiment.pair, [cell.drafter], cell.workload)

        def say(text):
            return console.print(text, style="yellow", soft_wrap=True)

        results = Results.open(output, identity_of(config, experiment), say)
    except (ValueError, OSError) as error:
        sys.exit(str(error))
    made_up = any("synthetic_acceptance" in cell.key for cell in cells)
    if made_up:
        console.print("[bold red]SYNTHETIC ACCEPTANCE: speedups and ms per token below are made up; rounds are not.[/]")
    there = sum(results.find(cell.key) is not None for cell in cells)
    if there:
        told = "replaced one by one" if again else "not measured again (--again would)"
        console.print(f"{there} of {len(cells)} cells are in {output} already: {told}", soft_wrap=True)

    def header():
        return {"command": entry.command(), "environment": report.environment()}

    with console.status("starting") as status:
        try:
            measured = grid.measure_cells(
                experiment.pair, cells, results, again=again, header=header, progress=status.update
            )
        except ValueError as error:
            sys.exit(str(error))
    if not entry.is_first():
        return
    rows = [results.find(cell.key) for cell in cells]
    title = "SYNTHETIC ACCEPTANCE, see the rows" if made_up else "Cells, each measured beside plain decoding in turn"
    report.show([tables.grid_table(title, rows)], console, plain)
    if len(cells) == len(measured) == 1:
        rate = cells[0].key.get("synthetic_acceptance")
        label = "" if rate is None else LABEL.format(rate=rate)
        report.show(report.result_tables(measured[0][1], label), console, plain)
    if output:
        console.print(f"\nwritten to {output}", soft_wrap=True)


def read_prompts(path: str) -> list[str]:
    """Prompts of a file: JSON (a list of texts, or what comes with a pair), or one in each line, \\n for a break.

    Raises:
      ValueError: there are none, or one is empty.
      FileNotFoundError: there is no such file.
    """
    text = storage.place(path).read_text()
    if path.endswith(".json"):
        try:
            listed = json.loads(text)
            listed = listed["prompts"] if isinstance(listed, dict) else listed
            prompts = [one if isinstance(one, str) else one["text"] for one in listed]
            if not isinstance(listed, list) or not all(isinstance(prompt, str) for prompt in prompts):
                raise TypeError("not a list of texts")
        except (json.JSONDecodeError, KeyError, TypeError) as error:
            raise ValueError(f"{path} is no JSON list of prompts ({type(error).__name__}: {error})") from error
    else:
        prompts = [line.replace("\\n", "\n") for line in text.splitlines()]
    if not prompts:
        raise ValueError(f"{path} holds no prompts")
    empty = next((number for number, prompt in enumerate(prompts, 1) if not prompt), None)
    if empty is not None:
        raise ValueError(f"prompt {empty} of {path} is empty")
    return prompts

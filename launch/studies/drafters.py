"""Measures all that can draft for one target on the same held-out prompts, and makes one table of it.

    python launch/studies/drafters.py --output=runs/python_drafters.json
    python launch/studies/drafters.py --head=Medusa=runs/medusa_head --output=runs/python_drafters.json
    python launch/studies/drafters.py --exit_target=runs/layer_skip --prompts=4 --K=2 --output=runs/few.json
    python launch/studies/drafters.py --combined --repeated --K=4 --output=runs/python_voting_repeated.json

The draft model of a pair, prompt lookup, an early exit and the pair's head, greedy, at 0.8/0.95 and at temperature 1, by
draft length. ``--head`` adds a head that launch/export_head.py wrote. An early exit of the pair's own target, which was
not trained for it, is hardly accepted: ``--exit_target`` names the run of one that was, whose texts are its own.
``--combined`` measures the draft model and prompt lookup alone, chosen from past rounds and voting, instead; with
``--repeated`` on prompts that end with their own beginning, so that texts go on as copies.

Every drafter takes turns with plain decoding of its target. Temperature and top-p are numbers of one program: a drafter
is compiled once for each K, and greedy decoding pays for the warp that it does not need, on both sides. A cell is written
when it is done, and one that the output already holds is not measured again.

A second table says what the same acceptance would be worth on a chip, by the costs that the compiler estimates for another
target and its drafters (``--costs``, of the study compile): a head is taken to cost what EAGLE-3's does there.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import pathlib
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
from absl import flags

from launch.lib import entry
from launch.lib.drafters import lookup_and_model
from launch.studies.drafters_on_chips import (
    FORECAST_HEADER,
    SAMPLINGS,
    Costs,
    costs_of_drafters,
    forecast_rows,
    sampling_name,
)
from launch.studies.results_drafters import cost_of_a_draft
from specsamp import chain, storage, temperature, top_p, use_compilation_cache
from specsamp.analysis import report
from specsamp.analysis.grid import Cell, Results, measure_cells
from specsamp.analysis.measured import counts_of
from specsamp.analysis.workload import Workload
from specsamp.checkpoints.heads import open_head, read_head
from specsamp.checkpoints.pair import load_pair, load_prompts, pair_folder
from specsamp.checkpoints.params import digest_of_pair
from specsamp.decoding.checks import encode
from specsamp.decoding.drafter import Drafter
from specsamp.decoding.drafters import (
    ChoosingDrafter,
    EarlyExitDrafter,
    FeatureDrafter,
    ModelDrafter,
    NgramDrafter,
    VotingDrafter,
)
from specsamp.decoding.loop import decode_window
from specsamp.decoding.pair import Pair
from specsamp.models.heads import FeatureHead
from specsamp.models.transformer import TransformerLM
from specsamp.sampling.rejection import TokenRule
from specsamp.training.source import open_target

_PAIR = flags.DEFINE_string("pair", "python", "The pair, by name or folder.")
_HEADS = flags.DEFINE_multi_string("head", [], "Another head of its target, as NAME=FOLDER; may be repeated.")
_EXIT_TARGET = flags.DEFINE_string(
    "exit_target", None, "The run of a target that was trained for early exit. Default: the pair's own target."
)
_EXIT_LAYER = flags.DEFINE_integer("exit_layer", 2, "Layers of the target that draft in an early exit.", lower_bound=1)
_LENGTHS = flags.DEFINE_multi_integer("K", [1, 2, 4], "Draft length to measure; may be repeated.", lower_bound=1)
_PROMPTS = flags.DEFINE_integer("prompts", 16, "Decode the first so many held-out prompts of the pair.", lower_bound=1)
_TOKENS = flags.DEFINE_integer("max_new_tokens", 128, "Tokens that each prompt is continued by.", lower_bound=1)
_SAMPLINGS = flags.DEFINE_multi_enum(
    "sampling", ["greedy", "0.8/0.95", "1.0"], ["greedy", "0.8/0.95", "1.0"], "Distribution; may be repeated."
)
_COMBINED = flags.DEFINE_bool(
    "combined", False, "Measure the draft model and prompt lookup alone, chosen and voting, instead of all drafters."
)
_REPEATED = flags.DEFINE_bool("repeated", False, "Add to each prompt the first half of its own text.")
_COSTS = flags.DEFINE_string(
    "costs",
    str(pathlib.Path(__file__).parents[2] / "notebooks" / "results" / "compile_heads.json"),
    "Take the costs on a chip from this file, which the study compile wrote of heads.",
)
_CHIPS = flags.DEFINE_string("chips", "v5e:2x2", "Forecast for this slice of the file of costs.")
_CHIP_TARGET = flags.DEFINE_string("chip_target", "Llama 3.1 8B", "Forecast for this target of the file of costs.")
_OUTPUT = entry.define_output()


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Source:
    """Something that drafts."""

    name: str
    pair: Pair
    make: Callable[[int], Drafter]  # of K
    most: int | None = None  # tokens that it drafts; None: any number


def main() -> None:
    console = entry.make_console()
    entry.check_output(_OUTPUT.value)
    found = sources()
    costs = costs_of_drafters(storage.read_json(_COSTS.value), _CHIP_TARGET.value, _CHIPS.value, _COSTS.value)
    prompts = load_prompts(_PAIR.value)[: _PROMPTS.value]
    if _REPEATED.value:
        prompts = [f"{text}\n\n\n{text[: len(text) // 2]}" for text in prompts]
    tokens = tuple(map(tuple, encode(found[0].pair, prompts)))
    work = Workload(
        prompts=tokens,
        prompt_length=max(map(len, tokens)),
        max_new_tokens=_TOKENS.value,
        repeats=len(tokens),
    )
    results = Results.open(_OUTPUT.value, identity(work), lambda text: console.print(text, style="yellow"))
    use_compilation_cache()

    def header() -> dict[str, Any]:
        return {"command": entry.command(), "environment": report.environment()}

    kept = f"the cells measured so far are in {_OUTPUT.value}; the same command goes on"
    with entry.keeps(kept), entry.progress(console, "starting") as say:
        asked = {source: cells_of(source, work) for source in found}
        for source, cells in asked.items():
            measure_cells(
                source.pair, cells, results, header=header, progress=lambda text: say(f"{source.name}, {text}")
            )
    measured = [[results.find(cell.key) for cell in cells] for cells in asked.values()]
    shown = [cell for cells in measured for cell in by_sampling(cells)]
    entry.show([table(shown), chip_table(shown, costs)], console)


def sources() -> list[Source]:
    """Returns all that drafts, checked before anything is measured.

    Raises:
      FileNotFoundError, ValueError: a pair, head or run that is not there or does not fit.
    """
    pair, window = load_pair(_PAIR.value), decode_window()
    alone = [
        Source(name="draft model", pair=pair, make=lambda K: ModelDrafter(pair.draft, K, window)),
        Source(name="prompt lookup", pair=pair, make=lambda K: NgramDrafter(K=K)),
    ]
    if _COMBINED.value:
        both = functools.partial(lookup_and_model, pair.draft)
        return alone + [
            Source(name="chosen: lookup or draft model", pair=pair, make=lambda K: ChoosingDrafter(both(K))),
            Source(name="voting: lookup and draft model", pair=pair, make=lambda K: VotingDrafter(both(K))),
        ]
    target = pair.target
    own = open_target(_EXIT_TARGET.value) if _EXIT_TARGET.value else None
    exits = pair
    if own is not None:
        model = TransformerLM.for_backend(dataclasses.replace(own.config, dtype=target.config.dtype))
        exits = dataclasses.replace(pair, target=model, target_params=own.params)
    EarlyExitDrafter(exits.target, _EXIT_LAYER.value, 1, window)
    early_exit = Source(
        name=f"early exit after {_EXIT_LAYER.value}" + (" (trained for it)" if own is not None else ""),
        pair=exits,
        make=lambda K: EarlyExitDrafter(exits.target, _EXIT_LAYER.value, K, window),
    )
    heads = {}
    if (pair_folder(_PAIR.value) / "head").is_dir():
        heads["its head"] = load_pair(_PAIR.value, draft="head", check_fit=False)
    for text in _HEADS.value:
        name, equals, folder = text.partition("=")
        if not (name and equals and folder):
            raise ValueError(f"--head={text}: write a name and a folder, such as Medusa=runs/medusa_head")
        heads[name if "head" in name else f"{name} head"] = with_head(pair, folder)
    return [*alone, early_exit] + [head_source(name, one) for name, one in heads.items()]


def with_head(pair: Pair, folder: str) -> Pair:
    """Returns the pair with the head of a folder in the place of its draft model."""
    checkpoint = open_head(folder, pair.target.config, dtype=pair.target.config.dtype)
    head = FeatureHead(checkpoint.config)
    return dataclasses.replace(pair, draft=None, head=head, draft_params=read_head(checkpoint, head))


def head_source(name: str, pair: Pair) -> Source:
    def make(K: int) -> Drafter:
        return FeatureDrafter(pair.target, pair.head, K, decode_window())

    return Source(name=name, pair=pair, make=make, most=pair.head.config.max_tokens)


def identity(work: Workload) -> dict[str, Any]:
    """Returns what all cells of a file share."""
    return {
        "pair": _PAIR.value,
        "prompts": {"count": len(work.prompts), "crc32": zlib.crc32(repr(work.prompts).encode())},
        "max_new_tokens": work.max_new_tokens,
        "machine": report.machine(),
        "jax": jax.__version__,
    }


def cells_of(source: Source, work: Workload) -> list[Cell]:
    """Makes the cells of one drafter, those of a program together: other weights are other cells."""
    weights = digest_of_pair(source.pair)
    cells = []
    for K in _LENGTHS.value:
        if source.most is not None and K > source.most:
            continue
        for heat, share in (SAMPLINGS[name] for name in _SAMPLINGS.value):
            key = {"draft_length": K, "drafter": source.name, "rule": "token", "batch": 1}
            key |= {"temperature": heat, "top_k": 0, "top_p": share, "min_p": 0.0, "weights": weights}
            cells.append(
                Cell(
                    key=key,
                    drafter=source.make(K),
                    rule=TokenRule(),
                    sampling=chain(temperature(heat), top_p(share)),
                    draft_sampling=None,
                    workload=work,
                )
            )
    return cells


def table(cells: list[Mapping[str, Any]]) -> report.Table:
    """Returns a row for each cell."""
    most = max(cell["key"]["draft_length"] for cell in cells)
    rows = []
    for cell in cells:
        key = cell["key"]
        what = key["drafter"], sampling_name(key), str(key["draft_length"])
        if "result" not in cell:
            rows.append((*what, "out of memory", *[""] * (most + 3)))
            continue
        counts, result = counts_of(cell), cell["result"]
        shares = ["" if math.isnan(share) else f"{share:.2f}" for share in counts.acceptance_by_position]
        cost = cost_of_a_draft(result, key["draft_length"])
        rows.append(
            (
                *what,
                f"{counts.emitted_per_round:.2f}",
                *shares,
                *[""] * (most - len(shares)),
                "" if cost is None else f"{cost:.2f}",
                f"{result['speculative']['ms_per_token']['median']:.2f}",
                f"{result['speedup']['median']:.2f}x",
            )
        )
    positions = [f"accepted at {i + 1}" for i in range(most)]
    header = (
        "drafter",
        "sampling",
        "K",
        "tokens per round",
        *positions,
        "a draft, in steps",
        "ms per token",
        "speedup",
    )
    return report.Table(
        title="Drafters of one target, on the same prompts",
        header=header,
        rows=rows,
        note="accepted at a position: of the rounds that came so far; a draft: what proposing and reading what was "
        "accepted take for each drafted token, in steps of the target; speedup over plain decoding in turn",
    )


def by_sampling(cells: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Returns cells in the order of their distributions, then of K."""
    names = list(SAMPLINGS)
    return sorted(cells, key=lambda cell: (names.index(sampling_name(cell["key"])), cell["key"]["draft_length"]))


def chip_table(cells: Sequence[Mapping[str, Any]], costs: Costs) -> report.Table:
    """Returns a forecast for each cell whose kind of drafter has costs there."""
    return report.Table(
        title=f"The same acceptance, with {_CHIP_TARGET.value} on {_CHIPS.value} (forecast)",
        header=FORECAST_HEADER,
        rows=forecast_rows(cells, costs),
        note="costs are the compiler's estimates, calibrated; acceptance is that of the pair measured here",
    )


if __name__ == "__main__":
    entry.run(main)

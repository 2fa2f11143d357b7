"""Forecasts whether speculation pays, and with which K: from acceptance and costs, without decoding
anything.

    python launch/plan.py --acceptance=0.8 --target_ms=14.1 --draft_ms=1.8
    python launch/plan.py --acceptance=0.85,0.8,0.7 --target_ms=14.1 --draft_ms=1.8 \\
        --new_tokens=128 --batch=8
    python launch/plan.py --histogram=40,25,15,20 --config=configs/chinchilla.py --chip=v4 \\
        --devices=16 --context=2048
    python launch/plan.py --acceptance=0.8 \\
        --compile_report=notebooks/results/compile_chinchilla_v4.json
    python launch/plan.py --measured=notebooks/results/python_pair_grid.json --temperature=0.8 \\
        --new_tokens=128

Acceptance is a rate, a rate for each drafted position (given that all earlier tokens were
accepted), or the numbers of rounds with 0, 1, ..., K accepted tokens. Costs are milliseconds per
call, a file of launch/compile_report.py, or a roofline of the configuration's models on a chip. A
file of launch/benchmark.py has both.
"""

import functools
import itertools
import math
from collections.abc import Sequence

from absl import flags
from rich.console import Console

from launch.lib import entry
from launch.lib.costs import cost_tables, define_chip_hour
from launch.lib.fields import ExperimentFlag
from launch.lib.shapes import target_and_draft
from specsamp import storage
from specsamp.analysis import grid, tables
from specsamp.analysis.acceptance import Acceptance, Profile
from specsamp.analysis.costs import Costs, PerCall
from specsamp.analysis.planner import Plan, make_plan
from specsamp.analysis.report import Table
from specsamp.analysis.tree_shape import TreeForecast, best_shape, choose_shape
from specsamp.tpu.calibration import Band
from specsamp.tpu.pair_report import basis, compiled_costs
from specsamp.tpu.topology import CHIPS, parse
from specsamp.tpu.work import Roofline, Shape

_ACCEPTANCE = flags.DEFINE_list(
    "acceptance",
    None,
    "The probability that a drafted token is accepted, or one per position, as 0.85,0.8: the last "
    "for all later ones.",
)
_HISTOGRAM = flags.DEFINE_list(
    "histogram", None, "Rounds by number of accepted tokens, 0 to K, as 40,25,15,20."
)
_TARGET_MS = flags.DEFINE_float(
    "target_ms", None, "Milliseconds of a call of the target, at your batch and context."
)
_DRAFT_MS = flags.DEFINE_float(
    "draft_ms", None, "Milliseconds of a call of the draft, at the same batch and context."
)
_COMPILE_REPORT = flags.DEFINE_string(
    "compile_report", None, "Take costs from this file of launch/compile_report.py."
)
_CONFIG = ExperimentFlag("configs/chinchilla.py")
_CHIP = flags.DEFINE_enum(
    "chip",
    None,
    sorted(CHIPS),
    "Take costs from a roofline of the models of --config on this chip.",
)
_DEVICES = flags.DEFINE_integer(
    "devices",
    None,
    "Chips that the models are split over; goes with --chip, or with --chip_hour.",
    lower_bound=1,
)
_MEASURED = flags.DEFINE_string(
    "measured",
    None,
    "Take costs, and acceptance if none is given, from this file of launch/benchmark.py.",
)
_RULE = flags.DEFINE_string(
    "rule", "token", "Take measured cells of this acceptance rule; goes with --measured."
)
_DRAFTER = flags.DEFINE_string(
    "drafter", "model", "Take measured cells of this drafter; goes with --measured."
)
_TEMPERATURE = flags.DEFINE_float(
    "temperature",
    None,
    "Take measured cells of this temperature, needed if there are several; goes with --measured.",
)
_BATCH = flags.DEFINE_multi_integer(
    "batch", [1], "Number of rows that are decoded together; may be repeated.", 1
)
_CONTEXT = flags.DEFINE_multi_integer(
    "context",
    [],
    "Number of slots of the caches; goes with --chip or --compile_report; may be repeated.",
    1,
)
_RANKS = flags.DEFINE_list(
    "ranks",
    None,
    "Also forecast token trees, from the acceptance of the first, second, ... sibling, as "
    "0.6,0.2,0.1; goes with costs of calls, or with --chip.",
)
_NEW_TOKENS = flags.DEFINE_integer(
    "new_tokens",
    None,
    "Number of tokens of every row; by default rows never end.",
    lower_bound=1,
    upper_bound=8192,
)
_LONGEST = flags.DEFINE_integer(
    "longest", 12, "The largest K to compare.", lower_bound=1, upper_bound=256
)
_CHIP_HOUR = define_chip_hour()
_OUTPUT = entry.define("output")

MOST_ROWS, MOST_LEVELS = 65, 12  # of token trees
ROOFLINE = ". Calls stream or compute at the full rate of the chip: real calls take longer"
EXPERTS = (
    ". Of experts a call reads those that its tokens choose, if they choose independently and all "
    "alike, divided evenly over the devices"
)
# Of --config.
NOT_READ = (
    "adaptive attention batch chat draft_length draft_temperature max_new_tokens mesh "
    "prompt_length prompts repeats rule sampling seed synthetic_acceptance tree"
)
GOES_WITH = {
    "context": ("chip", "compile_report"),
    "devices": ("chip", "chip_hour"),
    "chip_hour": ("devices",),  # that take these milliseconds
    **dict.fromkeys(("rule", "drafter", "temperature"), ("measured",)),
}


def main() -> None:
    console = entry.make_console()
    entry.check_result(_OUTPUT.value)
    if _CHIP.value is None:
        _CONFIG.refuse("it goes with --chip")
    _CONFIG.read(NOT_READ.split(), "a plan takes --batch, --context, --devices and --longest")
    entry.check_goes_with(GOES_WITH)
    with entry.reading(_MEASURED.value or _COMPILE_REPORT.value or "the plan"):
        report = _COMPILE_REPORT.value and storage.read_json(_COMPILE_REPORT.value)["report"]
        check_devices(report)
        cells = measured_cells(console) if _MEASURED.value else []
        accepted, costs = acceptance(cells), round_costs(cells, report)
    ranks = None if _RANKS.value is None else numbers("ranks", _RANKS.value, float)
    if ranks is not None:
        best_shape(ranks, 2)  # refuses ranks, as the next line costs of chains, before all tables
        costs.tree_ms(1, 2)
    lengths = range(_LONGEST.value + 1)
    places = [
        dict(batch=batch, context=context, new_tokens=_NEW_TOKENS.value, draft_lengths=lengths)
        for context in _CONTEXT.value or [None]
        for batch in _BATCH.value
    ]
    plans = [make_plan(accepted, costs, **place) for place in places]
    for plan in plans:
        ms = [(f"K = {one.draft_length}", one.ms_per_token.value) for one in plan.forecasts]
        dollars = cost_tables(ms, _DEVICES.value, _CHIP_HOUR.value)
        entry.show([plan_table(plan, costs, report), *dollars], console)
    for plan, place in zip(plans, places, strict=True):
        best, digits = plan.best, ".2g" if report else ".2f"
        verdict = "decode plainly"
        if best.draft_length:
            verdict = f"K = {best.draft_length}, {best.speedup.value:{digits}}x"
        if costs.is_range:
            hidden, added = (
                make_plan(accepted, edge, **place).best.draft_length for edge in costs.bounds
            )
            verdict = (
                f"K = {hidden} if all collectives are hidden, {added} if all are added (0: decode "
                "plainly)"
            )
        console.print(f"{where(plan)}: {verdict}")
    trees = tree_forecasts(ranks, costs, places, console) if ranks else []
    document = {"kind": "forecast", "acceptance": accepted, "costs": costs, "plans": plans}
    entry.write_result(_OUTPUT.value, document | ({"trees": trees} if trees else {}), console)


def tree_forecasts(
    ranks: Sequence[float], costs: Costs, places: Sequence[grid.Json], console: Console
) -> list[dict[str, TreeForecast]]:
    """Returns the best tree and the best chain for each batch and context, and prints which is
    better.
    """
    found = []
    for place in places:
        ms = functools.partial(costs.tree_ms, batch=place["batch"], context=place["context"])
        tree, chain = choose_shape(
            ranks, ms, most_rows=MOST_ROWS, most_depth=min(_LONGEST.value, MOST_LEVELS)
        )
        text = (
            f"{tree.shape.K} nodes, depth {tree.shape.depth}: {tree.tokens_per_round:.2f} tokens "
            "per round"
        )
        than = f"{chain.ms_per_token:.3g} ms per token as the best chain, K = {chain.shape.K}"
        verdict = (
            f"a chain is better than all trees, {than}"
            if tree.is_chain
            else f"a tree of {text}, {tree.ms_per_token:.3g} instead of {than}; "
            f"parents {tree.shape.parents}"
        )
        console.print(f"batch {place['batch']}: {verdict}")
        found.append({"tree": tree, "chain": chain})
    return found


def check_devices(report: grid.Json | None) -> None:
    """Raises ValueError if a compile report is of another number of chips than --devices."""
    chips = report and math.prod(parse(report["topology"])[1])
    if chips and _DEVICES.value not in (None, chips):
        raise ValueError(
            f"--devices={_DEVICES.value}: {_COMPILE_REPORT.value} is of {chips} chips, "
            f"{report['topology']}"
        )


def measured_cells(console: Console) -> list[grid.Json]:
    """Reads the cells of one rule, drafter and distribution, and prints where they were measured.

    Cells with a draft temperature belong to another drafter; cells with made-up acceptance, or with
    lengths that adapt, are left out.
    """
    wanted = {
        "rule": _RULE.value,
        "drafter": _DRAFTER.value,
        "draft_temperature": None,
        "synthetic_acceptance": None,
        "adaptive": None,
    }
    wanted |= {} if _TEMPERATURE.value is None else {"temperature": _TEMPERATURE.value}
    document = grid.read_document(_MEASURED.value)
    console.print(grid.origin(_MEASURED.value, document))
    cells = grid.chosen(document["cells"], **wanted)
    drafted = [cell["key"] for cell in cells if cell["key"]["draft_length"]]
    laws = {grid.distribution_of(key) for key in drafted}
    if len(laws) == 1:
        return [cell for cell in cells if grid.distribution_of(cell["key"]) in laws]
    keys = drafted or [cell["key"] for cell in document["cells"] if cell["key"]["draft_length"]]
    known = sorted(
        {f"{key['rule']}, {key['drafter']}, {grid.distribution_of(key)}" for key in keys}
    )
    raise ValueError(
        "--measured: choose cells of one distribution by --rule, --drafter and --temperature; "
        f"{_MEASURED.value} has {'; '.join(known) or 'no draft'}"
    )


def acceptance(cells: Sequence[grid.Json]) -> Acceptance:
    """Returns the acceptance from the flags, or from the measured cells."""
    if _ACCEPTANCE.value is None and _HISTOGRAM.value is None and cells:
        return grid.measured_acceptance(cells)
    if (_ACCEPTANCE.value is None) == (_HISTOGRAM.value is None):
        raise ValueError("give either --acceptance or --histogram")
    if _ACCEPTANCE.value is not None:
        return Profile.of_positions(numbers("acceptance", _ACCEPTANCE.value, float))
    return Profile.of_histogram(numbers("histogram", _HISTOGRAM.value, int))


def numbers(flag: str, texts: list[str], kind: type) -> list:
    """Returns the values of a list, each as ``kind``."""
    try:
        return [kind(text) for text in texts]
    except ValueError as error:
        raise ValueError(f"--{flag}={','.join(texts)}: {error}") from error


def round_costs(cells: Sequence[grid.Json], report: grid.Json | None) -> Costs:
    """Returns the costs of rounds; raises ValueError unless the flags give them in
    exactly one way.
    """
    calls = (_TARGET_MS.value, _DRAFT_MS.value)
    given = [calls != (None, None), report is not None, _CHIP.value is not None, bool(cells)]
    if sum(given) != 1 or None in calls and given[0]:
        raise ValueError(
            "give costs in one way: --target_ms and --draft_ms, --compile_report, --chip with "
            "--config, or --measured"
        )
    if cells:
        return grid.measured_costs(cells)
    if report is not None:
        return compiled_costs(report)
    return PerCall(*calls) if given[0] else roofline()


def roofline() -> Roofline:
    """Returns the costs of the models of --config on the chips of --chip."""
    config, chip = _CONFIG.value, CHIPS[_CHIP.value]
    word = config.word
    if not word.compiled or word.draft == "head" or config.window:
        raise ValueError(
            f"--chip plans a draft model or an early exit; --config.drafter is {config.drafter}"
        )
    target, draft = target_and_draft(config)
    size = target.weight_bytes + (0 if word.inside else draft.weight_bytes)
    least = math.ceil(size / chip.hbm_bytes)
    if _DEVICES.value is None or _DEVICES.value < least:
        raise ValueError(
            f"--devices={_DEVICES.value} cannot hold the models: weights of {size / 1e9:.1f} GB "
            f"take at least {least} {_CHIP.value} of {chip.hbm_bytes / 1e9:.0f} GB"
        )
    costs = Roofline(
        target=target.config, draft=draft.config, chip=_CHIP.value, devices=_DEVICES.value
    )
    models = [target.config] if word.inside else [target.config, draft.config]
    longest = min(model.max_positions for model in models)
    if (most := max(_CONTEXT.value, default=0)) > longest:
        raise ValueError(f"--context={most} is above max_positions {longest} of the models")
    for batch, context in itertools.product(
        _BATCH.value, _CONTEXT.value or [min(longest, costs.default_context)]
    ):
        caches = batch * sum(
            Shape.of(model).cache_bytes(model.cache_dtype or model.dtype, context)
            for model in models
        )
        if size + caches > _DEVICES.value * chip.hbm_bytes:
            raise ValueError(
                f"--batch={batch} takes caches of {caches / 1e9:.1f} GB and weights of "
                f"{size / 1e9:.1f} GB, more than {_DEVICES.value} {_CHIP.value} of "
                f"{chip.hbm_bytes / 1e9:.0f} GB hold: lower it, or raise --devices"
            )
    return costs


def where(plan: Plan) -> str:
    """Describes the batch, the context and the length of the texts."""
    context = "" if plan.context is None else f", {plan.context} slots"
    tokens = (
        "rows that never end"
        if plan.new_tokens is None
        else f"{plan.new_tokens} tokens each, to the slowest row"
    )
    return f"batch {plan.batch}{context}, {tokens}"


def plan_table(plan: Plan, costs: Costs, report: grid.Json | None) -> Table:
    """Returns the table of forecasts for every K; its digits and bands depend on the precision of
    the costs.
    """
    digits = 3 if report is None else 2
    show = tables.span if costs.is_range else functools.partial(tables.interval, digits=digits)
    rows = []
    for one in plan.forecasts:
        K, ms = one.draft_length, f"{one.round_ms:.{digits}g}"
        if costs.bounds:
            least, most = (edge.round_ms(K, plan.batch, plan.context) for edge in costs.bounds)
            ms = str(Band(least=least, likely=one.round_ms, most=most, open=costs.is_range))
        rows.append(
            {
                "": f"K = {K}" + " *" * (one is plan.best and not costs.is_range),
                "tokens per round": tables.interval(one.tokens_per_round),
                "ms per round": ms,
                "ms per token": show(one.ms_per_token),
                "speedup": show(one.speedup, "x"),
            }
        )
    note = (
        "* is best; brackets: 95%, by the counts behind the acceptance and the clocks behind the "
        "costs"
    )
    if costs.bounds:
        note += f". Milliseconds: {basis(costs.is_range)}"
    if isinstance(costs, Roofline):
        note += ROOFLINE + (EXPERTS if costs.target.experts else "")
    return Table.of(f"Forecast: {where(plan)}", rows, note=note)


if __name__ == "__main__":
    entry.run(main, _CONFIG)

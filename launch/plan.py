"""Forecasts whether speculation pays, and with which K: from acceptance and costs, without decoding anything.

    python launch/plan.py --acceptance=0.8 --target_ms=14.1 --draft_ms=1.8
    python launch/plan.py --by_position=0.85,0.8,0.7 --target_ms=14.1 --draft_ms=1.8 --new_tokens=128 --batch=8
    python launch/plan.py --histogram=40,25,15,20 --config=configs/chinchilla.py --chip=v4 --devices=16 --context=2048
    python launch/plan.py --acceptance=0.8 --config=configs/hf.py:qwen-30b-a3b --chip=v5e --devices=8
    python launch/plan.py --acceptance=0.8 --compile_report=notebooks/results/compile_chinchilla_v4.json
    python launch/plan.py --measured=notebooks/results/python_pair_grid.json --temperature=0.8 --new_tokens=128

Acceptance is a rate, one chance for each drafted position (given that those before were accepted), or rounds by
number of accepted tokens (0, 1, ..., K). Costs are milliseconds per call, what launch/compile_report.py wrote, or
a roofline of the configuration's models on a chip. What launch/benchmark.py measured gives both.
"""

import functools
import math
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from absl import flags
from rich.console import Console

from launch.lib import entry, price
from launch.lib.calibration_file import define_calibration, own_calibration
from launch.lib.config import ConfigFlag
from launch.lib.fields import ExperimentConfig
from launch.lib.shapes import known_models
from specsamp import storage
from specsamp.analysis import grid, report, tables
from specsamp.analysis.acceptance import Profile, Profiles, mirrored_block_survival
from specsamp.analysis.costs import Costs, ModelSize, PerCall, Roofline
from specsamp.analysis.planner import AdaptiveForecast, Plan, make_plan, plan_adaptive
from specsamp.decoding.drafters import EarlyExitDrafter
from specsamp.models.config import TransformerConfig
from specsamp.tpu.calibration import Band, Calibration
from specsamp.tpu.costs import compiled_costs
from specsamp.tpu.tables import basis
from specsamp.tpu.topology import CHIPS, parse

_ACCEPTANCE = flags.DEFINE_float(
    "acceptance", None, "The chance that a drafted token is accepted, from 0 to 1, the same at every position."
)
_BY_POSITION = flags.DEFINE_list(
    "by_position",
    None,
    "The chances that drafted tokens are accepted, by position, as 0.85,0.8; the last one holds on.",
)
_HISTOGRAM = flags.DEFINE_list(
    "histogram", None, "Counts of rounds by the number of accepted tokens, 0 to K, as 40,25,15,20."
)
_TARGET_MS = flags.DEFINE_float(
    "target_ms", None, "Milliseconds of a call of the target, at the batch and context that are meant."
)
_DRAFT_MS = flags.DEFINE_float("draft_ms", None, "Milliseconds of a call of the draft, at the same batch and context.")
_COMPILE_REPORT = flags.DEFINE_string(
    "compile_report", None, "Take costs from this file, which launch/compile_report.py wrote."
)
_CONFIG = ConfigFlag("configs/chinchilla.py", ExperimentConfig)
_CHIP = flags.DEFINE_enum(
    "chip", None, sorted(CHIPS), "Take costs from a roofline of the models of --config on this chip."
)
_DEVICES = flags.DEFINE_integer(
    "devices",
    None,
    "How many chips hold the models together; needed with --chip, and where costs are given with --chip_hour.",
    lower_bound=1,
)
_CALL_MS = flags.DEFINE_float("call_ms", 0, "Constant milliseconds of every call; goes with --chip.", lower_bound=0)
_MEASURED = flags.DEFINE_string(
    "measured", None, "Take costs, and acceptance if none is given, from this file of launch/benchmark.py."
)
_RULE = flags.DEFINE_string("rule", "token", "Take measured cells of this acceptance rule; goes with --measured.")
_DRAFTER = flags.DEFINE_string("drafter", "model", "Take measured cells of this drafter; goes with --measured.")
_TEMPERATURE = flags.DEFINE_float(
    "temperature", None, "Take measured cells of this temperature, needed if there are several; goes with --measured."
)
_BATCH = flags.DEFINE_multi_integer("batch", [1], "How many rows are decoded together; may be repeated.", lower_bound=1)
_CONTEXT = flags.DEFINE_multi_integer(
    "context",
    [],
    "How many slots the caches have; goes with --chip or --compile_report; may be repeated.",
    lower_bound=1,
)
_NEW_TOKENS = flags.DEFINE_integer(
    "new_tokens", None, "How many tokens every row gets; by default rows never end.", lower_bound=1, upper_bound=8192
)
_LONGEST = flags.DEFINE_integer("longest", 12, "The largest K to compare.", lower_bound=1, upper_bound=256)
_ADAPTIVE = flags.DEFINE_list(
    "adaptive", [], "Also forecast draft lengths that adapt, of these, as 0,1,2,4,8; goes with --new_tokens."
)
_CALIBRATION = define_calibration()
_CHIP_HOUR = price.define_chip_hour()
_OUTPUT = entry.define_output()

ROOFLINE = ". Calls stream or compute at the full rate of the chip and take --call_ms besides: real ones take longer"
EXPERTS = (
    ". Of experts those are read that the tokens of a call choose, if they choose independently and all alike, divided "
    "evenly over the devices"
)
MIRRORED = (
    ". A bare rate is taken for certain, and does not settle what the block rule gains: nothing at least; the last "
    "column is its tokens per round if target and draft exchange the chances of two tokens"
)


def main() -> None:
    console = entry.make_console()
    entry.check_output(_OUTPUT.value)
    check_heeded()
    with entry.reading(_MEASURED.value or _COMPILE_REPORT.value or "the plan"):
        cells = measured_cells(console) if _MEASURED.value else []
        accepted, costs, chips = acceptance(cells), round_costs(cells), priced_chips(cells)
    places = [
        dict(batch=B, context=S, new_tokens=_NEW_TOKENS.value) for S in _CONTEXT.value or [None] for B in _BATCH.value
    ]
    lengths = range(_LONGEST.value + 1)
    plans = [make_plan(accepted, costs, draft_lengths=lengths, **place) for place in places]
    tried = numbers("adaptive", _ADAPTIVE.value, int)
    adaptive = [plan_adaptive(accepted, costs, lengths=tried, **place) for place in places if tried]
    for plan in plans:
        ms = [(f"K = {one.draft_length}", one.ms_per_token.value) for one in plan.forecasts]
        entry.show([plan_table(plan, costs), *price.tables(ms, chips, _CHIP_HOUR.value)], console)
    if cells and _NEW_TOKENS.value and max(_BATCH.value) > 1:
        console.print("Measured cells count all texts together: where they differ, the slowest row takes longer.")
    for plan, place in zip(plans, places, strict=True):
        best, digits = plan.best, ".2g" if _COMPILE_REPORT.value else ".2f"
        verdict = f"K = {best.draft_length}, {best.speedup.value:{digits}}x" if best.draft_length else "decode plainly"
        if costs.open:
            edges = [make_plan(accepted, edge, draft_lengths=lengths, **place).best for edge in costs.edges]
            hidden, added = (edge.draft_length for edge in edges)
            verdict = f"K = {hidden} if all collectives are hidden, {added} if all are added (0: decode plainly)"
        console.print(f"{where(plan)}: {verdict}")
    document = {"kind": "forecast", "acceptance": accepted, "costs": costs, "plans": plans}
    if adaptive:
        document["adaptive"] = adaptive
        console.print("\n".join(map(told, adaptive)), markup=False)
    if (chip_hour := _CHIP_HOUR.value) is not None:
        document["dollars_per_million_tokens"] = [
            {K.draft_length: price.dollars_per_million(K.ms_per_token.value, chips, chip_hour) for K in plan.forecasts}
            for plan in plans
        ]
    if _ACCEPTANCE.value is not None:
        document["block_rule_mirrored"] = {K: block_mirrored(K) for K in range(_LONGEST.value + 1)}
    entry.write_result(_OUTPUT.value, document, console)


def told(one: AdaptiveForecast) -> str:
    """Returns a line about lengths that adapt."""
    total = sum(one.rounds_by_drafted)
    shares = ", ".join(f"{K}: {count / total:.0%}" for K, count in enumerate(one.rounds_by_drafted) if count)
    lengths = f"batch {one.batch}, lengths that adapt, usually {one.adaptive.usual}"
    return f"{lengths}: {one.ms_per_token:.3g} ms per token, {one.speedup:.2f}x; rounds by drafted tokens {shares}"


GOES_WITH = {
    "adaptive": ("new_tokens",),
    "context": ("chip", "compile_report"),
    "devices": ("chip", "chip_hour"),
    "call_ms": ("chip",),
    "calibration": ("compile_report",),
    **dict.fromkeys(("rule", "drafter", "temperature"), ("measured",)),
}


def check_heeded() -> None:
    """Refuses a flag that goes with another way of giving costs.

    Raises:
      ValueError: with both flags.
    """
    if _CHIP.value is None and any(argument.startswith("--config") for argument in sys.argv[1:]):
        raise ValueError("--config would not be heeded: it goes with --chip")
    for name, others in GOES_WITH.items():
        if flags.FLAGS[name].present and all(flags.FLAGS[other].value is None for other in others):
            others = " or ".join(f"--{other}" for other in others)
            raise ValueError(f"--{name} would not be heeded: it goes with {others}")


def measured_cells(console: Console) -> list[Mapping[str, Any]]:
    """Reads the cells of one rule, drafter and distribution, and says where they were measured.

    A draft with a temperature of its own is another drafter, and made-up acceptance is no measurement.
    """
    wanted = {"rule": _RULE.value, "drafter": _DRAFTER.value, "draft_temperature": None, "synthetic_acceptance": None}
    wanted |= {} if _TEMPERATURE.value is None else {"temperature": _TEMPERATURE.value}
    document = grid.read_document(_MEASURED.value)
    console.print(grid.origin(_MEASURED.value, document), soft_wrap=True, markup=False)
    cells = grid.chosen(document["cells"], **wanted)
    distributions = sorted({grid.distribution_of(cell["key"]) for cell in cells if cell["key"]["draft_length"]})
    if not distributions:
        keys = [cell["key"] for cell in document["cells"] if cell["key"]["draft_length"]]
        there = sorted({f"{key['rule']} and {key['drafter']} at temperature {key['temperature']:g}" for key in keys})
        asked = " and ".join(f"--{name}={value}" for name, value in wanted.items() if value is not None)
        raise ValueError(
            f"--measured: no cell of {_MEASURED.value} has {asked}; it has {'; '.join(there) or 'no draft'}"
        )
    if len(distributions) > 1:
        told = f"{_MEASURED.value} has {'; '.join(distributions)}"
        raise ValueError(f"--measured: choose cells of one distribution with --temperature; {told}")
    return [cell for cell in cells if grid.distribution_of(cell["key"]) == distributions[0]]


def acceptance(cells: Sequence[Mapping[str, Any]]) -> Profiles:
    """Returns the acceptance that the flags give, or that of the measured cells."""
    given = [value for value in (_ACCEPTANCE.value, _BY_POSITION.value, _HISTOGRAM.value) if value is not None]
    if not given and cells:
        return grid.measured_acceptance(cells)
    if len(given) != 1:
        raise ValueError(f"give one of --acceptance, --by_position and --histogram; got {len(given)} of them")
    if _ACCEPTANCE.value is not None:
        return Profile.of_rate(_ACCEPTANCE.value)
    if _BY_POSITION.value is not None:
        return Profile.of_positions(numbers("by_position", _BY_POSITION.value, float))
    return Profile.of_histogram(numbers("histogram", _HISTOGRAM.value, int))


def numbers(flag: str, texts: list[str], kind: type) -> list:
    """Returns the values of a list, each as ``kind``."""
    try:
        return [kind(text) for text in texts]
    except ValueError as error:
        raise ValueError(f"--{flag}={','.join(texts)}: {error}") from error


def round_costs(cells: Sequence[Mapping[str, Any]]) -> Costs:
    """Returns what rounds cost by the one way that the flags give."""
    calls = (_TARGET_MS.value, _DRAFT_MS.value)
    given = [calls != (None, None), _COMPILE_REPORT.value is not None, _CHIP.value is not None, bool(cells)]
    if sum(given) != 1 or None in calls and given[0]:
        raise ValueError(
            "give costs in one way: --target_ms and --draft_ms, --compile_report, --chip with --config, or --measured"
        )
    if cells:
        return grid.measured_costs(cells)
    if given[0]:
        return PerCall(*calls)
    if given[1]:
        report, own = compiled()
        return compiled_costs(report, own)
    config = _CONFIG.value
    models, inside = known_models(config), config.word.inside
    if "target" not in models or "draft" not in models and not inside and config.word.planned:
        raise ValueError("--config: a roofline needs the shapes of both models, such as configs/chinchilla.py has them")
    if not config.word.planned:
        raise ValueError(f"--chip plans a draft model or an early exit; config.drafter is {config.drafter!r}")
    chip = CHIPS[_CHIP.value]
    target = models["target"]
    draft = EarlyExitDrafter(target, config.exit_layer, K=1).exit_model if inside else models["draft"]
    check_devices([target.config] if inside else [target.config, draft.config])
    return Roofline(
        target=ModelSize.of(target.config),
        draft=ModelSize.of(draft.config),
        bytes_per_second=chip.hbm_bytes_per_second,
        flops_per_second=chip.flops_per_second,
        devices=_DEVICES.value,
        call_ms=_CALL_MS.value,
    )


def priced_chips(cells: Sequence[Mapping[str, Any]]) -> int:
    """Returns the chips whose price counts: those of --devices, of a compile report, or of the measured cells.

    Raises:
      ValueError: nothing says how many they are.
    """
    if _DEVICES.value is not None or _CHIP_HOUR.value is None:
        return _DEVICES.value or 1
    if _COMPILE_REPORT.value:
        return math.prod(parse(compiled()[0]["topology"])[1])
    known = {cell.get("environment", {}).get("devices") for cell in cells}
    if len(known) == 1 and None not in known:
        return known.pop()
    raise ValueError("--chip_hour needs --devices: how many chips take these milliseconds")


def check_devices(held: Sequence[TransformerConfig]) -> None:
    """Refuses a roofline of chips that cannot hold the weights of the models.

    Raises:
      ValueError: --devices is missing, or too few; the message says how many are the least.
    """
    size = sum(config.weight_bytes for config in held)
    capacity = CHIPS[_CHIP.value].hbm_bytes
    told = f"weights of {size / 1e9:.1f} GB take at least {math.ceil(size / capacity)} {_CHIP.value} of {capacity / 1e9:.0f} GB"
    if _DEVICES.value is None:
        raise ValueError(f"--chip={_CHIP.value} needs --devices, how many chips hold the models together: {told}")
    if size > _DEVICES.value * capacity:
        raise ValueError(f"--devices={_DEVICES.value} cannot hold the models: {told}")


def where(plan: Plan) -> str:
    context = "" if plan.context is None else f", {plan.context} slots"
    tokens = "rows that never end" if plan.new_tokens is None else f"{plan.new_tokens} tokens each, to the slowest row"
    return f"batch {plan.batch}{context}, {tokens}"


def plan_table(plan: Plan, costs: Costs) -> report.Table:
    rate, digits = _ACCEPTANCE.value is not None, 2 if _COMPILE_REPORT.value else 3  # no more are known
    show = tables.span if costs.open else functools.partial(tables.interval, digits=digits)
    rows = []
    for one in plan.forecasts:
        K, ms = one.draft_length, f"{one.round_ms:.{digits}g}"
        if costs.edges:
            least, most = (edge.round_ms(K, plan.batch, plan.context) for edge in costs.edges)
            ms = str(Band(least=least, likely=one.round_ms, most=most, open=costs.open))
        name = f"K = {K}" + " *" * (one is plan.best and not costs.open)
        row = (name, tables.interval(one.tokens_per_round), ms, show(one.ms_per_token), show(one.speedup, "x"))
        rows.append((*row, f"{block_mirrored(K):.2f}") if rate else row)
    notes = [
        "* is best; in brackets, 95% of what is left open by the counts behind the acceptance and the clocks behind the costs",
        f". Milliseconds: {basis(costs.open, compiled()[1])}" if costs.edges else "",
        MIRRORED if rate else "",
        ROOFLINE if _CHIP.value else "",
        EXPERTS if isinstance(costs, Roofline) and costs.target.experts else "",
    ]
    header = ("", "tokens per round", "ms per round", "ms per token", "speedup", *["block rule, mirrored"] * rate)
    return report.Table(title=f"Forecast: {where(plan)}", header=header, rows=rows, note="".join(notes))


def compiled() -> tuple[dict[str, Any], Calibration | None]:
    """Returns the report of --compile_report, and the calibration of its slice that --calibration names."""
    report = storage.read_json(_COMPILE_REPORT.value)["report"]
    return report, own_calibration(_CALIBRATION.value, report["topology"])


def block_mirrored(draft_length: int) -> float:
    """Returns the tokens per round where the block rule gains much, though not all that it could.

    See `mirrored_block_survival`.
    """
    return 1 + float(mirrored_block_survival(_ACCEPTANCE.value, draft_length).sum())


if __name__ == "__main__":
    entry.run(main, _CONFIG)

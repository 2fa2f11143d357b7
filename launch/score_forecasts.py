"""Measures the frozen forecasts that fit the devices at hand, and says how all that were scored did.

    python launch/score_forecasts.py --dry_run                    # which forecasts fit these devices
    python launch/score_forecasts.py                              # a few minutes on a slice
    python launch/score_forecasts.py --only=llama-8b --repeats=20

Each forecast is the milliseconds of a round of a pair (`launch/studies/freeze_forecasts.py`). The pair is made with random
weights: a round takes as long as with trained ones. Measurement and verdict are added to the ledger after each, so the
same command goes on where it was interrupted; what is there is never changed. Send the ledger back as a pull request.
"""

import datetime
from typing import Any

import jax
from absl import flags

import entry
from config_file import load_config
from round_times import devices_here, random_pair, round_ms
from specsamp import storage, use_compilation_cache
from specsamp.analysis import report
from specsamp.analysis.report import Table
from specsamp.analysis.timing import of_first_process
from specsamp.models.compiling import is_out_of_memory
from specsamp.tpu.calibration import two_digits
from specsamp.tpu.ledger import Setting, read_entry, standing
from specsamp.tpu.own import chip_of

_LEDGER = flags.DEFINE_string("ledger", "notebooks/results/forecasts.json", "The frozen forecasts, and their scores.")
_ONLY = flags.DEFINE_string("only", "", "Measure the forecasts with this text in their name.")
_REPEATS = flags.DEFINE_integer("repeats", 10, "How often each round is measured.", lower_bound=1)
_AGAIN = flags.DEFINE_bool("again", False, "Measure forecasts again that were scored on these devices already.")
_DRY_RUN = flags.DEFINE_bool("dry_run", False, "Print which forecasts fit these devices, and measure nothing.")


def main() -> None:
    console = entry.make_console()
    with entry.reading(_LEDGER.value):
        ledger = storage.read_json(_LEDGER.value)
        entries = [read_entry(one) for one in ledger["forecasts"]]
    fitting = [i for i, (setting, _, _) in enumerate(entries) if fits(setting)]
    others = [setting for i, (setting, _, _) in enumerate(entries) if i not in fitting]
    chosen = [
        i for i in fitting if _ONLY.value in entries[i][0].name and (_AGAIN.value or not scored_here(entries[i][2]))
    ]
    needed = ", ".join(dict.fromkeys(setting.topology for setting in others))
    console.print(f"{len(fitting)} of {len(entries)} forecasts are of {devices_here()}; {len(chosen)} to be measured")
    if others:
        console.print(f"{len(others)} are of other devices: {needed}", soft_wrap=True)
    if _DRY_RUN.value:
        for i in chosen:
            console.print(entries[i][0].name)
    elif chosen:
        entry.check_output(_LEDGER.value, "ledger")
        use_compilation_cache()
        with entry.keeps(f"the scores so far are in {_LEDGER.value}"), entry.progress(console, "measuring") as say:
            for i in chosen:
                say(entries[i][0].name)
                ledger["forecasts"][i]["scores"].append(score(entries[i][0], entries[i][1]))
                if entry.is_first():
                    report.write_json(_LEDGER.value, ledger)
    entries = [read_entry(one) for one in ledger["forecasts"]]
    entry.show([scores_table(entries)], console)
    for kind, open in (("bands of nine in ten", False), ("ranges from all hidden to all added", True)):
        first = [(band, scores[0]["measured_ms"]) for _, band, scores in measured(entries) if band.open == open]
        console.print(f"{kind}: {standing(first).verdict}")


def fits(setting: Setting) -> bool:
    """Returns whether a forecast is of the devices at hand."""
    return setting.chip == chip_of(jax.devices()[0]) and setting.devices == jax.device_count()


def scored_here(scores: list[dict[str, Any]]) -> bool:
    return any(one["devices"] == devices_here() for one in scores)


def score(setting: Setting, band: Any) -> dict[str, Any]:
    """Measures a forecast; that it does not fit the memory is a verdict, too."""
    known = {
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "devices": devices_here(),
        "command": entry.command(),
        "environment": report.environment(),
    }
    try:
        pair = random_pair(load_config(setting.config), setting.batch)
        took = round_ms(pair, setting.draft_length, setting.batch, setting.slots, _REPEATS.value)
    except jax.errors.JaxRuntimeError as error:
        if not is_out_of_memory(error):
            raise
        return known | {"verdict": "out of memory"}
    measured_ms = of_first_process(took.median)
    verdict = "within" if band.covers(measured_ms) else "below" if measured_ms < band.least else "above"
    return known | {"measured_ms": measured_ms, "quartiles_ms": (took.lower, took.upper), "verdict": verdict}


def measured(entries: list[tuple]) -> list[tuple]:
    """Returns the entries that were measured, with those of their scores that are times."""
    times = [(setting, band, [one for one in scores if "measured_ms" in one]) for setting, band, scores in entries]
    return [one for one in times if one[2]]


def scores_table(entries: list[tuple]) -> Table:
    """Returns a row for each score."""
    rows = [
        (
            setting.name,
            str(band),
            two_digits(one["measured_ms"]) if "measured_ms" in one else "",
            one["verdict"],
            where(one),
        )
        for setting, band, scores in entries
        for one in scores
    ]
    header = ("", "forecast, ms of a round", "measured", "verdict", "where")
    return Table(title="Scored forecasts", header=header, rows=rows, note="" if rows else "none yet")


def where(one: dict[str, Any]) -> str:
    return f"{one['devices']}, {one['date']}"


if __name__ == "__main__":
    entry.run(main)

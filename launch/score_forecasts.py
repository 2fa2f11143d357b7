"""Measures the frozen forecasts that fit the devices at hand, and says how all that were scored did.

    python launch/score_forecasts.py --dry_run                    # which forecasts are of this slice
    python launch/score_forecasts.py                              # a few minutes on a slice
    python launch/score_forecasts.py --only=llama-8b --repeats=20

Each forecast is the milliseconds of a round of a pair (`launch/studies/freeze_forecasts.py`). The pair is made with random
weights: a round takes as long as with trained ones. Measurement and verdict are added to the ledger after each, so the
same command goes on where it was interrupted; what is there is never changed, and a ledger with an edited forecast is
refused. Send the ledger back as a pull request.
"""

import datetime
from collections.abc import Sequence
from typing import Any

import jax
from absl import flags

from launch.lib import entry
from launch.lib.drafters import make_drafter
from launch.lib.round_times import devices_here, random_pair, round_ms, setting_config
from specsamp import storage, use_compilation_cache
from specsamp.analysis import report
from specsamp.analysis.report import Table
from specsamp.mesh.distributed import gather_objects
from specsamp.models.compiling import is_out_of_memory
from specsamp.tpu import ledger
from specsamp.tpu.calibration import Band, two_digits
from specsamp.tpu.ledger import Batch, Entry, Setting
from specsamp.tpu.own import chip_of, extent
from specsamp.tpu.topology import same_slice

_LEDGER = flags.DEFINE_string("ledger", "notebooks/results/forecasts.json", "The frozen forecasts, and their scores.")
_ONLY = flags.DEFINE_string("only", "", "Measure the forecasts with this text in their name.")
_REPEATS = flags.DEFINE_integer("repeats", 10, "How often each round is measured.", lower_bound=1)
_AGAIN = flags.DEFINE_bool("again", False, "Measure forecasts again that were scored on such a slice already.")
_DRY_RUN = flags.DEFINE_bool("dry_run", False, "Print which forecasts are of this slice, and measure nothing.")


def main() -> None:
    console = entry.make_console()
    batches = read()
    every = [(b, i, one) for b, batch in enumerate(batches) for i, one in enumerate(batch.entries)]
    others = [one.setting.topology for _, _, one in every if not fits(one.setting)]
    chosen = [
        (b, i, one.setting, one.band)
        for b, i, one in every
        if fits(one.setting) and _ONLY.value in one.setting.name and (_AGAIN.value or not scored_here(one))
    ]
    count = len(every) - len(others)
    console.print(f"{count} of {len(every)} forecasts are of {slice_here()}; {len(chosen)} to be measured")
    if others:
        console.print(f"{len(others)} are of other slices: {', '.join(dict.fromkeys(others))}", soft_wrap=True)
    if _DRY_RUN.value:
        for b, _, setting, _ in chosen:
            console.print(f"{setting.name} (frozen {batches[b].date})")
    elif chosen:
        entry.check_output(_LEDGER.value, "ledger")
        use_compilation_cache()
        with entry.keeps(f"the scores so far are in {_LEDGER.value}"), entry.progress(console, "measuring") as say:
            for b, i, setting, band in chosen:
                say(setting.name)
                found = score(setting, band)
                if entry.is_first():
                    append(b, i, found)
    show(read(), console)


def read() -> tuple[Batch, ...]:
    """Reads the ledger; a forecast that was edited is refused."""
    with entry.reading(_LEDGER.value):
        return ledger.read_ledger(storage.read_json(_LEDGER.value))


def append(batch: int, place: int, found: dict[str, Any]) -> None:
    """Adds a score to the ledger as it is now: others may have added theirs, or a batch, since it was read.

    Raises:
      ValueError: a forecast was edited.
    """
    with storage.locked(_LEDGER.value):
        document = storage.read_json(_LEDGER.value)
        ledger.read_ledger(document)
        document["batches"][batch]["forecasts"][place]["scores"].append(found)
        report.write_json(_LEDGER.value, document)


def fits(setting: Setting) -> bool:
    """Returns whether a forecast is of the slice at hand: its chip and its shape, not the number of devices alone."""
    return setting.chip == chip_of(jax.devices()[0]) and same_slice(setting.sizes, extent(jax.devices()))


def slice_here() -> str:
    """Names the slice at hand as settings do."""
    return f"{chip_of(jax.devices()[0])}:{'x'.join(map(str, extent(jax.devices())))}"


def scored_here(one: Entry) -> bool:
    """Returns whether a forecast was scored on a slice such as this one."""
    return any(score["slice"] == slice_here() for score in one.scores)


def score(setting: Setting, band: Band) -> dict[str, Any]:
    """Measures a forecast; that it does not fit the memory is a verdict, too."""
    known = {
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "slice": slice_here(),
        "devices": devices_here(),
        "command": entry.command(),
        "environment": report.environment(),
    }
    try:
        config = setting_config(setting)
        pair = random_pair(config, setting.batch)
        drafter = make_drafter(config, pair.target, pair.draft_or_head, setting.draft_length)
        took = round_ms(pair, drafter, setting.batch, setting.slots, _REPEATS.value)
    except jax.errors.JaxRuntimeError as error:
        if not is_out_of_memory(error):
            raise
        return known | {"verdict": "out of memory"}
    measured_ms = gather_objects(took.median)[0]
    verdict = "within" if band.covers(measured_ms) else "below" if measured_ms < band.least else "above"
    return known | {"measured_ms": measured_ms, "quartiles_ms": (took.lower, took.upper), "verdict": verdict}


def show(batches: Sequence[Batch], console: Any) -> None:
    """Prints all scores, and what they say of each batch's bands and of its ranges."""
    entry.show([scores_table(batches)], console)
    for batch in batches:
        for kind, open, chance in (("bands", False, batch.chance), ("ranges from all hidden to all added", True, None)):
            outcomes = [one.outcome for one in batch.entries if one.outcome and one.band.open == open]
            console.print(
                f"{kind} frozen {batch.date} at {batch.commit[:7]}: {ledger.standing(outcomes).verdict(chance)}",
                soft_wrap=True,
            )


def scores_table(batches: Sequence[Batch]) -> Table:
    """Returns a row for each score."""
    rows = [
        (
            one.setting.name,
            batch.date,
            str(one.band),
            two_digits(score["measured_ms"]) if "measured_ms" in score else "",
            score["verdict"],
            f"{score['devices']} ({score['slice']}), {score['date']}",
        )
        for batch in batches
        for one in batch.entries
        for score in one.scores
    ]
    header = ("", "frozen", "forecast, ms of a round", "measured", "verdict", "where")
    return Table(title="Scored forecasts", header=header, rows=rows, note="" if rows else "none yet")


if __name__ == "__main__":
    entry.run(main)

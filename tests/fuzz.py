"""Draws streams of requests for all entry points, and compares each completion with that of its
request decoded alone.

    python tests/fuzz.py --minutes=30 --record=runs/fuzz.jsonl   # resumes after the last seed
    python tests/fuzz.py --seed=7                                # repeats the streams of a seed
    python tests/fuzz.py --fault=chunk                           # a planted fault must be found

Every seed draws streams of requests (`support.fuzz.streams`) for the settings of
`support.fuzz.settings`. All models compute in float64, so that no difference is due to rounding.
"""

import argparse
import collections
import json
import pathlib
import sys
import time
import traceback

FOLDER = pathlib.Path(__file__).parent
sys.path[:0] = [str(FOLDER), str(FOLDER.parent)]

from support.fuzz.float64 import use_float64

use_float64()

import hypothesis

from specsamp import use_compilation_cache
from support.fuzz.entries import ENTRIES
from support.fuzz.faults import FAULTS, planted
from support.fuzz.settings import SETTINGS
from support.fuzz.streams import Different, streams
from support.programs import forget_if_many

STREAMS_PER_SEED = 40


def run(settings, seed, count, counts, shrink=False):
    """Decodes ``count`` streams, and counts them in ``counts`` by setting. Raises the first
    difference.
    """
    phases = [hypothesis.Phase.generate] + ([hypothesis.Phase.shrink] if shrink else [])

    @hypothesis.seed(seed)
    @hypothesis.settings(
        max_examples=count,
        database=None,
        deadline=None,
        phases=phases,
        suppress_health_check=list(hypothesis.HealthCheck),
        print_blob=False,
    )
    @hypothesis.given(streams(settings))
    def decode(stream):
        counts[stream.setting.name] += 1
        if counts.total() % 10 == 0:
            forget_if_many()
        ENTRIES[stream.setting.entry](stream)

    decode()


def recorded(path):
    """Returns the lines of a record."""
    if path is None or not path.exists():
        return []
    return [json.loads(line) for line in path.read_text().splitlines()]


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--minutes", type=float, default=0, help="Go on with further seeds for so many minutes."
    )
    parser.add_argument(
        "--record", type=pathlib.Path, help="A file of seeds and counts, to which is added."
    )
    parser.add_argument(
        "--seed", type=int, help="The first seed; default: after the last one of the record."
    )
    parser.add_argument("--streams", type=int, default=STREAMS_PER_SEED, help="Streams of a seed.")
    parser.add_argument("--only", default="", help="Settings whose names contain this text.")
    parser.add_argument("--fault", choices=[*FAULTS], help="Plant a fault, which must be found.")
    parser.add_argument(
        "--shrink", action="store_true", help="Look for a smaller stream after a difference."
    )
    arguments = parser.parse_args()
    use_compilation_cache()
    done = recorded(arguments.record)
    seed = arguments.seed
    if seed is None:
        seed = 1 + max((line["seed"] for line in done), default=0)
    fault = FAULTS.get(arguments.fault)
    settings = [
        one for one in (SETTINGS if fault is None else fault.settings) if arguments.only in one.name
    ]
    end = time.monotonic() + 60 * arguments.minutes
    if fault is not None:
        with planted(fault):
            run_faulty(settings, seed, arguments)
        return
    is_different = False
    while True:
        begin = time.monotonic()
        counts = collections.Counter()
        failed = {}
        try:
            run(settings, seed, arguments.streams, counts, arguments.shrink)
        except Exception as error:
            traceback.print_exc()
            failed = {"failed": f"{type(error).__name__}: {error}"[:2000]}
        seconds = round(time.monotonic() - begin)
        line = (
            dict(seed=seed, streams=sum(counts.values()), seconds=seconds, counts=counts) | failed
        )
        is_different |= bool(failed)
        print(json.dumps(line), flush=True)
        if arguments.record is not None:
            arguments.record.parent.mkdir(parents=True, exist_ok=True)
            with arguments.record.open("a") as record:
                record.write(json.dumps(line) + "\n")
        seed += 1
        if time.monotonic() >= end:
            sys.exit(int(is_different))


def run_faulty(settings, seed, arguments):
    """Ends with status 1 if a planted fault is not found."""
    try:
        run(settings, seed, arguments.streams, collections.Counter())
    except Different as error:
        print(f"found: {str(error).splitlines()[0][:200]}")
        return
    sys.exit(f"the fault {arguments.fault!r} was not found in {arguments.streams} streams")


if __name__ == "__main__":
    main()

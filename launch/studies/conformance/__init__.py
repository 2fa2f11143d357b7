"""Enumerates what the verifiers of public systems emit, and compares it with what their own plain sampling emits.

    python launch/study.py conformance --output=runs/conformance.json --checkouts=../checkouts
    python launch/study.py conformance --systems=transformers,mlx-lm

A system's code runs unchanged on tables of three or four tokens, with every random number that it draws as a branch
(`specsamp.evaluation.enumeration`): what is compared is its distribution, not a sample. A system is an installed package or
a folder within --checkouts that has the name of its repository, or of a wheel that was unpacked there. Code that is not
Python is implemented from a description in our own words, and marked so.
"""

from __future__ import annotations

import pathlib
from typing import Any

from launch.lib.study import Document, Key, Option, Published, Say, Study, answers
from launch.studies.conformance.cases import CASES
from launch.studies.conformance.systems import SYSTEMS, Emit, find_files
from specsamp import validate
from specsamp.analysis.report import Table
from specsamp.evaluation.enumeration import Outside, Raised, joint, law_distance

EXACT = 1e-6  # float32 rounds by less, and the mistakes found are larger by four orders
KNOWN = ("version", "place", "draws", "how", "says", "note", "read")


def prepare(options: Any) -> None:
    """Refuses names of no system, and a folder that is missing."""
    for name in options.systems:
        validate.choice("--systems", name, SYSTEMS)
    if options.checkouts and not pathlib.Path(options.checkouts).is_dir():
        raise ValueError(f"--checkouts={options.checkouts} is no folder: give the one that has the checkouts in it")


def measure(options: Any, key: Key, say: Say) -> dict[str, Any]:
    """Returns total variations of a system by case, and what its paths raised."""
    system = SYSTEMS[key["system"]]
    found = {name: getattr(system, name) for name in KNOWN} | {"examined": system.version, "missing": "", "cases": {}}
    folder = None
    if system.package:
        folder, found["examined"] = find_files(system.package, options.checkouts)
        if folder is None:
            return found | {"missing": f"{system.package}, as a package or in --checkouts"}
    for case in CASES if system.adapter else ():
        if case.needs <= set(system.takes.split()) and case.name not in system.without:
            say(case.name)
            try:
                found["cases"][case.name] = compare_laws(*system.samplers(folder, case), case.count)
            except (Outside, OSError, ImportError, AttributeError) as error:  # another version, or other draws
                return found | {"missing": f"{type(error).__name__}: {error}"[:200]}
    return found


def compare_laws(emit: Emit, plain: Emit, count: int) -> dict[str, Any]:
    """Returns the total variation of the joint distributions, and the probability of each exception."""
    laws = [joint(sampler, count) for sampler in (emit, plain)]
    raised = {text.error: share for law in laws for text, share in law.items() if isinstance(text, Raised)}
    return {"variation": float(law_distance(*laws)), "raised": raised}


def verdict(result: Any) -> tuple[str, str]:
    """Returns the verdict of a row, and the case where it first fails."""
    if result["how"] == "read":
        return result["read"], ""
    for name, case in result["cases"].items():
        if sum(case["raised"].values()) > EXACT:
            return "raises: " + next(iter(case["raised"])), name
        if case["variation"] > EXACT:
            return ("by design: " + result["says"]) if result["says"] else "**biased**", name
    if result["missing"]:
        ran = len(result["cases"])
        return (f"exact in {ran} cases, then " if ran else "not run: ") + result["missing"], ""
    return "exact", ""


def table(document: Document) -> Table:
    """Returns a row for each system."""
    rows = []
    for key, result in answers(document):
        worst = max((case["variation"] for case in result["cases"].values()), default=None)
        said, first = verdict(result)
        other = f" (expected {result['version']})" if not result["examined"].startswith(result["version"]) else ""
        rows.append(
            {
                "system": key["system"],
                "version, place": f"{result['examined']}{other}, {result['place']}",
                "above temperature 0": result["draws"],
                "how it ran": result["how"],
                "worst total variation": "" if worst is None else f"{worst:.3f}" if worst > EXACT else f"{worst:.0e}",
                "verdict": said,
                "first failing case": first,
                "note": result["note"],
            }
        )
    return Table.of("Which verifiers sample their target?", rows, left=4)


STUDY = Study(
    question="Which of the world's speculative samplers sample their target?",
    options={
        "systems": Option(tuple(SYSTEMS), "The systems, with commas between them.", tuple(SYSTEMS)),
        "checkouts": Option("", "Folder with checkouts and unpacked wheels, each named as its repository or package."),
    },
    prepare=prepare,
    cells=lambda options: [{"system": name} for name in options.systems],
    identity=lambda options: {},
    measure=measure,
    tables={"conformance": Published(["conformance"], table)},
)

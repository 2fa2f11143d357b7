"""Compiles many programs for described TPU slices, to answer one question; see compile_cells.py.

    python launch/studies/compile_study.py --study=slices  --output=runs/compile_slices.json
    python launch/studies/compile_study.py --study=scoring --output=runs/compile_scoring.json --figure=scoring.png
    python launch/studies/compile_study.py --study=shapes  --output=runs/compile_shapes.json --figure=shapes.png
    python launch/studies/compile_study.py --study=complements --output=runs/compile_complements.json
    python launch/studies/compile_study.py --study=variants --output=runs/compile_variants.json
    python launch/studies/compile_study.py --study=heads --output=runs/compile_heads.json
    python launch/studies/compile_study.py --study=kernels --output=runs/compile_kernels.json

Every cell is written when it is done, and one that the output already holds is not compiled again. Ten minutes
to an hour on two cores; nothing runs on a TPU.
"""

import io
import time

import jax
from absl import flags

jax.config.update("jax_platforms", "cpu")  # arrays stay here; only the compiler is a TPU's

from rich.progress import Progress

from launch.lib import entry
from launch.studies import compile_cells
from launch.studies.compile_complements import complements
from launch.studies.compile_figures import PICTURES
from launch.studies.compile_heads import heads
from launch.studies.compile_kernels import kernels
from launch.studies.compile_variants import variants
from specsamp import storage
from specsamp.analysis import report as tables
from specsamp.tpu.calibration import estimate
from specsamp.tpu.work import Work

STUDIES = compile_cells.STUDIES | {study.__name__: study for study in (complements, variants, heads, kernels)}

_STUDY = flags.DEFINE_enum("study", None, sorted(STUDIES), "Study to run.", required=True)
_OUTPUT = flags.DEFINE_string(
    "output", None, "JSON file for the answers; those that it already holds are not compiled again.", required=True
)
_FIGURE = flags.DEFINE_string(
    "figure", None, f"PNG file for a figure of the answers, for {' and '.join(sorted(PICTURES))}."
)


def main() -> None:
    console = entry.make_console()
    if _FIGURE.value and _STUDY.value not in PICTURES:
        raise ValueError(f"--study={_STUDY.value} has no figure; {', '.join(sorted(PICTURES))} have")
    entry.check_output(_OUTPUT.value)
    entry.check_output(_FIGURE.value, "figure")
    document = read(_OUTPUT.value, _STUDY.value)
    try:
        cells = STUDIES[_STUDY.value]()
    except RuntimeError as error:  # no libtpu
        raise ValueError(str(error)) from error
    known = [cell["name"] for cell in document["cells"]]
    missing = [cell for cell in cells if cell.name not in known]
    kept = f"the answers so far are in {_OUTPUT.value}; the same command goes on"
    with entry.keeps(kept), Progress(console=console, transient=True) as progress:
        task = progress.add_task(_STUDY.value, total=len(missing))
        for cell in missing:
            progress.update(task, description=", ".join(f"{key} {value}" for key, value in cell.name.items()))
            start = time.perf_counter()
            answer = cell.answer()
            answered = [*document["cells"], {"name": cell.name, "seconds": time.perf_counter() - start} | answer]
            answered.sort(key=lambda done: [c.name for c in cells].index(done["name"]))
            tables.write_json(_OUTPUT.value, head(_STUDY.value) | {"cells": answered})
            document = storage.read_json(_OUTPUT.value)
            progress.advance(task)
    entry.show([table(document)], console)
    if _FIGURE.value:
        picture = io.BytesIO()
        PICTURES[_STUDY.value](document["cells"]).savefig(picture, format="png", dpi=140)
        storage.write(_FIGURE.value, picture.getvalue())


def head(study: str) -> dict:
    """Returns what is written before the answers."""
    return {
        "command": entry.command(),
        "environment": tables.environment(),
        "kind": "compiler estimate",
        "study": study,
        "libtpu": tables.version("libtpu"),
    }


def read(path: str, study: str) -> dict:
    """Reads what an earlier call has left there, or returns a document without cells.

    Raises:
      ValueError: something else is there, or answers of another compiler with some still missing.
    """
    here, place = head(study), storage.place(path)
    if not place.exists():
        return here | {"cells": []}

    def versions(document):
        return (document["libtpu"], document["environment"]["jax"])

    try:
        found = storage.read_json(path)
        names, asked = [cell["name"] for cell in found["cells"]], [cell.name for cell in STUDIES[study]()]
        complete = all(name in names for name in asked)  # then nothing is compiled
        same = found["study"] == study and (complete or versions(found) == versions(here))
    except (KeyError, TypeError) as error:
        raise ValueError(f"{path} holds no answers of a study ({error!r}): choose another --output") from error
    if not same:
        raise ValueError(
            f"{path} holds answers to {found['study']!r} by libtpu and jax {versions(found)}, not to {study!r} by "
            f"{versions(here)}: choose another --output"
        )
    if gone := [name for name in names if name not in asked]:
        raise ValueError(f"{path} holds answers that are no longer asked for, {gone[0]} among them: remove it")
    return found


def table(document: dict) -> tables.Table:
    """Tabulates the answers, a row per program."""
    rows = []
    for cell in document["cells"]:
        name = ", ".join(f"{key} {value}" for key, value in cell["name"].items())
        programs = cell.get("programs") or {"": cell}
        for program, facts in programs.items():
            rows.append((name, program, *line(facts, cell["name"].get("topology", "v4:2x2x4"))))
            name = ""
    return tables.Table(
        title=f"{document['study']} (compiler estimate, libtpu {document['libtpu']})",
        header=(
            "",
            "program",
            "HBM traffic, MB",
            "over floor",
            "streaming, ms",
            "cycles, ms",
            "collectives",
            "calibrated, ms",
        ),
        rows=rows,
        note="calibrated as specsamp/tpu/calibration.py says: a range goes from all collectives hidden to all added",
    )


def line(facts: dict, topology: str) -> tuple[str, ...]:
    """Formats the numbers of one program."""
    if "hbm_bytes" not in facts:
        return ("does not fit", "", "", "", "", "")
    floor = facts.get("over_floor")
    return (
        f"{facts['hbm_bytes'] / 1e6:,.1f}",
        f"{floor:.3f}" if floor else "",
        f"{facts['streaming_ms']:.3f}",
        f"{facts['cycles_ms']:.3f}",
        str(round(sum(facts["collectives"].values()))),
        str(estimate(topology.partition(":")[0], Work(**facts["work"]))) if "work" in facts else "",
    )


if __name__ == "__main__":
    entry.run(main)

"""Writes notebooks/results/README.md from the JSON files beside it, and the two tables of numbers in the main README.

    python launch/studies/results_readme.py --output=notebooks/results/README.md
    python launch/studies/results_readme.py --table=headline        # prints the first table of README.md
    python launch/studies/results_readme.py --table=summary         # prints its table of results

Every number comes from a file. Tests hold the committed texts against what this command makes.
"""

from __future__ import annotations

import json
import pathlib
import re
import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

from absl import flags

from launch.lib import entry
from launch.studies.results_in_short import headline, summary
from launch.studies.results_sections import SECTIONS
from launch.studies.results_tables import Documents
from specsamp import storage

ROOT = pathlib.Path(__file__).parents[2]
RESULTS = ROOT / "notebooks/results"
PAIR = ROOT / "specsamp/checkpoints/assets/python/pair.json"

_TABLE = flags.DEFINE_enum(
    "table", "all", ["all", "headline", "summary"], "Which text to make: the whole page, or a table of README.md."
)
_OUTPUT = entry.define_output("Write the text to this file instead of printing it.")


TOP = """# Results

This page is made from the JSON files in this folder:

```bash
python launch/studies/results_readme.py --output=notebooks/results/README.md
```

Do not edit it. The files hold what the authors measured, with versions and machine (older files name the system and
its cores alone). The commands below measure the same again and write to `runs/`, which git ignores. Quartiles stand in
brackets after medians.
"""


def main() -> None:
    console = entry.make_console()
    entry.check_output(_OUTPUT.value)
    text = {"all": page, "headline": headline, "summary": summary}[_TABLE.value](read())
    if _OUTPUT.value:
        storage.write(_OUTPUT.value, text.encode())
        console.print(f"written to {_OUTPUT.value}", soft_wrap=True)
    else:
        print(text)


def read() -> dict[str, Any]:
    """Reads all documents: those of notebooks/results by their names, and the record of the shipped pair."""
    found = {path.stem: json.loads(path.read_text(encoding="utf-8")) for path in sorted(RESULTS.glob("*.json"))}
    return found | {"pair": json.loads(PAIR.read_text(encoding="utf-8"))}


def page(documents: Documents) -> str:
    """Returns the whole page."""
    parts = [TOP]
    for section in SECTIONS:
        text = textwrap.fill(section.text, 120, break_on_hyphens=False, break_long_words=False)
        parts += [f"## {section.title}\n", f"{text}\n", section.make(documents) + "\n"]
        parts += [f"![{figure.replace('_', ' ')}]({figure}.png)\n" for figure in section.figures]
        if section.files:
            parts.append("\n".join(source(name, documents[name]) for name in section.files) + "\n")
    return "\n".join(parts)


def source(name: str, document: Mapping[str, Any]) -> str:
    """Returns where the numbers come from: file, dates, machine, versions and the commands that measure them again."""
    records = (
        [cell for cell in document.get("cells", ()) if "environment" in cell] or document.get("batches") or [document]
    )
    environments = [record["environment"] for record in records if "environment" in record]
    facts = [_machine(environments)] if environments else []
    facts += [f"{key} {document[key]}" for key in ("libtpu", "torch", "transformers") if key in document]
    commands = dict.fromkeys(_today(record["command"]) for record in records if "command" in record)
    again = "".join(f"\n  - `{command}`" for command in commands)
    return f"- [`{name}.json`]({name}.json)" + (": " if facts else "") + "; ".join(facts) + again


def _machine(environments: Sequence[Mapping[str, Any]]) -> str:
    def all_of(name: str) -> str:
        return ", ".join(dict.fromkeys(str(one[name]) for one in environments))

    days = sorted({one["date"][:10] for one in environments})
    when = days[0] if len(days) == 1 else f"{days[0]} to {days[-1]}"
    return (
        f"{when}; {all_of('machine')}, {all_of('cores')} cores, {all_of('devices')} x {all_of('device_kind')}; "
        f"Python {all_of('python')}, jax {all_of('jax')}, jaxlib {all_of('jaxlib')}, flax {all_of('flax')}"
    )


def _today(command: str) -> str:
    """Returns a recorded command as it is given today: scripts have moved, and results go to runs/."""
    if " --memory" in command:  # was a flag of the benchmark
        command = command.replace(" --memory", "").replace("launch/benchmark.py", "launch/studies/memory.py")
    script = re.search(r"launch/(\w+\.py)", command)
    if script and not (ROOT / script[0]).exists():
        command = command.replace(script[0], f"launch/studies/{script[1]}")
    return re.sub(r"--(output|figure)=notebooks/results/", r"--\1=runs/", command)


if __name__ == "__main__":
    entry.run(main)

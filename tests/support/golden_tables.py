"""Extracts the cells of every table of the results page and of README.md: the gate of moves that must change no number.

    python tests/support/golden_tables.py        # writes tests/launch/golden_tables.json from the committed pages

The file was written from the page as it stood before tables moved into their studies. It is not written again: a table
that leaves is deleted from it, in a commit that does nothing else.
"""

import hashlib
import json
import pathlib
import re

ROOT = pathlib.Path(__file__).parents[2]
RESULTS = ROOT / "notebooks/results"
GOLDEN = ROOT / "tests/launch/golden_tables.json"

Cells = list[list[str]]

# Names of the tables, by their headings on that page.
NAMES = {
    "The pair that comes with the package": "pair",
    "Rounds as they went": "one_round",
    "Its head": "head",
    "Drafters of one target": "drafters",
    "The same acceptance on a chip": "drafters_on_chips",
    "Two drafters together": "voting",
    "Speedup by draft length and rule": "speedup",
    "Best draft length by drafter, rule, batch and temperature": "grid",
    "Draft lengths that adapt": "adaptive",
    "A draft with a temperature of its own": "draft_temperature",
    "Lossy rules and their price": "lossy",
    "Lossy rules and their price (2)": "lossy_nucleus",
    "Do forecasts hold?": "agreement",
    "Audit of the pair": "audit",
    "Quality of completions": "quality",
    "HumanEval": "humaneval",
    "The queue beside fixed batches": "refill",
    "Who goes first": "scheduling",
    "Who goes first (2)": "scheduling_humaneval",
    "The endpoint under load": "serve_load",
    "Beside Hugging Face transformers": "transformers",
    "A random pair": "random_pair",
    "Memory of the loop": "memory",
    "Host memory of reading a checkpoint": "streaming",
    "What int8 changes": "int8_error",
    "Where int8 helps on a CPU": "int8_speed",
    "What storing the pair in int8 changed": "int8_stored",
    "What a forecast of milliseconds is worth": "backtest",
    "What is prefetched while collectives run?": "in_flight",
    "Frozen forecasts": "forecasts",
    "Frozen forecasts (2)": "forecasts_later",
    "The paper's pair on 16 TPU v4 chips": "chinchilla",
    "The same pair on four slices, by batch": "slices",
    "Caches that are read as far as they are alive": "kernels",
    "What does a call for more tokens cost?": "scoring",
    "Which shape should a draft have?": "shapes",
    "What int8, fewer kv heads and drafting save together": "complements",
    "Public pairs on TPU v5e": "public_pairs",
    "Heads and early exits beside a draft model": "heads",
    "A training step of an EAGLE-3 head": "head_training",
    "Why the loop is written as it is": "variants",
}


def tables_of(text: str) -> list[Cells]:
    """Returns every table of a Markdown text: the cells of its header, then of its rows, as they are shown."""
    found, last = [], None
    for line in text.splitlines():
        if not line.startswith("|"):
            last = None
            continue
        cells = [cell.strip() for cell in re.split(r"(?<!\\)\|", line.strip())[1:-1]]
        if last is None:
            found.append(last := [])
        if not all(re.fullmatch(r":?-+:?", cell) for cell in cells):
            last.append(cells)
    return found


def tables_by_heading(text: str) -> dict[str, Cells]:
    """Returns the tables of a page by their heading; the second under one heading has a number behind it."""
    found = {}
    for part in re.split(r"^#+ ", text, flags=re.MULTILINE)[1:]:
        for number, cells in enumerate(tables_of(part), 1):
            found[part.partition("\n")[0] + (f" ({number})" if number > 1 else "")] = cells
    return found


def digests() -> dict[str, str]:
    """Returns the SHA-256 of every committed result."""
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(RESULTS.glob("*.json"))}


def main() -> None:
    page = tables_by_heading((RESULTS / "README.md").read_text(encoding="utf-8"))
    readme = tables_by_heading((ROOT / "README.md").read_text(encoding="utf-8"))
    numbers = {"headline": readme["specsamp"], "summary": readme["Results"]}
    tables = {NAMES.get(heading, heading): cells for heading, cells in (page | numbers).items()}
    parts = [
        f' "results": {json.dumps(digests(), indent=2)}',
        ' "tables": {\n' + ",\n".join(map(lines, *zip(*tables.items()))) + "\n }",
    ]
    GOLDEN.write_text("{\n" + ",\n".join(parts) + "\n}\n", encoding="utf-8")


def lines(name: str, cells: Cells) -> str:
    """Returns a table as JSON with a row in each line, for differences that a person can read."""
    rows = ",\n".join("   " + json.dumps(row, ensure_ascii=False) for row in cells)
    return f"  {json.dumps(name)}: [\n{rows}\n  ]"


if __name__ == "__main__":
    main()

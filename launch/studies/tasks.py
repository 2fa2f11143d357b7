"""Draws acceptance by task, from results of launch/evaluate.py.

    pip install -e .[figures]
    python launch/studies/tasks.py --evaluation=runs/python.json --evaluation=runs/humaneval.json --output=runs/tasks.png

Each result is a task, or as many as it has categories. Bars are the share of verified drafted tokens that were accepted,
with twice the standard error of independent tokens. Nothing is measured here.
"""

from absl import flags

from launch.lib import entry
from specsamp import storage
from specsamp.analysis.figures import COLOURS, to_png
from specsamp.analysis.grid import read_document

_EVALUATIONS = flags.DEFINE_multi_string("evaluation", [], "A result of launch/evaluate.py; may be repeated.")
_OUTPUT = entry.define_output("Write the figure to this file.", required=True)
WIDTH = 0.8  # of the bars of a task


def main() -> None:
    entry.check_output(_OUTPUT.value)
    if not _EVALUATIONS.value:
        raise ValueError("give --evaluation=FILE, a result of launch/evaluate.py")
    found: dict[str, dict[str, tuple[float, float]]] = {}
    for path in _EVALUATIONS.value:
        with entry.reading(path):
            for task, bars in acceptance(read_document(path)).items():
                found.setdefault(task, {}).update(bars)
    try:
        picture = draw(found)
    except ModuleNotFoundError as error:
        raise ValueError(f"{error}: pip install -e .[figures]") from error
    storage.write(_OUTPUT.value, picture)
    print(f"written to {_OUTPUT.value}")


def acceptance(document: dict) -> dict[str, dict[str, tuple[float, float]]]:
    """Returns the acceptance and its error of each drafting method, by task or category."""
    task = document["identity"]["task"]["name"]
    found: dict[str, dict[str, tuple[float, float]]] = {}
    for row in document["evaluation"]:
        for category, counts in row["counts_by_category"].items():
            if row["exact"] and counts["rate"] is not None:
                name = f"{task}: {category}" if category else task
                found.setdefault(name, {})[row["name"]] = counts["rate"], counts["rate_error"]
    return found


def draw(found: dict[str, dict[str, tuple[float, float]]]) -> bytes:
    """Returns the figure as PNG."""
    import matplotlib.pyplot as plt

    methods = list(dict.fromkeys(name for bars in found.values() for name in bars))
    figure, axis = plt.subplots(figsize=(2 + 1.6 * len(found), 3.6), layout="constrained")
    for number, method in enumerate(methods):
        places = [at for at, bars in enumerate(found.values()) if method in bars]
        values = [bars[method] for bars in found.values() if method in bars]
        axis.bar(
            [at + (number - (len(methods) - 1) / 2) * WIDTH / len(methods) for at in places],
            [rate for rate, _ in values],
            width=WIDTH / len(methods) * 0.9,
            yerr=[2 * error for _, error in values],
            color=COLOURS[number % len(COLOURS)],
            label=method,
        )
    axis.set(ylabel="accepted share of verified tokens", ylim=(0, 1), xticks=range(len(found)))
    axis.set_xticklabels(found, rotation=0 if len(found) < 6 else 30)
    axis.legend(fontsize="small", frameon=False)
    return to_png(figure)


if __name__ == "__main__":
    entry.run(main)

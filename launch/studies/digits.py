"""Measures a pair that draws handwritten digits: how many rounds it takes, and whether anyone can tell the images apart.

    python launch/study.py digits --pair=runs/digits_pair --output=runs/digits.json

configs/digits.py trains the pair. A discriminator (a random forest) learns on one half of two sets of images, and tells
them apart on the other half. Speculative images must be no more telling than a second set of plain ones; images whose drafts
were all accepted must be. A classifier of real digits reads all sets.
"""

from collections.abc import Callable
from typing import Any

import numpy as np

from launch.lib.study import Document, Option, Published, Study
from specsamp import TokenRule, chain, generate, load_pair, temperature
from specsamp.analysis.report import Table
from specsamp.sampling.synthetic import SyntheticAcceptance
from specsamp.training.digits import CLASSES, LEVELS, SIDE, prompt, write_digits

K, PIXELS = 4, SIDE * SIDE
WAYS = {
    "plain": {"draft_length": 0},
    "plain again": {"draft_length": 0, "seed": 1},
    "speculative": {"draft_length": K, "seed": 2},
    "every draft accepted": {"draft_length": K, "seed": 3, "rule": SyntheticAcceptance(TokenRule(), 1.0)},
}


def draw(pair: Any, samples: int, **how: Any) -> list[Any]:
    """Draws images of all classes, as texts of 64 tokens."""
    law = {"sampling": chain(temperature(1.0)), "num_samples": samples, "stop": []}
    return generate(pair, [prompt(number) for number in range(CLASSES)], PIXELS, **law, **how)


def measure(options: Any, key: dict, say: Callable[[str], None]) -> dict[str, Any]:
    """Returns the accuracy of discriminators and of a classifier, and the rounds."""
    from sklearn.ensemble import RandomForestClassifier
    from sklearn.svm import SVC

    pair, drawn = load_pair(options.pair), {}
    for name, how in WAYS.items():
        say(f"drawing: {name}")
        drawn[name] = draw(pair, options.samples, **how)
    numbers, real = np.repeat(np.arange(CLASSES), options.samples), write_digits(options.data)
    reader = SVC(gamma=0.001, C=10).fit(real[:, 1:], real[:, 0].astype(int) - LEVELS)
    train = np.arange(len(numbers)) % 2 == 0
    result: dict[str, Any] = {"images": len(numbers), "ways": {}}
    tokens_of = {name: np.array([text.tokens for text in texts]) for name, texts in drawn.items()}
    for name, tokens in tokens_of.items():
        images, sides = np.concatenate([tokens_of["plain"], tokens]), np.repeat([0, 1], len(numbers))
        both, inputs = np.tile(train, 2), np.column_stack([images, np.tile(numbers, 2)])
        forest = RandomForestClassifier(500, random_state=0, n_jobs=-1).fit(inputs[both], sides[both])
        told = {"read": float(reader.score(tokens, numbers)), "rounds": sum(text.stats.rounds for text in drawn[name])}
        if name != "plain":
            told["told_apart"] = float(forest.score(inputs[~both], sides[~both]))
        result["ways"][name] = told
    return result


def table(document: Document) -> Table:
    """Returns a row for each way to draw; intervals hold 95% of binomial errors."""
    count, rows = document["images"], []
    for name, told in document["ways"].items():
        apart, width = told.get("told_apart"), 1.96 * np.sqrt(0.25 / count)
        shown = "" if apart is None else f"{apart:.3f} ({apart - width:.3f} to {apart + width:.3f})"
        rows.append((name, f"{count * PIXELS / told['rounds']:.2f}", shown, f"{told['read']:.3f}"))
    header = ("images", "pixels per round", "told apart from plain ones (chance 0.5)", "read as their class")
    return Table(title="Digits drawn pixel by pixel", header=header, rows=rows)


STUDY = Study(
    question="Does a pair that draws images speculatively draw what its target draws?",
    options={
        "pair": Option("runs/digits_pair", "Folder of the pair."),
        "data": Option("runs/digits", "Folder in which the real images are, or into which they are written."),
        "samples": Option(200, "Images of each class.", least=2),
    },
    identity=lambda options: {"samples": options.samples, "K": K},
    measure=measure,
    tables={"digits": Published(["digits"], table)},
)

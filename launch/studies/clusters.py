"""Measures whether rejections are clustered: how a round predicts the next round, and the round eight later.

    python launch/study.py clusters --output=runs/python_clusters.json

A round is kept as the number of tokens that it accepted, a digit. If tokens were accepted independently, rounds would be as
long as the mean rate says, and their counts uncorrelated. Intervals hold 95% of 1,000 sets of prompts that are drawn anew.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from launch.lib.study import Document, Published, Study, answers, law
from specsamp import chain, generate, load_pair, temperature, top_p
from specsamp.analysis.report import Table
from specsamp.checkpoints.trained_pair import load_prompts

PAIR, K, SAMPLES, TOKENS = "python", 3, 4, 192  # samples and tokens of each prompt; a digit holds K
LAWS = ({"temperature": 0.0, "top_p": 1.0}, {"temperature": 0.8, "top_p": 0.95}, {"temperature": 1.0, "top_p": 1.0})


def measure(options: Any, key: dict, say: Callable[[str], None]) -> dict[str, Any]:
    """Returns the accepted counts of all rounds but the last, which the budget may cut: a list of texts for each prompt."""
    prompts, samples = load_prompts(PAIR), SAMPLES if key["temperature"] else 1  # greedy texts are all alike
    how = {"sampling": chain(temperature(key["temperature"]), top_p(key["top_p"])), "num_samples": samples}
    found: list[list[str]] = [[] for _ in prompts]
    for text in generate(load_pair(PAIR), prompts, TOKENS, draft_length=K, **how):
        drafted = "".join("d" if each else "." for each in text.from_draft)  # the target writes a round's last token
        found[text.prompt_index].append("".join(str(len(run)) for run in drafted.split(".")[:-2]))
    return {"K": K, "max_new_tokens": TOKENS, "rounds": found}


def table(document: Document) -> Table:
    """Returns a row for each distribution."""
    rows = []
    for key, result in answers(document):
        K, prompts = result["K"], [[[int(digit) for digit in text] for text in texts] for texts in result["rounds"]]
        drawn = np.random.default_rng(0).integers(len(prompts), size=(1000, len(prompts)))
        found = np.array([statistics([prompts[i] for i in chosen], K) for chosen in drawn])
        low, high = np.quantile(found, (0.025, 0.975), axis=0)
        shown = [f"{mean:.2f} ({a:.2f} to {b:.2f})" for mean, a, b in zip(statistics(prompts, K), low, high)]
        rows.append((law(key), f"{sum(len(text) for texts in prompts for text in texts)}", *shown))
    after = ("first accepted after a full round", "after an empty one", "correlation with the next", "8 rounds later")
    header = ("sampling", "rounds", "tokens per round", "if independent", *after)
    return Table(title="Are rejections clustered?", header=header, rows=rows)


def statistics(prompts: Sequence[Sequence[Sequence[int]]], K: int) -> list[float]:
    """Returns what the table shows of some prompts."""
    texts = [np.array(text) for texts in prompts for text in texts]
    accepted = np.concatenate(texts)
    rate = accepted.sum() / np.minimum(accepted + 1, K).sum()  # of the tokens that were verified
    lags = [[np.concatenate(each) for each in zip(*((text[:-n], text[n:]) for text in texts))] for n in (1, 8)]
    before, after = lags[0]
    full, empty = (float((after[before == count] > 0).mean()) for count in (K, 0))
    independent, related = sum(rate**i for i in range(K + 1)), [np.corrcoef(*each)[0, 1] for each in lags]
    return [accepted.mean() + 1, independent, full, empty, *related]


STUDY = Study(
    question="Are rejections clustered: does the acceptance of a round predict that of the next round?",
    cells=lambda options: LAWS,
    identity=lambda options: {"pair": PAIR, "K": K, "samples": SAMPLES, "max_new_tokens": TOKENS},
    measure=measure,
    tables={"clusters": Published(["python_clusters"], table)},
)

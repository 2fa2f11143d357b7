"""Measures the gain of lossy rules and the bias that they meter: a curve for each rule, and exact rules at zero.

    python launch/study.py lossy --output=runs/python_lossy.json --figures=runs
    python launch/study.py lossy --rules=token,ears:0.3,bounded:0.01:ears:1 --prompt_count=2 --config.max_new_tokens=32

Each rule takes turns with plain decoding on the same prompts; a speedup is the median over prompts. Constants of rules follow
their names after colons, see launch/lib/rules.py.

Bias is the total variation of a token's distribution under the rule from the target's, metered while decoding. Its sum
over a text, on average, bounds the total variation of texts; beyond 1 it says nothing. Bought is the share of verified
tokens that are accepted beyond what the token rule would accept there.
"""

import dataclasses
import functools
import re
from collections.abc import Mapping
from typing import Any

from launch.lib.rules import make_rule
from launch.lib.study import Document, Key, Option, Published, Say, Study, answers
from specsamp import chain, temperature, top_p
from specsamp.analysis.benchmark import benchmark
from specsamp.analysis.figures import BLUE, GREEN, GREY, ORANGE, PURPLE, SKY, STYLES, VERMILLION, axes_of
from specsamp.analysis.report import Table
from specsamp.analysis.tables import ratio
from specsamp.decoding.method import Method

RULES = (
    "token",
    "block",
    *(f"ears:{beta}" for beta in (0.1, 0.3, 1)),
    *(f"lenience:{lenience}" for lenience in (0.8, 0.5, 0.2)),
    *(f"typical:{epsilon}:{delta}" for epsilon, delta in ((0.3, 0.55), (0.09, 0.3), (0.01, 0.1))),
    *(f"bounded:{budget}:ears:1" for budget in (0.003, 0.01, 0.03)),
    *(f"bounded:{budget}:typical" for budget in (0.01, 0.03)),
)
SAMPLINGS = ({"temperature": 1.0, "top_p": 1.0}, {"temperature": 0.8, "top_p": 0.95})
TABLES = ("lossy", "lossy_nucleus")
Point = Mapping[str, Any]  # what a rule gained and cost


def prepare(options: Any) -> None:
    """Refuses unknown rules, and rules that do not begin with token."""
    for word in options.rules:
        make_rule(word)
    if options.rules[0] != "token":
        raise ValueError(f"--rules={','.join(options.rules)} must begin with token, where all curves begin")


def measure(options: Any, key: Key, say: Say) -> Point:
    """Decodes all prompts with a rule and plainly, in turn; returns what the rule gained and cost."""
    experiment, rule = options.experiment, make_rule(key["rule"])
    sampling = chain(temperature(key["temperature"]), top_p(key["top_p"]))
    work = dataclasses.replace(experiment.workload, batch=1, repeats=options.prompt_count)
    method = Method(drafter=experiment.method.drafter, rule=rule, sampling=sampling)
    found = benchmark(experiment.pair, method, work, say)
    counts = found.acceptance
    return {
        **key,
        "exact": rule.exact,
        "draft_length": method.drafter.K,
        "tokens_per_round": counts.emitted_per_round,
        "acceptance": counts.acceptance_rate,
        "bought": counts.extra_accepted / sum(counts.reached) if rule.metered else 0.0,
        "variation_per_token": counts.variation_per_token if rule.metered else 0.0,
        "variation_per_text": found.variation_per_text or 0.0,
        "ms_per_token": found.speculative.ms_per_token,
        "speedup": found.speedup,
    }


def points_of(document: Document, number: int) -> list[Point]:
    """Returns the points under the distribution of a number."""
    return [result for key, result in answers(document) if SAMPLINGS[number].items() <= key.items()]


def table(number: int, document: Document) -> Table:
    """Returns a row for each rule, under the distribution of that number."""
    points = points_of(document, number)
    rows = [
        (
            point["rule"] if point["exact"] else f"{point['rule']} (lossy)",
            f"{point['tokens_per_round']:.2f}",
            ratio(point["speedup"]),
            f"{point['variation_per_token']:.4f}",
            f"{point['variation_per_text']:.2f}",
            f"{point['acceptance']:.3f}",
            f"{point['bought']:+.3f}",
        )
        for point in points
    ]
    gains, costs = ("rule", "tokens per round", "speedup over plain"), ("bias per token", "bias per text, at most")
    title = "T = {temperature:g}, top-p {top_p:g}, K = {draft_length}".format(**points[0])
    return Table(title=title, header=(*gains, *costs, "acceptance", "of it bought"), rows=rows)


def family(rule: str) -> str:
    """Returns the rule without its constants: the name of a curve."""
    return " ".join(part for part in rule.split(":") if not re.fullmatch(r"[\d.]+", part))


def draw(document: Document) -> Any:
    """Draws tokens per round and speedup by bias per token: a curve for each rule, from the token rule, without bias."""
    points, colours = points_of(document, 0), (BLUE, VERMILLION, GREEN, PURPLE, ORANGE, SKY, GREY)
    token = next(point for point in points if point["rule"] == "token")
    values = {
        "tokens per round": lambda point: point["tokens_per_round"],
        "speedup over plain decoding": lambda point: point["speedup"]["median"],
    }
    figure, axes = axes_of(2, "bias: total variation per token, metered")
    for axis, (label, value) in zip(axes, values.items(), strict=True):
        for number, name in enumerate(dict.fromkeys(family(point["rule"]) for point in points if not point["exact"])):
            curve = [point for point in points if family(point["rule"]) == name]
            curve = [token, *sorted(curve, key=lambda point: point["variation_per_token"])]
            biases, style = [point["variation_per_token"] for point in curve], STYLES[number % len(STYLES)]
            look = {"color": colours[number % len(colours)], "marker": "o", "markersize": 3, "label": name}
            axis.plot(biases, [value(point) for point in curve], style, **look)
        for marker, point in zip("s^", (point for point in points if point["exact"])):
            axis.plot([0], [value(point)], marker, color=GREY, markersize=5, label=point["rule"])
        axis.set_xscale("symlog", linthresh=0.01)
        axis.set_xlim(left=-0.001)
        axis.set_ylabel(label)
    axes[0].legend(fontsize=7, frameon=False)
    return figure


STUDY = Study(
    question="What do lossy rules gain, and at which bias?",
    config="configs/trained_pair.py",
    options={
        "rules": Option(RULES, "The rules, with commas between them; the first is the exact one."),
        "prompt_count": Option(16, "Decode the first so many held-out prompts.", least=1),
    },
    prepare=prepare,
    cells=lambda options: [law | {"rule": rule} for law in SAMPLINGS for rule in options.rules],
    identity=lambda options: {"prompt_count": options.prompt_count},
    measure=measure,
    tables={name: Published(["python_lossy"], functools.partial(table, i)) for i, name in enumerate(TABLES)},
    figures={"python_lossy": Published(["python_lossy"], draw)},
)

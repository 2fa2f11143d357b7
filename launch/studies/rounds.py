"""Draws rounds of the shipped pair as they went: what the draft proposed, and what the target made of it.

    python launch/study.py rounds --output=runs/one_round.json --figures=runs
    python launch/study.py rounds --results=notebooks/results --figures=runs        # draws the committed rounds again

An example, not a measurement: prompt and seed are those of a text whose first rounds show every outcome.
"""

from collections.abc import Iterable
from typing import Any

import jax

from launch.lib.study import Document, Published, Study
from specsamp import Loop, Method, ModelDrafter, Pair, chain, load_pair, temperature, top_p
from specsamp.analysis.figures import GREY, WRITERS, tint
from specsamp.checkpoints.trained_pair import load_prompts
from specsamp.decoding.engine import Engine
from specsamp.decoding.loop import decode_window
from specsamp.decoding.request import make_requests
from specsamp.decoding.state import DecodeState, RequestBatch, Weights
from specsamp.sampling.rng import RoundKeys
from specsamp.sampling.rules import TargetDistributions

TEMPERATURE, TOP_P = 0.8, 0.95


def measure(options, key, say) -> dict[str, Any]:
    """Decodes the first rounds of a held-out prompt of the pair."""
    return decode(load_pair("python"), load_prompts("python")[8], K=4, seed=3, count=3)


def decode(pair: Pair, prompt: str, K: int, seed: int, count: int) -> dict[str, Any]:
    """Decodes ``count`` rounds, and returns of each what was drafted, the chance to keep it, and what came of it."""
    sampling = chain(temperature(TEMPERATURE), top_p(TOP_P))
    method = Method(drafter=ModelDrafter(pair.draft, K, decode_window()), sampling=sampling)
    requests = make_requests(pair, method, [prompt], (K + 1) * count, seed=seed)
    engine = Engine.create(pair, method, requests)
    state, rounds = engine.prefill(requests), []
    for _ in range(count):
        tokens_BK, chances_BK, verdict = jax.device_get(ahead(engine.loop, engine.weights, state.request, state))
        accepted = int(verdict.num_accepted_B[0])
        last = pair.tokenizer.decode([int(verdict.tokens_BT[0, accepted])])
        drafted = [
            {"text": pair.tokenizer.decode([token]), "chance": chance}
            for token, chance in zip(tokens_BK[0].tolist(), chances_BK[0].tolist())
        ]
        rounds.append({"drafted": drafted, "accepted": accepted, "last": last})
        state = engine.run(state, 1)
    sampled = {"temperature": TEMPERATURE, "top_p": TOP_P, "rule": "token", "seed": seed}
    return {"prompt": prompt, "K": K, "sampling": sampled, "rounds": rounds}


@jax.jit(static_argnames="loop")
def ahead(loop: Loop, weights: Weights, request: RequestBatch, state: DecodeState):
    """Returns what the next round will draft, the chance of each token to be kept, and the verdict: noise is addressed."""
    draft, _, cache = loop.draft(weights, request, state)
    output = loop.score(weights, state, draft, cache)
    target = TargetDistributions(
        logits_BTV=output.logits_BTV, warp=request.sampling, draft=draft, warp_state=state.warp_state
    )
    keys = RoundKeys(rows_B=request.row_keys_B, starts_B=state.lengths_B)
    return draft.tokens_BK, loop.rule.acceptance(draft, target.all()), loop.rule.verify(draft, target, keys)


# Of the figure, in pixels of which there are 100 to an inch. It is as wide as a README.
WIDTH, LEFT, TOP, ROW, BOX, GAP, MARGIN = 860, 104, 66, 70, 34, 14, 14
LARGE, SMALL = 13, 10  # points
LETTER = 0.602 * LARGE * 100 / 72  # the width of a letter of DejaVu Sans Mono
NARROWEST = 5  # letters that have room in a box
INK = "#1f2328"  # of text on a colour
LEGEND = {
    "accepted": "drafted and accepted",
    "rejected": "drafted and rejected",
    "correction": "the target's correction",
    "bonus": "the target's bonus",
}


def draw(document: Document) -> Any:
    """Returns the figure, without a background: it is shown on light and on dark pages."""
    from matplotlib.figure import Figure

    rounds, K = document["rounds"], document["K"]
    height = TOP + ROW * (len(rounds) + 1) + 22
    figure = Figure(figsize=(WIDTH / 100, height / 100), dpi=200)
    figure.patch.set_alpha(0)
    axis = figure.add_axes((0, 0, 1, 1), xlim=(0, WIDTH), ylim=(height, 0))
    axis.set_axis_off()
    draw_rounds(axis, rounds, K)
    draw_text(axis, rounds, K, TOP + ROW * len(rounds))
    for number, (writer, text) in enumerate(LEGEND.items()):
        x, y = MARGIN + number * (WIDTH - MARGIN) / len(LEGEND), height - 26
        draw_box(axis, x, y, 26, 16, writer)
        write(axis, x + 36, y + 8, text)
    return figure


def draw_rounds(axis: Any, rounds: list[dict], K: int) -> None:
    """Draws a line for each round: the drafted tokens, and the target's own."""

    def width(texts: Iterable[str]) -> float:
        return max(NARROWEST, *map(len, texts)) * LETTER + 20

    wide = [width(one["drafted"][i]["text"] for one in rounds) for i in range(K)]
    starts = [LEFT + sum(wide[:i]) + GAP * i for i in range(K)]
    own_start, own_wide = starts[-1] + wide[-1] + 64, width(one["last"] for one in rounds)
    write(axis, LEFT, 20, f"the draft proposes {K} tokens", weight="bold")
    write(axis, LEFT, 39, "below each: how likely it is kept")
    write(axis, own_start, 20, "the target adds one", weight="bold")
    write(axis, own_start, 39, "with the call that judges the draft")
    for number, one in enumerate(rounds):
        y, accepted = TOP + ROW * number, one["accepted"]
        middle = y + BOX / 2
        write(axis, MARGIN, middle, f"round {number + 1}", weight="bold")
        for i, token in enumerate(one["drafted"]):
            writer = "accepted" if i < accepted else "rejected" if i == accepted else None
            draw_box(axis, starts[i], y, wide[i], BOX, writer, token["text"])
            below = f"{token['chance']:.0%}" if writer else "dropped"
            write(axis, starts[i] + wide[i] / 2, y + BOX + 12, below, ha="center")
        arrow = {"arrowstyle": "->", "color": GREY, "linewidth": 1.2}
        axis.annotate("", (own_start - 12, middle), (own_start - 52, middle), arrowprops=arrow)
        draw_box(axis, own_start, y, own_wide, BOX, of_target(one, K), one["last"])
        write(axis, own_start + own_wide + 32, middle, f"{accepted + 1} token" + "s" * (accepted > 0))


def draw_text(axis: Any, rounds: list[dict], K: int, y: float) -> None:
    """Draws the text that the rounds wrote, each token on the colour of who wrote it."""
    from matplotlib.patches import Rectangle

    written = []
    for one in rounds:
        written += [(token["text"], "accepted") for token in one["drafted"][: one["accepted"]]]
        written.append((one["last"], of_target(one, K)))
    x = LEFT
    write(axis, MARGIN, y + BOX / 2, "the text", weight="bold")
    for text, writer in written:
        text = text.replace("\n", "")
        axis.add_patch(Rectangle((x, y + 2), LETTER * len(text), BOX - 4, color=tint(WRITERS[writer]), linewidth=0))
        write_token(axis, x, y + BOX / 2, text, INK)
        x += LETTER * len(text)
    write(axis, x + 24, y + BOX / 2, f"{len(written)} tokens in {len(rounds)} calls of the target")


def of_target(one: dict, K: int) -> str:
    """Returns what the target's own token of a round is."""
    return "bonus" if one["accepted"] == K else "correction"


def draw_box(axis: Any, x: float, y: float, wide: float, high: float, writer: str | None, text: str = "") -> None:
    """Draws a token in the colours of who wrote it; None: nobody judged it."""
    from matplotlib.patches import FancyBboxPatch

    colour = WRITERS[writer] if writer else GREY
    look = {"facecolor": tint(colour), "linewidth": 1.5} if writer else {"facecolor": "none", "linestyle": (0, (3, 2))}
    axis.add_patch(FancyBboxPatch((x, y), wide, high, "round,pad=0,rounding_size=5", edgecolor=colour, **look))
    text = text.replace("\n", "↵").replace(" ", "␣")
    start = x + (wide - LETTER * len(text)) / 2
    write_token(axis, start, y + high / 2, text, INK if writer else GREY)
    if writer == "rejected" and text:
        axis.plot([start - 5, start + LETTER * len(text) + 5], [y + high / 2] * 2, color=colour, linewidth=2)


def write_token(axis: Any, x: float, y: float, text: str, colour: str) -> None:
    """Writes a token; all of its letters have the same width."""
    axis.text(x, y, text, color=colour, va="center_baseline", size=LARGE, family="DejaVu Sans Mono")


def write(axis: Any, x: float, y: float, text: str, **options: Any) -> None:
    """Writes a label in grey."""
    axis.text(x, y, text, color=GREY, va="center", size=SMALL, **options)


STUDY = Study(
    question="What is drafted, accepted and corrected in the first rounds of a text?",
    measure=measure,
    figures={"one_round": Published(["one_round"], draw)},
)

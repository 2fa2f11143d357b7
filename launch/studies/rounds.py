"""Draws rounds of the shipped pair as they went: what the draft proposed, and what the target made of it.

    python launch/study.py rounds --output=runs/one_round.json --figures=runs
    python launch/study.py rounds --results=notebooks/results --figures=runs        # draws the committed rounds again

An example, not a measurement: prompt and seed are those of a text whose first rounds show every outcome.
"""

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
WIDTH, LEFT, TOP, ROW, COLUMN, MARGIN = 860, 112, 84, 70, 88, 14
LARGE, SMALL = 13, 10  # points
LETTER = 0.602 * LARGE * 100 / 72  # the width of a letter of DejaVu Sans Mono
INK, SPACES = "#1f2328", str.maketrans({"\n": "↵", " ": "␣"})  # of text on a colour
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
    below, own = TOP + ROW * len(rounds), LEFT + COLUMN * K + 40
    figure = Figure(figsize=(WIDTH / 100, (below + 76) / 100), dpi=200)
    figure.patch.set_alpha(0)
    axis = figure.add_axes((0, 0, 1, 1), xlim=(0, WIDTH), ylim=(below + 76, 0))
    axis.set_axis_off()
    write(axis, LEFT - 8, 20, f"the draft proposes {K} tokens", weight="bold")
    write(axis, LEFT - 8, 39, "below each: how likely it is kept")
    write(axis, own - 8, 20, "the target adds one", weight="bold")
    write(axis, own - 8, 39, "with the call that judges the draft")
    written = []
    for number, one in enumerate(rounds):
        y, accepted = TOP + ROW * number, one["accepted"]
        write(axis, MARGIN, y, f"round {number + 1}", weight="bold")
        for i, token in enumerate(one["drafted"]):
            writer = "accepted" if i < accepted else "rejected" if i == accepted else None
            draw_token(axis, LEFT + COLUMN * i, y, token["text"], writer)
            kept = f"{token['chance']:.0%}" if writer else "dropped"
            write(axis, LEFT + COLUMN * i + 2.5 * LETTER, y + 30, kept, ha="center")
        draw_token(axis, own, y, one["last"], of_target(one, K))
        write(axis, own + COLUMN, y, f"{accepted + 1} token" + "s" * (accepted > 0))
        written += [(token["text"], "accepted") for token in one["drafted"][:accepted]]
        written.append((one["last"], of_target(one, K)))
    write(axis, MARGIN, below, "the text", weight="bold")
    x = LEFT - 8
    for text, writer in written:
        text, colour = text.replace("\n", ""), tint(WRITERS[writer])
        axis.barh(below, LETTER * len(text), 30, x, color=colour)
        axis.text(x, below, text, va="center_baseline", size=LARGE, family="DejaVu Sans Mono", color=INK)
        x += LETTER * len(text)
    write(axis, x + 24, below, f"{len(written)} tokens in {len(rounds)} calls of the target")
    for number, (writer, text) in enumerate(LEGEND.items()):
        x = MARGIN + number * (WIDTH - MARGIN) / len(LEGEND)
        write(axis, x + 8, below + 52, "  ", bbox=look_of(writer))
        write(axis, x + 32, below + 52, text)
    return figure


def of_target(one: dict, K: int) -> str:
    """Returns what the target's own token of a round is."""
    return "bonus" if one["accepted"] == K else "correction"


def look_of(writer: str | None) -> dict[str, Any]:
    """Returns a box in the colours of who wrote a token; None: nobody judged it."""
    colour, shape = WRITERS.get(writer, GREY), {"boxstyle": "round,pad=0.45,rounding_size=0.3"}
    filled = (
        {"facecolor": tint(colour), "linewidth": 1.5} if writer else {"facecolor": "none", "linestyle": (0, (3, 2))}
    )
    return shape | filled | {"edgecolor": colour}


def draw_token(axis: Any, x: float, y: float, text: str, writer: str | None) -> None:
    """Draws a token in a box of five letters; one that was rejected is struck through."""
    text = text.translate(SPACES)
    axis.text(x, y, " " * 5, va="center", size=LARGE, family="DejaVu Sans Mono", bbox=look_of(writer))
    how = {"ha": "center", "va": "center_baseline", "size": LARGE, "family": "DejaVu Sans Mono"}
    axis.text(x + 2.5 * LETTER, y, text, color=INK if writer else GREY, **how)
    if writer == "rejected":
        half = LETTER * len(text) / 2 + 5
        axis.plot(
            [x + 2.5 * LETTER - half, x + 2.5 * LETTER + half], [y, y], color=WRITERS[writer], linewidth=2, zorder=4
        )


def write(axis: Any, x: float, y: float, text: str, **options: Any) -> None:
    """Writes a label in grey."""
    axis.text(x, y, text, color=GREY, va="center", size=SMALL, **options)


STUDY = Study(
    question="What is drafted, accepted and corrected in the first rounds of a text?",
    measure=measure,
    figures={"one_round": Published(["one_round"], draw)},
)

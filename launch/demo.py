"""Speculative decoding in a minute: a trained pair writes Python, every token coloured by who wrote it.

bash launch/demo.sh
python launch/demo.py --prompt='def fibonacci(n):'
python launch/demo.py --plain
JAX_DISABLE_JIT=1 python launch/demo.py --config=configs/random_pair.py:tiny
"""

import functools
import operator
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
from absl import flags
from ml_collections import config_flags
from rich.console import Console
from rich.text import Text

import entry
from experiment import Experiment, build, headline
from specsamp import NoDrafter, TokenRule, chain, temperature, use_compilation_cache
from specsamp.analysis import phases, report
from specsamp.analysis.decoder import Decoder, Timing, decoders
from specsamp.decoding.text import TextStream

_CONFIG = config_flags.DEFINE_config_file("config", "configs/trained_pair.py", lock_config=True)
_PROMPT = flags.DEFINE_multi_string("prompt", [], "To complete; \\n for a line break, not at the end; may be repeated.")
_PLAIN = flags.DEFINE_bool("plain", False, "No colours: the target's own tokens stand in brackets.")
_PASSES = flags.DEFINE_integer("passes", 3, "How often every prompt is decoded by each side.", lower_bound=1)

NUM_PROMPTS = 3
DRAFTED, OWN, PROMPT = "green", "black on yellow", "dim"
BRACKETS = "⟦", "⟧"


def main() -> None:
    console = entry.make_console(no_color=_PLAIN.value, highlight=False, soft_wrap=True)
    try:
        experiment = build(_CONFIG.value, [text.replace("\\n", "\n") for text in _PROMPT.value])
    except (ValueError, FileNotFoundError) as error:
        sys.exit(f"--config: {error}")
    if _PROMPT.value and experiment.pair.tokenizer is None:
        sys.exit("--prompt: this pair has no tokenizer")
    console.print(headline(experiment))
    console.print(f"compiled programs are kept in {use_compilation_cache()}", style="dim")
    prompts = len(_PROMPT.value) or min(NUM_PROMPTS, len(experiment.workload.prompts) or NUM_PROMPTS)
    # Numbers of a warp are data: the greedy and the sampled distribution run the same programs.
    laws = {name: chain(temperature(t), experiment.sampling) for name, t in (("greedy", 0.0), ("sampled", 1.0))}
    contenders = {"autoregressive": (NoDrafter(), TokenRule()), "speculative": (experiment.drafter, experiment.rule)}
    try:
        sides = {law: decoders(experiment.pair, contenders, warp, experiment.workload) for law, warp in laws.items()}
    except ValueError as error:
        sys.exit(str(error))
    with console.status("compiling"):
        for side in sides["greedy"].values():
            side.decode(0)
    timings = {(law, name): [] for law in laws for name in contenders}
    for number in range(_PASSES.value):
        for prompt in range(prompts):
            for law, name in timings:
                timings[law, name].append(sides[law][name].decode(prompt))
            if number == 0:
                show_text(experiment, prompt, timings["sampled", "speculative"][-1], console)
    show_agreement(experiment, prompts, timings, console)
    share = None if jax.config.jax_disable_jit else streaming_share(sides["greedy"]["autoregressive"])
    if share is None:
        console.print("\nJAX_DISABLE_JIT is set, nothing is compiled: the timings are left out.")
        return
    report.show([speed_table(timings, share, experiment)], console, _PLAIN.value)


def show_text(experiment: Experiment, prompt: int, timing: Timing, console: Console) -> None:
    """The prompt and what followed, each token by who wrote it; of a batch, its first row."""
    stats, tokenizer, work = timing.rows[0], experiment.pair.tokenizer, experiment.workload
    tokens, drafted = timing.texts[0], timing.from_draft[0]
    console.print(
        f"\n[bold]prompt {prompt}[/bold], sampled: {stats.emitted} tokens in {stats.rounds} rounds; ",
        Text("drafted and accepted", style=DRAFTED),
        ", ",
        own("the target's own"),
        sep="",
    )
    if tokenizer is None:
        console.print(Text().join(Text("█", style=DRAFTED) if d else Text("░") for d in drafted))
        return
    text = Text(tokenizer.decode(work.prompts[prompt * work.batch % len(work.prompts)]), style=PROMPT)
    pieces = TextStream(tokenizer)
    for i, by_draft in enumerate(drafted):
        if tokens[i] == tokenizer.eos_id:
            text.append(" ■ end of file", style="bold")
            break
        piece = pieces.push(list(tokens[: i + 1]), finished=i + 1 == len(tokens))
        text.append_text(Text(piece, style=DRAFTED) if by_draft else own(piece))
    console.print(text)


def own(piece: str) -> Text:
    """A token of the target. Line breaks keep the background short of the margin."""
    if _PLAIN.value:
        return Text(f"{BRACKETS[0]}{piece}{BRACKETS[1]}")
    head, line_break, tail = piece.partition("\n")
    return Text.assemble((head + ("↵" if line_break else ""), OWN), line_break, (tail, OWN))


def show_agreement(experiment: Experiment, prompts: int, timings: dict, console: Console) -> None:
    """Greedy decoding has one right answer: with and without a draft the tokens must be equal."""
    pairs = list(zip(timings["greedy", "autoregressive"][:prompts], timings["greedy", "speculative"][:prompts]))
    gaps = [first_gap(experiment, i, plain, drafted) for i, (plain, drafted) in enumerate(pairs)]
    equal, tokens = gaps.count(None), sum(plain.stats.emitted for plain, _ in pairs)
    console.print(
        f"\ngreedy, speculative = autoregressive: {equal} of {prompts} prompts, {tokens} tokens",
        style="bold green" if equal == prompts else "bold red",
    )
    for index, gap in enumerate(gaps):
        if gap is not None:
            console.print(f"prompt {index}: {gap}")


def first_gap(experiment: Experiment, prompt: int, plain: Timing, drafted: Timing) -> str | None:
    """Where two greedy texts part, and by how little the target prefers one token there."""
    for row, (one, other) in enumerate(zip(plain.texts, drafted.texts, strict=True)):
        if one == other:
            continue
        index = next(i for i, (a, b) in enumerate(zip(one, other)) if a != b)
        target = experiment.pair.target
        tokens_BP, lengths_B, _ = experiment.workload.rows(prompt, target.vocab_size)
        context = [*tokens_BP[row, : lengths_B[row]].tolist(), *one[:index]]
        logits_V = target.forward(experiment.pair.target_params, jnp.asarray([context])).logits_BTV[0, -1]
        gap = float(logits_V[one[index]] - logits_V[other[index]])
        return f"tokens differ from number {index} on, where their logits are {gap:.1e} apart (rounding: below 1e-4)"
    return None


def streaming_share(side: Decoder) -> float:
    """Time of plain products over the target's matrices / time of an autoregressive step, measured in turn."""
    request = side.request(0)
    board = phases.first_board(side.loop, side.weights, request, side.warm_state())
    matrices = phases.matrices_of(side.loop.target, side.weights.target)
    iterations, ratios = 8, []
    for number in range(6):
        start = time.perf_counter()
        jax.block_until_ready(phases.stream(side.loop, matrices, iterations, rows=side.workload.batch))
        middle = time.perf_counter()
        board = phases.repeat(phases.whole_round, side.loop, side.weights, request, board, iterations)
        jax.block_until_ready(board)
        if number:  # the first one compiles
            ratios.append((middle - start) / (time.perf_counter() - middle))
    return float(np.median(ratios))


def speed_table(timings: dict, share: float, experiment: Experiment) -> report.Table:
    def column(law: str) -> list[str]:
        plain, drafted = timings[law, "autoregressive"], timings[law, "speculative"]

        def per_token(runs):
            return [t.loop_seconds / t.stats.emitted * 1e3 for t in runs]

        ratio = np.median([a / b for a, b in zip(per_token(plain), per_token(drafted), strict=True)])
        stats = functools.reduce(operator.add, (timing.stats for timing in drafted))
        return [
            f"{np.median(per_token(plain)):.2f}",
            f"{np.median(per_token(drafted)):.2f}",
            f"{ratio:.2f}x",
            f"{stats.acceptance_rate:.1%}",
            f"{stats.emitted_per_round:.2f}",
            f"{share:.0%}",
        ]

    names = (
        "autoregressive, ms per token",
        f"speculative, K = {experiment.drafter.K}, ms per token",
        "speedup",
        "acceptance, of judged tokens",
        "emitted per round",
        "autoregressive step: plain products' share of its time",
    )
    return report.Table(
        title="Both sides in one process, in turn; medians",
        header=("", *("greedy", "sampled")),
        rows=list(zip(names, column("greedy"), column("sampled"), strict=True)),
    )


if __name__ == "__main__":
    entry.run(main)

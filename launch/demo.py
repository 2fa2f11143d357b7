"""Shows speculative decoding in a minute: a trained pair writes Python, every token coloured by its
author.

    bash launch/demo.sh
    python launch/demo.py --prompt='def fibonacci(n):'
    python launch/demo.py --plain
    JAX_DISABLE_JIT=1 python launch/demo.py --config=configs/random_pair.py:tiny

Without colours (--plain, NO_COLOR, a pipe or a file), the target's own tokens are in brackets.
"""

import dataclasses
import functools
import itertools
import time

import jax
import numpy as np
from absl import flags
from rich.console import Console
from rich.text import Text

from launch.lib import entry
from launch.lib.experiment import Experiment, build, headline, use_few_rows
from launch.lib.fields import MACHINE, ExperimentConfig, ExperimentFlag, Int8Fields
from launch.lib.machine_choice import Calls, best, is_possible
from specsamp import Method, NoDrafter, chain, temperature, use_compilation_cache
from specsamp.analysis import tables
from specsamp.analysis.report import Table
from specsamp.analysis.workload import TimedDecoder, Timing, decoders, take_turns
from specsamp.decoding.kept_loop import KeptLoop
from specsamp.decoding.request import make_stops
from specsamp.decoding.text import Continuation

_CONFIG = ExperimentFlag("configs/trained_pair.py")
_PROMPT = flags.DEFINE_multi_string(
    "prompt",
    [],
    "A text to complete; \\n is a line break, which should not end it; may be repeated.",
)
_PASSES = flags.DEFINE_integer(
    "passes",
    3,
    "Number of times that each side decodes every prompt; more passes give steadier times.",
    lower_bound=1,
)

NUM_PROMPTS = 3


def main() -> None:
    console = entry.make_console()
    config = _CONFIG.read(["repeats"], "give --passes")
    use_few_rows(config, console)
    configs = choose(config, console)
    with entry.progress(console, "reading the pair"):
        experiment = build(
            configs["sampled"], [text.replace("\\n", "\n") for text in _PROMPT.value]
        )
    console.print(headline(experiment))
    console.print(f"compiled programs are kept in {use_compilation_cache()}", style="dim")
    prompts = len(_PROMPT.value) or min(
        NUM_PROMPTS, len(experiment.workload.prompts) or NUM_PROMPTS
    )
    sides = {}
    for name, of_name in configs.items():
        # Numbers of a warp are data: the greedy and the sampled distribution run the same programs.
        warp = chain(temperature(float(name == "sampled")), experiment.method.sampling)
        methods = {
            "autoregressive": Method(drafter=NoDrafter(), sampling=warp),
            "speculative": dataclasses.replace(of_name.make_method(experiment.pair), sampling=warp),
        }
        for side, decoder in decoders(experiment.pair, methods, experiment.workload).items():
            sides[name, side] = kept(decoder)
    start = time.perf_counter()
    shown = "sampled", "speculative"
    with entry.progress(console, "compiling, then decoding"):
        sides[shown].compile()
        first = sides[shown].decode(0)
    show_text(experiment, 0, first, console)
    with entry.progress(console, "compiling the rest"):
        for side in sides.values():
            side.decode(0)
    done = "ran once without compiling" if jax.config.jax_disable_jit else "compiled"
    console.print(f"\n{done} in {time.perf_counter() - start:.1f} s", style="dim")
    with entry.keeps("the same command starts anew"), entry.progress(console, "decoding") as say:

        def decode(key: tuple[str, str], turn: int) -> Timing:
            number, prompt = divmod(turn, prompts)
            say(f"pass {number + 1} of {_PASSES.value}, prompt {prompt}: {', '.join(key)}")
            timing = sides[key].decode(prompt)
            if number == 0 and prompt and key == shown:
                show_text(experiment, prompt, timing, console)
            return timing

        runs = {key: functools.partial(decode, key) for key in sides}
        timings = take_turns(runs, _PASSES.value * prompts)
    show_agreement(prompts, timings, console)
    if jax.config.jax_disable_jit:
        console.print("\nJAX_DISABLE_JIT is set, nothing is compiled: the timings are left out.")
        return
    table = timing_table(timings, configs)
    if experiment.pair_name == "python" and config.int8 == Int8Fields():
        table = dataclasses.replace(table, rows=[*table.rows, committed_speedups()])
    entry.show([table], console)


def kept(decoder: TimedDecoder) -> TimedDecoder:
    """Returns the decoder with programs that are kept on disk, so that the first text of a second
    demo comes sooner.
    """
    engine = dataclasses.replace(decoder.engine, loop=KeptLoop.of(decoder.engine.loop))
    return dataclasses.replace(decoder, engine=engine)


def choose(config: ExperimentConfig, console: Console) -> dict[str, ExperimentConfig]:
    """Returns the configuration of both distributions; by default with the best draft length for
    this machine.
    """
    configs = {"greedy": config.turned({"sampling.temperature": 0.0}), "sampled": config}
    asked = {name.partition(".")[0] for name in _CONFIG.fields_set}
    can_choose = (
        config.writes_text
        and is_possible(config)
        and asked.isdisjoint({"draft_length", "drafter", "adaptive"})
    )
    if config.draft_length != MACHINE and not can_choose:
        return configs
    calls = Calls.of(config, console)
    return {name: best(of_name, calls, console, least=1) for name, of_name in configs.items()}


def show_text(experiment: Experiment, prompt: int, timing: Timing, console: Console) -> None:
    """Prints a prompt and its text, each token coloured by its author; for a batch, the first
    row.
    """
    stats, tokenizer, work = timing.rows[0], experiment.pair.tokenizer, experiment.workload
    tokens, drafted = timing.texts[0], timing.from_draft[0]
    console.print(
        f"\nprompt {prompt}, sampled: {stats.emitted} tokens in {stats.rounds} rounds; ",
        Text("drafted and accepted", style=entry.DRAFTED),
        ", ",
        entry.own("the target's own", console),
        sep="",
    )
    if tokenizer is None:
        blocks = [("█", entry.DRAFTED) if by_draft else "░" for by_draft in drafted]
        console.print(Text.assemble(*blocks))
        return
    before = work.prompts[prompt * work.batch % len(work.prompts)]
    stops = make_stops(experiment.pair, None).ids
    before_end = itertools.takewhile(lambda token: token not in stops, tokens)
    count = min(len([*before_end]) + 1, len(tokens))
    is_whole = tokens[count - 1] in stops
    pieces = entry.Pieces(experiment.pair, before, console)
    written = pieces.add(tokens[:count], drafted[:count], True)
    end = Text(" ■ end of file" if is_whole else "", style="bold")
    shown = Text(entry.visible(Continuation(tokenizer).complete(before)), style=entry.PROMPT)
    console.print(Text.assemble(shown, written, end))


def show_agreement(prompts: int, timings: dict, console: Console) -> None:
    """Prints whether greedy text is the same with a draft; greedy decoding has a single correct
    text.
    """
    plain, drafted = timings["greedy", "autoregressive"], timings["greedy", "speculative"]
    different = [i for i in range(prompts) if plain[i].texts != drafted[i].texts]
    tokens = sum(timing.stats.emitted for timing in plain[:prompts])
    console.print(
        f"\ngreedy, speculative = autoregressive: {prompts - len(different)} of {prompts} prompts, "
        f"{tokens} tokens",
        style="bold red" if different else "bold green",
    )
    if different:
        console.print(f"prompts {different} differ: launch/audit.py says whether by rounding alone")


def timing_table(timings: dict, configs: dict[str, ExperimentConfig]) -> Table:
    """Returns the table of both sides, greedy and sampled."""

    def column(distribution: str, config: ExperimentConfig) -> dict[str, str]:
        plain, drafted = (
            np.array([t.loop_seconds / t.stats.emitted * 1e3 for t in timings[distribution, side]])
            for side in ("autoregressive", "speculative")
        )
        stats = sum(timing.stats for timing in timings[distribution, "speculative"])
        adapts = not config.adaptive.is_off
        cells = {
            "autoregressive, ms per token": f"{np.median(plain):.2f}",
            "drafter": f"{config.drafter_name}, K = {'0 to ' * adapts}{config.draft_length}",
            "speculative, ms per token": f"{np.median(drafted):.2f}",
            "speedup": f"{np.median(plain / drafted):.2f}x",
            "acceptance, of verified tokens": f"{stats.acceptance_rate:.1%}",
            "emitted per round": f"{stats.emitted_per_round:.2f}",
        }
        if not config.acceptance_rule.exact:
            cells["LOSSY rule, total variation per token"] = f"{stats.variation_per_token:.5f}"
        if adapts:
            cells["rounds by drafted tokens, from 0 on"] = tables.shares(stats)
        return cells

    columns = {name: column(name, config) for name, config in configs.items()}
    rows = [
        {"": name} | {side: cells[name] for side, cells in columns.items()}
        for name in columns["greedy"]
    ]
    return Table.of("Both sides in one process, in turn; medians", rows)


def committed_speedups() -> tuple[str, str, str]:
    """Returns a row of the table: the speedups of the README, greedy and sampled."""
    from launch.lib import study  # takes a second, so after the first text

    name = "python_pair_machine"
    if not (study.RESULTS / f"{name}.json").exists():
        return ("speedup in the README", "only in a clone", "only in a clone")
    document = study.read_result(name)
    chosen = [cell for cell in document["cells"] if "draft_length=machine" in cell["command"]]
    chosen.sort(key=lambda cell: cell["key"]["temperature"])
    cells = [
        f"{tables.ratio(cell['result']['speedup'])}, K = {cell['key']['draft_length']}"
        for cell in chosen
    ]
    return (f"speedup in the README, {study.cpu_of(document)}", *cells)


if __name__ == "__main__":
    entry.run(main, _CONFIG)

"""Holds a conversation with a pair: streams answers, with tokens coloured by their author, and
keeps turns in the caches.

    python launch/chat.py --config=configs/hf.py:llama-8b-eagle3 --config.max_new_tokens=512
    python launch/chat.py --system='Answer in one sentence.' --config=FILE
    python launch/chat.py    # the shipped pair has no chat template: it continues your Python

A line is a turn. /new starts a new conversation, /undo removes the last turn, /quit or the end of
the input ends the chat; Ctrl-C stops an answer. Each turn prints the number of tokens that were
read, only new ones since caches are kept.
"""

import dataclasses
import io
import os
import sys
import time

import jax
from absl import flags
from rich.console import Console

from launch.lib import entry
from launch.lib.experiment import Experiment, headline
from launch.lib.fields import ExperimentFlag
from launch.lib.machine_choice import open_for_machine
from launch.lib.rules import make_rule
from specsamp import Conversation, use_compilation_cache
from specsamp.checkpoints.chat import knows_conversations
from specsamp.decoding.method import check_exact
from specsamp.decoding.request import Prompt, encode, make_stops

_CONFIG = ExperimentFlag("configs/trained_pair.py")
_SYSTEM = flags.DEFINE_string("system", None, "The system message, before the first turn.")
_TOKENS = flags.DEFINE_integer(
    "max_tokens",
    None,
    "Tokens of all turns together; a smaller number is faster; default up to 4096.",
    lower_bound=3,
)
_REQUIRE_EXACT = entry.define("require_exact")

COMMANDS = {"/new", "/undo", "/quit"}


def main() -> None:
    console = entry.make_console()
    if jax.process_count() > 1:
        raise ValueError("a chat runs in one process: leave out --distributed and --coordinator")
    _CONFIG.refuse_fields(["prompts"], "type them")
    config = _CONFIG.read(["batch", "prompt_length", "repeats"], "a chat decodes one text")
    if _REQUIRE_EXACT.value:
        check_exact(make_rule(config.rule))
    experiment = open_for_machine(config, console)
    tokenizer = experiment.pair.tokenizer
    # A tuned model also completes texts, if that is set.
    is_asked = config.chat or "chat" not in _CONFIG.fields_set
    has_template = is_asked and knows_conversations(tokenizer)
    if _SYSTEM.value and not has_template:
        raise ValueError("--system: this pair has no chat template")
    console.print(headline(experiment))
    chat = Conversation(
        experiment.pair,
        max_tokens=_TOKENS.value,
        method=experiment.method,
        seed=experiment.workload.seed,
    )
    talk = Talk(
        experiment=experiment,
        chat=chat,
        has_template=has_template,
        system=_SYSTEM.value,
        console=console,
    )
    talk.compile()
    told = "" if has_template else "no chat template: what you type is completed; "
    console.print(f"{told}/new, /undo, /quit", style="dim")
    if isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(errors="replace")  # bytes that are no UTF-8 end no chat
    while (line := ask(console)) is not None:
        if line == "/quit":
            break
        talk.turn(line)


def ask(console: Console) -> str | None:
    """Returns the next line that is not empty; None at the end of the input."""
    line = ""
    while not line.strip():
        try:
            line = console.input("> " if console.is_terminal else "")
        except EOFError:
            return None
    return line.rstrip()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Turn:
    """The past turns, and the tokens of their whole text."""

    asked: str
    answered: str
    tokens: tuple[int, ...]


@dataclasses.dataclass(kw_only=True)
class Talk:
    """A conversation in the terminal."""

    experiment: Experiment
    chat: Conversation
    has_template: bool
    system: str | None
    console: Console
    turns: list[Turn] = dataclasses.field(default_factory=list)

    def compile(self) -> None:
        """Compiles a first and a later turn, which have different programs, so that answers begin
        at once.
        """
        start, folder = time.perf_counter(), use_compilation_cache()
        self.console.print(
            f"compiling for {self.chat.max_tokens} tokens; programs are kept in {folder}",
            style="dim",
        )
        with entry.progress(self.console, "compiling"):
            for tokens in ([0], [0, 0]):
                list(self.chat.stream(tokens, 1))
        self.console.print(f"compiled in {time.perf_counter() - start:.1f} s", style="dim")

    def turn(self, line: str) -> None:
        if line == "/new":
            self.turns = []
        elif line == "/undo":
            self.turns = self.turns[:-1]
        elif line.startswith("/") and line.split()[0] not in COMMANDS and self.has_template:
            self.console.print(
                f"no command {line.split()[0]}: {', '.join(sorted(COMMANDS))}", style="yellow"
            )
        else:
            self.answer(line)

    def answer(self, line: str) -> None:
        start, pair = time.perf_counter(), self.experiment.pair
        pieces = entry.Pieces(pair, [], self.console)
        try:
            (prompt,) = encode(pair, [self.prompt(line)])
            pieces = entry.Pieces(pair, prompt, self.console)
            for chunk in self.chat.stream(prompt, self.experiment.workload.max_new_tokens):
                written = pieces.add(chunk.tokens, chunk.from_draft, chunk.finish is not None)
                self.console.print(written, end="")
        except KeyboardInterrupt:
            self.console.print(" (ended)", style="dim")
        except ValueError as error:  # too long, or nothing that the template takes
            self.console.print(f"{error}. /new starts a new conversation", style="red")
            return
        else:
            seconds, stats = time.perf_counter() - start, self.chat.stats
            told = (
                f"\n{stats.emitted} tokens, {stats.emitted / seconds:.1f} a second, "
                f"{stats.emitted_per_round:.2f} a round"
            )
            if stats.variation is not None:
                told += f", bias {stats.variation_per_token:.4f} a token (lossy rule)"
            self.console.print(f"{told}; read {self.chat.tokens_read} tokens", style="dim")
        self.turns.append(Turn(asked=line, answered=pieces.text, tokens=tuple(self.chat.tokens)))

    def prompt(self, line: str) -> Prompt:
        """Returns the turns and the line: as messages, or without a template as one text."""
        if self.has_template:
            messages = [{"role": "system", "content": self.system}] if self.system else []
            for turn in self.turns:
                messages += [
                    {"role": "user", "content": turn.asked},
                    {"role": "assistant", "content": turn.answered},
                ]
            return [*messages, {"role": "user", "content": line}]
        pair = self.experiment.pair
        before, ends = self.turns[-1].tokens if self.turns else (), make_stops(pair, None).ids
        said = [token for token in before if token not in ends]
        # A line break would be half of a token.
        told = pair.tokenizer.encode(f"\n{line}" if said else line)
        if said:  # it begins with the beginning of the text already
            told = told[len(os.path.commonprefix([told, pair.tokenizer.encode("")])) :]
        return [*said, *told]


if __name__ == "__main__":
    entry.run(main, _CONFIG)

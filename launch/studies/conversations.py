"""Counts the conversations that a target wrote, and looks for prompts of tests among them.

    python launch/study.py conversations --target=TARGET --folder=runs/chats --tests=spec_bench=spec_bench.jsonl,gsm8k=test.jsonl --output=runs/chats.json

A prompt is found where thirteen of its words stand in a conversation one after another, or all of a shorter one. A folder
that holds one is refused: drafts that learn from it would look better on this test than on other texts.
"""

import collections
import re
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from launch.lib.study import Option, Study
from specsamp import storage
from specsamp.checkpoints.hugging_face import open_checkpoint
from specsamp.evaluation.tasks import load_task

WORDS = 13  # as of GPT-3 (arXiv 2005.14165, appendix C)
SHORTEST = 5  # prompts of fewer words stand in many texts
GRAM = 4  # tokens


def measure(options, key, say) -> dict[str, Any]:
    """Reads all shards and all tests."""
    tokenizer = open_checkpoint(options.target).tokenizer
    paths = sorted(storage.place(options.folder).glob("*.npy"))
    if not paths:
        raise ValueError(f"--folder={options.folder} has no conversations: write them by launch/generate.py")
    tests = dict(read_test(each) for each in options.tests)
    held: dict[str, set[str]] = {name: set() for name in tests}
    owners = {words: (name, id) for name, prompts in tests.items() for id, words in parts_of(prompts)}
    lengths = sorted({len(words) for words in owners})
    counts, grams, num_grams = collections.Counter(), set(), 0
    for path in paths:
        say(path.name)
        tokens, described = np.load(path), storage.read_json(path.with_suffix(".json"))
        starts = [start for start, _ in described["conversations"]] + [len(tokens)]
        counts += {"tokens": len(tokens), "questions": described["questions"], "ended": described["ended"]}
        for (start, length), end in zip(described["conversations"], starts[1:]):
            counts["conversations"] += 1
            answer = tuple(tokens[start + length : end].tolist())
            windows = [answer[at : at + GRAM] for at in range(len(answer) - GRAM + 1)]
            grams.update(windows)
            num_grams += len(windows)
            words = words_of(tokenizer.decode(tokens[start:end].tolist()))
            for n in lengths:
                for part in zip(*(words[at:] for at in range(n))):
                    if part in owners:
                        name, id = owners[part]
                        held[name].add(id)
    found = [f"{name} {min(ids)}" for name, ids in held.items() if ids]
    if found:
        raise ValueError(
            f"--folder={options.folder} holds {sum(map(len, held.values()))} prompts of tests, such as "
            f"{found[0]}: leave out these conversations"
        )
    return {
        "kind": "conversations",
        "shards": len(paths),
        **counts,
        "answers_that_end": counts["ended"] / counts["conversations"],
        f"distinct_{GRAM}_grams": len(grams) / num_grams,
        "tests": {name: len(prompts) for name, prompts in tests.items()},
    }


def read_test(named: str) -> tuple[str, dict[str, str]]:
    """Returns the name of a task, and its prompts by their names, of ``TASK=FILE``."""
    name, _, source = named.partition("=")
    problems = load_task(name, source or None, insist=True).problems
    return name, {problem.id: " ".join([problem.prompt, *problem.further_turns]) for problem in problems}


def parts_of(prompts: dict[str, str]) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Yields each run of `WORDS` words of each prompt, or all words of a shorter prompt."""
    for id, prompt in prompts.items():
        words = words_of(prompt)
        if len(words) >= SHORTEST:
            n = min(WORDS, len(words))
            yield from ((id, tuple(words[at : at + n])) for at in range(len(words) - n + 1))


def words_of(text: str) -> Sequence[str]:
    return re.findall(r"\w+", text.lower())


STUDY = Study(
    question="How varied are conversations that a target wrote, and do they hold prompts of tests?",
    measure=measure,
    options={
        "target": Option("", "The target, a folder or the id of a model of the hub, for its tokenizer."),
        "folder": Option("", "The conversations, of launch/generate.py --conversations."),
        "tests": Option((), "Tasks and their files, such as spec_bench=spec_bench.jsonl."),
    },
)

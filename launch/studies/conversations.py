"""Counts the conversations that a target wrote, and looks for prompts of tests among them.

    python launch/study.py conversations --target=TARGET --folder=runs/chats \\
        --tests=spec_bench=spec_bench.jsonl,gsm8k=test.jsonl --output=runs/chats.json

A prompt is found where thirteen of its words stand in a conversation one after another, or all
words of a shorter turn. Turns of fewer than five words are left out, since many texts hold them. A
folder that holds a prompt is refused: drafts that learn from it would look better on this test than
on other texts. --drop takes such conversations out of their shards first.
"""

import collections
import hashlib
import itertools
import re
from collections.abc import Collection, Iterator, Sequence
from typing import Any

import numpy as np
from etils import epath

from launch.lib.study import Document, Published, Say, Study
from specsamp import storage
from specsamp.analysis.report import Table
from specsamp.checkpoints.hugging_face import open_checkpoint
from specsamp.checkpoints.tokenizer import JsonTokenizer
from specsamp.evaluation.tasks import load_task
from specsamp.training.run_folder import read_array, write_array

WORDS = 13  # as of GPT-3 (arXiv 2005.14165, appendix C)
SHORTEST = 5
GRAM = 4  # tokens
NO_SPACES = "\u3040-\u30ff\u3400-\u9fff"  # Japanese and Chinese


def prepare(options: Any) -> None:
    """Lists the shards of the folder and of the folders in it, reads the tests, and drops
    conversations.

    Raises:
      ValueError: the shards are missing, or a test is not TASK=FILE.
    """
    folder = storage.place(options.folder)
    options.paths = sorted([*folder.glob("*.npy"), *folder.glob("*/*.npy")])
    if not options.paths:
        raise ValueError(
            f"--folder={options.folder} has no conversations: write them by launch/generate.py"
        )
    options.prompts = dict(read_test(each) for each in options.tests)
    options.tokenizer = open_checkpoint(options.target).tokenizer
    if options.drop:
        for path in options.paths:
            drop(path, prompts_of(path, options), options.tokenizer)


def identity(options: Any) -> dict[str, Any]:
    """Returns the target, and the contents of all shards and tests."""
    contents = {
        "conversations": b"".join(path.read_bytes() for path in options.paths),
        "tests": repr(options.prompts).encode(),
    }
    digests = {name: hashlib.sha256(each).hexdigest()[:16] for name, each in contents.items()}
    return {"target": options.target, **digests}


def measure(options: Any, say: Say) -> dict[str, Any]:
    """Reads all shards."""
    counts, grams, held, num_grams = collections.Counter(), set(), set(), 0
    for path in options.paths:
        say(path.name)
        tokens, described = read_array(path), storage.read_json(path.with_suffix(".json"))
        places = described["conversations"]
        counts.update(
            tokens=len(tokens),
            questions=described["questions"],
            ended=described["ended"],
            conversations=len(places),
        )
        for (_, length), text in zip(places, split(tokens, places)):
            of_answer = list(runs_of(text[length:].tolist(), GRAM))
            grams.update(of_answer)
            num_grams += len(of_answer)
        held.update(*prompts_of(path, options).values())
    if held:
        first = " ".join(min(held))
        raise ValueError(
            f"--folder={options.folder} holds {len(held)} prompts of tests, such as {first}: "
            "--drop takes these conversations out"
        )
    return {
        "kind": "conversations",
        "shards": len(options.paths),
        **counts,
        "answers_that_end": counts["ended"] / counts["conversations"],
        f"distinct_{GRAM}_grams": len(grams) / max(num_grams, 1),
        "tests": {
            name: {
                "prompts": len({id for id, _ in turns}),
                "looked_for": len({id for id, _ in parts_of(turns)}),
            }
            for name, turns in options.prompts.items()
        },
    }


def split(tokens_T: np.ndarray, places: Sequence[Sequence[int]]) -> list[np.ndarray]:
    """Returns the tokens of each conversation of a shard."""
    return np.split(tokens_T, [start for start, _ in places[1:]])


def prompts_of(path: epath.Path, options: Any) -> dict[int, set[tuple[str, str]]]:
    """Returns the prompts of tests, task and id, in the conversations of a shard that hold some."""
    owners = {
        part: (name, id) for name, turns in options.prompts.items() for id, part in parts_of(turns)
    }
    lengths = sorted({len(part) for part in owners})
    places = storage.read_json(path.with_suffix(".json"))["conversations"]
    found = {}
    for number, tokens in enumerate(split(read_array(path), places)):
        words = words_of(text_of(options.tokenizer, tokens.tolist()))
        parts = owners.keys() & {part for n in lengths for part in runs_of(words, n)}
        if parts:
            found[number] = {owners[part] for part in parts}
    return found


def drop(path: epath.Path, numbers: Collection[int], tokenizer: JsonTokenizer) -> None:
    """Takes conversations out of a shard."""
    if not numbers:
        return
    described = storage.read_json(path.with_suffix(".json"))
    places = described["conversations"]
    texts = split(read_array(path), places)
    # An answer that ended has a special token last.
    described["ended"] -= sum(tokenizer.token_bytes(int(texts[n][-1])) is None for n in numbers)
    kept = [number for number in range(len(texts)) if number not in numbers]
    if not kept:
        raise ValueError(f"all conversations of {path} hold prompts of tests: delete the shard")
    starts = np.cumsum([0, *(len(texts[number]) for number in kept)]).tolist()
    described["conversations"] = [(start, places[n][1]) for start, n in zip(starts, kept)]
    # A shard without a description is refused: a killed run leaves none with a wrong one.
    path.with_suffix(".json").unlink()
    write_array(path, np.concatenate([texts[number] for number in kept]))
    storage.write_json(path.with_suffix(".json"), described)


def read_test(named: str) -> tuple[str, list[tuple[str, str]]]:
    """Returns the name of a task, and the name and text of every turn of its prompts, of
    ``TASK=FILE``.
    """
    name, _, source = named.partition("=")
    problems = load_task(name, source or None, insist=True).problems
    return name, [
        (problem.id, turn)
        for problem in problems
        for turn in (problem.prompt, *problem.further_turns)
    ]


def parts_of(turns: Sequence[tuple[str, str]]) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Yields each run of `WORDS` words of each turn, or all words of a shorter turn."""
    for id, turn in turns:
        words = words_of(turn)
        if len(words) >= SHORTEST:
            for part in runs_of(words, min(WORDS, len(words))):
                yield id, part


def runs_of(items: Sequence[Any], n: int) -> Iterator[tuple[Any, ...]]:
    """Returns all runs of n items one after another."""
    return zip(*(items[at:] for at in range(n)))


def text_of(tokenizer: JsonTokenizer, tokens: Sequence[int]) -> str:
    """Returns the text of tokens, with a line break for special tokens, which have no text."""
    parts = itertools.groupby(tokens, key=lambda token: tokenizer.token_bytes(token) is None)
    return "".join("\n" if is_special else tokenizer.decode([*part]) for is_special, part in parts)


def words_of(text: str) -> list[str]:
    """Returns the words of a text; in scripts without spaces, its characters."""
    return re.findall(rf"[{NO_SPACES}]|[^\W{NO_SPACES}]+", text.lower())


def conversations_table(document: Document) -> Table:
    """Returns the counts."""
    looked_for = sum(test["looked_for"] for test in document["tests"].values())
    row = {
        "conversations": f"{document['conversations']:,}",
        "tokens": f"{document['tokens']:,}",
        "answers that end": f"{document['answers_that_end']:.0%}",
        f"distinct {GRAM}-grams": f"{document[f'distinct_{GRAM}_grams']:.0%}",
        "prompts of tests": f"{looked_for:,}, none found",
    }
    return Table.of("Conversations that a target wrote", [row], left=0)


STUDY = Study(
    question="How varied are conversations that a target wrote, and do they hold prompts of tests?",
    measure=measure,
    prepare=prepare,
    identity=identity,
    tables={"conversations": Published(["smollm2_conversations"], conversations_table)},
    options={
        "target": (
            None,
            "The target, for its tokenizer: a folder or the id of a model of the hub.",
        ),
        "folder": (None, "The conversations, of launch/generate.py --conversations."),
        "tests": ([], "Tasks and their files, such as spec_bench=spec_bench.jsonl."),
        "drop": (False, "Take conversations that hold a prompt of a test out of their shards."),
    },
)

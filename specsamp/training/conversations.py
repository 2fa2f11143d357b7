"""Conversations that a tuned target writes itself, to distil a draft or a head where it will be
used.
"""

import functools
import itertools
import operator
import os
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from etils import epath

from specsamp import storage, validate
from specsamp.checkpoints.params import digest
from specsamp.decoding.pair import Pair
from specsamp.decoding.request import make_stops
from specsamp.sampling.warp import temperature
from specsamp.serving.generate_many import generate_many
from specsamp.training.data import WRITTEN_BY
from specsamp.training.run_folder import read_array, write_array


def write_conversations(
    folder: epath.Path,
    pair: Pair,
    *,
    tokens: int,
    shard: int = 384,
    rows: int = 32,
    longest_question: int = 128,
    longest_answer: int = 384,
    coolest: float = 0.7,
    seed: int = 0,
    report: Callable[[int], Any] = lambda tokens: None,
) -> None:
    """Lets the target write questions at temperature 1, by continuing the beginning of a chat, and
    answers to them.

    A question is dropped if it does not end by itself, is empty, or stands in an earlier
    conversation (Magpie, arXiv 2406.08464). The temperatures of the answers are spread evenly over
    [``coolest``, 1]. Each shard is kept in a file, with which a killed run resumes; a longer
    run begins with the shards of a shorter one.

    Args:
      folder: of the shards: ``0000.npy`` holds tokens, ``[T]``, in the narrowest unsigned type for
        the vocabulary; `specsamp.training.data.read_corpus` reads both. ``0000.json`` counts the
        questions that were written and the answers that ended, and has the place of each
        conversation: its first token, and the tokens before its answer. ``written_by.json`` has the
        digest of the target and the options, which stay the same.
      pair: its target writes; its tokenizer has a chat template.
      tokens: of all shards together; the last shard is whole.
      shard: questions of a shard, before some are dropped.
      rows: texts that are written at a time.
      longest_question, longest_answer: in tokens; a longer answer is cut.
      coolest: the lowest temperature of an answer, in [0, 1].
      seed: of the noise.
      report: called with the number of written tokens.

    Raises:
      ValueError: a number out of range, no chat template, a folder of another target or of other
        options, several processes, or a shard whose questions were all dropped.
    """
    lengths = {
        "shard": shard,
        "longest_question": longest_question,
        "longest_answer": longest_answer,
    }
    for name, value in {**lengths, "tokens": tokens, "rows": rows}.items():
        validate.integer(name, value, 1)
    validate.number("coolest", coolest, 0, 1)
    if jax.process_count() > 1:
        raise ValueError(
            "one process writes conversations: leave out --distributed and --coordinator"
        )
    if pair.tokenizer is None:
        raise ValueError("conversations need a target with a tokenizer and a chat template")
    begin, end = borders(pair)
    check_same_writer(
        folder, {"target": digest(pair.target_params), "seed": seed, "coolest": coolest, **lengths}
    )
    write = functools.partial(generate_many, pair, rows=rows, draft_length=0, seed=seed)
    stop = sorted(make_stops(pair, None).ids.union(end[:1]))
    seen: set[tuple[int, ...]] = set()
    by_prompt = operator.attrgetter("prompt_index")
    written = 0
    for number in itertools.count():
        path = folder / f"{number:04d}.npy"
        if not path.exists():
            ids = range(number * shard, (number + 1) * shard)
            hot = temperature(1.0)
            questions = write(
                [begin] * shard, longest_question, sampling=hot, prompt_ids=ids, stop=stop
            )
            prompts: dict[tuple[int, ...], int] = {}
            for id, question in zip(ids, sorted(questions, key=by_prompt)):
                if question.finish == "stop" and question.text.strip():
                    prompt = asked(pair, question.text)
                    if prompt not in seen:
                        prompts.setdefault(prompt, id)
            if not prompts:
                raise ValueError(
                    f"none of {shard} questions ended and was new: raise longest_question or shard"
                )
            spread = temperature(np.linspace(coolest, 1, len(prompts)))
            answers = write(
                list(prompts), longest_answer, sampling=spread, prompt_ids=list(prompts.values())
            )
            answers = sorted(answers, key=by_prompt)
            texts = [[*prompt, *answer.tokens] for prompt, answer in zip(prompts, answers)]
            starts = np.cumsum([0, *map(len, texts)])
            counts = {
                "questions": shard,
                "ended": sum(answer.finish == "stop" for answer in answers),
                "conversations": [[int(at), len(prompt)] for at, prompt in zip(starts, prompts)],
            }
            storage.write_json(path.with_suffix(".json"), counts)
            write_array(
                path, np.concatenate(texts).astype(np.min_scalar_type(pair.target.vocab_size - 1))
            )
        shard_T = read_array(path)
        for start, length in storage.read_json(path.with_suffix(".json"))["conversations"]:
            seen.add(tuple(shard_T[start : start + length].tolist()))
        written += len(shard_T)
        report(written)
        if written >= tokens:
            return


def check_same_writer(folder: epath.Path, identity: dict[str, Any]) -> None:
    """Writes the target and the options of a folder of conversations, or compares them with the
    written ones.

    Raises:
      ValueError: they differ, or the folder holds other arrays.
    """
    path = folder / WRITTEN_BY
    if not path.exists():
        if any(folder.glob("*.npy")):  # they would be taken for shards
            raise ValueError(f"{folder} holds arrays of something else: name another folder")
        storage.write_json(path, identity)
    elif different := storage.differences(storage.read_json(path), identity):
        raise ValueError(
            f"{folder} holds other conversations: {'; '.join(different)}. Name another folder"
        )


def borders(pair: Pair) -> tuple[list[int], list[int]]:
    """Returns the tokens of a chat before the user's text, and the tokens between this text and
    the answer.
    """
    one = asked(pair, "A")
    other = asked(pair, "7")
    end = os.path.commonprefix([one[::-1], other[::-1]])[::-1]
    return list(os.path.commonprefix([one, other])), list(end)


def asked(pair: Pair, text: str) -> tuple[int, ...]:
    """Returns the tokens of a chat with the user's message ``text``, up to the answer."""
    return tuple(pair.tokenizer.encode_chat([{"role": "user", "content": text.strip()}]))

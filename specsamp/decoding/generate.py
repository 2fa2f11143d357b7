"""Prompts in, completions out.

    completions = generate(pair, ["def fib(n):"], sampling=chain(temperature(0.8), top_p(0.95)))

Everything is checked before anything is compiled (`specsamp.decoding.checks`). Prompt lengths and
budgets are rounded up to buckets; within them they are data, as are sampling parameters, seeds and stop
tokens. A program is compiled once per pair of buckets, number of prompts and samples, drafter, rule,
chain of warps (not their numbers), ``return_log_probs`` and stops that are strings or not, and kept on disk between processes
(`use_compilation_cache`).
"""

from __future__ import annotations

import os
import pathlib
from collections.abc import Callable, Generator, Iterator, Sequence

import jax
from absl import logging

from specsamp import validate
from specsamp.decoding import checks
from specsamp.decoding.adaptive import Adaptive
from specsamp.decoding.checks import Prompt
from specsamp.decoding.drafter import Drafter
from specsamp.decoding.job import Job
from specsamp.decoding.pair import Pair
from specsamp.decoding.results import Chunk, Completion, RowText
from specsamp.decoding.state import DecodeState, Finish
from specsamp.decoding.text import TextStream
from specsamp.sampling.rejection import TokenRule
from specsamp.sampling.rules import Rule
from specsamp.sampling.warp import Warp


def generate(
    pair: Pair,
    prompts: Sequence[Prompt],
    max_new_tokens: int | Sequence[int] = 128,
    *,
    sampling: Warp | None = None,
    draft_sampling: Warp | None = None,
    draft_length: int | Adaptive | None = None,
    rule: Rule = TokenRule(),
    drafter: Drafter | None = None,
    seed: int = 0,
    stop: Sequence[int | str] | None = None,
    num_samples: int = 1,
    return_log_probs: bool = False,
    prompt_ids: Sequence[int] | None = None,
    require_exact: bool = False,
) -> list[Completion]:
    """Completes prompts; the tokens follow the target's warped distribution exactly, unless a lossy rule was chosen.

    Args:
      pair: target, draft, tokenizer.
      prompts: texts, lists of token ids, or conversations: lists of messages such as ``{"role": "user", "content":
        "Hi"}``, which the chat template of the target's checkpoint writes out. Of any lengths from 1.
      max_new_tokens: budget, one for all or one per prompt.
      sampling: a warp (see `specsamp.sampling.warp`), its numbers scalar or one per prompt; default greedy.
        Ids that the tokenizer does not have (a padded vocabulary) are always excluded.
      draft_sampling: the draft's own warp; default the target's. Any choice is exact, the more alike
        the two the more is accepted.
      draft_length: K, tokens drafted per round; 0 decodes autoregressively. Default: 4, or the drafter's.
        `specsamp.analysis.draft_length.choose_draft_length` measures which K pays on a device. `Adaptive`: each row
        drafts as many tokens as pay for it, down to none, round by round.
      rule: `TokenRule`, `BlockRule` or `CoupledRule`; or a lossy one (`specsamp.sampling.lossy`), which says in
        `Completion.stats` what it cost.
      drafter: your own, or `EarlyExitDrafter` or `NgramDrafter`; default the pair's draft model.
      seed: in [0, 2**32); same seed and prompt id, same noise, whatever the batch around a prompt. Calls that
        share both share their noise: give each its own seed or ``prompt_ids``.
      stop: token ids, or strings of any number of tokens, which are not part of the text; default the pair's stop
        tokens, or the tokenizer's end of text. Strings are looked for every few rounds: what was decoded beyond one
        is dropped, and counted in `Completion.dropped` alone.
      num_samples: completions per prompt, from one prefill.
      return_log_probs: also return the target's log-probability of each token.
      prompt_ids: the prompts' indices in your data set, if this call handles a part of it: a completion
        depends on its id, not on its place in the call. Default 0, 1, 2, ...
      require_exact: refuse a lossy rule or drafter, before anything is read.

    Returns:
      ``num_samples`` completions for each prompt, in order.

    Raises:
      ValueError: before compilation, naming the value and the fix.
    """
    use_compilation_cache()
    method = checks.make_method(
        pair,
        draft_length=draft_length,
        drafter=drafter,
        rule=rule,
        sampling=sampling,
        draft_sampling=draft_sampling,
        require_exact=require_exact,
    )
    job = Job.create(
        pair,
        prompts,
        max_new_tokens,
        method,
        seed=seed,
        stop=stop,
        num_samples=num_samples,
        return_log_probs=return_log_probs,
        prompt_ids=prompt_ids,
    )
    return job.decode()


def stream(
    pair: Pair,
    prompts: Sequence[Prompt],
    max_new_tokens: int | Sequence[int] = 128,
    *,
    rounds_per_chunk: int = 8,
    sampling: Warp | None = None,
    draft_sampling: Warp | None = None,
    draft_length: int | Adaptive | None = None,
    rule: Rule = TokenRule(),
    drafter: Drafter | None = None,
    seed: int = 0,
    stop: Sequence[int | str] | None = None,
    num_samples: int = 1,
    prompt_ids: Sequence[int] | None = None,
    require_exact: bool = False,
) -> Iterator[Chunk]:
    """Does what `generate` does, a few rounds at a time: the same tokens, as they come.

    The loop stays on the device for ``rounds_per_chunk`` rounds; a row's last chunk says how it ended.
    Text that is not yet complete (half of a multi-byte character) is held back.
    """
    rounds_per_chunk = validate.integer("rounds_per_chunk", rounds_per_chunk, 1)
    use_compilation_cache()
    method = checks.make_method(
        pair,
        draft_length=draft_length,
        drafter=drafter,
        rule=rule,
        sampling=sampling,
        draft_sampling=draft_sampling,
        require_exact=require_exact,
    )
    job = Job.create(
        pair,
        prompts,
        max_new_tokens,
        method,
        seed=seed,
        stop=stop,
        num_samples=num_samples,
        prompt_ids=prompt_ids,
    )
    return chunks(job, job.prefill, rounds_per_chunk)


def use_compilation_cache() -> str | None:
    """Keeps compiled programs on disk between processes, unless JAX was told where (or not) to.

    Returns:
      The folder: that of ``JAX_COMPILATION_CACHE_DIR`` or ``jax_compilation_cache_dir`` if set, else
      ``~/.cache/specsamp/xla``; None if ``JAX_ENABLE_COMPILATION_CACHE`` is off, or if no folder can be written.
    """
    folder = find_compilation_cache()
    if folder is None:
        jax.config.update("jax_enable_compilation_cache", False)
    elif not jax.config.jax_compilation_cache_dir:
        jax.config.update("jax_compilation_cache_dir", folder)
    return folder


def find_compilation_cache() -> str | None:
    """Returns the folder that `use_compilation_cache` would use; nothing is kept in it yet."""
    if not jax.config.jax_enable_compilation_cache:
        return None
    folder = jax.config.jax_compilation_cache_dir or _cache_folder()
    return None if folder is None else str(folder)


def _cache_folder() -> pathlib.Path | None:
    """Makes the user's folder of compiled programs; None, and a warning, where there is no place for one."""
    try:
        folder = pathlib.Path(os.environ.get("XDG_CACHE_HOME") or pathlib.Path.home() / ".cache") / "specsamp" / "xla"
        is_new = not folder.exists()
        folder.mkdir(parents=True, exist_ok=True)
        if not os.access(folder, os.W_OK):
            raise PermissionError(f"{folder} is not writable")
    except (OSError, RuntimeError) as error:  # no home, or one that cannot be written
        logging.warning("compiled programs are not kept: %s; set JAX_COMPILATION_CACHE_DIR to a folder", error)
        return None
    if is_new:
        logging.info("specsamp keeps compiled programs in %s", folder)
    return folder


def chunks(
    job: Job, prefill: Callable[[], DecodeState], rounds_per_chunk: int
) -> Generator[Chunk, None, tuple[DecodeState, list[RowText]]]:
    """Decodes what ``prefill`` has read, a few rounds at a time; returns the state in which all rows have ended, and texts."""
    state, decoders = prefill(), [job.continuation(row) for row in range(job.rows)]
    shown, ended = [0] * job.rows, [False] * job.rows
    streams = [None if decoder is None else TextStream(decoder, job.stops) for decoder in decoders]
    while not all(ended):
        state = job.run(state, rounds_per_chunk)
        texts = job.texts(state, range(job.rows))
        if job.stops.texts:
            state = job.end(state, texts)
        for row, text in enumerate(texts):
            finish = None if text.finish == Finish.RUNNING else text.finish.name.lower()
            if ended[row] or (finish is None and len(text.tokens) == shown[row]):
                continue
            yield Chunk(
                **job.row_index(row),
                text=None if streams[row] is None else streams[row].push(text.tokens, finish is not None),
                tokens=text.tokens[shown[row] :],
                from_draft=text.from_draft[shown[row] :],
                finish=finish,
            )
            shown[row], ended[row] = len(text.tokens), finish is not None
    return state, texts

"""Runs tasks of lm-evaluation-harness: texts are written by our queue, likelihoods are read from the target.

    import lm_eval                                        # pip install lm-eval
    from specsamp import load_pair
    from specsamp.evaluation.harness import HarnessModel

    found = lm_eval.simple_evaluate(model=HarnessModel(load_pair("python")), tasks=["gsm8k"])

Generated texts follow the target's distribution, so scores equal the target's, in less time.
"""

from __future__ import annotations

import collections
import functools
import json
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from absl import logging

from specsamp.decoding.data_shards import BY_ROWS, REPLICATED, DataShards
from specsamp.decoding.drafters import NoDrafter
from specsamp.decoding.pair import Pair
from specsamp.decoding.request import make_stops
from specsamp.decoding.state import Weights
from specsamp.decoding.whole_texts import read_logits, read_texts
from specsamp.models.interface import LanguageModel
from specsamp.sampling.warp import Warp, chain, greedy, temperature, top_k, top_p
from specsamp.serving.generate_many import DEFAULT_ROWS, generate_many

try:
    from lm_eval.api.model import LM
except ImportError as error:
    raise ImportError(f"lm-evaluation-harness is missing ({error}): pip install lm-eval") from error

Array = jax.Array

DEFAULT_TOKENS = 256  # the budget of tasks that set none, as in the harness
READ_TOGETHER = 64  # texts of similar length, whose batches are equally wide
KNOWN = {"until", "max_gen_toks", "max_tokens", "do_sample", "temperature", "top_p", "top_k"}


class HarnessModel(LM):
    """A pair as a model of the harness.

    Args:
      pair: with a tokenizer.
      rows: texts that are decoded together.
      options: of `generate_many`, such as ``rule``, ``drafter``, ``draft_length`` and ``seed``.

    Raises:
      ValueError: the pair has no tokenizer.
    """

    def __init__(self, pair: Pair, *, rows: int = DEFAULT_ROWS, **options: Any):
        super().__init__()
        if pair.tokenizer is None:
            raise ValueError("requests of the harness are texts: give a pair with a tokenizer")
        self.pair, self.rows, self.options = pair, rows, options

    def generate_until(self, requests: Sequence[Any]) -> list[str]:
        """Returns the continuation of each context; contexts with the same sampling are decoded together."""
        groups: dict[str, list[int]] = collections.defaultdict(list)
        for index, request in enumerate(requests):
            groups[json.dumps(request.args[1], sort_keys=True)].append(index)
        texts: dict[int, str] = {}
        for asked, indices in groups.items():
            fields = json.loads(asked)
            usual = min(DEFAULT_TOKENS, self._positions() // 2)
            budget = fields.get("max_gen_toks", fields.get("max_tokens", usual))
            until = fields.get("until") or []
            prompts = [self._cut(self._encode(requests[i].args[0]), budget) for i in indices]
            work = generate_many(
                self.pair,
                prompts,
                budget,
                rows=self.rows,
                sampling=sampling_of(fields),
                stop=[*([until] if isinstance(until, str) else until), *sorted(make_stops(self.pair, None).ids)],
                prompt_ids=indices,
                **self.options,
            )
            texts |= {indices[completion.prompt_index]: completion.text for completion in work}
        return [texts[index] for index in range(len(requests))]

    def loglikelihood(self, requests: Sequence[Any]) -> list[tuple[float, bool]]:
        """Returns the log-probability of each continuation, and whether greedy decoding would write it."""
        texts, counts = [], []
        for request in requests:
            context, continuation = request.args
            if context.strip():
                first = self._encode(context.rstrip())  # a space goes with the word after it
                tokens = self._encode(context + continuation)
            else:
                first = self._begin()
                tokens = [*first, *self._encode(context + continuation)]
            texts.append(tokens[-self._positions() :])
            counts.append(min(len(tokens) - len(first), len(texts[-1]) - 1))
        return self._read(texts, counts)

    def loglikelihood_rolling(self, requests: Sequence[Any]) -> list[float]:
        """Returns the log-probability of each text; a text beyond the model's positions is read in windows."""
        windows, counts, owners = [], [], []
        for index, request in enumerate(requests):
            tokens, width = [*self._begin(), *self._encode(request.args[0])], self._positions()
            for end in range(1, len(tokens), width - 1):
                last = min(end + width - 1, len(tokens))
                windows.append(tokens[max(last - width, 0) : last])
                counts.append(last - end)
                owners.append(index)
        totals = [0.0] * len(requests)
        for owner, (score, _) in zip(owners, self._read(windows, counts), strict=True):
            totals[owner] += score
        return totals

    @property
    def tokenizer_name(self) -> str:
        return repr(self.pair.target)

    def apply_chat_template(self, chat_history: Sequence[Mapping[str, str]], add_generation_prompt: bool = True) -> str:
        return self.pair.tokenizer.decode(self.pair.tokenizer.encode_chat(chat_history))

    def _encode(self, text: str) -> list[int]:
        return self.pair.tokenizer.encode(text)

    def _begin(self) -> list[int]:
        """Returns the tokens of an empty context: the end-of-text token."""
        if self.pair.tokenizer.eos_id is None:
            raise ValueError("the tokenizer has no end of text to begin an empty context with")
        return [self.pair.tokenizer.eos_id]

    def _positions(self) -> int:
        return self.pair.target.max_positions or 2048

    def _cut(self, tokens: list[int], budget: int) -> list[int]:
        """Drops the beginning of a context that leaves no room for the answer, as the harness's own models do."""
        room = self._positions() - budget
        if room < 1:
            raise ValueError(f"a budget of {budget} tokens leaves no room in {self._positions()} positions")
        if len(tokens) > room:
            logging.warning("a context of %d tokens lost its first %d", len(tokens), len(tokens) - room)
        return (tokens or self._begin())[-room:]

    def _read(self, texts: Sequence[Sequence[int]], counts: Sequence[int]) -> list[tuple[float, bool]]:
        """Returns the log-probability of each text's last ``count`` tokens, and whether each is the most probable."""

        def read(weights: Weights, slots: int, tokens_BT: Array, *_: Any) -> tuple[Array, Array]:
            return _score(self.pair.target, self.pair.shards, weights.target, tokens_BT, slots=slots)

        by_size = sorted(range(len(texts)), key=lambda index: len(texts[index]))
        found: dict[int, tuple[float, bool]] = {}
        for first in range(0, len(by_size), READ_TOGETHER):
            part = by_size[first : first + READ_TOGETHER]
            scored = read_texts(self.pair, NoDrafter(), [texts[index] for index in part], read)
            for index, (scores_N, is_best_N) in zip(part, scored, strict=True):
                end = len(texts[index]) - 1
                tail = slice(end - counts[index], end)
                found[index] = float(scores_N[tail].sum()), bool(is_best_N[tail].all())
        return [found[index] for index in range(len(texts))]


def sampling_of(fields: Mapping[str, Any]) -> Warp:
    """Returns the warp of a task's generation settings; without ``do_sample`` or a temperature it is greedy.

    Raises:
      ValueError: an unknown field, which could change the distribution.
    """
    unknown = sorted(fields.keys() - KNOWN)
    if unknown:
        raise ValueError(f"the task sets {', '.join(unknown)}, which is not supported: override its generation_kwargs")
    value = fields.get("temperature", 1.0 if fields.get("do_sample") else 0.0)
    if not fields.get("do_sample", value > 0) or value == 0:
        return greedy()
    filters = [make(fields[name]) for name, make in (("top_k", top_k), ("top_p", top_p)) if fields.get(name)]
    return chain(temperature(value), *filters)


@functools.partial(jax.jit, static_argnames=("model", "shards", "slots"))
def _score(
    model: LanguageModel, shards: DataShards, weights: Any, tokens_BT: Array, *, slots: int
) -> tuple[Array, Array]:
    def read(weights: Any, tokens_BT: Array) -> tuple[Array, Array]:
        logits_BTV = read_logits(model, weights, tokens_BT, slots)[:, :-1]
        next_BT = tokens_BT[:, 1:]
        scores_BT = jnp.take_along_axis(jax.nn.log_softmax(logits_BTV), next_BT[..., None], axis=-1)[..., 0]
        return scores_BT, jnp.argmax(logits_BTV, axis=-1) == next_BT

    return shards.map(read, (REPLICATED, BY_ROWS))(weights, tokens_BT)

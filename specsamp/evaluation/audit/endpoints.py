"""Audits other engines at their endpoint (OpenAI's completions): a speculative and a plain engine,
or a single engine.

The first two tokens after some prompts are counted, as in `specsamp.evaluation.audit.distribution`.
Two engines are compared by their texts: half of the samples select the cells that came more often
from the first engine, the other half counts them (Fisher's exact test); comparing two counts needs
twice the samples. A single engine is compared with the log-probabilities that it returns, which
must be of the sampled distribution: if it returns them before temperature and top-p, use
temperature 1 without top-p. Cells have a probability of at least 0.01; the other continuations are
one cell.
"""

import collections
import concurrent.futures
import dataclasses
import functools
import itertools
import json
import math
import time
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from scipy import stats

from specsamp.analysis.report import Say, silent
from specsamp.evaluation.audit.distribution import (
    SMALLEST,
    TOKENS,
    Cells,
    check_cells,
    excess,
    samples_for,
)
from specsamp.evaluation.audit.subject import Check

PILOT = 400  # samples of each prompt that find its cells
AT_ONCE, CHOICES = 8, 64  # requests, and samples per request
TOO_MANY = 429  # the status of an engine that is too busy
BUSY_SECONDS = 600.0  # after which a request is given up: its key may have no credit left


@dataclasses.dataclass(frozen=True)
class RemoteEngine:
    """An engine with OpenAI's completions, such as http://127.0.0.1:8000/v1; ``fields`` are added
    to requests.
    """

    url: str
    fields: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    def sample(self, prompt: str, count: int, first_seed: int) -> list[tuple[Any, float]]:
        """Returns ``count`` continuations and their log-probabilities, NaN without ``logprobs``
        among the fields.

        Raises ValueError, with the engine's answer, if it refuses or cannot be reached.
        """
        found: list[tuple[Any, float]] = []
        size = CHOICES  # engines may ignore n and return one
        seeds = itertools.count(first_seed)
        with concurrent.futures.ThreadPoolExecutor(AT_ONCE) as pool:
            while len(found) < count:
                calls = min(AT_ONCE, math.ceil((count - len(found)) / size))
                ask = functools.partial(self._ask, prompt)
                for answer in pool.map(ask, itertools.islice(seeds, calls)):
                    found += answer
                    size = len(answer)
        return found[:count]

    def _ask(self, prompt: str, seed: int) -> list[tuple[Any, float]]:
        body = {
            "prompt": prompt,
            "max_tokens": TOKENS,
            "temperature": 1.0,
            "n": CHOICES,
            "seed": seed,
            **self.fields,
        }
        request = urllib.request.Request(
            self.url.rstrip("/") + "/completions",
            json.dumps(body).encode(),
            {"content-type": "application/json"},
        )
        begin = time.monotonic()
        while True:
            try:
                with urllib.request.urlopen(request, timeout=600) as answer:
                    choices = json.load(answer)["choices"]
                break
            except urllib.error.HTTPError as error:
                if error.code != TOO_MANY or time.monotonic() - begin >= BUSY_SECONDS:
                    told = error.read()[:300].decode(errors="replace")
                    busy = f" for {BUSY_SECONDS:g} seconds" if error.code == TOO_MANY else ""
                    raise ValueError(f"{self.url} refused {sorted(body)}{busy}: {told}") from error
                time.sleep(1)
            except (OSError, KeyError, ValueError, TypeError) as error:
                reason = f"{type(error).__name__}: {getattr(error, 'reason', error)}"
                raise ValueError(f"{self.url} gave no completion ({reason})") from error
        if not choices:
            raise ValueError(f"{self.url} returns no choices: give another engine")
        if "logprobs" not in self.fields:
            return [(choice["text"], math.nan) for choice in choices]
        if not all(choice.get("logprobs") for choice in choices):
            raise ValueError(f"{self.url} returns no logprobs: give --reference, or another engine")
        found = [choice["logprobs"] for choice in choices]
        return [(tuple(one["tokens"]), sum(one["token_logprobs"])) for one in found]


def compare_endpoints(
    engine: RemoteEngine,
    plain: RemoteEngine | None,
    prompts: Sequence[str],
    *,
    detect: float,
    level: float,
    progress: Say = silent,
) -> Check:
    """Checks that an engine's samples follow a plain engine's distribution, or the engine's own
    log-probabilities.

    Args:
      engine, plain: the endpoints.
      prompts: texts with random continuations.
      detect: total variation between the counted cells that is detected with `POWER`.
      level: largest probability that a correct engine fails.
    """
    reference = plain or engine
    cells = []
    for i, prompt in enumerate(prompts):
        progress(f"pilot, prompt {i + 1} of {len(prompts)}")
        pilot = reference.sample(prompt, PILOT, 1_000_000)
        if plain is None:
            shares = {text: math.exp(value) for text, value in pilot}
        else:
            counted = collections.Counter(text for text, _ in pilot)
            shares = {text: count / len(pilot) for text, count in counted.items()}
        probable = {(text, None): share for text, share in shares.items() if share >= SMALLEST}
        found = Cells.of(i, probable)
        if found.is_random:
            cells.append(found)
    if not cells:
        raise ValueError(
            "--prompts: the engine leaves nothing to chance after these; give others, or a "
            "temperature"
        )
    samples = samples_for(cells, detect if plain is None else detect / math.sqrt(2), level)

    def halves(endpoint, first_seed):
        first = []
        second = []
        for one in cells:
            progress(
                f"{samples} samples of {endpoint.url}, prompt {one.prompt_id + 1} of {len(prompts)}"
            )
            drawn = endpoint.sample(prompts[one.prompt_id], samples, first_seed)
            texts = [(text, None) for text, _ in drawn]
            first.append(one.count(texts[::2]))
            second.append(one.count(texts[1::2]))
        return first, second

    choosing, counting = halves(engine, 2_000_000)
    if plain is None:
        found = excess(cells, choosing, counting, 0.0)
        against = (
            ", against its own log-probabilities, taken as those of the distribution it samples"
        )
    else:
        found = _difference(choosing, counting, *halves(plain, 3_000_000))
        against = f", against {plain.url}"
    return check_cells(cells, samples, found, detect=detect, level=level, against=against)


def _difference(*counts: Sequence[np.ndarray]) -> tuple[float, float]:
    """Returns measured total variation and p-value from an engine's and a plain one's choosing and
    counting halves.
    """
    hits = np.zeros(2)
    misses = np.zeros(2)
    for chose, counted, plain_chose, plain_counted in zip(*counts, strict=True):
        is_chosen_C = chose / chose.sum() > plain_chose / plain_chose.sum()
        both_2C = np.stack([counted, plain_counted])
        hits += both_2C[:, is_chosen_C].sum(1)
        misses += both_2C[:, ~is_chosen_C].sum(1)
    share, plain_share = hits / (hits + misses)
    _, p_value = stats.fisher_exact([hits, misses], alternative="greater")
    return float(share - plain_share), float(p_value)

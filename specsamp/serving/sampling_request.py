"""The request of a caller, of one type for `generate_many`, `Service` and the endpoint."""

import dataclasses
from collections.abc import Sequence
from typing import Any

from specsamp import validate
from specsamp.decoding.request import Prompt
from specsamp.sampling.warp import Warp

MAX_STOPS = 32  # stop strings of a request; tasks of lm-eval send up to 6
MAX_STOP_IDS = 16  # stop tokens of a request
MOST_PRIORITY = 1000


@dataclasses.dataclass(frozen=True, kw_only=True)
class SamplingRequest:
    """Prompts, and how their texts are sampled, ended and delivered.

    Attributes:
      prompts: as in `generate`.
      max_new_tokens: of each text; None: the rest of the context. A service cuts it to that, and
        `generate_many`, like `generate`, refuses more tokens than the models have positions.
      sampling: a warp of the same kinds as the method's, which is the default.
      seed: of the random numbers.
      stop, stop_ids: at most 32 strings and 16 tokens, in addition to the pair's stop tokens.
      ignore_eos: whether the pair's stop tokens end nothing.
      min_tokens: the least tokens of a text: stop tokens are excluded from them, and no string ends
        in them. The end of a grammar ends the text anyway.
      draft_length: tokens to draft in a round, at most the drafter's K; a text is that of
        `generate` with this length.
      num_samples: texts of each prompt.
      grammar: kind and source of the grammar of all texts, see `specsamp.sampling.grammar.grammar`.
      is_streamed: whether chunks are delivered while a text grows; else each text is one chunk.
      is_scored: whether to score prompts and texts (`specsamp.serving.scores`); the last chunk of
        each text is delivered after its scores, and texts are not streamed.
      client: name of the caller; clients get free rows in turn.
      priority: smaller numbers go first, and with `specsamp.serving.orders.ShortestFirst` preempt.

    Raises:
      ValueError: naming the value and the fix.
    """

    prompts: Sequence[Prompt]
    max_new_tokens: int | None = None
    sampling: Warp | None = None
    seed: int = 0
    stop: Sequence[str] = ()
    stop_ids: Sequence[int] = ()
    ignore_eos: bool = False
    min_tokens: int = 0
    draft_length: int | None = None
    num_samples: int = 1
    grammar: tuple[str, Any] | None = None
    is_streamed: bool = False
    is_scored: bool = False
    client: str = ""
    priority: int = 0

    def __post_init__(self):
        lists = {"prompts": self.prompts, "stop": self.stop, "stop_token_ids": self.stop_ids}
        for name, value in lists.items():
            if not validate.is_list(value):
                raise ValueError(f"{name} must be a list; got {value!r}")
        if len(self.stop) > MAX_STOPS:
            raise ValueError(f"{len(self.stop)} stop texts: at most {MAX_STOPS}")
        if len(self.stop_ids) > MAX_STOP_IDS:
            raise ValueError(f"{len(self.stop_ids)} stop_token_ids: at most {MAX_STOP_IDS}")
        if self.max_new_tokens is not None:
            validate.integer("max_tokens", self.max_new_tokens, 1)
        validate.integer("min_tokens", self.min_tokens, 0)
        validate.integer("num_samples", self.num_samples, 1)
        validate.integer("priority", self.priority, -MOST_PRIORITY, MOST_PRIORITY + 1)
        for name in ("ignore_eos", "is_streamed", "is_scored"):
            validate.switch(name, getattr(self, name))
        validate.instance("client", self.client, str, "'ann'")
        if self.grammar is not None and (
            not isinstance(self.grammar, tuple) or len(self.grammar) != 2
        ):
            raise ValueError(
                "grammar must be a tuple of kind and source, such as ('regex', '[a-z]+'); got "
                f"{self.grammar!r:.200}"
            )

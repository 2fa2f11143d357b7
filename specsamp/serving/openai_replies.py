"""Writes the replies of OpenAI's protocol: whole answers, the events of streams, log-probabilities
and usage.
"""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Mapping
from typing import Any

from specsamp.decoding.request import Request
from specsamp.decoding.results import Chunk, RowStats
from specsamp.decoding.text import Continuation, TextStream, Written
from specsamp.serving.answer import Answer
from specsamp.serving.openai_requests import GenerationRequest
from specsamp.serving.scores import Scores

LEAST_LOG_PROB = -9999.0
LAST_EVENT = b"data: [DONE]\n\n"

Document = dict[str, Any]  # an object of the protocol
# A token, its log-probability, and the likeliest tokens in its place with theirs, or nothing.
Scored = tuple[int, float | None, list[tuple[int, float]] | None]


def json_bytes(document: Any) -> bytes:
    """Returns JSON in ASCII, which holds any text."""
    return json.dumps(document, separators=(",", ":"), allow_nan=False).encode()


def to_event(document: Any) -> bytes:
    """Returns an event of a stream."""
    return b"data: " + json_bytes(document) + b"\n\n"


class Reply:
    """Makes the reply to a request from the chunks of its texts.

    Attributes:
      is_complete: all texts have ended.
      prompt_tokens: of all prompts.
    """

    def __init__(
        self,
        asked: GenerationRequest,
        answer: Answer,
        model: str,
        exact: bool,
        repeats: bool = True,
    ):
        self._asked = asked
        self._choices = [
            _Choice(asked, row, request, answer.scores)
            for row, request in enumerate(answer.requests)
        ]
        self.prompt_tokens = sum(
            len(request.prompt) for request in answer.requests if not request.sample_index
        )
        kind = "chat.completion" if asked.is_chat else "text_completion"
        prefix = "chatcmpl" if asked.is_chat else "cmpl"
        self._head = {
            "id": f"{prefix}-{uuid.uuid4().hex}",
            "object": kind,
            "created": int(time.time()),
            "model": model,
        }
        if not exact:  # a field beyond the protocol, which its clients skip
            self._head["exact"] = False
        if not repeats:
            self._head["repeats_by_seed"] = False
        if asked.is_chat and asked.stream:
            self._head["object"] += ".chunk"

    @property
    def is_complete(self) -> bool:
        return all(choice.stats is not None for choice in self._choices)

    def begin(self) -> list[Document]:
        """Returns the chunks that open a stream."""
        if not self._asked.is_chat:
            return []
        delta = {"role": "assistant", "content": ""}
        return [self._chunk(choice, {"delta": delta}) for choice in self._choices]

    def chunk(self, gained: Chunk) -> Document | None:
        """Adds new tokens of a text, and returns the chunk of a stream; None if they add no text
        yet.
        """
        choice = self._choices[gained.prompt_index * self._asked.n + gained.sample_index]
        text = choice.push(gained)
        if not (text or choice.log_probs or choice.marks or gained.finish):
            return None
        content = {"text": text}
        if self._asked.is_chat:
            content = {"delta": {"content": text} if text else {}}
            if choice.calls:
                content["delta"]["tool_calls"] = [{"index": 0} | call for call in choice.calls]
        return self._chunk(choice, content)

    def end(self) -> list[Document]:
        """Returns the chunks after the last text."""
        return [self._head | {"choices": []} | self._counts()] if self._asked.include_usage else []

    def whole(self) -> Document:
        """Returns the answer of a request that is not streamed."""
        choices = []
        for choice in self._choices:
            content = {"text": choice.text}
            if self._asked.is_chat:
                content = {
                    "message": {"role": "assistant", "content": choice.text, "refusal": None}
                }
                if choice.calls:
                    content["message"] |= {"content": None, "tool_calls": choice.calls}
            choices.append(choice.document(content))
        return self._head | {"choices": choices} | self._counts()

    def _counts(self) -> Document:
        return {"usage": self.usage(), "metrics": {"speculative_decoding": speculation(self.stats)}}

    @property
    def stats(self) -> RowStats:
        """Returns the counts of all texts, which have ended."""
        return sum(choice.stats for choice in self._choices)

    def usage(self) -> Document:
        """Counts tokens, including stop texts and the stop token.

        Drafted tokens were accepted or rejected. Rejected tokens are in no other count.
        """
        prompt, stats = self.prompt_tokens, self.stats
        completion, accepted, drafted = stats.emitted, stats.accepted, stats.drafted
        # Unknown to the protocol.
        lossy = {} if stats.variation is None else {"total_variation": stats.variation}
        return lossy | {
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "total_tokens": prompt + completion,
            "completion_tokens_details": {
                "accepted_prediction_tokens": accepted,
                "rejected_prediction_tokens": drafted - accepted,
            },
        }

    def _chunk(self, choice: _Choice, content: Document) -> Document:
        usage = {"usage": None} if self._asked.include_usage else {}
        return self._head | {"choices": [choice.document(content)]} | usage


def speculation(stats: RowStats) -> Document:
    """Returns counts under the names that vLLM gives them."""
    return {
        "mean_acceptance_length": stats.emitted_per_round if stats.rounds else None,
        "draft_acceptance_rate": stats.accepted / stats.drafted if stats.drafted else None,
        "acceptance_histogram": list(stats.accepted_counts),
        "num_spec_steps": stats.rounds,
        "num_accepted_draft_tokens": stats.accepted,
        "num_draft_tokens": stats.drafted,
        "num_spec_tokens": len(stats.reached),
    }


class _Choice:
    """Holds a text that grows.

    Attributes:
      log_probs: of the tokens of the last chunk, under the target at temperature 1, if requested.
      marks: whether each of these tokens had been drafted, if requested.
      calls: of functions, at most one, in the protocol's form; empty before the end.
    """

    def __init__(
        self, asked: GenerationRequest, row: int, request: Request, scores: Mapping[Request, Scores]
    ):
        self.row, self.text, self.finish, self.calls = row, "", None, []
        self._request, self._scores = request, scores
        self._tokenizer = request.tokenizer
        self._decoder = Continuation(request.tokenizer, request.prompt)
        self._stream = TextStream(self._decoder, request.stops)
        if asked.echo:
            self.text = Continuation(request.tokenizer).complete(request.prompt)
        self.stats: RowStats | None = None  # at the end
        self.log_probs: Document | None = None
        self.marks: dict[str, list[bool]] = {}
        self._asked, self._tokens = asked, []

    def document(self, content: Document) -> Document:
        """Returns the choice in the protocol's form; ``content`` is its text."""
        return {
            "index": self.row,
            **content,
            **self.marks,
            "logprobs": self.log_probs,
            "finish_reason": self.finish,
        }

    def push(self, gained: Chunk) -> str:
        """Takes a chunk, and returns the new text."""
        self._tokens += gained.tokens
        self.finish, self.stats = gained.finish, gained.stats
        new = self._stream.push(self._tokens, gained.finish is not None)
        self.text += new
        # Shown at its end.
        if self._asked.is_chat and self._asked.functions and self.text.startswith("{"):
            if gained.finish == "stop" and (call := _call(self.text)):
                self.finish, self.calls = "tool_calls", [call]
            new = self.text if gained.finish and not self.calls else ""
        if self._asked.mark_drafted:
            self.marks = {"from_draft": gained.from_draft}
        scored = []
        if self._asked.is_scored and gained.finish is not None:
            scored = self._all_scored()
        elif self._asked.log_probs:
            scored = [(token, value, None) for token, value in zip(gained.tokens, gained.log_probs)]
        self.log_probs = self._in_form(scored) if scored else None
        return new

    def _all_scored(self) -> list[Scored]:
        """Returns the scored tokens of the text, after the prompt's tokens if it is echoed."""
        scores, prompt = self._scores[self._request], self._request.prompt
        scored = list(
            zip([*prompt, *self._tokens], [None, *scores.log_probs], [None, *scores.tops])
        )
        return scored if self._asked.echo else scored[len(prompt) :]

    def _in_form(self, scored: list[Scored]) -> Document:
        """Returns log-probabilities of the last tokens as the protocol writes them."""
        steps = self._decoder.steps(self._tokens)
        if self._asked.echo:
            steps = Continuation(self._tokenizer).steps([*self._request.prompt, *self._tokens])
        befores = steps[-1 - len(scored) : -1]
        entries = []
        for (token, value, likeliest), before in zip(scored, befores, strict=True):
            likeliest = likeliest and likeliest[: self._asked.tops]
            tops = likeliest and [self._entry(before, *top) for top in likeliest]
            entries.append((self._entry(before, token, value), tops))
        if self._asked.is_chat:
            content = [entry | {"top_logprobs": tops or []} for entry, tops in entries]
            return {"content": content, "refusal": None}
        # Of two tokens with one name, the likelier.
        named = [
            tops and {top["token"]: top["logprob"] for top in reversed(tops)} for _, tops in entries
        ]
        return {
            "tokens": [entry["token"] for entry, _ in entries],
            "token_logprobs": [entry["logprob"] for entry, _ in entries],
            "top_logprobs": named if self._asked.tops else None,
            "text_offset": [before.size for before in befores],
        }

    def _entry(self, before: Written, token: int, log_prob: float | None) -> Document:
        """Returns a token's name, its log-probability and its bytes.

        The name is the text that the token completes, so that consecutive names are the text. A
        token without bytes, for example the end of text, has its own name.
        """
        written = self._tokenizer.token_bytes(token, before.last)
        if written is None:
            name = self._tokenizer.token(token)
        else:
            name = before.then(self._tokenizer, token).text
        return {
            "token": name,
            "logprob": log_prob and max(log_prob, LEAST_LOG_PROB),  # JSON has no -inf
            "bytes": None if written is None else list(written),
        }


def _call(text: str) -> Document | None:
    try:
        name = json.loads(text)["name"]
    except (
        ValueError,
        LookupError,
        RecursionError,
    ):  # a stop text cut it off, or it is nested too deeply
        return None
    function = {"name": name, "arguments": text.partition('"arguments":')[2][:-1].strip()}
    return {"id": f"call_{uuid.uuid4().hex[:24]}", "type": "function", "function": function}

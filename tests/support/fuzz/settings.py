"""The settings of streams of requests: an entry point with a drafter and a rule."""

import dataclasses
import functools

from specsamp import (
    Adaptive,
    CoupledRule,
    ModelDrafter,
    Pair,
    RecursiveRule,
    TokenRule,
    TransformerConfig,
    TransformerLM,
)
from specsamp.mesh.layout import make_mesh
from specsamp.mesh.sharded import shard
from support.byte_tokenizer import ByteTokenizer
from support.drafters import ALL, DRAFTERS, OTHERS, TARGET, K, Kind, sharp, with_errors

BYTES = TransformerLM(
    TransformerConfig(
        vocab_size=257, width=8, num_layers=1, num_heads=2, feedforward_width=16, positions="rotary"
    )
)


class Latin1(ByteTokenizer):
    """Has a character for each byte, so that any tokens have one text."""

    def encode(self, text):
        return list(text.encode("latin-1"))

    def decode(self, tokens):
        return bytes(token for token in tokens if token < 256).decode("latin-1")

    def token_bytes(self, token, before=None):
        return None if token == self.eos_id else chr(token).encode()


def of_bytes(_):
    """Returns a pair with a tokenizer of bytes."""
    return Pair(
        target=BYTES,
        target_params=sharp(BYTES),
        draft=BYTES,
        draft_params=sharp(BYTES),
        tokenizer=Latin1(),
    )


WRITES = Kind(of_bytes, lambda pair: ModelDrafter(pair.draft, K), ALL, K)
KINDS = DRAFTERS | OTHERS | {"bytes": WRITES}


@dataclasses.dataclass(frozen=True)
class Setting:
    """An entry point and its method of decoding.

    Attributes:
      entry: a function of `support.fuzz.entries`.
      kind: of the drafter, of `KINDS`.
      rule: greedy texts equal plain decoding under every rule, sampled texts under the coupled
        rule.
      adapts: whether draft lengths adapt, with pauses.
      shards: data shards.
      slots: number of slots, enough for all prompts and budgets.
    """

    entry: str
    kind: str
    rule: object = TokenRule()
    adapts: bool = False
    shards: int = 1
    slots: int = 128

    @property
    def name(self):
        words = [self.entry, self.kind, type(self.rule).__name__]
        words += ["adaptive"] if self.adapts else []
        words += [f"{self.shards} shards"] if self.shards > 1 else []
        return ", ".join([*words, f"{self.slots} slots"])

    @property
    def context(self):
        """Returns the context of a service; its rows have a few slots more."""
        return self.slots - 16

    @property
    def most_prompt(self):
        return self.context - self.most_budget

    @property
    def most_budget(self):
        return 16

    @functools.cached_property
    def pair(self):
        """Returns the pair on one device, with a draft that errs."""
        return with_errors(KINDS[self.kind].pair(TARGET))

    @property
    def drafter(self):
        """Returns the drafter on one device."""
        return KINDS[self.kind].drafter(self.pair)

    @functools.cached_property
    def decoding(self):
        """Returns the pair of the entry point, and the keywords of its method."""
        kind, pair = KINDS[self.kind], self.pair
        lengths = kind.lengths
        if self.shards > 1:
            pair = shard(pair, make_mesh(data=self.shards, model=1))
        drafter = kind.drafter(pair)
        options = dict(drafter=drafter, rule=self.rule)
        if self.adapts:
            costs = tuple(1 + 0.1 * length for length in lengths)
            options["draft_length"] = Adaptive(lengths=lengths, costs_ms=costs, pause=2, trust=1.0)
        return pair, options


COUPLED = CoupledRule()
TREES = RecursiveRule()
SETTINGS = [
    Setting("queue", "none"),
    Setting("queue", "model"),
    Setting("queue", "prompt lookup", slots=256),
    Setting("queue", "corpus"),
    Setting("queue", "model", COUPLED, adapts=True),
    Setting("queue", "early exit"),
    Setting("queue", "window", COUPLED, adapts=True),
    Setting("queue", "EAGLE-3"),
    Setting("queue", "modules", slots=256),
    Setting("queue", "choices", slots=256),
    Setting("queue", "parallel", adapts=True),
    Setting("batch", "beam"),
    Setting("queue", "DFlash 2"),
    Setting("queue", "model tree", TREES),
    Setting("queue", "model", shards=2),
    Setting("log", "model"),
    Setting("service", "model", slots=256),
    Setting("service", "model", COUPLED, adapts=True, slots=256),
    Setting("service", "model", shards=2),
    Setting("service", "early exit"),
    Setting("service", "logs", COUPLED, adapts=True),
    Setting("service", "modules"),
    Setting("service", "votes", COUPLED, adapts=True),
    Setting("service", "tokenizer", adapts=True),
    Setting("service", "bytes"),
    Setting("endpoint", "bytes"),
    Setting("conversation", "model", adapts=True),
    Setting("conversation", "EAGLE-3 tree", TREES),
    Setting("batch", "DSpark"),
    Setting("stream", "bytes"),
]

# A setting of another kind would fail only once a stream is drawn for it.
assert {setting.kind for setting in SETTINGS} <= KINDS.keys()

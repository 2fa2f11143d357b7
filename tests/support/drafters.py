"""A drafter of every kind, with the small transformer that it drafts for."""

import dataclasses
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp

from specsamp import Growth, Pair, TransformerConfig, TransformerLM, TreeShape
from specsamp.decoding.drafters import (
    AssistantDrafter,
    BeamDrafter,
    BlockDrafter,
    BlockTree,
    ChoosingDrafter,
    EarlyExitDrafter,
    EarlyExitTree,
    FeatureDrafter,
    FeatureTree,
    ModelDrafter,
    ModelTree,
    ModuleDrafter,
    NgramDrafter,
    NoDrafter,
    ParallelDrafter,
    TranslatingDrafter,
    VotingDrafter,
    WindowDrafter,
)
from specsamp.decoding.drafters.translating import SharedVocabulary
from support.heads import WIDTH, assistant, dflash2, dspark, eagle3, medusa, mtp
from support.weights import drawn_params

V, LAYERS, K = 24, 2, 3
ERROR = 0.6  # size of the noise on a draft's parameters
SHAPE = dict(width=WIDTH, num_heads=2, feedforward_width=16, positions="rotary")
# N-grams and a window, so that a wrong token or slot anywhere in the cache shows.
MEMORY = dict(ngram_rows=32, window=12, global_layers=(1,))
TARGET = TransformerLM(TransformerConfig(vocab_size=V, num_layers=LAYERS, **MEMORY, **SHAPE))


@functools.cache
def sharp(model):
    """Returns parameters whose distributions depend much on the text, and little on rounding."""
    return jax.tree.map(lambda x: 2 * x if x.dtype == jnp.float32 else x, drawn_params(model))


@dataclasses.dataclass(frozen=True)
class Kind:
    """A kind of drafter.

    Attributes:
      pair: makes the pair of a target.
      drafter: makes the drafter of a pair, which may be sharded.
      lengths: draft lengths to choose from.
      perfect: number of first drafted tokens that have the target's distribution.
    """

    pair: Callable
    drafter: Callable
    lengths: tuple[int, ...] = (0, K)
    perfect: int = 0

    def __call__(self, target=TARGET):
        """Returns a pair, a drafter, draft lengths, and the number of perfect tokens."""
        pair = self.pair(target)
        return pair, self.drafter(pair), self.lengths, self.perfect


def alone(target):
    return Pair(target=target, target_params=sharp(target))


def twice(target):
    """Returns a pair whose draft is the target."""
    return dataclasses.replace(alone(target), draft=target, draft_params=sharp(target))


def with_errors(pair):
    """Returns the pair with a noisy draft, some of whose tokens are rejected."""
    model = pair.head if pair.draft is None else pair.draft
    if model is None:
        return pair
    params = jax.tree.map(
        lambda x, y: x + ERROR * y if x.dtype.kind == "f" else x,
        pair.draft_params,
        drawn_params(model, 1),
    )
    return dataclasses.replace(pair, draft_params=params)


def of_head(make, drafter, lengths=(0, K), **options):
    """Returns the kind of drafter of a head, which is made for a vocabulary."""

    def pair(target):
        head = make(target.config.vocab_size)
        return dataclasses.replace(alone(target), head=head, draft_params=sharp(head))

    return Kind(pair, lambda pair: drafter(pair.target, pair.head, **options), lengths)


def vocabulary_of(size):
    """Returns a vocabulary in which odd tokens are two draft ids: the draft's text is longer."""
    ids_V = [token if token % 2 == 0 else -1 for token in range(size)]
    reading_VM = [
        [token, -1] if token % 2 == 0 else [V + token % 5, token] for token in range(size)
    ]
    return SharedVocabulary(ids_V, reading_VM, 30, begin=(29,))


def of_tokenizers(target):
    draft = TransformerLM(TransformerConfig(vocab_size=30, num_layers=1, **SHAPE))
    vocabulary = vocabulary_of(target.config.vocab_size)
    return dataclasses.replace(
        alone(target), draft=draft, draft_params=sharp(draft), vocabulary=vocabulary
    )


class InTurn(ChoosingDrafter):
    """Chooses a part by the length of the text."""

    def choose(self, state, prefix):
        return prefix.lengths_B // 5 % len(self.parts)


class EqualVotes(VotingDrafter):
    update_weight = 0.0
    recovery_weight = 0.0


def with_params(parts):
    """Returns a function that makes a pair without a draft, but with parameters for each part."""

    def pair(target):
        models = [
            getattr(part, "head", getattr(part, "model", None)) for part in parts(alone(target))
        ]
        params = tuple(model and sharp(model) for model in models)
        return dataclasses.replace(alone(target), draft_params=params)

    return pair


def small(target):
    shape = TransformerConfig(vocab_size=target.config.vocab_size, num_layers=1, **SHAPE)
    return TransformerLM(shape)


def choices(pair):
    head = EAGLE(pair.target.config.vocab_size)
    return FeatureDrafter(pair.target, head, K), ModelDrafter(pair.target, K)


def voters(pair):
    exits = EarlyExitDrafter(pair.target, 1, K)
    return parallel(pair), ModelDrafter(small(pair.target), K), exits


def parallel(pair):
    return ParallelDrafter(pair.target, K, mask_id=pair.target.vocab_size - 1)


def two(pair):
    return NgramDrafter(K), ModelDrafter(pair.draft, K)


def corpus(size):
    return [[*range(size), *range(0, size, 2)]]


READS = dict(target_layers=LAYERS)
LAST = dict(hidden_layers=(LAYERS,), **READS)
BLOCK = dict(hidden_layers=(0, 1), **READS)
EAGLE = functools.partial(eagle3, hidden_layers=(-1, 0, 1), **READS)
MEDUSA = functools.partial(medusa, num_heads=K, **LAST)
DSPARK = functools.partial(dspark, confidence=None, **BLOCK)
TREE = TreeShape((0, 0, 1, 1, 2, 3))
SHAPED = dict(tree=TREE, lengths=(0, TREE.K))
GROWTH = Growth(depth=3, expanded=2, children=2)
ALL = (0, 1, K)
DRAFTERS = {
    "model": Kind(twice, lambda pair: ModelDrafter(pair.draft, K), ALL, K),
    "parallel": Kind(twice, parallel, ALL, 1),
    "beam": Kind(twice, lambda pair: BeamDrafter(pair.draft, K, beams=3), ALL),
    "tokenizer": Kind(
        of_tokenizers, lambda pair: TranslatingDrafter(pair.draft, pair.vocabulary, K)
    ),
    "early exit": Kind(alone, lambda pair: EarlyExitDrafter(pair.target, 1, K)),
    "window": Kind(alone, lambda pair: WindowDrafter(pair.target, K, window=5, sinks=2)),
    "choosing": Kind(with_params(choices), lambda pair: InTurn(choices(pair)), ALL),
    "voting": Kind(with_params(voters), lambda pair: EqualVotes(voters(pair)), ALL),
    "EAGLE-3": of_head(EAGLE, FeatureDrafter, K=K),
    "Medusa": of_head(MEDUSA, FeatureDrafter, K=K),
    "modules": of_head(functools.partial(mtp, num_modules=K, **LAST), ModuleDrafter, K=K),
    "assistant": of_head(functools.partial(assistant, **LAST), AssistantDrafter, K=K),
    "DFlash 2": of_head(functools.partial(dflash2, **BLOCK), BlockDrafter, K=K),
    "DSpark": of_head(DSPARK, BlockDrafter, K=K),
    "model tree": Kind(twice, lambda pair: ModelTree(pair.draft, tree=TREE), (0, TREE.K), K),
    "grown tree": Kind(twice, lambda pair: ModelTree(pair.draft, tree=GROWTH), (0, GROWTH.K), K),
    "early exit tree": Kind(
        alone, lambda pair: EarlyExitTree(pair.target, 1, tree=TREE), (0, TREE.K)
    ),
    "EAGLE-3 tree": of_head(EAGLE, FeatureTree, **SHAPED),
    "Medusa tree": of_head(MEDUSA, FeatureTree, **SHAPED),
    "block tree": of_head(DSPARK, BlockTree, **SHAPED),
}
# Drafters without a model of their own, or with parts that share the pair's draft.
OTHERS = {
    "none": Kind(alone, lambda pair: NoDrafter()),
    "prompt lookup": Kind(alone, lambda pair: NgramDrafter(K)),
    "corpus": Kind(alone, lambda pair: NgramDrafter(K, corpus=corpus(pair.target.vocab_size))),
    "logs": Kind(alone, lambda pair: NgramDrafter(K, log=32)),
    "votes": Kind(
        twice, lambda pair: VotingDrafter((*two(pair), EarlyExitDrafter(pair.target, 1, K)))
    ),
    "choices": Kind(twice, lambda pair: ChoosingDrafter(two(pair)), ALL),
}

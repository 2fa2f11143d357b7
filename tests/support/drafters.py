"""A drafter of every kind, with the small transformer that it drafts for."""

import dataclasses
import functools

import jax
import jax.numpy as jnp

from specsamp.decoding.drafters import (
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
    ParallelDrafter,
    TranslatingDrafter,
    VotingDrafter,
    WindowDrafter,
)
from specsamp.decoding.drafters.translating import SharedVocabulary
from specsamp.decoding.pair import Pair
from specsamp.decoding.trees import Growth, TreeShape
from specsamp.models.config import TransformerConfig
from specsamp.models.transformer import TransformerLM
from support.heads import WIDTH, block, dflash2, dspark, eagle1, eagle3, medusa, mtp
from support.weights import drawn_params

V, LAYERS, K = 24, 2, 3
TREE = TreeShape.in_levels((0, 0, 1, 3))
SHAPE = dict(width=WIDTH, num_heads=2, feedforward_width=16, positions="rotary")
# N-grams and a window, so that a wrong token or slot anywhere in the cache is seen.
MEMORY = dict(ngram_rows=32, window=12, global_layers=(1,))
TARGET = TransformerLM(TransformerConfig(vocab_size=V, num_layers=LAYERS, **MEMORY, **SHAPE))


@functools.cache
def sharp(model):
    """Returns parameters with which distributions depend much on the text, and little on
    rounding.
    """
    return jax.tree.map(lambda x: 2 * x if x.dtype == jnp.float32 else x, drawn_params(model))


def of_model(drafter, draft=TARGET, lengths=(0, K), perfect=0):
    """Returns a pair, a drafter, and draft lengths; the first ``perfect`` tokens are the
    target's.
    """
    pair = Pair(target=TARGET, target_params=sharp(TARGET), draft=draft, draft_params=sharp(draft))
    return pair, drafter, lengths, perfect


def of_target(drafter, lengths=(0, K)):
    return Pair(target=TARGET, target_params=sharp(TARGET)), drafter, lengths, 0


def of_head(kind, head, lengths=(0, K), **options):
    pair = Pair(target=TARGET, target_params=sharp(TARGET), head=head, draft_params=sharp(head))
    return pair, kind(TARGET, head, **options), lengths, 0


def of_tokenizer():
    """Every odd token is two ids of the draft, so that its text is longer than the target's."""
    draft = TransformerLM(TransformerConfig(vocab_size=30, num_layers=1, **SHAPE))
    ids_V = [token if token % 2 == 0 else -1 for token in range(V)]
    reading_VM = [[token, -1] if token % 2 == 0 else [V + token % 5, token] for token in range(V)]
    vocabulary = SharedVocabulary(ids_V, reading_VM, 30, begin=(29,))
    pair, *rest = of_model(TranslatingDrafter(draft, vocabulary, K), draft)
    return dataclasses.replace(pair, vocabulary=vocabulary), *rest


class InTurn(ChoosingDrafter):
    """Chooses a part by the length of the text."""

    def choose(self, state, prefix):
        return prefix.lengths_B // 5 % len(self.parts)


class EqualVotes(VotingDrafter):
    update_weight = 0.0
    recovery_weight = 0.0


def of_several(kind, parts, lengths=(0, 1, K)):
    """Returns a pair without a draft, and a drafter whose parts have parameters of their own."""
    models = [getattr(part, "head", getattr(part, "model", None)) for part in parts]
    params = tuple(model and sharp(model) for model in models)
    pair = Pair(target=TARGET, target_params=sharp(TARGET), draft_params=params)
    return pair, kind(parts), lengths, 0


READS = dict(target_layers=LAYERS)
LAST = dict(hidden_layers=(LAYERS,), **READS)
EAGLE = eagle3(V, hidden_layers=(-1, 0, 1), **READS)
DSPARK = dspark(V, confidence=None, hidden_layers=(0, 1), **READS)
TREE = TreeShape((0, 0, 1, 1, 2, 3))
SHAPED = dict(tree=TREE, lengths=(0, TREE.K))
GROWTH = Growth(depth=3, expanded=2, children=2)
SMALL = TransformerLM(TransformerConfig(vocab_size=V, num_layers=1, **SHAPE))
PARALLEL = ParallelDrafter(TARGET, K, mask_id=V - 1)
GROWN = ModelTree(TARGET, tree=GROWTH)
DRAFTERS = {
    "model": lambda: of_model(ModelDrafter(TARGET, K), lengths=(0, 1, K), perfect=K),
    "parallel": lambda: of_model(PARALLEL, lengths=(0, 1, K), perfect=1),
    "beam": lambda: of_model(BeamDrafter(TARGET, K, beams=3), lengths=(0, 1, K)),
    "tokenizer": of_tokenizer,
    "early exit": lambda: of_target(EarlyExitDrafter(TARGET, 1, K)),
    "window": lambda: of_target(WindowDrafter(TARGET, K, window=5, sinks=2)),
    "whole window": lambda: (*of_target(WindowDrafter(TARGET, K, window=200), (0, 1, K))[:3], K),
    "choosing": lambda: of_several(
        InTurn, (FeatureDrafter(TARGET, EAGLE, K), ModelDrafter(TARGET, K))
    ),
    "voting": lambda: of_several(
        EqualVotes, (PARALLEL, ModelDrafter(SMALL, K), EarlyExitDrafter(TARGET, 1, K))
    ),
    "EAGLE-1": lambda: of_head(FeatureDrafter, eagle1(V, **LAST), K=K),
    "EAGLE-3": lambda: of_head(FeatureDrafter, EAGLE, K=K),
    "MTP": lambda: of_head(FeatureDrafter, mtp(V, **LAST), K=K),
    "Medusa": lambda: of_head(FeatureDrafter, medusa(V, K, **LAST), K=K),
    "modules": lambda: of_head(ModuleDrafter, mtp(V, num_modules=K, **LAST), K=K),
    "DFlash": lambda: of_head(BlockDrafter, block(V, hidden_layers=(0, 1), **READS), K=K),
    "DFlash 2": lambda: of_head(BlockDrafter, dflash2(V, hidden_layers=(0, 1), **READS), K=K),
    "DSpark": lambda: of_head(BlockDrafter, DSPARK, K=K),
    "model tree": lambda: of_model(ModelTree(TARGET, tree=TREE), lengths=(0, TREE.K), perfect=K),
    "grown tree": lambda: of_model(GROWN, lengths=(0, GROWTH.K), perfect=K),
    "early exit tree": lambda: of_target(EarlyExitTree(TARGET, 1, tree=TREE), (0, TREE.K)),
    "EAGLE-3 tree": lambda: of_head(FeatureTree, EAGLE, **SHAPED),
    "Medusa tree": lambda: of_head(FeatureTree, medusa(V, K, **LAST), **SHAPED),
    "block tree": lambda: of_head(BlockTree, DSPARK, **SHAPED),
}

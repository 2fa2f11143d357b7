"""The audit of heads: a sound head passes, and each mistake fails its check."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest

from specsamp import FeatureDrafter, Pair, TokenRule, TransformerLM, chain, temperature
from specsamp.evaluation.audit import Settings, Status, audit
from specsamp.evaluation.audit.checks import UNREADABLE
from specsamp.models.config import tiny
from specsamp.models.eagle import Eagle3Config
from specsamp.models.heads import DRAFT_IDS, FeatureHead
from support import mutants
from support.audits import subject_of
from support.heads import LayeredTable, ShowsTokens, eagle3, table_head
from support.loop_distributions import TARGET, V
from support.weights import drawn_params, shapes_of

# After a prompt of one token, the first round drafts nothing.
PROMPTS = [[0], [1, 2, 1], [2, 1, 2, 1], [1, 2, 1, 2, 2]]
COARSE = Settings(detect=0.1, rows=512)


def subject(drafter=FeatureDrafter, rule=TokenRule()):
    target, head = ShowsTokens(V), table_head(V)
    pair = Pair(target=target, target_params=TARGET, head=head, draft_params=TARGET)
    drafter = drafter(target, head, 2)
    sampling = chain(temperature(1.0))
    return subject_of(
        pair=pair, prompts=PROMPTS, drafter=drafter, rule=rule, sampling=sampling, max_new_tokens=24
    )


def only(name, audited):
    (check,) = audit(audited, dataclasses.replace(COARSE, checks=(name,))).checks
    return check


@pytest.mark.slow
def test_a_sound_head_passes():
    found = audit(
        subject(), dataclasses.replace(COARSE, checks=("greedy", "distribution", "acceptance"))
    )
    assert len(found.named(Status.PASSED)) == 3, found.summary
    assert UNREADABLE not in found.summary
    (acceptance,) = (check for check in found.checks if check.name == "acceptance")
    numbers = acceptance.numbers
    assert "verified_at_position_2" not in numbers, "later tokens depend on where their round began"
    assert numbers["accepted_at_position_1"] == numbers["verified_at_position_1"] > 300, (
        "one-token prompts were read"
    )


@pytest.mark.parametrize("mutant", [mutants.OfTheWrongRow, mutants.OfAnotherLayer])
def test_wrong_features_show_as_acceptance(mutant):
    assert only("acceptance", subject(mutant)).verdict is Status.FAILED


@pytest.mark.slow
def test_target_reduced_like_its_head_fails_audit():
    target, head = LayeredTable(V), eagle3(V, draft_vocab_size=2)
    params = drawn_params(head) | {DRAFT_IDS: jnp.asarray([0, 2], jnp.int32)}
    pair = Pair(target=target, target_params=TARGET, head=head, draft_params=params)
    settings = dict(
        pair=pair, prompts=PROMPTS[1:], drafter=FeatureDrafter(target, head, 2), max_new_tokens=8
    )
    broken = subject_of(
        rule=mutants.OfTheDraftVocabulary(), sampling=chain(temperature(1.0)), **settings
    )
    assert only("distribution", broken).verdict is Status.FAILED


def test_a_head_is_recast_with_its_target():
    shape = tiny(num_layers=3, positions="rotary", dtype="bfloat16")
    target = TransformerLM(shape)
    layer = dataclasses.replace(shape, num_layers=1)
    config = Eagle3Config(
        layer=layer, target_layers=3, hidden_layers=(0, 1, 2), draft_vocab_size=8, own_output=True
    )
    head = FeatureHead(config)

    def zeros(model):
        shapes = shapes_of(model)
        return jax.tree.map(
            lambda x: jnp.zeros(x.shape, "bfloat16" if x.dtype == "float32" else x.dtype), shapes
        )

    pair = Pair(target=target, target_params=zeros(target), head=head, draft_params=zeros(head))
    drafter = FeatureDrafter(target, head, 2)
    wide = subject_of(pair=pair, prompts=[[1, 2]], drafter=drafter, sampling=chain()).cast(
        "float32"
    )
    assert wide.pair.head == wide.method.drafter.head
    assert wide.method.drafter.head.config.layer.dtype == "float32"
    assert wide.pair.draft_params["fc"].dtype == jnp.float32
    assert wide.pair.draft_params[DRAFT_IDS].dtype == jnp.int32
    assert wide.cast("bfloat16").pair.head.config == config

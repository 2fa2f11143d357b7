"""Continuing two depths in a straight line to all layers; rounds of each kind of drafter."""

import dataclasses

import pytest

from specsamp.analysis.report import as_json
from specsamp.decoding.trees import TreeShape
from specsamp.models.config import TransformerConfig
from specsamp.models.dflash import BlockConfig
from specsamp.models.eagle import Eagle3Config
from specsamp.sampling.rejection import TokenRule
from specsamp.sampling.tree_rules import RecursiveRule
from specsamp.sampling.warp import chain, top_p
from specsamp.tpu.pair_report import compile_report, compiled_costs
from specsamp.tpu.program import Memory, Program
from specsamp.tpu.stack import FEW, MANY, Stack, linear
from specsamp.tpu.topology import described_mesh
from support import extras


def program(layers, fits=True):
    memory = Memory(arguments=100 * layers, temporaries=7 + layers, outputs=0, capacity=10_000)
    return Program(
        name="x",
        tokens=5,
        floor_bytes=10.0 * layers + 3,
        live_floor_bytes=9.0 * layers,
        memory=memory if fits else None,
        out_of_memory=None if fits else "too much",
        hbm_bytes=11.0 * layers + 4,
        live_hbm_bytes=10.0 * layers + 4,
        cycles=2.0 * layers + 1,
        kernel_cycles=1.0 * layers,
        collectives={"all-reduce": 2 * layers + 1, "all-gather": 1},
        collective_bytes={"all-reduce": 50.0 * layers},
        num_copies=layers,
    )


def continued(few, many, layers):
    slope = (layers - FEW) / (MANY - FEW)
    return linear((1.0, few), (slope, many), (-slope, few))


def test_a_straight_line():
    whole = continued(program(2), program(4), 80)
    assert (
        whole.hbm_bytes == 11 * 80 + 4
        and whole.live_hbm_bytes == 804
        and whole.floor_bytes == 803
        and whole.cycles == 161
    )
    assert whole.collectives == {"all-reduce": 161, "all-gather": 1}
    assert whole.collective_bytes == {"all-reduce": 4000} and whole.num_copies == 80
    assert whole.memory.arguments == 8000 and whole.memory.temporaries == 87 and whole.memory.fits


def test_what_does_not_fit_stays_so():
    assert continued(program(2), program(4, fits=False), 80).memory is None
    assert program(2, fits=False).facts("v4:2x2x4") == {"fits": False, "why": "too much"}
    # Two and four layers fit, a hundred do not.
    assert continued(program(2), program(4), 96).facts("v4:2x2x4")["fits"]
    made = continued(program(2), program(4), 98).facts("v4:2x2x4")
    assert not made["fits"] and made["why"].endswith("of 0 GiB") and "hbm_bytes" not in made


CONFIG = TransformerConfig(
    vocab_size=512, width=256, num_layers=6, num_heads=2, positions="rotary", tied=False, dtype="bfloat16"
)
HEAD = Eagle3Config(
    layer=dataclasses.replace(CONFIG, num_layers=1),
    target_layers=6,
    hidden_layers=(2, 3, 4),
    draft_vocab_size=128,
    own_output=True,
)
BLOCK = BlockConfig(
    layer=dataclasses.replace(CONFIG, num_layers=2), target_layers=6, hidden_layers=(1, 2, 4), block_size=4, mask_id=0
)


@pytest.mark.slow
@extras.needs("libtpu")
def test_a_round_of_a_tree_has_a_call_of_the_draft_for_each_level():
    stack = Stack(CONFIG, described_mesh("v5e:1x1"), "v5e:1x1", slots=256, drafter=HEAD)
    tree, sampling = TreeShape((0, 0, 0, 1, 1, 2)), chain(top_p(0.8))
    asked = dict(topology="v5e:1x1", size=tree, rule=RecursiveRule(), names=("target step", "score", "round"))
    report, chained = compile_report(stack.programs(6, sampling), **asked), stack.round(2, sampling, TokenRule())
    drawn = report["round"]
    assert (drawn.calls, drawn.layers, drawn.tokens) == (3, 6 + 2, 7) and chained.calls == 3
    assert drawn.floor_bytes == pytest.approx(chained.floor_bytes, rel=0.1) and drawn.cycles > chained.cycles
    assert report["score"].tokens == 7 and report.draft_length == 2
    with pytest.raises(ValueError, match="is of a token tree"):
        compiled_costs(as_json(report))


@pytest.mark.slow
@extras.needs("libtpu")
@pytest.mark.parametrize(
    "drafter, layers, steps",
    [(dataclasses.replace(CONFIG, num_layers=3), 3, 2), (HEAD, 1, 2), (BLOCK, 2, 1), (5, 5, 2)],
    ids=["model", "head", "block", "early exit"],
)
def test_a_round_is_that_of_all_layers(drafter, layers, steps):
    """Steps of a model of three layers, of a head, or of the first five layers, or a block; and a call of the target's six."""
    stack = Stack(CONFIG, described_mesh("v5e:1x1"), "v5e:1x1", slots=256, drafter=drafter)
    step, round_ = stack.draft_step(), stack.round(2, chain(top_p(0.8)), TokenRule())
    assert step.layers == layers and round_.layers == 6 + steps * layers and round_.calls == steps + 1
    assert round_.floor_bytes == pytest.approx(stack.call(3).floor_bytes + steps * step.floor_bytes, rel=0.1)
    alone = dataclasses.replace(stack, drafter=None)
    held = stack.bytes_of_state()  # of a head, the target alone
    if drafter in (HEAD, BLOCK):
        held += sum(stack.programs(2).bytes_of_state()) - sum(alone.programs(2).bytes_of_state())
    assert round_.memory.arguments == pytest.approx(held, rel=0.05)
    assert (held > 1.1 * alone.bytes_of_state()) == (drafter != 5)

"""Continuing two depths in a straight line to all layers."""

from specsamp.tpu.program import Memory, Program
from specsamp.tpu.stack import continued, facts


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
        collectives={"all-reduce": 2 * layers + 1, "all-gather": 1},
        collective_bytes={"all-reduce": 50.0 * layers},
        num_copies=layers,
    )


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
    assert facts(program(2, fits=False), "v4:2x2x4") == {"fits": False, "why": "too much"}
    # Two and four layers fit, a hundred do not.
    assert facts(continued(program(2), program(4), 96), "v4:2x2x4")["fits"]
    made = facts(continued(program(2), program(4), 98), "v4:2x2x4")
    assert not made["fits"] and made["why"].endswith("of 0 GiB") and "hbm_bytes" not in made

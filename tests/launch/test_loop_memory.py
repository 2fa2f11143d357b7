"""The memory of the loop, as compiled."""

from launch.studies.loop_memory import memory_grid, memory_table
from specsamp.models.config import tiny
from specsamp.sampling.rejection import TokenRule
from specsamp.sampling.warp import chain, temperature
from support.run_script import call


def test_memory_counts_what_the_loop_adds():
    """Room for the scored distributions, a few times over; how it grows is tests/decoding/test_compiled.py's matter."""
    model = tiny(num_layers=1)
    (point,) = memory_grid(model, model, TokenRule(), chain(temperature(0.8)), slots=32, grid=((1, 2, 8192),))
    assert point.logits_bytes == 4 * 3 * 8192
    assert 1 <= point.temp_bytes / point.logits_bytes <= 16
    assert point.cache_bytes == 4 * 2 * 2 * 32 * 32  # keys and values of two models, 32 slots of width 32
    (row,) = memory_table([point]).rows
    assert row[0] == "1, 2, 8192" and len(row) == len(memory_table([]).header)


def test_what_the_grid_varies_cannot_be_set():
    done = call("studies/memory", "--config=configs/random_pair.py:38m", "--config.batch=2")
    assert done.returncode == 2 and "--config.batch would not be heeded: this study reads target, draft" in done.stderr


def test_shapes_are_wanted():
    done = call("studies/memory", "--config=configs/trained_pair.py")
    assert done.returncode == 2 and "--config has no field target, draft" in done.stderr

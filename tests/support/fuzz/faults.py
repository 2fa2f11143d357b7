"""Planted faults of admission, prefix copies, resizing, chunking, insertion and cancellation, all
of which must be found.
"""

import contextlib
import dataclasses
import inspect
import sys
import textwrap

import jax

from specsamp.decoding import adaptive, batch_rows, engine, loop
from specsamp.models import cache, slots
from specsamp.serving import batch, prefill, scheduler
from specsamp.serving import slots as slot_table
from support.fuzz.settings import SETTINGS


@dataclasses.dataclass(frozen=True)
class Change:
    """A change of a function's source: ``old``, which occurs once, becomes ``new``."""

    owner: object
    name: str
    old: str
    new: str


@dataclasses.dataclass(frozen=True)
class Fault:
    """Changes of the code, and the settings that must detect them."""

    changes: tuple[Change, ...]
    entries: tuple[str, ...]
    kinds: tuple[str, ...] = ("none", "model")
    adapts: tuple[bool, ...] = (False, True)

    @property
    def settings(self):
        return [
            one
            for one in SETTINGS
            if one.entry in self.entries
            and one.kind in self.kinds
            and one.adapts in self.adapts
            and one.shards == 1
        ]


def moved_write(cache_BMSH, new_BMTH, start_B, axis=slots.SLOTS_AXIS):
    """Writes slots as JAX does: slots that do not fit are moved."""

    def write(row, new, start):
        return jax.lax.dynamic_update_slice_in_dim(row, new, start, axis - 1)

    return jax.vmap(write)(cache_BMSH, new_BMTH, start_B)


NOT_CHECKED = Change(engine.Engine, "extend", "if needed > self.slots", "if False")
MOVED = Change(cache, "write_slots", "", "")
FAULTS = {
    "a row is read in as many calls as others": Fault(
        (MOVED, NOT_CHECKED, Change(prefill, "plan", "most if fits else", "most if True else")),
        ("queue",),
        ("none",),
    ),
    "a paused drafter is taken for one that has read all": Fault(
        (
            Change(engine.Engine, "num_held", "if seen_B is None", "if True"),
            Change(adaptive.Adaptive, "begin", "seen_B=lengths_B if", "seen_B=lengths_B - 1 if"),
            Change(
                loop.Loop,
                "extend",
                "caches = state and (state.cache, state.drafter_state)\n",
                "caches = state and (state.cache, state.drafter_state)\n"
                "        adapts = state is not None and state.adaptive_state is not None\n"
                "        if adapts and state.adaptive_state.seen_B is not None:\n"
                "            seen_B = jnp.maximum(state.adaptive_state.seen_B, 0)\n"
                "            start_B = jnp.minimum(start_B, seen_B)\n",
            ),
            MOVED,
            NOT_CHECKED,
        ),
        ("service",),
        adapts=(True,),
    ),
    "a prefix is copied two tokens too long": Fault(
        (
            Change(
                slot_table.SlotTable, "longest_prefix", "best = row, start", "best = row, start + 2"
            ),
        ),
        ("queue",),
        ("none",),
    ),
    "rows change places when the size changes": Fault(
        (
            Change(
                engine.Engine,
                "resize",
                "jnp.asarray(at, jnp.int32)",
                "jnp.asarray(at[::-1], jnp.int32)",
            ),
        ),
        ("service",),
    ),
    "a chunk begins one token late": Fault(
        (Change(prefill.Prefill, "read", "[end if entry", "[end + 1 if entry"),),
        ("queue", "service"),
    ),
    "rows are inserted in another order": Fault(
        (
            Change(
                batch_rows,
                "_write_rows",
                "row = new[n : n + 1]",
                "row = new[len(at_N) - 1 - n :][:1]",
            ),
        ),
        ("queue",),
        ("none",),
    ),
    "another row ends with a caller that has left": Fault(
        (Change(batch.Batch, "collect", "late[row] = finish_B", "late[row - 1] = finish_B"),),
        ("service",),
    ),
    "prompts that are read together have each other's numbers": Fault(
        (
            Change(
                engine.Engine,
                "extend",
                "arrays = self.arrays(requests)",
                "arrays = self.arrays(requests[::-1])",
            ),
        ),
        ("queue",),
        ("none",),
    ),
    "a waiting request goes with a caller that has left": Fault(
        (
            Change(
                scheduler.Scheduler,
                "finish",
                "entries.remove(entry)",
                "entries.remove(entries[-1])",
            ),
        ),
        ("service",),
    ),
}


@contextlib.contextmanager
def planted(fault):
    """Changes the code, and changes it back."""
    kept = [
        (change.owner, change.name, inspect.getattr_static(change.owner, change.name))
        for change in fault.changes
    ]
    try:
        for change in fault.changes:
            setattr(change.owner, change.name, changed(change))
        jax.clear_caches()
        yield
    finally:
        for owner, name, value in kept:
            setattr(owner, name, value)
        jax.clear_caches()


def changed(change):
    """Returns the function with the changed source."""
    if change is MOVED:
        return moved_write
    function = inspect.unwrap(inspect.getattr_static(change.owner, change.name))
    source = textwrap.dedent(inspect.getsource(function))
    old, new = (text.replace("\n" + 4 * " ", "\n") for text in (change.old, change.new))
    if source.count(old) != 1:
        raise ValueError(
            f"{old!r} stands {source.count(old)} times in {change.name}: mend the planted fault"
        )
    scope = sys.modules[function.__module__].__dict__
    made = {}
    exec(compile(source.replace(old, new), f"<planted in {change.name}>", "exec"), scope, made)
    return made[change.name]

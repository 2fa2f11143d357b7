"""The flag --chip_hour: the cost of tokens at a price for chips."""

from collections.abc import Iterable

import jax
from absl import flags

from specsamp import Pair
from specsamp.analysis.report import Table


def define_chip_hour() -> flags.FlagHolder:
    """Defines --chip_hour."""
    help = "Also print dollars per million tokens, at this price in dollars of a chip for an hour."
    return flags.DEFINE_float("chip_hour", None, help, lower_bound=0)


def chips_of(pair: Pair) -> int:
    """Returns the number of chips of a pair; some TPU chips are two devices with the same
    coordinates.
    """
    mesh = pair.shards.mesh
    devices = [jax.devices()[0]] if mesh is None else mesh.devices.flat
    places = {
        (getattr(one, "slice_index", 0), *one.coords) if one.platform == "tpu" else one.id
        for one in devices
    }
    return len(places)


def cost_tables(
    rows: Iterable[tuple[str, float]], chips: int, chip_hour: float | None
) -> list[Table]:
    """Returns the table of dollars per million tokens, for rows of name and ms per token; []
    without a price.
    """
    if chip_hour is None:
        return []
    cells = [
        {
            "": name,
            "ms per token": f"{ms:.3g}",
            # A million tokens take ms / 3.6 hours.
            "$ per million tokens": f"{ms / 3.6 * chips * chip_hour:.3g}",
        }
        for name, ms in rows
    ]
    note = (
        f"{chips} chip{'s' * (chips > 1)} at ${chip_hour:g} an hour, busy with nothing else and "
        "never idle; prefill is not counted"
    )
    return [Table.of("Cost", cells, note=note)]

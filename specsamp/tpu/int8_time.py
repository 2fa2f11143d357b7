"""The time of a layer in int8 over its time in bfloat16, by chip and batch, as the compiler
estimates it.
"""

from specsamp.tpu.topology import KINDS

# Of the paper's target, by the sequences of a replica: notebooks/results/compile_int8_*.json.
OVER_BFLOAT16: dict[str, dict[int, float]] = {
    "v4": {1: 0.74, 8: 1.15, 32: 1.37},
    "v5e": {1: 0.51, 8: 0.53, 32: 0.89},
}


def over_bfloat16(device_kind: str, rows: int) -> float | None:
    """Returns the ratio for a device as JAX names it, at the nearest batch that is not larger; None
    for other chips.
    """
    known = OVER_BFLOAT16.get(KINDS.get(device_kind, ""))
    return known and known[max(batch for batch in known if batch <= rows)]

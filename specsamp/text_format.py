"""Numbers as people read them."""

from __future__ import annotations

import math


def human_count(count: int) -> str:
    """Returns a count with four digits and a unit: 1234567 becomes '1.235M'."""
    exponent = min(int(math.log10(max(count, 1))) // 3, 3)
    return f"{count / 1000**exponent:.4g}{['', 'k', 'M', 'B'][exponent]}"

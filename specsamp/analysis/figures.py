"""The look of all figures: one palette, one style.

The colours are Okabe and Ito's (https://jfly.uni-koeln.de/color/), distinct for colour-blind
readers. Lines differ in `STYLES`, too, for print. Only drawing imports matplotlib.
"""

import io
from typing import Any

BLUE, VERMILLION, GREEN, PURPLE, ORANGE = "#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00"
SKY, YELLOW, GREY = "#56b4e9", "#f0e442", "#787e85"  # this grey is read on light and on dark pages
COLOURS = (BLUE, VERMILLION, GREEN, PURPLE, ORANGE)  # of curves, in this order
STYLES = ("-", "--", "-.", ":")
# Distributions, and results of a draft.
TARGET, DRAFT, KEPT, WRONG = BLUE, ORANGE, GREEN, VERMILLION
# Of a token.
WRITERS = {"accepted": GREEN, "rejected": VERMILLION, "correction": SKY, "bonus": YELLOW}

LEAST_DPI = 140


def tint(colour: str, share: float = 0.55) -> str:
    """Mixes a colour with white, as a background for dark text; ``share`` is the colour's, in [0,
    1].
    """
    parts = (int(colour[i : i + 2], 16) for i in (1, 3, 5))
    return "#" + "".join(f"{round(255 + share * (part - 255)):02x}" for part in parts)


def set_style() -> None:
    """Sets matplotlib's defaults for figures in a notebook."""
    import matplotlib.pyplot as plt
    from cycler import cycler  # comes with matplotlib

    plt.rcParams.update(
        {
            "figure.dpi": 110,
            "figure.constrained_layout.use": True,
            "font.size": 9,
            "axes.prop_cycle": cycler(color=COLOURS),
            "axes.titlesize": 10,
            "axes.titlelocation": "left",
            "axes.spines.top": False,
            "axes.spines.right": False,
            "legend.frameon": False,
        }
    )


def to_png(figure: Any) -> bytes:
    """Returns a figure as PNG, and closes it."""
    import matplotlib.pyplot as plt

    picture = io.BytesIO()
    figure.savefig(picture, format="png", dpi=max(figure.dpi, LEAST_DPI))
    plt.close(figure)
    return picture.getvalue()

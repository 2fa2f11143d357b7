"""The colours of figures: told apart by colour-blind readers, read on light and on dark pages."""

import itertools

import numpy as np
import pytest

from specsamp.analysis.figures import COLOURS, GREY, WRITERS, tint

# From linear RGB as it is to how it is seen: Machado et al. 2009 (IEEE TVCG 15, 1291-1298), complete absence of a cone.
SEEN = {
    "all cones": np.eye(3),
    "no red": [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]],
    "no green": [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.011820, 0.042940, 0.968881]],
}
LUMINANCE = (0.2126, 0.7152, 0.0722)
XYZ = [[0.4124, 0.3576, 0.1805], LUMINANCE, [0.0193, 0.1192, 0.9505]]  # of linear sRGB
WHITE, DARK, INK = "#ffffff", "#0d1117", "#1f2328"  # pages, and text on a colour


def linear(colour):
    parts = np.array([int(colour[i : i + 2], 16) for i in (1, 3, 5)]) / 255
    return np.where(parts <= 0.04045, parts / 12.92, ((parts + 0.055) / 1.055) ** 2.4)


def lab(rgb):
    """CIE L*a*b* of a linear RGB."""
    x, y, z = np.cbrt(np.maximum(XYZ @ np.clip(rgb, 0, 1) / (0.9505, 1, 1.089), 0.008856))
    return np.array([116 * y - 16, 500 * (x - y), 200 * (y - z)])


def nearest(colours, matrix):
    """The smallest distance of two colours; 2.3 is just noticeable."""
    labs = [lab(matrix @ linear(colour)) for colour in colours]
    return min(np.linalg.norm(a - b) for a, b in itertools.combinations(labs, 2))


def contrast(one, other):
    """The ratio of the Web Content Accessibility Guidelines; 3 for large text, 4.5 for small."""
    low, high = sorted(linear(colour) @ LUMINANCE + 0.05 for colour in (one, other))
    return high / low


@pytest.mark.parametrize("cones", SEEN)
def test_colours_are_told_apart(cones):
    matrix = np.array(SEEN[cones])
    assert nearest(COLOURS, matrix) > 12
    assert nearest([tint(colour) for colour in WRITERS.values()], matrix) > 12


def test_red_and_green_of_equal_lightness_would_be_refused():
    """The control."""
    assert nearest(("#c44e52", "#7d8a3a"), np.array(SEEN["no green"])) < 12


def test_texts_are_read_on_what_they_stand_on():
    assert min(contrast(GREY, WHITE), contrast(GREY, DARK)) > 4
    assert min(contrast(INK, tint(colour)) for colour in WRITERS.values()) > 4.5


def test_a_tint_goes_from_white_to_the_colour():
    assert tint("#d55e00", 0) == "#ffffff" and tint("#d55e00", 1) == "#d55e00"

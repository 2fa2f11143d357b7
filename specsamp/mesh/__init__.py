"""Devices: which slices there are, and how arrays lie on them."""

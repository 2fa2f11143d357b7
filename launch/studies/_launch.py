"""Puts launch/ on the path: a script finds only its own folder, and entry, experiment and cells are one above."""

import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).parents[1]))

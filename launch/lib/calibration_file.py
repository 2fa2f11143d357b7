"""The flag --calibration of commands that estimate the times of a TPU."""

from absl import flags

from specsamp import storage
from specsamp.tpu.calibration import Calibration
from specsamp.tpu.own import read_calibration

HELP = "Prefer this file of launch/calibrate.py, of the same slice, to the published measurements."


def define_calibration() -> flags.FlagHolder:
    """Defines --calibration."""
    return flags.DEFINE_string("calibration", None, HELP)


def own_calibration(path: str | None, topology: str) -> Calibration | None:
    """Reads the file of --calibration, if there is one; raises ValueError if it is of another slice, or damaged."""
    return read_calibration(storage.read_json(path), topology, path) if path else None

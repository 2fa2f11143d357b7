"""Reads the cycles of our kernels from their final schedules, which the TPU compiler writes as
text; it estimates none.

A core issues one bundle of instructions a cycle. The bundles of a kernel's loop count for each step
of its grid, and for two more in which the pipeline fills and empties, with all branches taken, and
all passes of a loop within the step; waiting for memory does not count.
"""

import atexit
import collections
import dataclasses
import functools
import os
import pathlib
import re
import shutil
import tempfile
from typing import Self

from specsamp.models.kernels.common import WARPS

FLAGS = "--xla_jf_dump_to={} --xla_jf_dump_llo_text=true --xla_jf_dump_hlo_text=false"
FLAGS += " --xla_jf_dump_llo_pass_label_regex=^final_bundles"
FILE = re.compile(r"\d+-(.+)-\d+-final_bundles\.txt")
PASSES = 16  # most passes of the warps' inner loop: each decides two of 32 bits
_BUNDLE = re.compile(r"^ *(?:0x[0-9a-f]+|0) +(?:[A-Z]{2})? *: *(>*)", re.M)


@dataclasses.dataclass(frozen=True)
class Schedule:
    """The bundles of one kernel."""

    once: int
    in_loop: int
    cores: int  # that share the steps
    passes: int = 1  # of the loop that is left where there is a single step: the one within it

    @classmethod
    def parse(cls, text: str, passes: int = 1) -> Self:
        """Reads the final bundles of a kernel; a loop over steps marks its own once, a loop within
        a step, of ``passes``, twice.
        """
        count = collections.Counter(map(len, _BUNDLE.findall(text)))
        once = count[0]
        in_loop = count[1]
        inner = count.total() - count[0] - count[1]
        # Every kernel reads its core's number once; one whose steps are shared by cores does in its
        # loop, too.
        cores = 2 if re.search(r"^.*: *>.*core id", text, re.M) else 1
        return cls(
            once=once, in_loop=in_loop + passes * inner, cores=cores, passes=1 if inner else passes
        )

    def cycles(self, steps: float) -> float:
        """Returns the cycles of a core, at most, if the grid has so many steps."""
        return self.once + self.in_loop * (
            self.passes if steps == 1 < self.passes else steps / self.cores + 2
        )


@functools.cache
def schedule_folder() -> pathlib.Path:
    """Returns the folder of this process into which libtpu, if it is not loaded before, writes the
    schedules.
    """
    path = tempfile.mkdtemp(prefix="specsamp-schedules-")
    atexit.register(shutil.rmtree, path, ignore_errors=True)
    os.environ["LIBTPU_INIT_ARGS"] = (
        f"{os.environ.get('LIBTPU_INIT_ARGS', '')} {FLAGS.format(path)}".strip()
    )
    return pathlib.Path(path)


def take(*kernels: str) -> dict[str, Schedule]:
    """Returns the schedules of kernels, written since the last call, by names of operations; all
    files are removed.
    """
    found = {}
    for path in schedule_folder().iterdir():
        match = FILE.fullmatch(path.name)
        if match and match[1].startswith(kernels):
            found[match[1]] = Schedule.parse(
                path.read_text(), PASSES if match[1].startswith(WARPS) else 1
            )
        path.unlink()
    return found

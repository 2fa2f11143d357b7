"""Drops compiled programs before a process has too many."""

import ctypes
import gc
import os
import pathlib
import sys

import jax

# Every compiled program is mapped into memory, and Linux allows a process 65,530 mappings: with
# more, XLA aborts. A test adds sixty on average, thousands at most.
MOST_MAPPINGS = 45_000
MOST_BYTES = 2.5 * 2**30  # of a process: two processes and a script fit into a small machine
kept_bytes = [0.0]  # after programs were dropped


def num_mappings():
    maps = pathlib.Path("/proc/self/maps")
    return maps.read_bytes().count(b"\n") if maps.exists() else 0


def resident_bytes():
    """Returns the memory of this process; 0 if the system does not report it."""
    statm = pathlib.Path("/proc/self/statm")
    return int(statm.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") if statm.exists() else 0


def forget_if_many():
    """Clears JAX's caches if there are many mappings or much memory; programs are compiled anew."""
    if num_mappings() > MOST_MAPPINGS or resident_bytes() > max(MOST_BYTES, 1.25 * kept_bytes[0]):
        jax.clear_caches()
        gc.collect()
        if sys.platform == "linux":
            ctypes.CDLL(None).malloc_trim(0)
        kept_bytes[0] = resident_bytes()

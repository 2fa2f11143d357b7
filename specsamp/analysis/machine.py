"""Which machine a time was measured on, without a name that says whose it is."""

from __future__ import annotations

import hashlib
import os
import pathlib
import platform
import re
from typing import Any

MACHINE_IDS = ("/etc/machine-id", "/var/lib/dbus/machine-id")


def machine() -> dict[str, Any]:
    """Returns the CPU's model, cores of this process, memory in GiB, the platform, and a hashed id of the machine.

    The id tells two equal machines apart. It is a hash of the operating system's own, from which that cannot be
    found; None where the system has none.
    """
    return {
        "cpu": _cpu(),
        "cores": cores(),
        "memory_gib": _memory_gib(),
        "platform": f"{platform.system()} {platform.machine()}",
        "id": _id(),
    }


def cores() -> int | None:
    """Returns how many cores this process may use."""
    try:
        return len(os.sched_getaffinity(0))
    except AttributeError:  # macOS
        return os.cpu_count()


def _cpu() -> str | None:
    try:
        found = re.search(r"^model name\s*:\s*(.+)$", pathlib.Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    except OSError:
        found = None
    return found.group(1).strip() if found else platform.processor() or None


def _memory_gib() -> int | None:
    try:
        return round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30)
    except (ValueError, OSError):
        return None


def _id() -> str | None:
    for path in MACHINE_IDS:
        try:
            own = pathlib.Path(path).read_text(encoding="ascii").strip()
        except (OSError, ValueError):
            continue
        if own:
            return hashlib.sha256(f"specsamp results {own}".encode()).hexdigest()[:12]
    return None

"""Reads facts about machine, devices and versions: for results that are kept, for the doctor, for
estimates of TPUs.
"""

import datetime
import glob
import hashlib
import importlib.metadata
import os
import pathlib
import platform
import re
import subprocess
from collections.abc import Sequence
from typing import Any

import jax

from specsamp import __version__

PACKAGE = pathlib.Path(__file__).parent
VECTOR_INSTRUCTIONS = ("avx2", "avx512f", "avx512_vnni", "amx_int8", "asimddp", "i8mm", "sve")
MACHINE_IDS = ("/etc/machine-id", "/var/lib/dbus/machine-id")
# The vendor on the PCI bus, also of network cards and disks; TPU_CHIPS are the ids of its TPUs
# there.
GOOGLE = "0x1ae0"
TPU_CHIPS = {
    "0x0027",
    "0x0056",
    "0x005e",
    "0x0062",
    "0x0063",
    "0x006f",
    "0x0076",
    "0x007c",
    "0x0083",
}


def environment() -> dict[str, Any]:
    """Returns versions, device and date, for a result that is kept."""
    device = jax.devices()[0]
    here = host_facts()
    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "python": platform.python_version(),
        **{name: version(name) for name in ("jax", "jaxlib", "flax")},
        "specsamp": __version__,
        "commit": commit(),
        "source": source_version(),
        "platform": device.platform,
        "device_kind": device.device_kind,
        "devices": jax.device_count(),
        "machine": here["platform"],
        "cpu": here["cpu"],
        "instructions": instructions(),
        "cores": here["cores"],
        "memory_gib": here["memory_gib"],
        "machine_id": here["id"],
        "load_average": os.getloadavg()[0] if hasattr(os, "getloadavg") else None,
    }


def host_facts() -> dict[str, Any]:
    """Returns the CPU's model, cores of this process, memory in GiB, the platform, and a hashed id
    of the machine.

    The id distinguishes equal machines. It is a hash of the operating system's id; None where the
    system has none.
    """
    return {
        "cpu": _cpuinfo("model name") or platform.processor() or None,
        "cores": cores(),
        "memory_gib": memory_gib(),
        "platform": f"{platform.system()} {platform.machine()}",
        "id": _id(),
    }


def cores() -> int | None:
    """Returns how many cores this process may use."""
    try:
        return len(os.sched_getaffinity(0))
    except AttributeError:  # macOS
        return os.cpu_count()


def instructions() -> list[str]:
    """Returns which of the vector instructions the CPU has that matter for speed; "AMD EPYC" names
    many kinds.
    """
    return [name for name in VECTOR_INSTRUCTIONS if name in cpu_flags()]


def cpu_flags() -> list[str]:
    """Returns the CPU's features by their names in Linux; empty on other systems."""
    return (_cpuinfo("flags") or _cpuinfo("Features") or "").split()


def _cpuinfo(field: str) -> str | None:
    try:
        found = re.search(
            rf"^{field}\s*:\s*(.+)$", pathlib.Path("/proc/cpuinfo").read_text(), re.MULTILINE
        )
    except OSError:
        return None
    return found and found[1].strip()


def memory_gib() -> int | None:
    """Returns the memory of the machine in GiB."""
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


def source_version() -> str:
    """Returns ``SPECSAMP_VERSION`` or "source", and a digest of the source tree."""
    folders = [PACKAGE] + [
        folder for name in ("launch", "configs") if (folder := PACKAGE.parent / name).is_dir()
    ]
    return f"{os.environ.get('SPECSAMP_VERSION') or 'source'} {source_digest(folders)}"


def source_digest(folders: Sequence[pathlib.Path]) -> str:
    """Returns a digest of the Python files of some folders, and of their names."""
    found = hashlib.sha256()
    for folder in folders:
        for path in sorted(
            folder.rglob("*.py"), key=lambda path: path.relative_to(folder).as_posix()
        ):
            name = f"{folder.name}/{path.relative_to(folder).as_posix()}"
            found.update(name.encode() + b"\0" + path.read_bytes() + b"\0")
    return found.hexdigest()[:12]


def commit() -> str:
    """Returns the commit of this checkout, "-dirty" where files differ from it; or "not a
    checkout".
    """
    root = PACKAGE.parent
    if not (root / ".git").exists():
        return os.environ.get("SPECSAMP_VERSION") or "not a checkout"
    git = [
        "git",
        "-C",
        os.fspath(root),
        "describe",
        "--always",
        "--dirty",
        "--abbrev=12",
        "--exclude=*",
    ]
    try:
        return subprocess.run(
            git, capture_output=True, text=True, timeout=20, check=True
        ).stdout.strip()
    except (OSError, subprocess.SubprocessError):  # no git, or the folder is another user's
        return "unknown"


def why_no_devices() -> str:
    """Returns why JAX has no devices, in one line, and an empty text where it has some; this starts
    its backend.
    """
    try:
        jax.local_devices()
    except (
        RuntimeError,
        AssertionError,
    ) as error:  # without a plugin or a GPU, JAX fails an assertion without a text
        asked = jax.config.jax_platforms
        return (
            " ".join(str(error).split())
            or f"this machine, or this installation of JAX, has no {asked}"
        )
    return ""


def require_devices() -> None:
    """Raises RuntimeError, with the reason and the fix, where JAX has no devices."""
    if why := why_no_devices():
        asked = jax.config.jax_platforms or ""
        raise RuntimeError(
            f"JAX finds no devices (JAX_PLATFORMS={asked}): {why}; `specsamp doctor` says more"
        )


def has_tpu() -> bool:
    """Returns whether a TPU is on this machine's PCI bus, also where no driver is installed."""
    for path in glob.glob("/sys/bus/pci/devices/*/vendor"):
        try:
            vendor, chip = (
                pathlib.Path(path).with_name(name).read_text().strip()
                for name in ("vendor", "device")
            )
        except OSError:
            continue
        if vendor == GOOGLE and chip in TPU_CHIPS:
            return True
    return False


def has_gpu() -> bool:
    """Returns whether this machine has an NVIDIA GPU with a driver, also where JAX does
    not see it.
    """
    return os.path.exists("/dev/nvidia0")


def version(package: str) -> str | None:
    """Returns the version of an installed package, None if it is not installed."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None

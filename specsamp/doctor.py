"""Looks for silent causes of slow or failing runs: versions that do not fit, devices that JAX does
not see.

    from specsamp import doctor
    doctor.check()    # at the top of a notebook: raises with the fix

``specsamp doctor`` prints all findings, also about a pair. (A jaxlib that JAX refuses ends every
import, with JAX's message.)
"""

import dataclasses
import enum
import importlib.metadata
import os
import pathlib
import shutil
import sys
import warnings
from collections.abc import Mapping

import jax
from packaging.requirements import Requirement

from specsamp import machine
from specsamp.compilation_cache import find_compilation_cache

TPU, GPU = ("libtpu",), ("jax-cuda12-plugin", "jax-cuda13-plugin")
PLUGINS = ("jaxlib", *TPU, *GPU)  # packages whose versions JAX requires
LEAST_FREE_BYTES = 2 << 30
USABLE = 0.9  # share of memory for weights, besides caches and temporaries
GATED = ("meta-llama/", "google/gemma", "mistralai/")  # checkpoints whose licence is accepted first


class Level(enum.IntEnum):
    """Ranks findings; the worst is the exit status of the command."""

    FINE = 0
    WARNING = 1
    ERROR = 2


@dataclasses.dataclass(frozen=True)
class Finding:
    """A finding and its fix."""

    level: Level
    what: str
    fix: str = ""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Facts:
    """Facts about a machine.

    Attributes:
      versions: of JAX and its installed plugins.
      required: the versions of each that JAX requires, for example ``==0.0.50.*``.
      has_tpu, has_gpu: whether the machine has one, also if JAX does not see it.
      platform: of the devices that JAX sees.
      failed: why JAX did not start; empty where it did.
      asked_platforms: ``JAX_PLATFORMS``; empty: all.
      memory_bytes: of one of these devices; None: unknown.
      cache: the folder of compiled programs; None: they are not kept.
      free_bytes: on its disk.
    """

    python: tuple[int, int]
    versions: Mapping[str, str]
    required: Mapping[str, str]
    has_tpu: bool
    has_gpu: bool
    platform: str
    failed: str
    devices: int
    asked_platforms: str
    memory_bytes: int | None
    cache: str | None
    free_bytes: int | None
    has_hub_token: bool


@dataclasses.dataclass(frozen=True, kw_only=True)
class Wanted:
    """A pair that is to be decoded with.

    Attributes:
      devices: of its mesh.
      weights_bytes: bytes of weights on each device; None: unknown before the files are read.
      from_hub: the names of its checkpoints that lie on the hub.
    """

    devices: int = 1
    weights_bytes: float | None = None
    from_hub: tuple[str, ...] = ()


def check() -> None:
    """Warns of the findings about this machine.

    Raises:
      RuntimeError: an error was found; with its fix.
    """
    # Errors after all warnings.
    for finding in sorted(examine(read_facts()), key=lambda finding: finding.level):
        if finding.level is Level.WARNING:
            warnings.warn(f"{finding.what}: {finding.fix}", stacklevel=2)
        elif finding.level is Level.ERROR:
            raise RuntimeError(f"{finding.what}: {finding.fix}")


def examine(known: Facts, wanted: Wanted = Wanted()) -> list[Finding]:
    """Returns the findings of some facts, also about a pair."""
    return [
        *_versions(known),
        _devices(known),
        *_pair(known, wanted),
        _cache(known),
        _hub(known, wanted),
    ]


def _versions(known: Facts) -> list[Finding]:
    """Returns packages whose versions JAX does not support: errors where JAX therefore does not see
    a device.
    """
    found, works = [], known.platform != "cpu" and not known.failed
    python = "{}.{}".format(*known.python)
    used = {
        "jaxlib": True,
        **dict.fromkeys(TPU, known.has_tpu),
        **dict.fromkeys(GPU, known.has_gpu),
    }
    for name, needed in known.required.items():
        if used[name] and not Requirement(f"{name}{needed}").specifier.contains(
            known.versions[name], prereleases=True
        ):
            what = (
                f"{name} {known.versions[name]} does not fit jax {known.versions['jax']}, which "
                f"needs {needed}"
            )
            found.append(
                Finding(
                    Level.WARNING if works else Level.ERROR, what, f"pip install '{name}{needed}'"
                )
            )
    versions = ", ".join(f"{name} {version}" for name, version in known.versions.items())
    return found or [Finding(Level.FINE, f"Python {python}, {versions}")]


def _devices(known: Facts) -> Finding:
    if known.failed:
        fix = (
            "unset JAX_PLATFORMS to see what there is"
            if known.asked_platforms
            else "mend that device's installation"
        )
        return Finding(Level.ERROR, f"JAX does not start: {known.failed}", fix)
    there, plugins, install = (
        "GPU",
        GPU,
        "pip install 'jax[cuda13]' (jax[cuda12] for an older driver)",
    )
    if known.has_tpu:
        there, plugins, install = "TPU", TPU, "pip install 'jax[tpu]'"
    seen = f"{known.devices} x {known.platform}"
    if known.platform != "cpu" or not (known.has_tpu or known.has_gpu):
        memory = "" if known.memory_bytes is None else f", {known.memory_bytes / 1e9:.1f} GB each"
        return Finding(Level.FINE, f"JAX sees {seen}{memory}")
    what = f"this machine has a {there}, but JAX sees only {seen}"
    if known.asked_platforms == "cpu":
        return Finding(
            Level.WARNING, what, "JAX_PLATFORMS is 'cpu': unset it, unless that is meant"
        )
    if any(name in known.versions for name in plugins):
        install = f"end the process that holds the {there}, or see what JAX says of it"
    return Finding(Level.ERROR, what, f"{install}, and start again")


def _pair(known: Facts, wanted: Wanted) -> list[Finding]:
    found = []
    if wanted.devices not in (1, known.devices) and not known.failed:
        what = f"the pair's mesh takes {wanted.devices} devices, JAX sees {known.devices}"
        fix = (
            "set --config.mesh.data and --config.mesh.model to what there is, or take another slice"
        )
        found.append(Finding(Level.ERROR, what, fix))
    if wanted.weights_bytes is not None and known.memory_bytes is not None:
        what = (
            f"weights take {wanted.weights_bytes / 1e9:.1f} of the {known.memory_bytes / 1e9:.1f} "
            "GB of a device"
        )
        if wanted.weights_bytes < USABLE * known.memory_bytes:
            found.append(Finding(Level.FINE, what))
        else:
            fix = (
                "divide the target over more devices (--config.mesh.model), or take a smaller pair"
            )
            found.append(Finding(Level.ERROR, what, fix))
    return found


def _cache(known: Facts) -> Finding:
    fix = "set JAX_COMPILATION_CACHE_DIR to a folder that can be written"
    if known.cache is None:
        return Finding(
            Level.WARNING, "compiled programs are not kept, so every start compiles again", fix
        )
    if known.free_bytes is not None and known.free_bytes < LEAST_FREE_BYTES:
        what = f"{known.cache}, for compiled programs, has {known.free_bytes / 1e9:.1f} GB left"
        return Finding(Level.WARNING, what, f"make room, or {fix}")
    return Finding(Level.FINE, f"compiled programs are kept in {known.cache}")


def _hub(known: Facts, wanted: Wanted) -> Finding:
    gated = [name for name in wanted.from_hub if name.startswith(GATED)]
    if known.has_hub_token:
        return Finding(Level.FINE, "there is a token of the hub")
    if not gated:
        return Finding(
            Level.FINE, "no token of the hub: gated checkpoints need one (hf auth login)"
        )
    fix = "accept its licence on its page, then: hf auth login"
    return Finding(Level.WARNING, f"{gated[0]} is gated, and there is no token of the hub", fix)


def read_facts() -> Facts:
    """Reads the facts of this machine; the devices are JAX's, which starts its backend."""
    versions = {
        name: found for name in ("jax", *PLUGINS) if (found := machine.version(name)) is not None
    }
    cache = find_compilation_cache()
    memory, host, failed = None, machine.memory_gib(), machine.why_no_devices()
    devices = [] if failed else jax.local_devices()
    platform = devices[0].platform if devices else "cpu"
    if devices and platform != "cpu":
        memory = (devices[0].memory_stats() or {}).get("bytes_limit")
    elif devices and host is not None:
        memory = int(host * (1 << 30) / len(devices))
    token = (
        pathlib.Path(os.environ.get("HF_HOME") or pathlib.Path.home() / ".cache/huggingface")
        / "token"
    )
    return Facts(
        python=sys.version_info[:2],
        versions=versions,
        required={
            name: needed for name in PLUGINS if name in versions and (needed := required(name))
        },
        has_tpu=machine.has_tpu(),
        has_gpu=machine.has_gpu(),
        platform=platform,
        failed=failed,
        devices=jax.device_count() if devices else 0,
        asked_platforms=os.environ.get("JAX_PLATFORMS", ""),
        memory_bytes=memory,
        cache=cache,
        free_bytes=None
        if cache is None or not os.path.isdir(cache)
        else shutil.disk_usage(cache).free,
        has_hub_token=bool(os.environ.get("HF_TOKEN")) or token.exists(),
    )


def required(name: str) -> str:
    """Returns the versions of a package that the installed JAX or its extras require;
    empty: any.
    """
    for line in importlib.metadata.requires("jax") or ():
        requirement = Requirement(line)
        extras = "minimum-jaxlib", "ci"  # of its own tests
        if requirement.name == name and not any(extra in line for extra in extras):
            return str(requirement.specifier)
    return ""

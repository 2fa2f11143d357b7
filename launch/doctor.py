"""Looks for what is wrong with this machine before an hour is spent on it: versions, devices, memory, caches, access.

    python launch/doctor.py
    python launch/doctor.py --config=configs/hf.py:llama-8b          # does the pair fit, are its files within reach?
    python launch/doctor.py --bucket=gs://my-bucket/runs             # can results be written there?

Exit status: 0, nothing; 1, a warning; 2, something that must be mended first.
"""

from absl import flags
from rich.markup import escape

from launch.lib import entry
from launch.lib.config import ConfigFlag
from launch.lib.shapes import known_models
from specsamp import storage
from specsamp.doctor import Finding, Level, Wanted, examine, facts

_CONFIG = ConfigFlag("configs/trained_pair.py")
_BUCKET = flags.DEFINE_string("bucket", None, "Try to write into this folder, local or gs://.")

SIGNS = {Level.FINE: ("fine", "green"), Level.WARNING: ("warning", "yellow"), Level.ERROR: ("mend", "red")}


def main() -> int:
    console = entry.make_console()
    known = facts()
    findings = examine(known, wanted(known.devices))
    if _BUCKET.value:
        findings.append(writable(_BUCKET.value))
    for finding in findings:
        sign, colour = SIGNS[finding.level]
        fix = f"\n{'':<9}{finding.fix}" if finding.fix else ""
        console.print(f"[{colour}]{sign:<9}[/]{escape(finding.what + fix)}", soft_wrap=True)
    return max(finding.level for finding in findings)


def wanted(devices: int) -> Wanted:
    """Returns what the configuration asks for, its models divided over the devices of a replica."""
    config = _CONFIG.value
    names = [config.hugging_face.target, config.hugging_face.draft] if config.hugging_face else []
    from_hub = tuple(name for name in names if name and not storage.place(name).exists())
    data, model = config.mesh.data or 1, config.mesh.model
    models = known_models(config)
    sizes = [one.config.weight_bytes for one in models.values()]
    each = sum(sizes) / (model or max(devices // data, 1)) if sizes else None
    return Wanted(devices=data * (model or 1), weights_bytes=each, from_hub=from_hub)


def writable(folder: str) -> Finding:
    """Writes a file into a folder and removes it."""
    probe = f"{folder.rstrip('/')}/specsamp-doctor"
    try:
        storage.write(probe, " ")
        storage.place(probe).unlink()
    except Exception as error:  # noqa: BLE001, of a file system, a network or a login
        told = " ".join(str(error).split())
        fix = (
            "gcloud auth application-default login, and pip install gcsfs"
            if folder.startswith("gs://")
            else "choose another"
        )
        return Finding(level=Level.ERROR, what=f"{folder} cannot be written ({type(error).__name__}: {told})", fix=fix)
    return Finding(level=Level.FINE, what=f"{folder} can be written")


if __name__ == "__main__":
    entry.run(main, _CONFIG)

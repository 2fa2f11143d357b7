"""Tests this package on a TPU in twenty minutes; send the file and the table back.

    python launch/first_tpu.py                            # one chip, such as Colab's v5e-1
    python launch/first_tpu.py --config.mesh.model=4      # the four chips of a host
    launch/tpu/run.sh --name=pod -- python launch/first_tpu.py --distributed --config.batch=2 \\
        --config.mesh.data=2 --config.mesh.model=8 --output=gs://BUCKET/first_tpu.json
    JAX_PLATFORMS=cpu python launch/first_tpu.py --interpret    # a rehearsal without a TPU

The parts, in this order: "doctor", the findings about the machine; "kernel", every Pallas kernel
against its plain form; "audit", the checks of launch/audit.py with kernels, on the pair that comes
with the package; "times", milliseconds of a plain step, a draft step, scoring and a round of
--config; "estimate", what the compiler estimates for the same programs. The times of single calls
hold the launch of a program. Estimates are of caches that are full.

The file is written after each part, so the same command resumes: passed parts are kept, failed
parts are tried again. A part in which the process died is tried last. A failed part is named with
its error, and all other parts run.

Exit status: 0, all parts passed; 1, a part failed; 2, there is no TPU, or the file is of another
run.
"""

import dataclasses
import functools
import math
import os
import pathlib
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping
from typing import Any

import jax
from absl import flags
from rich.console import Console

from launch.lib import entry
from launch.lib.config import known_fields, load_config
from launch.lib.experiment import Experiment, build
from launch.lib.fields import NOT_COMPILED, ExperimentConfig, ExperimentFlag
from launch.lib.subject import make_subject
from specsamp import doctor, machine, storage, use_compilation_cache
from specsamp.analysis import report
from specsamp.analysis.benchmark import benchmark
from specsamp.analysis.grid import Results
from specsamp.decoding.engine import round_slots
from specsamp.evaluation.audit import Settings, audit
from specsamp.mesh.distributed import from_first
from specsamp.models.kernels.dispatch import PallasKernels
from specsamp.models.kernels.first_call import reason_for_plain
from specsamp.tpu.calibration import Band
from specsamp.tpu.kernel_check import CHECKS, KernelCheck
from specsamp.tpu.topology import topology_of

GROUPS = ("doctor", "kernel", "audit", "times", "estimate")
_CONFIG = ExperimentFlag("configs/random_pair.py:3b")
_PARTS = flags.DEFINE_list(
    "parts", list(GROUPS), f"Parts to run, separated by commas: any of {', '.join(GROUPS)}."
)
_INTERPRET = flags.DEFINE_bool(
    "interpret", False, "Interpret the kernels on a CPU, with a tiny pair: a rehearsal."
)
_OUTPUT = flags.DEFINE_string(
    "output",
    "runs/first_tpu.json",
    "The file of results, local or gs://, which the same command continues.",
)

AUDITED, AUDITED_HEADS = "configs/trained_pair.py", 4
# Of a rehearsal: the pair, and the chip of the estimate.
REHEARSED, REHEARSED_ON = "configs/random_pair.py:kernels", "v5e:1x1"
# By --interpret.
AUDIT = {False: Settings(detect=0.1), True: Settings(checks=("acceptance",), detect=0.5, rows=8)}
ESTIMATE_SECONDS = 1800
# Measured times, and the programs of a compile report that they are of.
PROGRAMS = {
    "plain step": "target step",
    "draft step": "draft step",
    "scoring": "score",
    "round": "round",
}
SAME_RUN = (
    *("python", "jax", "jaxlib", "flax", "specsamp", "source"),
    *("platform", "device_kind", "devices"),
)


@dataclasses.dataclass(frozen=True)
class Found:
    """The result of a part: a line, and JSON."""

    passed: bool
    said: str
    more: Any = None


def main() -> int:
    console = entry.make_console()
    if not _PARTS.value or {*_PARTS.value} - {*GROUPS}:
        raise ValueError(f"--parts={','.join(_PARTS.value)}: choose from {', '.join(GROUPS)}")
    machine.require_devices()
    if _INTERPRET.value:
        _CONFIG.refuse("--interpret has a tiny pair of its own")
        config = ExperimentConfig.from_config_dict(load_config(REHEARSED))
    elif jax.default_backend() == "tpu":
        config = _CONFIG.value
    else:
        seen = f"{jax.device_count()} x {jax.default_backend()}"
        raise ValueError(
            f"this needs a TPU, and JAX sees {seen}: run it on one, see doctor.py, or give "
            "--interpret"
        )
    entry.check_output(_OUTPUT.value)
    use_compilation_cache()
    results = Results.open(_OUTPUT.value, identity_of(config))

    def found(name: str) -> dict[str, Any]:
        return (results.find({"part": name}) or {"result": {}})["result"]

    def keep(name: str, part: Mapping[str, Any]) -> None:
        results.add({"key": {"part": name}, "result": part}, entry.header())

    asked = {
        name: part
        for name, part in make_parts(config).items()
        if name.partition(" ")[0] in _PARTS.value
    }
    missing = from_first(
        lambda: sorted(  # parts that killed the process are last
            (name for name in asked if not found(name).get("passed")),
            key=lambda name: "began" in found(name),
        )
    )
    with entry.keeps(f"{_OUTPUT.value} has the parts so far, and the same command continues"):
        for name in missing:
            keep(name, {"began": True})
            part = run_part(name, asked[name], console)
            keep(name, part)
            line = f"{outcome(part)}  {name}: {part['said']} ({part['seconds']:g} s)"
            console.print(entry.visible(line), style=None if part["passed"] else "bold red")
    shown = from_first(lambda: {name: found(name) for name in asked})
    entry.show([table_of(shown)], console)
    console.print(f"\nPlease send {_OUTPUT.value} and this table to the repository, as an issue.")
    return int(not all(part["passed"] for part in shown.values()))


def identity_of(config: ExperimentConfig) -> dict[str, Any]:
    """Returns the shared settings of all parts of a file: versions, devices and the timed pair."""
    here = machine.environment()
    known = {name: here[name] for name in SAME_RUN} | {"libtpu": machine.version("libtpu")}
    return known | {"interpret": _INTERPRET.value, "config": config.recorded}


def make_parts(config: ExperimentConfig) -> dict[str, Callable[[], Found]]:
    """Returns the parts by name; the first word of a name is its group."""
    return {
        "doctor": examine,
        **{f"kernel {check.name}": functools.partial(check_kernel, check) for check in CHECKS},
        "audit": functools.partial(audit_pair, config),
        "times": functools.partial(time_pair, config),
        # All processes take the estimate of the first.
        "estimate": lambda: from_first(lambda: compile_report(config)),
    }


def run_part(name: str, part: Callable[[], Found], console: Console) -> dict[str, Any]:
    """Runs a part; returns its result or its error as JSON."""
    start = time.monotonic()
    with entry.progress(console, name):
        try:
            found = part()
        except Exception as error:  # of any kind: all other parts run
            said = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
            found = Found(False, said, {"traceback": traceback.format_exc()})
    seconds = round(time.monotonic() - start, 1)
    return report.as_json(
        {"passed": found.passed, "said": found.said, "seconds": seconds, "found": found.more}
    )


def examine() -> Found:
    """Lists the findings of the doctor."""
    findings = doctor.examine(doctor.read_facts())
    worst = max(findings, key=lambda finding: finding.level)
    said = "; ".join(finding.what for finding in findings[:2])
    if worst.fix:
        said = f"{worst.what}: {worst.fix}"
    return Found(worst.level < doctor.Level.ERROR, said, findings)


def check_kernel(check: KernelCheck) -> Found:
    """Compares a kernel with its plain form."""
    difference = check.difference(PallasKernels(interpret=_INTERPRET.value))
    passed = difference <= check.near  # NaN is not
    more = "" if passed else f", which is more than {check.near:g}"
    return Found(
        passed,
        f"differs by {difference:.2g} of the largest entry{more}",
        {"difference": repr(difference)},
    )


def build_with_kernels(config: ExperimentConfig) -> tuple[Experiment, str]:
    """Returns the pair of a configuration, and why its target does without kernels; an empty text:
    it has them.
    """
    experiment = build(config, check_heads=False)
    pair = experiment.pair
    if _INTERPRET.value:
        how = {"weight_order": "default", "kernels": PallasKernels(interpret=True)}
        target, draft = (dataclasses.replace(one, **how) for one in (pair.target, pair.draft))
        pair = dataclasses.replace(pair, target=target, draft=draft)
        method = config.make_method(pair)
        return dataclasses.replace(experiment, pair=pair, method=method), ""
    if pair.target.kernels is not None:
        return experiment, ""
    reason = reason_for_plain(pair.target.config, PallasKernels())
    return experiment, reason or f"config.attention is {config.attention}"


def audit_pair(config: ExperimentConfig) -> Found:
    """Audits a small pair, since an audit keeps its weights in float32, too."""
    if not _INTERPRET.value:
        trained = ExperimentConfig.from_config_dict(load_config(AUDITED))
        devices = config.mesh.data * config.mesh.model
        model = math.gcd(devices, AUDITED_HEADS)
        config = trained.turned({"mesh.data": devices // model, "mesh.model": model})
    experiment, reason = build_with_kernels(config)
    subject = make_subject(experiment, 4 if _INTERPRET.value else 16)
    found = audit(subject, AUDIT[_INTERPRET.value])
    said = f"WITHOUT KERNELS, {reason}; {found.summary}" if reason else found.summary
    return Found(found.passed and not reason, said, found)


def time_pair(config: ExperimentConfig) -> Found:
    """Times the calls of a round, and rounds, in turn with plain decoding."""
    experiment, reason = build_with_kernels(config)
    result = benchmark(experiment.pair, experiment.method, experiment.workload)
    if result.split is None:
        raise ValueError(
            "the calls of a round do not fit into memory beside the decoders: take a smaller pair"
        )
    split, drafted = result.split, max(result.speculative.draft_length, 1)
    ms = {
        "plain step": split.step.median,
        "plain step in the loop": result.autoregressive.ms_per_round.median,
        "draft step": split.draft.median / drafted,
        "scoring": split.score.median,
        "round": result.speculative.ms_per_round.median,
    }
    said = ", ".join(f"{name} {value:.3g} ms" for name, value in ms.items())
    said = f"WITHOUT KERNELS, {reason}; {said}" if reason else said
    return Found(not reason, said, {"ms": ms, "slots": result.slots, "result": result})


def compile_report(config: ExperimentConfig) -> Found:
    """Compiles the same programs for these chips as launch/compile_report.py does, in a process of
    its own; returns the compiler's estimates by program.
    """
    text, topology = REHEARSED, REHEARSED_ON
    if not _INTERPRET.value:
        devices = jax.devices()[: config.mesh.data * config.mesh.model]
        text, topology = _CONFIG.text, topology_of(devices)
    slots = round_slots(config.workload().longest + config.draft_length + 1)
    command = [sys.executable, "-m", "specsamp", "compile-report"]
    command += [f"--config={text}", f"--topology={topology}", f"--slots={slots}"]
    known = known_fields(_CONFIG.fields)
    refused = {*NOT_COMPILED}
    if config.word.draft is None:
        refused.add("mesh.draft_model_parallelism")
    changes = [name for name in _CONFIG.fields_set if not {name, name.partition(".")[0]} & refused]
    command += [f"--config.{name}={known[name]}" for name in changes]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder, "report.json")
        done = subprocess.run(
            [*command, f"--output={path}"],
            env=environment,
            timeout=ESTIMATE_SECONDS,
            capture_output=True,
            text=True,
        )
        if done.returncode:
            raise ValueError(
                f"compile_report.py ended with {done.returncode}: {done.stderr.strip()[-2000:]}"
            )
        document = storage.read_json(path)
    bands = document["calibrated_ms"]
    said = ", ".join(f"{name} {Band(**band)} ms" for name, band in bands.items())
    more = {"topology": topology, "ms": bands, "programs": document["report"]["programs"]}
    return Found(bool(bands), f"compiler estimate for {topology}: {said}", more)


def outcome(part: Mapping[str, Any]) -> str:
    """Returns whether a part has passed, in a word."""
    return "passed" if part["passed"] else "FAILED"


def table_of(parts: Mapping[str, Any]) -> report.Table:
    """Tabulates the parts, and the measured times with the compiler's estimates."""
    rows = [
        {"part": name, "": outcome(part), "found": entry.visible(part["said"])}
        for name, part in parts.items()
    ]
    measured, estimated = (
        (parts.get(name, {}).get("found") or {}).get("ms", {}) for name in ("times", "estimate")
    )
    for name, ms in measured.items():
        band = estimated.get(PROGRAMS.get(name))
        beside = f"; compiler estimate {Band(**band)} ms" if band else ""
        rows.append({"part": f"time of a {name}", "found": f"{ms:.3g} ms{beside}"})
    failed = sum(not part["passed"] for part in parts.values())
    return report.Table.of(f"{failed} of {len(parts)} parts failed", rows, left=3)


if __name__ == "__main__":
    entry.run(main, _CONFIG)

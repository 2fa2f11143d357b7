"""Freezes forecasts of rounds on TPUs, before anybody has measured them; launch/score_forecasts.py scores them.

    python launch/studies/freeze_forecasts.py --output=runs/forecasts.json

Pairs and slices, batch 1 and 8, plain decoding and K = 4 with a draft model, and for some an early exit after a quarter
of the layers and a head of EAGLE-3's shape: the milliseconds of a round, with bands, the date and the commit that made
them. They are added to the ledger as a batch of its own: what is frozen is not changed, a newer fit makes a newer batch.
No compiler is asked; the milliseconds come from shapes and `specsamp.tpu.calibration`.
"""

import dataclasses
import datetime
import itertools
import json
import math
import subprocess

from absl import flags

from launch.lib import entry
from launch.lib.config import CHECKOUT
from launch.lib.experiment import ExperimentConfig
from launch.lib.round_times import draft_devices, draft_shape, setting_config
from launch.lib.shapes import known_models
from specsamp import storage
from specsamp.analysis import report
from specsamp.analysis.report import Table
from specsamp.tpu.calibration import calibrate
from specsamp.tpu.ledger import Setting, forecast, with_batch

PAIRS = (
    ("configs/hf.py:qwen-3b", "v5e:1x1"),
    ("configs/hf.py:qwen-3b", "v6e:1x1"),
    ("configs/hf.py:qwen-7b", "v5e:2x2"),
    ("configs/hf.py:llama-8b", "v5e:2x2"),
    ("configs/hf.py:llama-8b", "v4:2x2x1"),
    ("configs/hf.py:gemma-9b", "v6e:2x2"),
    ("configs/hf.py:qwen-32b", "v5e:2x4"),
    ("configs/hf.py:llama-70b", "v5e:4x4"),
    ("configs/hf.py:llama-70b", "v5p:2x2x4"),
    ("configs/chinchilla.py", "v4:2x2x4"),
)
INSIDE = (  # an early exit and a head draft too
    ("configs/hf.py:llama-8b", "v5e:2x2"),
    ("configs/hf.py:llama-8b", "v6e:2x2"),
    ("configs/hf.py:qwen-32b", "v5e:2x4"),
    ("configs/hf.py:llama-70b", "v5e:4x4"),
)
BATCHES, K, SLOTS = (1, 8), 4, 2048

_OUTPUT = flags.DEFINE_string(
    "output", None, "The ledger, a JSON file; one that is there gets another batch.", required=True
)


def main() -> None:
    console = entry.make_console()
    entry.check_output(_OUTPUT.value, "ledger")
    commit = git("rev-parse", "HEAD")
    if changed := git("status", "--porcelain", "--", "specsamp", "launch", "configs"):
        raise ValueError(
            f"the source differs from commit {commit[:12]} ({changed.splitlines()[0].strip()}): commit first"
        )
    forecasts, fits = [], calibrate()
    for setting in settings():
        config = setting_config(setting)
        target = known_models(config)["target"].config
        chips = draft_devices(config, known_models(config), math.prod(setting.sizes))
        band = forecast(setting, target, draft_shape(config), chips)
        forecasts.append({"setting": setting, "forecast": dataclasses.replace(band, worlds=()), "scores": []})
    rows = [(one["setting"].name, str(one["forecast"])) for one in forecasts]
    entry.show([Table(title="Frozen forecasts", header=("", "ms of a round"), rows=rows)], console)
    frozen = {"date": datetime.datetime.now(datetime.UTC).date().isoformat(), "commit": commit}
    made = {"command": entry.command(), "environment": report.environment(), "calibration": fits}
    batch = {"frozen": frozen, "chance": fits.hidden.chance, "forecasts": forecasts} | made
    batch = json.loads(report.to_json(batch))
    with storage.locked(_OUTPUT.value):
        there = storage.place(_OUTPUT.value).exists()
        document = storage.read_json(_OUTPUT.value) if there else {"kind": "ledger", "batches": []}
        with entry.reading(_OUTPUT.value):
            document = with_batch(document, batch)
        report.write_json(_OUTPUT.value, document)
    console.print(f"{len(forecasts)} forecasts are frozen in {_OUTPUT.value}", soft_wrap=True)


def settings() -> list[Setting]:
    """Returns what is forecast."""
    ways = [(place, "none") for place in PAIRS] + [(place, "model") for place in PAIRS]
    ways += [(place, drafter) for place in INSIDE for drafter in ("early_exit", "head")]
    found = []
    for ((config, topology), drafter), batch in itertools.product(ways, BATCHES):
        layers = known_models(ExperimentConfig.from_file(config))["target"].config.num_layers
        found.append(
            Setting(
                config=config,
                topology=topology,
                batch=batch,
                draft_length=0 if drafter == "none" else K,
                slots=SLOTS,
                drafter=drafter,
                exit_layer=layers // 4 if drafter == "early_exit" else None,
            )
        )
    return found


def git(*arguments: str) -> str:
    """Returns what git says about the checkout of this file."""
    done = subprocess.run(["git", "-C", str(CHECKOUT), *arguments], capture_output=True, text=True, check=False)
    if done.returncode:
        raise ValueError(f"forecasts are frozen in a clone, with its commit: {done.stderr.strip()}")
    return done.stdout.strip()


if __name__ == "__main__":
    entry.run(main)

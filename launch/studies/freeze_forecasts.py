"""Freezes forecasts of rounds on TPUs, before anybody has measured them; launch/score_forecasts.py scores them.

    python launch/studies/freeze_forecasts.py --output=runs/forecasts.json

Ten pairs and slices, batch 1 and 8, plain decoding and a draft model at K = 4: forty forecasts of the milliseconds of a
round, with bands, the date and the commit that made them. A ledger that is there is not written again: a forecast that
can be changed is none. No compiler is asked; the milliseconds come from shapes and `specsamp.tpu.calibration`.
"""

import datetime
import itertools
import subprocess

from absl import flags

import _launch  # noqa: F401, the folder of entry
import entry
from config_file import CHECKOUT, load_config
from round_times import draft_devices
from shapes import known_models
from specsamp import storage
from specsamp.analysis.report import Table
from specsamp.tpu.calibration import calibrate
from specsamp.tpu.ledger import Setting, forecast

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
BATCHES, LENGTHS, SLOTS = (1, 8), (0, 4), 2048

_OUTPUT = flags.DEFINE_string("output", None, "JSON file for the ledger; it must not be there.", required=True)


def main() -> None:
    console = entry.make_console()
    entry.check_output(_OUTPUT.value)
    if storage.place(_OUTPUT.value).exists():
        raise ValueError(f"{_OUTPUT.value} is there already: frozen forecasts are not changed")
    commit = git("rev-parse", "HEAD")
    if changed := git("status", "--porcelain", "--", "specsamp", "launch", "configs"):
        raise ValueError(
            f"the source differs from commit {commit[:12]} ({changed.splitlines()[0].strip()}): commit first"
        )
    entries, rows = [], []
    for (name, topology), batch, K in itertools.product(PAIRS, BATCHES, LENGTHS):
        drafter = "model" if K else "none"
        setting = Setting(config=name, topology=topology, batch=batch, draft_length=K, slots=SLOTS, drafter=drafter)
        config = load_config(name)
        models = known_models(config)
        target, draft = models["target"].config, models["draft"].config
        band = forecast(setting, target, draft, draft_devices(config, draft, setting.devices))
        entries.append({"setting": setting, "forecast": band, "scores": []})
        rows.append((setting.name, str(band)))
    entry.show([Table(title="Frozen forecasts", header=("", "ms of a round"), rows=rows)], console)
    today = datetime.datetime.now(datetime.UTC).date().isoformat()
    head = {"kind": "ledger", "frozen": {"date": today, "commit": commit}, "calibration": calibrate()}
    entry.write_result(_OUTPUT.value, head | {"forecasts": entries}, console)


def git(*arguments: str) -> str:
    """Returns what git says about the checkout of this file."""
    done = subprocess.run(["git", "-C", str(CHECKOUT), *arguments], capture_output=True, text=True, check=False)
    if done.returncode:
        raise ValueError(f"forecasts are frozen in a clone, with its commit: {done.stderr.strip()}")
    return done.stdout.strip()


if __name__ == "__main__":
    entry.run(main)

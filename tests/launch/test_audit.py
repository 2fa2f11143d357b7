"""launch/audit.py: three exit statuses, and what it writes."""

import json
import os
import pathlib
import subprocess
import sys

ROOT = pathlib.Path(__file__).parents[2]


def run(*arguments):
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    environment |= {"JAX_ENABLE_COMPILATION_CACHE": "false", "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "launch/audit.py", "--plain", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, env=environment)


TINY = ["--config=configs/random_pair.py:tiny", "--prompt_count=3", "--checks=acceptance"]
TINY += ["--config.target.num_layers=1", "--config.target.positions=rotary", "--config.draft.positions=rotary"]


def test_a_sound_pair(tmp_path):
    output = tmp_path / "audit.json"
    done = run(*TINY, f"--output={output}")
    assert done.returncode == 0, done.stderr
    assert "1 of 1 checks passed" in done.stdout and "acceptance  PASSED" in done.stdout
    document = json.loads(output.read_text(encoding="utf-8"))
    assert document["passed"] and document["settings"]["detect"] == 0.05
    (check,) = document["checks"]
    assert check["verdict"] == "passed" and check["numbers"]["accepted"] == check["numbers"]["judged"] > 0


def test_a_lossy_setting_of_the_configuration():
    done = run(*TINY, "--config.synthetic_acceptance=0.5")
    assert done.returncode == 1, done.stderr
    assert "1 of 1 checks failed: acceptance" in done.stdout


def test_what_cannot_be_audited():
    done = run("--config=configs/trained_pair.py:nothing")
    assert done.returncode == 2 and "nothing was audited: no pair 'nothing'" in done.stderr
    assert "Traceback" not in done.stderr

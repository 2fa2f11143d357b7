"""launch/audit.py: three exit statuses, and what it writes."""

import json

from support.run_script import call

TINY = ["--config=configs/random_pair.py:tiny", "--prompt_count=3", "--checks=acceptance"]
TINY += ["--config.target.num_layers=1", "--config.target.positions=rotary", "--config.draft.positions=rotary"]


def test_a_sound_pair(tmp_path):
    output = tmp_path / "audit.json"
    done = call("audit", "--plain", *TINY, f"--output={output}")
    assert done.returncode == 0, done.stderr
    assert "1 of 1 checks passed" in done.stdout and "acceptance\n  verdict        passed" in done.stdout
    document = json.loads(output.read_text(encoding="utf-8"))
    assert document["passed"] and document["settings"]["detect"] == 0.05
    (check,) = document["checks"]
    assert check["verdict"] == "passed" and check["numbers"]["accepted"] == check["numbers"]["verified"] > 0


def test_a_lossy_setting_of_the_configuration():
    done = call("audit", "--plain", *TINY, "--config.synthetic_acceptance=0.5")
    assert done.returncode == 1, done.stderr
    assert "1 of 1 checks failed: acceptance" in done.stdout

"""launch/compile_report.py: what it writes, and what it refuses before it compiles."""

import json

from support import extras
from support.run_script import call

pytestmark = extras.needs("libtpu")
SMALL = ("--plain", "--config=configs/chinchilla.py:tiny", "--topology=v5e:1x1")


def test_a_report_of_a_small_pair(tmp_path):
    output = tmp_path / "report.json"
    done = call("compile_report", *SMALL, "--slots=64", "--acceptance=0.8", f"--output={output}")
    assert not done.returncode, done.stderr
    assert "compiler estimate" in done.stdout and "Milliseconds per token" in done.stdout
    document = json.loads(output.read_text(encoding="utf-8"))
    programs = {program["name"]: program for program in document["report"]["programs"]}
    assert set(programs) == {"draft step", "target step", "score", "draft prefill", "prefill", "round"}
    assert all(p["host_transfers"] == 0 and p["collectives"] == {} for p in programs.values())
    assert set(document["calibrated_ms"]) == set(programs)


def test_what_fits(tmp_path):
    output = tmp_path / "fits.json"
    done = call("compile_report", *SMALL, "--fits", f"--output={output}")
    assert not done.returncode, done.stderr
    for cell in json.loads(output.read_text(encoding="utf-8"))["fits"]:
        assert (cell["share"] <= 0.98) == (cell["batch"] <= cell["most_rows"])

"""launch/quality.py: a run that was killed goes on where it was, and refuses what it did not begin."""

import json
import os
import subprocess
import sys
import time

from support.run_script import FIXED, ROOT, call

FLAGS = ["--config.max_new_tokens=6", "--completions=20", "--rows=1"]


def test_what_it_does_not_heed_is_refused():
    done = call("quality", *FLAGS, "--config.draft_temperature=0.1")
    assert done.returncode == 2 and "config.draft_temperature = 0.1 would not be heeded" in done.stderr


def test_a_run_that_was_killed_goes_on(tmp_path):
    output = tmp_path / "quality.json"

    def cells():
        return json.loads(output.read_text(encoding="utf-8"))["cells"]

    command = [sys.executable, "launch/quality.py", *FLAGS, f"--output={output}"]
    killed = subprocess.Popen(
        command, cwd=ROOT, env=os.environ | FIXED, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    while not output.exists() and killed.poll() is None:
        time.sleep(0.01)
    killed.kill()
    printed = killed.communicate()[0].decode()
    assert output.exists(), printed
    kept = cells()
    assert 1 <= len(kept) < 20, "the file is to be found while the run goes on"
    tampered = [{**kept[0], "result": 77}, *kept[1:]]  # kept as it is, not counted again
    output.write_text(json.dumps(json.loads(output.read_text()) | {"cells": tampered}))

    refused = call("quality", "--config.max_new_tokens=7", *FLAGS[1:], f"--output={output}")
    assert refused.returncode == 2 and "Traceback" not in refused.stderr
    assert "config.max_new_tokens was 6, is 7" in refused.stderr and cells() == tampered

    done = call("quality", *FLAGS, f"--output={output}")
    assert done.returncode == 0, done.stderr
    document = json.loads(output.read_text(encoding="utf-8"))
    assert document["cells"][: len(kept)] == tampered
    assert sorted(cell["key"]["prompt"] for cell in document["cells"]) == list(range(20))
    assert sum(document["parse_by_prompt"]) == document["parse"] == 77 + sum(cell["result"] for cell in cells()[1:])
    assert f"{len(kept)} of 20 prompts are in {output} already" in done.stdout.replace("\n", "")
    assert document["completions"] == 20 and f"{document['parse']} of 20 completions parse" in done.stdout

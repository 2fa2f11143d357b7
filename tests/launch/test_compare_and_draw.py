"""Agreement and figures from the command line: what they refuse in one line, before any work."""

import pytest
from run_script import run

TINY = "--config=configs/random_pair.py:tiny"


@pytest.mark.parametrize(
    "script, arguments, message",
    [
        ("agreement", [TINY, "--config.drafter=none"], "without a drafter there is nothing to forecast"),
        ("agreement", [TINY, "--batch=1", "--batch=2"], "--check_batch=4 must lie within --batch=[1, 2]"),
        ("agreement", [TINY, "--config.synthetic_acceptance=0.8"], "synthetic_acceptance = 0.8 would not be heeded"),
        ("agreement", [TINY], "a pair without prompts has no halves of them"),
        ("speedup", [TINY, "--config.draft_temperature=0.5"], "draft_temperature = 0.5 would not be heeded"),
        ("figures", ["--cells=README.md"], "README.md holds no cells"),
        ("figures", ["--cells=nothing.json"], "nothing.json"),
    ],
)
def test_what_is_refused(script, arguments, message):
    done = run(script, *arguments)
    assert done.returncode == 1
    assert message in done.stderr and "Traceback" not in done.stderr

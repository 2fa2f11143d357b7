"""launch/calibrate.py: what it measures here, beside forecasts where the chip has any, and whom its file serves."""

import json
import types

from support.run_script import ROOT, call, module


def test_calibrate_measures_what_is_here(tmp_path, monkeypatch):
    """Runs on one device, with short loops."""
    from launch.lib import experiment
    from specsamp.analysis.workload import Quartiles
    from specsamp.tpu import own

    monkeypatch.setattr(experiment, "bare_pair", lambda *models, mesh: None)
    path = tmp_path / "calibration.json"
    ms = iter((1.0, 2.0, 3.0, 5.0))

    took = lambda *arguments: Quartiles(median=next(ms), lower=1, upper=6)  # noqa: E731
    monkeypatch.setattr(own, "step_ms", took)
    monkeypatch.setattr(own, "seconds_per_turn", lambda run: (run(1), 1e-4)[1])
    done = call("calibrate", "--plain", f"--output={path}")
    assert done.returncode == 0, done.stderr
    written = json.loads(path.read_text())
    assert written["devices"]["chip"] == "cpu" and len(written["measured"]["steps"]) == 4
    assert len(written["measured"]["all_reduces"]) == 2
    report = ROOT / "notebooks/results/compile_qwen_3b_v5e.json"
    done = call("plan", "--acceptance=0.8", f"--compile_report={report}", f"--calibration={path}")
    assert done.returncode == 2 and "is a calibration of cpu:8, and v5e:1x1 is asked about" in done.stderr


def test_a_step_stands_beside_the_forecast_from_published_measurements():
    """Stands in for a TPU: a step as quick as its weights are streamed lies within, one ten times as slow outside."""
    from specsamp.tpu.calibration import estimate
    from specsamp.tpu.work import Work

    script, work = module("calibrate"), Work(streaming_ms=3.0, layer_sequences=6)
    took = [types.SimpleNamespace(median=ms) for ms in (estimate("v5e", work).likely, 30.0)]
    steps = [({"layers": 2, "batch": 1, "ms": ms, "work": work}, 3.0) for ms in took]
    rows = script.measured_table("v5e", 8e11, 8.2e11, (2, 2), [], steps).rows
    assert rows[-2][-1] == f"{estimate('v5e', work)} ms" and rows[-1][-1] == f"{rows[-2][-1]}, outside"
    assert script.measured_table("cpu", 8e11, 8.2e11, (2,), [], steps).rows[-1][-1] == ""

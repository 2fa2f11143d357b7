"""launch/calibrate.py, launch/score_forecasts.py and the ledger that stands in notebooks/results."""

import json
import math

import jax
import pytest

from config_file import load_config
from shapes import known_models
from specsamp.tpu.calibration import Band
from specsamp.tpu.costs import read_report
from specsamp.tpu.ledger import Setting, forecast, read_entry, standing
from support.run_script import ROOT, call

LEDGER = ROOT / "notebooks/results/forecasts.json"


def entries():
    return [read_entry(one) for one in json.loads(LEDGER.read_text(encoding="utf-8"))["forecasts"]]


def test_forty_forecasts_are_frozen_with_date_and_commit():
    frozen = json.loads(LEDGER.read_text(encoding="utf-8"))["frozen"]
    assert len(frozen["commit"]) == 40 and len(frozen["date"]) == 10
    names = [setting.name for setting, _, _ in entries()]
    assert len(names) == len(set(names)) == 40
    for setting, band, _ in entries():
        assert 0 < band.least < band.likely < band.most and band.open == (setting.chip != "v5e")
        assert (setting.drafter == "none") == (setting.draft_length == 0)


def test_a_round_takes_longer_than_a_step_and_a_batch_longer_than_a_row():
    of = {(s.config, s.topology, s.batch, s.draft_length): band.likely for s, band, _ in entries()}
    for (config, topology, batch, K), ms in of.items():
        assert K == 0 or ms > of[config, topology, batch, 0]
        assert batch == 1 or ms > of[config, topology, 1, K]


def test_a_forecast_scales_with_what_is_streamed():
    models = known_models(load_config("configs/hf.py:llama-8b"))
    shapes = models["target"].config, models["draft"].config
    few, many = (
        forecast(Setting(config="x", topology=t, batch=1, draft_length=0, slots=64), *shapes, 1)
        for t in ("v5e:2x2", "v5e:2x4")
    )
    assert 0.5 < many.likely / few.likely < 0.75


def test_forecasts_from_shapes_agree_with_those_of_compiled_programs():
    """A round of a pair that was compiled as a whole: shapes know nothing of copies and layouts."""
    reports = {"qwen_3b_v5e": "hf.py:qwen-3b", "llama_70b_v5e": "hf.py:llama-70b", "chinchilla_v4": "chinchilla.py"}
    for name, config in reports.items():
        report = read_report(json.loads((ROOT / f"notebooks/results/compile_{name}.json").read_text())["report"])
        models = {side: model.config for side, model in known_models(load_config(f"configs/{config}")).items()}
        setting = Setting(config="", topology=report.topology, batch=1, draft_length=4, slots=report.slots)
        shapes = forecast(setting, **models, draft_chips=report.draft_model_parallelism or setting.devices)
        assert shapes.likely == pytest.approx(report.calibrated_ms("round").likely, rel=0.15), name


def setting(topology, batch=1):
    return dict(config="configs/random_pair.py:tiny", topology=topology, batch=batch, draft_length=2, slots=64)


@pytest.fixture
def ledger(tmp_path):
    count = jax.device_count()
    bands = [dict(least=1e-6, likely=1.0, most=1e6), dict(least=1e-9, likely=2e-9, most=3e-9)]
    cells = [
        {"setting": setting(f"cpu:{count}", 1 + i), "forecast": band, "scores": []} for i, band in enumerate(bands)
    ]
    cells.append({"setting": setting("v5e:4x4"), "forecast": bands[0], "scores": []})
    path = tmp_path / "ledger.json"
    path.write_text(json.dumps({"frozen": {"date": "2026-11-22", "commit": "0" * 40}, "forecasts": cells}))
    return path


def test_forecasts_that_fit_are_measured_and_the_others_named(ledger, monkeypatch):
    import round_times

    # Eight heads for eight devices; what is measured is tested where decoders are.
    monkeypatch.setattr(round_times, "random_pair", lambda config, batch: None)
    took = round_times.Quartiles(median=5.0, lower=4.0, upper=6.0)
    monkeypatch.setattr(round_times, "round_ms", lambda *arguments: took)
    before = json.loads(ledger.read_text())
    done = call("score_forecasts", "--plain", f"--ledger={ledger}", "--dry_run")
    assert "2 of 3 forecasts" in done.stdout and "1 are of other devices: v5e:4x4" in done.stdout
    assert json.loads(ledger.read_text()) == before
    done = call("score_forecasts", "--plain", f"--ledger={ledger}")
    assert done.returncode == 0 and "1 of 2 within the band" in done.stdout
    after = json.loads(ledger.read_text())
    assert [len(one["scores"]) for one in after["forecasts"]] == [1, 1, 0]
    assert [one["scores"][0]["verdict"] for one in after["forecasts"][:2]] == ["within", "above"]
    assert [one["forecast"] for one in after["forecasts"]] == [one["forecast"] for one in before["forecasts"]]
    assert "0 to be measured" in call("score_forecasts", "--plain", f"--ledger={ledger}").stdout


def test_a_round_is_measured(monkeypatch):
    """On one device, tiny, plainly."""
    from round_times import random_pair, round_ms

    monkeypatch.setattr(jax, "device_count", lambda: 1)
    pair = random_pair(load_config("configs/random_pair.py:tiny"), 1)
    took = round_ms(pair, 0, 1, 16, repeats=2)
    assert 0 < took.lower <= took.median <= took.upper


def test_a_standing_says_when_bands_are_too_narrow():
    band = Band(least=1.0, likely=2.0, most=3.0)
    assert "as promised" in standing([(band, 2.0)] * 18 + [(band, 4.0)] * 2).verdict
    assert "too narrow" in standing([(band, 2.0)] * 12 + [(band, 4.0)] * 8).verdict
    assert standing([]).verdict == "nothing scored" and math.isnan(standing([]).median_error)


def test_a_damaged_ledger_is_named(tmp_path):
    path = tmp_path / "none.json"
    path.write_text("{}")
    done = call("score_forecasts", f"--ledger={path}")
    assert done.returncode == 2 and f"{path} is damaged, or of another kind" in done.stderr


def test_frozen_forecasts_are_not_written_again():
    done = call("studies/freeze_forecasts", f"--output={LEDGER}")
    assert done.returncode == 2 and "is there already" in done.stderr


def test_calibrate_says_what_it_would_do_on_a_slice():
    done = call("calibrate", "--plain", "--dry_run", "--topology=v5e:4x4")
    assert done.returncode == 0 and "4x4 chips (axes 0, 1)" in done.stdout and "Measured" not in done.stdout
    done = call("calibrate", "--topology=v5e:4x4")
    assert done.returncode == 2 and "--topology=v5e:4x4 goes with --dry_run" in done.stderr


def test_calibrate_measures_what_is_here(tmp_path, monkeypatch):
    """On one device, with short loops."""
    import experiment
    import round_times
    from specsamp.tpu import own

    monkeypatch.setattr(experiment, "bare_pair", lambda *models, mesh: None)
    path = tmp_path / "calibration.json"
    ms = iter((1.0, 2.0, 3.0, 5.0))
    took = lambda *arguments: round_times.Quartiles(median=next(ms), lower=1, upper=6)  # noqa: E731
    monkeypatch.setattr(round_times, "round_ms", took)
    monkeypatch.setattr(own, "seconds_per_turn", lambda run, turns: (run(1), 1e-4)[1])
    done = call("calibrate", "--plain", f"--output={path}")
    assert done.returncode == 0, done.stderr
    written = json.loads(path.read_text())
    assert written["devices"]["chip"] == "cpu" and len(written["measured"]["steps"]) == 4
    assert len(written["measured"]["all_reduces"]) == 2
    report = ROOT / "notebooks/results/compile_qwen_3b_v5e.json"
    done = call("plan", "--acceptance=0.8", f"--compile_report={report}", f"--calibration={path}")
    assert done.returncode == 2 and "is a calibration of cpu:8, and v5e:1x1 is asked about" in done.stderr

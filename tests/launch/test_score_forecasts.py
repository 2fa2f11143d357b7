"""launch/calibrate.py, launch/score_forecasts.py and the ledger that stands in notebooks/results."""

import dataclasses
import json
import types

import jax
import pytest

from launch.lib.experiment import ExperimentConfig
from launch.lib.round_times import draft_shape, setting_config
from launch.lib.shapes import known_models
from specsamp.tpu.calibration import Band
from specsamp.tpu.costs import read_report
from specsamp.tpu.ledger import Setting, digest, forecast, read_ledger, standing, with_batch
from specsamp.tpu.shapes import Shape
from support.run_script import ROOT, call, module

LEDGER = ROOT / "notebooks/results/forecasts.json"
FIRST_FORTY = "5cfcb2520a9683a54c42ce55e21495764dec3fb7577a655afeb69fa4e49889a8"


def ledger_here():
    return json.loads(LEDGER.read_text(encoding="utf-8"))


def test_the_first_forty_are_as_they_were_frozen():
    first, document = read_ledger(ledger_here())[0], ledger_here()["batches"][0]
    assert document["digest"] == digest(document) == FIRST_FORTY
    assert first.commit.startswith("3aba00b") and first.chance == 0.9 and len(first.entries) == 40


def test_forecasts_are_frozen_with_date_commit_and_what_their_bands_promise():
    for batch in read_ledger(ledger_here()):
        assert len(batch.commit) == 40 and len(batch.date) == 10 and 0.5 < batch.chance < 1
        names = [one.setting.name for one in batch.entries]
        assert len(names) == len(set(names)) >= 40
        for one in batch.entries:
            assert 0 < one.band.least < one.band.likely < one.band.most
            assert one.band.open == (one.setting.chip != "v5e")
            assert (one.setting.drafter == "none") == (one.setting.draft_length == 0)


def test_the_newest_forecasts_are_those_of_today():
    """Drafts, early exits and heads, from the fit of today: a fit that changes wants another batch."""
    newest, script = read_ledger(ledger_here())[-1], module("studies/freeze_forecasts")
    assert [one.setting for one in newest.entries] == script.settings()
    assert {one.setting.drafter for one in newest.entries} == {"none", "model", "early_exit", "head"}
    for one in newest.entries[::9]:
        config = setting_config(one.setting)
        target = known_models(config)["target"].config
        chips = script.draft_devices(config, known_models(config), script.math.prod(one.setting.sizes))
        today = forecast(one.setting, target, draft_shape(config), chips)
        frozen, now = ([band.least, band.likely, band.most] for band in (one.band, today))
        assert frozen == pytest.approx(now) and one.band.open == today.open, one.setting.name


def test_a_round_takes_longer_than_a_step_and_a_batch_longer_than_a_row():
    for batch in read_ledger(ledger_here()):
        of = {
            (s.config, s.topology, s.batch, s.drafter): one.band.likely for one in batch.entries for s in [one.setting]
        }
        for (config, topology, rows, drafter), ms in of.items():
            plain = of.get((config, topology, rows, "none"))
            assert drafter == "none" or plain is None or ms > plain
            assert rows == 1 or ms > of[config, topology, 1, drafter]


def test_a_forecast_scales_with_what_is_streamed():
    target = known_models(ExperimentConfig.from_file("configs/hf.py:llama-8b"))["target"].config
    few, many = (
        forecast(Setting(config="x", topology=t, batch=1, draft_length=0, slots=64), target, None, 1)
        for t in ("v5e:2x2", "v5e:2x4")
    )
    assert 0.5 < many.likely / few.likely < 0.75


def test_what_an_early_exit_and_a_head_stream():
    """A quarter of the layers and the output again; one layer, the mix of three hidden states, 32,000 outputs."""
    settings = [
        Setting(config="configs/hf.py:llama-8b", topology="v5e:2x2", batch=1, draft_length=4, slots=64, **how)
        for how in (dict(drafter="early_exit", exit_layer=8), dict(drafter="head"))
    ]
    target = Shape.of(known_models(ExperimentConfig.from_file("configs/hf.py:llama-8b"))["target"].config)
    early, head = (draft_shape(setting_config(setting)) for setting in settings)
    assert early.parameters == pytest.approx(target.parameters / 4, rel=1e-3)
    assert early.head_parameters == target.head_parameters
    attention, mlp = 2 * 4096 * (4096 + 2 * 1024) + 4096**2, 3 * 4096 * 14336
    assert head.parameters == pytest.approx(attention + mlp + 3 * 4096**2, rel=1e-3)
    assert (head.layers, head.head_parameters) == (1, 32_000 * 4096)


def test_forecasts_from_shapes_agree_with_those_of_compiled_programs():
    """A round of a pair that was compiled as a whole: shapes know nothing of copies and layouts."""
    reports = {"qwen_3b_v5e": "hf.py:qwen-3b", "llama_70b_v5e": "hf.py:llama-70b", "chinchilla_v4": "chinchilla.py"}
    for name, config in reports.items():
        report = read_report(json.loads((ROOT / f"notebooks/results/compile_{name}.json").read_text())["report"])
        models = known_models(ExperimentConfig.from_file(f"configs/{config}"))
        setting = Setting(config="", topology=report.topology, batch=1, draft_length=4, slots=report.slots)
        chips = report.draft_model_parallelism or report.mesh["model"]
        shapes = forecast(setting, models["target"].config, Shape.of(models["draft"].config), chips)
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
    cells += [{"setting": setting(t), "forecast": bands[0], "scores": []} for t in ("v5e:4x4", f"cpu:{count // 2}x2")]
    batch = {"frozen": {"date": "2026-11-22", "commit": "0" * 40}, "chance": 0.9, "forecasts": cells}
    path = tmp_path / "ledger.json"
    path.write_text(json.dumps({"batches": [batch | {"digest": digest(batch)}]}))
    return path


@pytest.fixture
def measured(monkeypatch):
    """Rounds that take 5 ms: what is measured is tested where decoders are."""
    from launch.lib import drafters, round_times

    pair = types.SimpleNamespace(target=None, draft_or_head=None)
    monkeypatch.setattr(round_times, "random_pair", lambda config, batch: pair)
    monkeypatch.setattr(drafters, "make_drafter", lambda *arguments: None)
    took = round_times.Quartiles(median=5.0, lower=4.0, upper=6.0)
    monkeypatch.setattr(round_times, "round_ms", lambda *arguments: took)


def scores(path):
    return [one["scores"] for one in json.loads(path.read_text())["batches"][0]["forecasts"]]


def test_forecasts_of_this_slice_are_measured_and_the_others_named(ledger, measured):
    """As many devices in another shape are another slice."""
    before = json.loads(ledger.read_text())
    done = call("score_forecasts", "--plain", f"--ledger={ledger}", "--dry_run")
    assert "2 of 4 forecasts are of cpu:8" in done.stdout and "2 are of other slices: v5e:4x4, cpu:4x2" in done.stdout
    assert json.loads(ledger.read_text()) == before
    done = call("score_forecasts", "--plain", f"--ledger={ledger}")
    assert done.returncode == 0 and "1 of 2 within: they hold 1% to 99%" in done.stdout, done.stderr
    assert [len(found) for found in scores(ledger)] == [1, 1, 0, 0]
    assert [scores(ledger)[i][0]["verdict"] for i in (0, 1)] == ["within", "above"]
    assert digest(json.loads(ledger.read_text())["batches"][0]) == before["batches"][0]["digest"]
    assert "0 to be measured" in call("score_forecasts", "--plain", f"--ledger={ledger}").stdout


def test_scores_that_others_add_meanwhile_stay(ledger, measured, monkeypatch):
    from launch.lib import round_times

    def another(*arguments):
        document = json.loads(ledger.read_text())
        document["batches"][0]["forecasts"][2]["scores"].append(
            {"verdict": "within", "slice": "v5e:4x4", "devices": "16", "date": "2027"}
        )
        ledger.write_text(json.dumps(document))
        return round_times.Quartiles(median=5.0, lower=4.0, upper=6.0)

    monkeypatch.setattr(round_times, "round_ms", another)
    call("score_forecasts", "--plain", f"--ledger={ledger}", "--only=batch 1")
    assert [len(found) for found in scores(ledger)] == [1, 0, 1, 0]


def test_out_of_memory_is_scored(ledger, measured, monkeypatch):
    from launch.lib import round_times

    def fails(*arguments):
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory")

    monkeypatch.setattr(round_times, "round_ms", fails)
    done = call("score_forecasts", "--plain", f"--ledger={ledger}")
    assert "0 of 2 within, 2 out of memory" in done.stdout, done.stderr


def test_a_forecast_that_was_edited_is_refused(ledger):
    document = json.loads(ledger.read_text())
    document["batches"][0]["forecasts"][1]["forecast"]["most"] = 10.0
    ledger.write_text(json.dumps(document))
    done = call("score_forecasts", f"--ledger={ledger}")
    assert done.returncode == 2 and "are not as they were frozen: restore them with git" in done.stderr


def test_a_round_is_measured(monkeypatch):
    """On one device, tiny: plainly, and with a head."""
    from launch.lib.drafters import make_drafter
    from launch.lib.round_times import random_pair, round_ms

    monkeypatch.setattr(jax, "device_count", lambda: 1)
    config = ExperimentConfig.from_file("configs/random_pair.py:tiny")
    pair = random_pair(config, 1)
    took = round_ms(pair, make_drafter(config, pair.target, pair.draft, 0), 1, 16, repeats=2)
    assert 0 < took.lower <= took.median <= took.upper


def test_a_head_of_random_weights_fits_its_target(monkeypatch):
    from launch.lib.drafters import make_drafter
    from launch.lib.round_times import random_pair

    monkeypatch.setattr(jax, "device_count", lambda: 1)
    config = ExperimentConfig.from_file("configs/random_pair.py:tiny")
    config = config.turned({"drafter": "head", "target.positions": "rotary", "target.num_layers": 8})
    pair = random_pair(config, 1)
    assert make_drafter(config, pair.target, pair.draft_or_head, 4).K == 4 and pair.draft is None


def test_a_standing_says_how_many_scores_and_what_follows():
    band, within, above = Band(least=1.0, likely=2.0, most=3.0), 2.0, 4.0
    assert (
        standing([(band, within)]).verdict(0.9).startswith("1 of 1 within: they hold 2% to 100% (with 95%), no contra")
    )
    assert "no contradiction to the 90%" in standing([(band, within)] * 18 + [(band, above)] * 2).verdict(0.9)
    assert "fewer than the 90%" in standing([(band, within)] * 12 + [(band, above)] * 8).verdict(0.9)
    assert "more than the 50%" in standing([(band, within)] * 12).verdict(0.5)
    assert "0 of 2 within, 1 out of memory" in standing([(band, above), (band, None)]).verdict(0.9)
    wide = dataclasses.replace(band, open=True)  # ranges promise no share, and their middle is no value
    assert standing([(wide, above), (wide, within)]).verdict(None) == "1 of 2 within"
    assert standing([]).verdict(0.9) == "nothing scored"


def test_a_damaged_ledger_is_named(tmp_path):
    path = tmp_path / "none.json"
    path.write_text("{}")
    done = call("score_forecasts", f"--ledger={path}")
    assert done.returncode == 2 and f"{path} is damaged, or of another kind" in done.stderr


def test_a_batch_is_added_and_what_is_frozen_stays():
    document = ledger_here()
    first = document["batches"][0]
    made = with_batch(document, first | {"frozen": {"date": "2027-01-01", "commit": "a" * 40}})
    assert made["batches"][:-1] == document["batches"] and read_ledger(made)[-1].date == "2027-01-01"
    with pytest.raises(ValueError, match="of commit 3aba00bc3d5d are in this ledger already"):
        with_batch(document, first)


def test_calibrate_says_what_it_would_do_on_a_slice():
    done = call("calibrate", "--plain", "--dry_run", "--topology=v5e:4x4")
    assert done.returncode == 0 and "4x4 chips (axes 0, 1)" in done.stdout and "Measured" not in done.stdout
    done = call("calibrate", "--topology=v5e:4x4")
    assert done.returncode == 2 and "--topology=v5e:4x4 goes with --dry_run" in done.stderr


def test_calibrate_measures_what_is_here(tmp_path, monkeypatch):
    """On one device, with short loops."""
    from launch.lib import experiment, round_times
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

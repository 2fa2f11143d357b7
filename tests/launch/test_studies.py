"""The demo shows the committed results of a study."""

from launch.lib import study
from support.run_script import ROOT, module


def test_the_demo_has_the_speedups_of_the_readme(monkeypatch, tmp_path):
    demo = module("demo")
    name, *shown = demo.committed_speedups()
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert name.startswith("speedup in the README, 2 CPU cores (AMD EPYC, avx2")
    for told, K in zip(shown, (7, 4), strict=True):
        gain, _, length = told.partition(", ")
        assert length == f"K = {K}" and f"**{gain}**" in text
    monkeypatch.setattr(study, "RESULTS", tmp_path)
    assert "only in a clone" in demo.committed_speedups()

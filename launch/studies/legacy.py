"""Lists the tables that have not moved into their studies yet, as functions of all documents that return Markdown.

A table that moves leaves this list, and its function goes; then this file goes.
"""

from launch.studies import adaptive_points as adaptive
from launch.studies import lossy_curve
from launch.studies import results_drafters as drafted
from launch.studies import results_in_short as short
from launch.studies import results_int8 as int8
from launch.studies import results_tables as measured

TABLES = {
    "headline": short.headline,
    "summary": short.summary,
    "pair": measured.trained,
    "head": measured.head,
    "drafters": drafted.drafters,
    "drafters_on_chips": drafted.drafters_on_chips,
    "voting": drafted.voting,
    "speedup": measured.speedup,
    "grid": measured.grid,
    "adaptive": adaptive.section,
    "draft_temperature": measured.draft_temperatures,
    "lossy": lossy_curve.section,
    "agreement": measured.agreement,
    "audit": measured.audit,
    "quality": measured.evaluation("python_pair_tasks"),
    "humaneval": measured.evaluation("python_pair_humaneval"),
    "random_pair": measured.random_pair,
    "int8_stored": int8.int8_stored,
}

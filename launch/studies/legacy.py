"""Lists the tables that have not moved into their studies yet, as functions of all documents that return Markdown.

A table that moves leaves this list, and its function goes; then this file goes.
"""

from launch.studies import adaptive_points as adaptive
from launch.studies import results_in_short as short
from launch.studies import results_tables as measured

TABLES = {
    "headline": short.headline,
    "summary": short.summary,
    "head": measured.head,
    "speedup": measured.speedup,
    "adaptive": adaptive.section,
}

"""Lists the tables that have not moved into their studies yet, as functions of all documents that return Markdown.

A table that moves leaves this list, and its function goes; then this file goes.
"""

from launch.studies import adaptive_points as adaptive

TABLES = {
    "adaptive": adaptive.section,
}

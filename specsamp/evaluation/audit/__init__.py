"""Checks that a pair writes the texts of its target alone: `audit` runs all checks of a
`Subject`.
"""

from specsamp.evaluation.audit.checks import CHECKS, Audit, Settings, audit, audit_table
from specsamp.evaluation.audit.subject import Check, Status, Subject

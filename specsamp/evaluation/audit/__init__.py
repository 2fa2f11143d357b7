"""Checks that a pair writes what its target would write alone: `audit` runs every check of a `Subject`."""

from specsamp.evaluation.audit.run import CHECKS, Audit, BrokenOff, Settings, audit
from specsamp.evaluation.audit.subject import Check, Status, Subject

__all__ = ["CHECKS", "Audit", "BrokenOff", "Check", "Settings", "Subject", "Status", "audit"]

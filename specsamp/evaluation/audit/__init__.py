"""Does a pair write what its target would write alone? `audit` runs every check; each is a function of a `Subject`."""

from specsamp.evaluation.audit.run import CHECKS, Audit, Settings, audit
from specsamp.evaluation.audit.subject import Check, Subject, Verdict

__all__ = ["CHECKS", "Audit", "Check", "Settings", "Subject", "Verdict", "audit"]

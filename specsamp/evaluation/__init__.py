"""Evaluations: audits, tasks with scores, and checks of heads."""

"""Evaluations of what a pair writes."""

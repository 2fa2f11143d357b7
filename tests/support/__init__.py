"""Shared by tests: models to enumerate, mistakes to catch, stand-ins, and runners of scripts."""

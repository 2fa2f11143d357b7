"""Finds what a TPU will do, compiled without one: programs, traffic, reports, calibration, studies."""

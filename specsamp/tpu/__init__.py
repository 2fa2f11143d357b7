"""Estimates programs on TPUs without a TPU: compiled programs, their traffic, reports and
calibration.
"""

"""Meshes of devices: layouts of arrays, models and batches on them, jobs of many processes, and TPU
slices.
"""

"""Pallas kernels for TPUs. Each has a plain form elsewhere, which is its reference.

Each has an entry in `specsamp.tpu.kernel_check.CHECKS`.
"""

"""Pallas kernels for TPUs. Each has a plain form elsewhere, which is its reference."""

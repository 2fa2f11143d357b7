"""Exact speculative sampling for large language models in JAX."""

"""Tokenizers and trained pairs."""

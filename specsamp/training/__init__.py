"""Trains targets, and distils drafts from them."""

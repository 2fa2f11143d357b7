"""A differential fuzzer of the entry points; `tests/fuzz.py` is its command."""

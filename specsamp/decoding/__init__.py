"""The loop: draft -> score -> verify -> commit, on device; and the drafters that plug into it."""

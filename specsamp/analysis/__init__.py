"""Measurement: what decoding costs, where a round's time goes, and what memory the loop takes."""

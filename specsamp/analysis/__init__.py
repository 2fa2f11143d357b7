"""Measures and forecasts the time of decoding, and where the time of a round goes."""

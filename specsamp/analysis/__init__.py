"""Forecasts, measurement, and how far they agree: what decoding costs and where a round goes."""

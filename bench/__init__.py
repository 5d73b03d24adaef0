"""Measured speed; results as JSON with hardware and commit."""

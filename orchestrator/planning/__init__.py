"""Checks before a sweep starts: of its settings, its data and its machines."""

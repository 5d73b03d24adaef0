"""The record: directories of runs and sweeps, with their reports, results, locks and states."""

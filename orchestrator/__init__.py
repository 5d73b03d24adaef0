"""Data, training, sweeps, frontier and tracking for the models of `moe`."""

"""What is on disk of runs and sweeps: directories, records, locks, states."""

"""Training of one run: the optimiser, the loop, the run's directory, and its start on one or many workers."""

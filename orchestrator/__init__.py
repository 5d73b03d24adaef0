"""Data, training, sweeps, frontier and tracking for the models of `moe`."""

import os

# Read when torch is loaded, so set before. Threads that wait for each other at the end of a matmul give up
# their core soon, after some 50 us. The default of several ms takes it from whatever else runs on the
# machine, their own partners included (measured: bench/results/threads.json).
os.environ.setdefault("GOMP_SPINCOUNT", "2000")

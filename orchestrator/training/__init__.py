"""One run: optimiser, loop, checkpoints, and how it is started on one or many workers."""

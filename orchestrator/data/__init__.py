"""Image shards, which sample is at which step, and batches from it."""

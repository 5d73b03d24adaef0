"""Data sets: packing image shards, the order of samples, and batches from them."""

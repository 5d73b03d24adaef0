"""Packing image shards, the order of samples, and batches from them."""

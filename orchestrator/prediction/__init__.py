"""Batch inference: what a model says of each of many images, as parquet files.

`inputs.py` (which images there are) -> `plan.py` (which part of them goes to which file, and which are there)
-> `predictor.py` (one part: read, decode, forward, write) <- `run.py` (Ray Data: parts to a pool of actors).
"""

"""Checkpoints that cannot lie: a checkpoint is a folder whose manifest names every file with its SHA-256.

    checkpoints/step-00000100/
      weights-00000.3f9a1c.bin     rank 0's share of the weights: raw numbers, one tensor after the other
      optimizer-00000.3f9a1c.bin   its share of the optimiser's state
      weights.3f9a1c.json          where every part of every tensor lies; optimizer.3f9a1c.json the same
      manifest.json                step, progress, config, and the SHA-256 of every file; written last

`tensors.py` moves tensors (DCP plans which rank writes and reads what, so any layout loads any other),
`manifest.py` commits and verifies, `run.py` saves and resumes a run, `retention.py` says what stays,
`weights.py` hands weights on: to another model, or as one safetensors file. Nothing is pickled.
"""

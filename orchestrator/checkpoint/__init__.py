"""Checkpoints that cannot lie: a checkpoint is a folder whose manifest names every file with its SHA-256.

    checkpoints/step-00000100/
      weights-00000.3f9a1c2b.bin     rank 0's share of the weights: raw numbers, one tensor after the other
      optimizer-00000.3f9a1c2b.bin   its share of the optimiser's state
      weights.3f9a1c2b.json          where every part of every tensor lies; optimizer.3f9a1c2b.json the same
      manifest.json                  step, progress, config, and the SHA-256 of every file; written last

A run's way: `run.py` saves and resumes; `state.py` names the tensors, `snapshot.py` copies them, `tensors.py`
moves them to files and back (DCP plans which rank moves what, so any layout loads any other), `manifest.py`
commits, `find.py` verifies, `retention.py` says what stays.

Weights handed on: `start.py` fills another model from a `source.py`, and reports (`start_report.py`);
`weights.py` exports to one file (`single_file.py`). Nothing is pickled.
"""
